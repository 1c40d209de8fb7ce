"""The likeliest mistakes of a training loop: none is silent, and each is said once."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from device_stub import Device
from helpers import small_data, small_net
from torch.utils.data import DataLoader, TensorDataset

import adambs
from adambs.carried import was_weighted
from adambs.integrations._common import drawn_in

X, Y = small_data(200)


def train(way, epochs=3, **options):
    """A loop with one thing done wrong, or none; the warnings it has caused."""
    sampler = adambs.BanditSampler(len(X), 5, **{"gate": 0, **options})
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for (x, y), draw in adambs.BanditLoader(TensorDataset(X, Y), sampler):
                way(net, optimizer, x, y, draw)
    return caught


def right(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.zero_grad()
    draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    optimizer.step(draw, adambs.scores.cross_entropy(logits, y))


def right_with_the_weights(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.zero_grad()
    (draw.weights.float() * F.cross_entropy(logits, y, reduction="none")).mean().backward()
    optimizer.step(draw, adambs.scores.cross_entropy(logits, y))


def right_in_another_order(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.sampler.update(draw, adambs.scores.cross_entropy(logits, y))
    optimizer.zero_grad()
    draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    optimizer.step()


def right_by_number(net, optimizer, x, y, draw):
    carried = draw.carried()
    logits = net(x)
    optimizer.zero_grad()
    carried.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    optimizer.step(carried.number, adambs.scores.cross_entropy(logits, y))


def unweighted(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.zero_grad()
    F.cross_entropy(logits, y).backward()
    optimizer.step(draw, adambs.scores.cross_entropy(logits, y))


def without_feedback(net, optimizer, x, y, draw):
    optimizer.zero_grad()
    draw.mean(F.cross_entropy(net(x), y, reduction="none")).backward()
    optimizer.step()


def mean_losses(net, optimizer, x, y, draw):
    optimizer.zero_grad()
    losses = F.cross_entropy(net(x), y, reduction="none")
    draw.mean(losses).backward()
    optimizer.step(draw, losses.mean().expand(5))


@pytest.mark.parametrize(
    "way", [right, right_with_the_weights, right_in_another_order, right_by_number], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_right_loop_is_not_warned(way, feedback):
    assert not train(way, feedback=feedback)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (unweighted, "train on draw.mean(losses) instead of losses.mean(), or the gradient is biased"),
        (without_feedback, "an epoch of 40 batches is over and no scores came back, so p cannot learn"),
        (mean_losses, "they look like a loss after a mean reduction. Give one score for each example"),
    ],
    ids=lambda value: getattr(value, "__name__", "words"),
)
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_mistake_is_warned_of_once_in_words(way, words, feedback):
    [warning] = train(way, feedback=feedback)
    assert words in str(warning.message)
    assert warning.category is RuntimeWarning


def test_the_warning_points_at_the_training_loop():
    for way in (unweighted, without_feedback):
        [warning] = train(way)
        assert warning.filename == __file__


def test_weights_of_one_need_no_weighting():
    """While the gate is closed, losses.mean() is the same as draw.mean(losses)."""
    assert not train(unweighted, gate=1e9)


def test_scores_that_are_alike_for_a_reason_are_no_mistake():
    """Always the same ones, and batches of one example."""
    sampler, one = adambs.BanditSampler(20, 4), adambs.BanditSampler(20, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(20):
            sampler.update(sampler.draw().number, np.ones(4))
            one.update(one.draw().number, [float(k)])
    assert not caught


def test_most_scores_above_the_bound_of_the_rule_are_told_once():
    sampler = adambs.BanditSampler(100, 5, rule=adambs.Exp3(L=1.0))

    def go_on():
        for _ in range(120):
            draw = sampler.draw()
            assert draw.weights.numel() == 5
            sampler.update(draw, np.arange(2.0, 7))

    with pytest.warns(RuntimeWarning, match=r"250 of the first 250 scores were above the bound") as caught:
        go_on()
    assert len(caught) == 1


def test_an_epoch_that_was_left_early_is_no_mistake():
    sampler = adambs.BanditSampler(len(X), 5)
    loader = adambs.BanditLoader(TensorDataset(X, Y), sampler)
    for _ in loader:
        break
    assert loader.sampler.epochs.current.finished


def epochs_of(loader, count=2, seen=lambda batch: None):
    """Iterate some epochs; the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            for batch in loader:
                seen(batch)
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_without_feedback_is_told_when_the_next_begins(workers):
    """A plain DataLoader does not say that it is done."""
    sampler = adambs.BanditSampler(len(X), 5)
    loader = DataLoader(TensorDataset(X, Y), batch_sampler=sampler, num_workers=workers)
    assert epochs_of(loader, 1) == []
    [words] = epochs_of(loader, 3)
    assert "an epoch of 40 batches is over and no scores came back" in words


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_that_a_trainer_has_counted_is_over(drop_last):
    """It asks for as many batches as there are, and never for one more."""
    sampler = adambs.BanditSampler(len(X), 7)
    loader = adambs.BanditLoader(TensorDataset(X, Y), sampler, carry=True, drop_last=drop_last)
    batches = len(loader)

    class Counting:
        def __iter__(self):
            running = iter(loader)
            return iter([next(running) for _ in range(batches)])

    [words] = epochs_of(Counting(), 3)
    assert f"an epoch of {batches} batches is over" in words


def test_epochs_that_nobody_trains_on_are_no_mistake():
    data, sampler = TensorDataset(X, Y), adambs.BanditSampler(len(X), 5)
    loader = DataLoader(data, batch_sampler=sampler)
    for _ in range(3):  # left early
        next(iter(loader))
    with torch.no_grad():  # an evaluation, with either loader
        assert epochs_of(loader) == epochs_of(adambs.BanditLoader(data, sampler)) == []
    state = sampler.state_dict()
    for _ in range(2):  # a state was loaded in between
        assert epochs_of(loader, 1) == []
        sampler.load_state_dict(state)
    awaited = sampler.awaited
    feedback = iter(range(awaited.following, 10**9))
    assert epochs_of(loader, 3, lambda batch: sampler.update(next(feedback), np.ones(5))) == []
    assert sampler.diagnostics().updates == 120


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
def test_a_bad_score_names_the_example_of_the_data_set(bad):
    sampler = adambs.BanditSampler(1000, 4, seed=2)
    draw = sampler.draw()
    scores = [1.0, 2.0, bad, 1.0]
    index = draw.indices[2].item()
    with pytest.raises(
        ValueError, match=rf"scores\[2\] is {bad} \(draw 0, example {index} of the data set\)"
    ):
        sampler.update(draw, scores)


def test_no_hint_averages_over_padding():
    draw = adambs.BanditSampler(10, 4).draw()
    with pytest.raises(ValueError, match=r"losses.flatten\(1\).sum\(1\) / T with a constant T") as caught:
        draw.mean(torch.ones(4, 7))
    assert ".mean(" not in str(caught.value)


# ----------------------------------------------------------------------------------------------
# Batches that carry their draws
# ----------------------------------------------------------------------------------------------


def as_dict(examples):
    x, y = zip(*examples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


def train_carried(way, epochs=3, feedback="at once", **options):
    """As :func:`train`, with batches that carry their draws."""
    sampler = adambs.BanditSampler(len(X), 5, gate=0, feedback=feedback)
    net = small_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    loader = adambs.BanditLoader(TensorDataset(X, Y), sampler, carry=True, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                way(net, sampler, batch)
                optimizer.step()
    assert sampler.diagnostics().updates == epochs * 40
    return [w for w in caught if issubclass(w.category, RuntimeWarning)]


def losses_and_scores(net, x, y):
    logits = net(x)
    return F.cross_entropy(logits, y, reduction="none"), adambs.scores.cross_entropy(logits, y)


def carried_without_weights(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    losses.mean().backward()
    sampler.update(drawn.number, scores)


def carried_and_moved_without_weights(net, sampler, batch):
    """A trainer takes the batch apart and puts it together; that is no use of the weights."""
    trainer = {"__name__": "accelerate.utils", "tree_map": torch.utils._pytree.tree_map}
    exec("def send(batch): return tree_map(lambda entry: entry.clone(), batch)", trainer)
    carried_without_weights(net, sampler, trainer["send"](batch))


def carried_mean(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    drawn.mean(losses).backward()
    sampler.update(drawn.number, scores)


def carried_mean_with_the_cap(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    drawn.mean(losses, scores).backward()
    sampler.update(drawn.number, scores)


def carried_mean_after_the_feedback(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    sampler.update(drawn.number, scores)
    drawn.mean(losses).backward()


def carried_weights(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    (losses * drawn.weights).mean().backward()
    sampler.update(drawn.number, scores)


def carried_weights_by_place(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    (losses * drawn[2]).mean().backward()
    sampler.update(drawn.number, scores)


def carried_weights_unpacked(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    _, _, weights, *_ = drawn
    (losses * weights).mean().backward()
    sampler.update(drawn.number, scores)


def carried_weights_in_a_dict(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    (losses * drawn._asdict()["weights"]).mean().backward()
    sampler.update(drawn.number, scores)


def carried_and_moved(net, sampler, batch):
    x, y, drawn = batch
    moved = adambs.Carried(*(entry.to(torch.device("cpu"), copy=True) for entry in drawn))
    losses, scores = losses_and_scores(net, x, y)
    moved.mean(losses).backward()
    sampler.update(moved.number, scores)


def carried_and_copied(net, sampler, batch):
    """The copy is weighted, and the original's number comes back."""
    for copied in (
        pickle.loads(pickle.dumps(batch)),
        copy.deepcopy(batch),
        torch.utils._pytree.tree_map(torch.clone, batch),
    ):
        x, y, drawn = copied
        losses, scores = losses_and_scores(net, x, y)
        drawn.mean(losses / 3).backward()
    sampler.update(batch[-1].number, scores)


def carried_and_pickled(net, sampler, batch):
    carried_mean(net, sampler, pickle.loads(pickle.dumps(batch)))


def carried_as_a_plain_number(net, sampler, batch):
    x, y, drawn = batch
    losses, scores = losses_and_scores(net, x, y)
    losses.mean().backward()
    sampler.update(int(drawn.number[0]), scores)


def entries_of_a_dict(net, sampler, batch):
    losses, scores = losses_and_scores(net, batch["x"], batch["y"])
    (losses * batch["draw_weights"]).mean().backward()
    sampler.update(batch["draw_number"], scores)


def mean_of_a_dict(net, sampler, batch):
    drawn = drawn_in(batch)
    losses, scores = losses_and_scores(net, batch["x"], batch["y"])
    drawn.mean(losses, scores).backward()
    sampler.update(batch["draw_number"], scores)


def weights_of_a_dict_and_the_adapters_number(net, sampler, batch):
    losses, scores = losses_and_scores(net, batch["x"], batch["y"])
    (losses * batch["draw_weights"]).mean().backward()
    sampler.update(drawn_in(batch).number, scores)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"feedback": "late"}], ids=str)
@pytest.mark.parametrize(
    "way", [carried_without_weights, carried_and_moved_without_weights], ids=lambda f: f.__name__
)
def test_a_carried_draw_whose_weights_nobody_used_is_told_once(way, options):
    [warning] = train_carried(way, **options)
    assert "nobody asked for their weights: train on draw.mean(losses)" in str(warning.message)
    assert warning.filename == __file__


CARRIED_WELL = [
    carried_mean, carried_mean_with_the_cap, carried_mean_after_the_feedback, carried_weights,
    carried_weights_by_place, carried_weights_unpacked, carried_weights_in_a_dict, carried_and_moved,
    carried_and_copied, carried_and_pickled, carried_as_a_plain_number,
]  # fmt: skip


@pytest.mark.parametrize("way", CARRIED_WELL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_who_uses_carried_weights_or_may_have_is_not_warned(way, feedback):
    assert not train_carried(way, feedback=feedback)


@pytest.mark.parametrize(
    "way",
    [entries_of_a_dict, mean_of_a_dict, weights_of_a_dict_and_the_adapters_number],
    ids=lambda f: f.__name__,
)
def test_entries_of_a_dict_lie_open(way):
    assert not train_carried(way, collate_fn=as_dict)


@pytest.mark.parametrize("way", [carried_mean, carried_weights], ids=lambda f: f.__name__)
def test_carried_weights_that_come_from_workers_are_not_warned_of(way):
    assert not train_carried(way, num_workers=2)


@pytest.mark.parametrize("weighted", [True, False])
def test_carried_draws_on_a_device(weighted):
    """The number stays there, and the scores come home late."""
    sampler = adambs.BanditSampler(len(X), 5, gate=0)
    with Device() as device, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(40):
            carried = sampler.draw().carried()
            drawn = adambs.Carried(*(entry.to(device.device) for entry in carried))
            if weighted:
                drawn.mean(device.put(torch.ones(5)))
            sampler.update(drawn.number, device.put(torch.arange(1.0, 6) + k))
    assert ["nobody asked for their weights" in str(w.message) for w in caught] == [True] * (not weighted)


def test_a_carried_draw_is_what_frameworks_take_it_for():
    carried = adambs.BanditSampler(9, 3).draw().carried()
    assert isinstance(carried, tuple)
    assert [*carried._asdict()] == [*adambs.Carried._fields]
    mapped = torch.utils._pytree.tree_map(lambda entry: entry + 0, carried)
    for other in (mapped, carried._replace(units=carried.units), pickle.loads(pickle.dumps(carried))):
        assert type(other) is adambs.Carried
        assert all(map(torch.equal, other, carried))
    assert repr(carried).startswith("Carried(number=tensor([0, 0, 0]), indices=")


def test_a_carried_mean_can_be_compiled():
    """Whole, without a break in the graph; and it tells that the weights were used."""
    mean = torch.compile(
        lambda drawn, losses, scores: drawn.mean(losses, scores), backend="eager", fullgraph=True
    )
    plain = torch.compile(lambda drawn, losses: drawn.mean(losses), backend="eager", fullgraph=True)
    sampler = adambs.BanditSampler(9, 3, gate=0)
    for _ in range(3):
        carried, losses = sampler.draw().carried(), torch.rand(3)
        torch.testing.assert_close(plain(carried, losses), (losses * carried.weights).mean())
        torch.testing.assert_close(mean(carried, losses, losses), carried.mean(losses, losses))
        other = carried._replace(number=carried.number.clone())
        plain(other, losses)
        assert was_weighted(other.number)
