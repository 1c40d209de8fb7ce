"""The probe: its measures against sums written out, what it leaves alone, and what it refuses."""

import copy
import dataclasses
import json
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same, small_data, small_net
from lab_fixtures import write_run
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import adambs
from adambs.lab.insight import probe_evidence
from adambs.lab.report import analysis
from adambs.lab.runs import records
from adambs.probing import measures
from adambs.probing.answer import CONTEXT, DOUBT, EXPONENT, LOOK, OWN, PLAIN, SCATTER, UNKNOWN, USE, WIDTH
from adambs.probing.problem import Problem
from adambs.proposals import Passes


def quiet(share, words):
    """A progress bar that shows nothing."""


def probed(model=None, train=None, loss=F.cross_entropy, **options):
    train = TensorDataset(*small_data(200)) if train is None else train
    options = {"batch_size": 10, "seconds": 0.4, "lr": 1e-2, "progress": quiet, **options}
    return adambs.probe(small_net() if model is None else model, train, loss, **options)


# ------------------------------------------------------------------------------------------- measures


def test_the_potential_is_that_of_the_best_p():
    s = np.random.default_rng(0).gamma(0.5, size=50)
    best = s / s.sum()
    second_moment = sum(best[j] * (s[j] / (50 * best[j])) ** 2 for j in range(50))
    uniform = sum(s[j] ** 2 for j in range(50)) / 50
    assert measures.potential(s) == pytest.approx(uniform / second_moment)
    assert measures.reduction(s, 50 * best) == pytest.approx(measures.potential(s))
    assert measures.potential(np.ones(5)) == measures.potential(np.zeros(5)) == 1.0


def test_memory_is_worth_what_old_scores_tell_of_new_ones():
    rng = np.random.default_rng(1)
    old = rng.gamma(0.5, size=4000)
    assert measures.remembered(old, old) > 0.8 * measures.potential(old)
    fresh = rng.permutation(old)
    assert 0.7 < measures.remembered(old, fresh) < 1.05  # nothing is learned from noise
    half = measures.remembered(old, np.where(rng.random(4000) < 0.5, old, fresh))
    assert 1.1 < half < measures.remembered(old, old)
    assert measures.remembered(np.zeros(10), np.ones(10)) == 1.0


def test_a_context_is_worth_what_it_tells_of_scores():
    rng = np.random.default_rng(2)
    context = rng.integers(0, 5, 3000)
    scores = np.array([0.1, 0.1, 0.1, 0.1, 3.0])[context]
    expected = (scores**2).mean() / scores.mean() ** 2
    assert measures.told_apart(context, scores) == pytest.approx(expected, rel=0.1)
    assert measures.told_apart(rng.permutation(context), scores) == pytest.approx(1.0, abs=0.05)


def test_noise_is_found_without_bias():
    rng = np.random.default_rng(3)
    mean, noise = rng.normal(size=40), 0.8
    found = []
    for _ in range(400):
        gradients = [torch.from_numpy(mean + noise * rng.normal(size=40)) for _ in range(6)]
        squares = sum(float(g @ g) for g in gradients)
        crossed = sum(float(g @ h) for g in gradients for h in gradients if g is not h)
        signal = crossed / 30
        expected = (squares / 6 - signal) / signal
        assert measures.noise_to_signal(gradients) == pytest.approx(expected)
        found.append(1 / (1 + measures.noise_to_signal(gradients)))
    truth = (mean @ mean) / (mean @ mean + 40 * noise**2)
    assert np.mean(found) == pytest.approx(truth, rel=0.02)
    assert math.isinf(measures.noise_to_signal([torch.tensor([1.0]), torch.tensor([-1.0])]))


def test_ages_are_interpolated_and_continued():
    pairs = [(10, 4.0), (100, 2.0)]
    assert measures.at_age(pairs, 5) == 4.0
    assert measures.at_age(pairs, math.sqrt(1000)) == pytest.approx(math.sqrt(8))
    assert measures.at_age(pairs, 1000) == pytest.approx(1.0)
    rising = measures.at_age([(10, 2.0), (100, 3.0)], 1000)
    assert rising == pytest.approx(math.sqrt(6))  # what rises is not continued: the mean
    assert measures.at_age([], 10) == 1.0


def test_what_is_to_come_is_continued_from_what_was_measured():
    steps = [1, 10, 50, 100, 200, 400]
    power = [(step, 1.5 * step**0.3) for step in steps]
    for step in (100, 300, 5000):
        assert measures.ahead(power, step) == pytest.approx(1.5 * step**0.3)
    falling = [(step, 5 * step**-0.2) for step in steps]
    assert measures.ahead(falling, 5000) == pytest.approx(np.exp(np.log([y for _, y in falling[3:]]).mean()))
    steep = measures.ahead([(200, 2.0), (400, 32.0)], 4000)
    assert steep == pytest.approx(8 * 4000 / math.sqrt(200 * 400))  # no faster than the step
    apart = measures.ahead([(1, 2.0), (1000, 4.0)], 100)  # nothing near: between the neighbours
    assert apart == pytest.approx(2 * 100 ** (math.log(2) / math.log(1000)))
    assert measures.ahead([(0, 3.0)], 10) == 1.0
    assert measures.ahead([(5, 3.0)], 1) == measures.ahead([(5, 3.0)], 100) == pytest.approx(3.0)


def test_noise_under_p_tells_that_of_uniform_batches():
    """Against the second moments of all examples' gradients, whose norms are the scores."""
    rng = np.random.default_rng(0)
    g = rng.normal(1.0, 2.0, (50, 6)) * rng.gamma(0.3, size=(50, 1))
    s, K = np.linalg.norm(g, axis=1), 8
    ratios = 50 * (0.9 * s / s.sum() + 0.1 / 50)
    G = g.mean(0) @ g.mean(0)
    uniform, ours = (s**2).mean(), (s**2 / ratios).mean()
    found = measures.under_uniform((ours - G) / K / G, measures.reduction(s, ratios), K)
    assert found == pytest.approx((uniform - G) / K / G)


def test_a_race_is_told_as_the_lab_tells_it():
    """Losses e^(-0.01 t) and, twice as fast, e^(-0.02 t): every target is reached in half the steps."""
    steps = [0, 10, 40, 100, 200, 400]
    theirs = [(step, math.exp(-0.01 * step)) for step in steps]
    ours = [(step, math.exp(-0.02 * step)) for step in steps]
    assert measures.race(theirs, ours) == pytest.approx(2.0)
    assert measures.race(theirs, theirs) == pytest.approx(1.0)
    # Half as fast: what is reached after half of the steps takes all; the later targets are never reached.
    late = [0.25 / 0.5, 0.5, 0.75, 1.0]
    slower = measures.race(ours, theirs)
    assert slower == pytest.approx(math.exp(np.mean(np.log(late))))
    shifted = [(step, loss - 5) for step, loss in theirs]  # negative losses: straight, not their logarithms
    assert measures.race(shifted, shifted) == pytest.approx(1.0)
    assert measures.race([(0, 1.0), (9, 1.0)], [(0, 1.0), (9, 0.5)]) == 1.0  # there was nothing to reach


def test_exponent_and_offset_are_what_normal_distributions_say():
    """Against numbers drawn from them: the mean, weighted by how well each agrees with the race."""
    rng = np.random.default_rng(0)
    exponents, offsets = rng.normal(0.27, 0.25, 10**6), rng.normal(0, 0.3, 10**6)
    for x, seen, doubt in ((0.0, 0.4, 0.1), (0.5, 0.5, 0.1), (2.0, 0.1, 0.2)):
        agreement = np.exp(-((seen - exponents * x - offsets) ** 2) / (2 * doubt**2))
        expected = [np.average(each, weights=agreement) for each in (exponents, offsets)]
        assert measures.updated(0.27, 0.25, 0.3, x, seen, doubt) == pytest.approx(expected, abs=3e-3)
    assert measures.updated(0.27, 0.25, 0.3, 0.0, 0.4, 0.1)[0] == 0.27  # there was nothing to win


# ---------------------------------------------------------------------------------------- a whole probe


def test_a_probe_measures_everything_and_says_what_to_do(tmp_path):
    answer = probed(contexts={"half": np.arange(200) % 2})
    assert answer.steps >= 10
    assert answer.measured
    assert {"half", "label"} == answer.contexts.keys()
    assert answer.overhead > 0
    assert answer.look > 0
    assert answer.speedup[1] / answer.speedup[0] == pytest.approx(WIDTH**2)
    assert WIDTH**2 <= 1.5
    assert answer.verdict in str(answer)
    assert json.loads(json.dumps(answer.to_dict(), allow_nan=False))["steps"] == answer.steps
    page = answer.report(tmp_path / "probe.html").read_text("utf-8")
    assert "<polyline" in page
    assert "nan" not in page.lower().replace("nanosecond", "")


def test_everything_is_left_as_it_was():
    model, (x, y) = small_net(), small_data(100)
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    expected = torch.rand(3), random.random(), np.random.random(3)  # noqa: NPY002
    torch.manual_seed(5), random.seed(5), np.random.seed(5)  # noqa: NPY002
    answer = probed(model, TensorDataset(x, y), optimizer=optimizer)
    assert answer.lr == 1e-3
    found = torch.rand(3), random.random(), np.random.random(3)  # noqa: NPY002
    assert same(found, expected)
    assert same((model.state_dict(), optimizer.state_dict()), before)
    assert not model.training
    assert not model._forward_hooks


def test_the_copy_is_trained_as_the_readme_says():
    """The same parameters as the loop with AdamBS, scores in the mean and a clip, bit for bit."""
    x, y = small_data(60)
    torch.set_num_threads(1)
    kept, steps = [], 0

    def look(share, words):
        nonlocal steps
        # Then the whole training is raced again, with other draws.
        steps = int(words.split()[0]) if words.endswith("steps") else None

    class Spied(nn.Linear):  # the copy's parameters are seen at each forward pass
        def forward(self, inputs):
            if self.training and len(inputs) == 10:
                kept.append((steps, self.weight.detach().clone()))
            return super().forward(inputs)

    torch.manual_seed(0)
    model = Spied(6, 3)
    before = copy.deepcopy(model.state_dict())
    adambs.probe(model, TensorDataset(x, y), F.cross_entropy, batch_size=10, seconds=0.3, progress=look)
    sampler = adambs.BanditSampler(60, 10, seed=0)
    optimizer = adambs.AdamBS(model.parameters(), sampler, lr=1e-3)
    ours = {}
    for step in range(20):
        ours[step] = model.weight.detach().clone()
        draw = sampler.draw()
        logits = F.linear(x[draw.indices], model.weight, model.bias)
        losses, scores = F.cross_entropy(logits, y[draw.indices], reduction="none"), None
        scores = adambs.scores.cross_entropy(logits.detach(), y[draw.indices])
        optimizer.zero_grad()
        draw.mean(losses, scores).backward()
        optimizer.step(draw, scores)
    first, last = dict(reversed(kept)), dict(kept)  # in each step the bandit's copy comes first
    assert all(torch.equal(first[step], ours[step]) for step in range(10))
    # The other copy is trained by plain Adam, on the sampler's own passes.
    plain = Spied(6, 3)
    plain.load_state_dict(before)
    optimizer, passes = torch.optim.Adam(plain.parameters(), lr=1e-3), Passes(60, 0)
    for step in range(10):
        assert torch.equal(last[step], plain.weight)
        batch = passes.take(10)
        optimizer.zero_grad()
        F.cross_entropy(
            F.linear(x[batch], plain.weight, plain.bias), y[batch], reduction="none"
        ).mean().backward()
        optimizer.step()


def test_the_learning_rate_follows_the_schedule():
    asked = []

    def schedule(share):
        asked.append(share)
        return 0.0

    answer = probed(schedule=schedule, epochs=1, seconds=0.2)  # 200 examples in batches of 10: 20 steps
    assert asked[:3] == pytest.approx([0.5 / 20, 1.5 / 20, 2.5 / 20])
    assert max(asked) <= 1
    losses = [loss for _, loss in answer.losses]
    assert losses == pytest.approx([losses[0]] * len(losses))  # nothing moves at a rate of zero
    with pytest.raises(ValueError, match="schedule must return a finite number"):
        probed(schedule=lambda share: math.nan)


def test_a_short_training_is_seen_whole():
    answer = probed(epochs=1.5, seconds=600)  # 200 examples in batches of 10
    assert answer.steps == 30
    assert answer.losses[-1][0] == answer.plain_losses[-1][0] == answer.race[0] == 30
    assert len(answer.losses) >= 20  # one unlucky moment counts little
    assert [step for step, _ in answer.noise] == [0, 11, 21]


def test_a_short_training_is_raced_again_while_there_is_time():
    """Each race has draws of its own; the mean counts, and the more of them the less it is doubted."""
    x, y = small_data(200)
    y = torch.where(torch.arange(200) < 190, 0, y)  # p pays where most are easy
    options = {"epochs": 10, "train": TensorDataset(x, y)}
    once, answer = probed(**options, seconds=1e-9), probed(**options, seconds=600)
    assert once.more_races == []
    assert len(answer.more_races) == 4
    assert len(set(answer.more_races)) == 4
    single = dataclasses.replace(answer, more_races=[])
    logs = [math.log(single.race[1]), *map(math.log, answer.more_races)]
    assert math.log(answer.race[1]) == pytest.approx(sum(logs) / 5)
    assert ", in the first 200, the mean of 5 races" in str(answer)
    assert answer.to_dict()["more_races"] == answer.more_races


def test_ctrl_c_in_a_later_race_returns_the_others():
    def stop(share, words):
        if words == "race 3":
            raise KeyboardInterrupt

    answer = probed(epochs=1.5, seconds=600, progress=stop)
    assert answer.interrupted
    assert answer.steps == 30
    assert len(answer.more_races) == 1


def test_an_optimizer_of_ours_will_do():
    model, (x, y) = small_net(), small_data(100)
    optimizer = adambs.AdamBS(model.parameters(), adambs.BanditSampler(100, 10), lr=1e-3)
    answer = probed(model, TensorDataset(x, y), optimizer=optimizer)
    assert answer.measured
    assert optimizer.clip is not None


def test_scores_may_be_computed_when_they_are_asked_for():
    def loss(model, batch):
        logits = model(batch[0])
        found = F.cross_entropy(logits, batch[1], reduction="none")
        return found, lambda: adambs.scores.cross_entropy(logits, batch[1])

    first, second = probed(loss=loss), probed()
    assert first.potential[0] == second.potential[0]


class Words(Dataset):
    """Batches that are dicts, and random numbers in __getitem__."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": torch.full((6,), float(i)) + random.random(), "y": torch.tensor(i % 3)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


def test_any_batch_and_any_loss_will_do():
    def losses(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    def with_scores(model, batch):
        logits = model(batch["x"])
        found = F.cross_entropy(logits, batch["y"], reduction="none")
        return found, adambs.scores.cross_entropy(logits, batch["y"])

    first, second = (probed(train=Words(), loss=loss) for loss in (losses, with_scores))
    # The norm at the output is the closed form's, on the panel that was scored before training.
    assert first.potential[0][1] == pytest.approx(second.potential[0][1], rel=1e-5)
    assert first.contexts == {}


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(reduction="none"), torch.arange(60) % 3),
        (nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1), None),
        (F.mse_loss, torch.randn(60, 3)),
        (F.binary_cross_entropy_with_logits, torch.rand(60, 3)),
    ],
)
def test_known_losses(loss, targets):
    if targets is None:  # not known in closed form: given as a function
        plain, targets = loss, torch.arange(60) % 3
        loss = lambda model, batch: plain(model(batch[0]), batch[1])  # noqa: E731
    answer = probed(train=TensorDataset(torch.randn(60, 6), targets), loss=loss)
    assert answer.possible >= 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]), reduction="none"),
        nn.CrossEntropyLoss(ignore_index=1, reduction="none"),
        nn.CrossEntropyLoss(label_smoothing=0.2, reduction="none"),
        nn.MultiMarginLoss(reduction="none"),
    ],
)
def test_modules_with_options_are_the_losses_that_they_are(loss):
    """The panel's losses and scores are the module's: its own values, and the gradient at each output."""
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    problem = Problem(
        net := small_net(), TensorDataset(x, y), loss, 10, lr=1e-3, optimizer=None, collate_fn=None, seed=0
    )
    losses, norms, _ = problem.evaluated(np.arange(60), 25)
    z = net(x).detach().requires_grad_()
    np.testing.assert_allclose(losses, loss(z, y).detach(), rtol=1e-5)
    [gradient] = torch.autograd.grad(loss(z, y).sum(), z)
    np.testing.assert_allclose(norms, gradient.norm(dim=1), rtol=1e-5, atol=1e-7)


def test_ctrl_c_returns_what_there_is():
    def stop(share, words):
        if words == "8 steps":
            raise KeyboardInterrupt

    answer = probed(seconds=60, progress=stop)
    assert answer.interrupted
    assert answer.steps == 8
    assert answer.potential
    assert "interrupted" in str(answer)


def test_ctrl_c_before_anything_was_measured_is_said(tmp_path):
    class Stopped(nn.Linear):
        def forward(self, x):
            raise KeyboardInterrupt

    answer = probed(Stopped(6, 3))
    assert answer.steps == 0
    assert "Nothing can be said" in str(answer)
    assert json.dumps(answer.to_dict(), allow_nan=False)
    assert answer.report(tmp_path / "none.html").exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": nn.Sequential(nn.ReLU())}, ValueError, "no parameters to train"),
        ({"model": "net"}, TypeError, "must be a torch.nn.Module"),
        ({"loss": nn.CrossEntropyLoss()}, ValueError, r"reduced already \(mean\)"),
        ({"loss": lambda m, b: F.cross_entropy(m(b[0]), b[1])}, ValueError, "it looks reduced already"),
        ({"loss": "cross entropy"}, TypeError, "loss must be"),
        (
            {"train": TensorDataset(torch.ones(1, 6), torch.zeros(1).long())},
            ValueError,
            "train has 1 example:",
        ),
        ({"train": Stream()}, TypeError, "map-style"),
        ({"batch_size": 300}, ValueError, "at most the 200 examples"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"seconds": 0}, ValueError, "seconds must be positive"),
        ({"lr": -1}, ValueError, "lr must be positive"),
        ({"optimizer": "adam"}, TypeError, "must be a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, ValueError, "none of the model's"),
        ({"loss": F.nll_loss}, TypeError, "give its module"),
        ({"loss": partial(F.cross_entropy, label_smoothing=0.1)}, TypeError, "give its module"),
        ({"schedule": 3}, TypeError, "schedule must be a function"),
        ({"contexts": [1, 2]}, TypeError, "contexts must be a dict"),
        ({"contexts": {"c": [1, 2]}}, ValueError, r"contexts\['c'\] must be 200 whole numbers"),
        ({"train": Words()}, TypeError, "must be a pair"),
        ({"epochs": 0}, ValueError, "epochs must be positive"),
        ({"lr": math.inf}, ValueError, "lr must be positive and finite"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(changes, error, words):
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    with pytest.raises(error, match=words):
        probed(**{"model": model, **changes})
    assert same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), stream)


# -------------------------------------------------------------------------------------------- verdicts


def answer_with(**changes):
    values = {
        "potential": [(0, 1.5), (100, 4.0)],
        "learned": [(0, 1.0), (100, 3.0)],
        "memory": [(10, 3.5), (80, 3.0)],
        "noise": [(0, 30.0)],
        "steps": 100,
        "step_seconds": 0.01,
        "overhead": 0.02,
        "look": 0.4,
    }
    return adambs.Answer(8000, 100, 1e-3, **{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, USE, "BanditSampler(8000, batch_size=100)"),
        ({"steps": 39}, UNKNOWN, "39 steps of 800 are too few"),
        ({"steps": 99, "epochs": 100}, UNKNOWN, "99 steps of 8,000 are too few"),
        ({"noise": [(0, 0.2)]}, PLAIN, "Try batches of 20"),
        ({"potential": [(0, 1.0), (9, 1.1)], "learned": [], "memory": [(9, 1.0)]}, PLAIN, "too alike"),
        ({"potential": [(0, 5.0), (9, 60.0)], "look": 0.02}, LOOK, "score="),
        ({"memory": [(9, 1.0)], "learned": [], "contexts": {"source": [(9, 3.0)]}}, CONTEXT, "source tells"),
        ({"contexts": {"source": [(9, 1.0)], "length": [(9, 2.0)]}, "epochs": 1.5}, CONTEXT, "length tells"),
        ({"contexts": {"source": [(9, 3.0)]}, "epochs": 30}, USE, "Use it"),  # memory soon has it
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_measures(changes, kind, words):
    answer = answer_with(**changes)
    assert answer.kind == kind
    assert words in answer.verdict


def test_an_expensive_bandit_lowers_what_is_expected():
    assert answer_with(overhead=0.5).expected < answer_with().expected
    assert answer_with(noise=[(0, 0.5)]).expected < answer_with().expected


def test_what_is_expected_depends_on_how_long_the_training_is():
    rising = {"potential": [(25, 2.0), (50, 2.8), (100, 4.0)], "steps": 100}
    expected = [answer_with(epochs=epochs, **rising).expected for epochs in (1, 3, 30)]
    assert expected == sorted(expected)
    assert expected[0] < expected[-1]
    assert "at step 100 of 200, as measured" in str(answer_with(epochs=2.5, **rising))
    assert "continued from 100" in str(answer_with(epochs=30, **rising))


def test_the_course_of_p_is_a_plain_pass_and_then_what_was_learned():
    """8,000 examples in batches of 100: a pass is 80 steps."""
    flat = {"potential": [(1, 5.0), (1000, 5.0)], "learned": [(1, 3.0), (1000, 3.0)]}
    answer = answer_with(**flat, contexts={"c": [(1, 2.0), (1000, 2.0)]}, epochs=4, look=0.1)
    quarter, rest = [1.0] * 25, [3.0] * 75
    gains = [1 / (1 / T + (1 - 1 / T) / 3) for T in (5.0, 5 / 3)]
    pays = [(100 + 100) / (100 + 100 / gain) > 1.3 for gain in gains]  # a look at 3 K costs 3 x 0.1
    assert pays == [True, False]
    assert gains[1] > 1.3  # it would pay if noise were all that holds training up
    values = {"": quarter + rest, "c": [2.0] * 25 + rest, "look": [gains[0] / 1.3] * 25 + rest}
    for options, name in (({}, ""), ({"context": "c"}, "c"), ({"look": True}, "look")):
        assert answer.course(**options) == pytest.approx(values[name])
        expected = math.exp(EXPONENT * sum(map(math.log, values[name])) / 100) / 1.02
        assert answer.expects(**options) == pytest.approx(expected)
    dear = answer_with(**flat, epochs=4, look=0.5)
    assert dear.course(look=True) == dear.course()  # a look that costs more than it gains is not made
    more = answer_with(**{**flat, "learned": [(1, 9.0)]}, epochs=4)
    assert more.course()[-1] == pytest.approx(5.0)  # p has no more than there is


def test_what_was_seen_counts_more_than_what_is_usual():
    values = {"learned": [(1, 3.0), (1000, 3.0)], "epochs": 4, "steps": 200}
    losses = [(step, math.exp(-0.01 * step)) for step in (0, 50, 100, 200)]
    slower = [(step, math.exp(-0.008 * step)) for step in (0, 50, 100, 200)]
    seen = answer_with(**values, losses=losses, plain_losses=slower)
    until, speedup = seen.race
    assert (until, speedup) == (200, pytest.approx(1.25))
    x = math.log(3) * 120 / 200  # the first 80 steps are a plain pass
    exponent, offset = measures.updated(EXPONENT, SCATTER, OWN, x, math.log(1.25), DOUBT)
    assert seen.shown() == pytest.approx((exponent, offset), rel=1e-6)
    assert answer_with(**values).shown() == (EXPONENT, 0.0)
    again = answer_with(**values, losses=losses, plain_losses=slower, more_races=[1.25] * 3)  # doubted less
    more = measures.updated(EXPONENT, SCATTER, OWN, x, math.log(1.25), DOUBT / 2)
    assert again.shown() == pytest.approx(more, rel=1e-6)
    # Over the whole training: what was raced with the exponent and the offset that were shown, the offset for
    # the share that was raced; what a context adds with the usual exponent. One that tells much makes another
    # training of it.
    x, added = math.log(3) * 240 / 320, math.log(2) * 80 / 320
    raced = exponent * x + offset * 200 / 320
    assert seen.expects() == pytest.approx(math.exp(raced) / 1.02, rel=1e-6)
    seen.contexts = {"c": [(1, 2.0), (1000, 2.0)]}
    assert added < math.log(1.2)
    assert seen.expects(context="c") == pytest.approx(math.exp(raced + EXPONENT * added) / 1.02, rel=1e-6)
    seen.contexts = {"c": [(1, 4.0), (1000, 4.0)]}
    seen.potential = [(1, 4.0), (1000, 4.0)]
    assert seen.expects(context="c") == pytest.approx(math.exp(EXPONENT * math.log(4)) / 1.02, rel=1e-6)
    assert "1.25 times as fast in steps, in the first 200" in str(seen)
    # Only what lies within the planned training is compared.
    later = {"losses": [*losses, (900, 1e-9)], "plain_losses": [*slower, (900, 1.0)]}
    assert answer_with(**values, **later).race == seen.race


def test_a_race_that_was_won_counts_more_than_a_noise_that_is_small():
    """Six batches may miss the few examples that make the noise; a race over the whole training does not."""
    losses = [(step, math.exp(-0.01 * step)) for step in range(0, 801, 20)]
    slower = [(step, math.exp(-0.007 * step)) for step in range(0, 801, 20)]
    quiet_one = answer_with(noise=[(0, 0.1)], steps=800)
    raced = dataclasses.replace(quiet_one, losses=losses, plain_losses=slower)
    assert quiet_one.kind == PLAIN
    assert raced.kind == USE
    assert 1.2 < raced.expected < 1 / 0.7


def test_a_cost_that_takes_the_gain_away_is_named():
    answer = answer_with(overhead=0.4)
    assert answer.kind == PLAIN
    assert "a step would take 1.40 times as long" in answer.verdict


# -------------------------------------------------------------------------------------------- evidence


def test_answers_come_back_from_their_json(tmp_path):
    answer = answer_with(noise=[(0, math.inf), (50, 30.0)], seconds=60.0, steps=100)
    (tmp_path / "cnn-fashion.json").write_text(json.dumps(answer.to_dict(), allow_nan=False))
    assert probe_evidence.read_answer(tmp_path / "cnn-fashion.json") == answer
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="was not written by a probe"):
        probe_evidence.read_answer(tmp_path / "other.json")


def test_an_earlier_probe_told_of_contexts_at_its_end_only(tmp_path):
    answer = answer_with(steps=100, contexts={"label": [(100, 1.5)]})
    found = answer.to_dict()
    found["contexts"] = {"label": 1.5}
    (tmp_path / "old.json").write_text(json.dumps(found, allow_nan=False))
    assert probe_evidence.read_answer(tmp_path / "old.json") == answer


def test_ranges_stand_beside_what_was_recorded(tmp_path, monkeypatch, capsys):
    results, probes = tmp_path / "results", tmp_path / "results" / "probes"
    for name, seeds in (("a", 2), ("probes/again", 3), ("sweep-a", 2)):
        write_run(results / name, ["adam", "adambs"], seeds=seeds)
    config = records.read(results / "a").config
    same_run = {name: config[name] for name in ("n", "lr", "batch_size", "epochs")}
    probes.mkdir(exist_ok=True)
    for k, name in enumerate(("cnn-fashion", "flipped", "third", "fourth", "other-lr")):
        answer = answer_with(learned=[(0, 1.0), (1, 1.1 + k / 2)])
        for field, value in same_run.items():
            setattr(answer, field, value * (1 + (name == "other-lr" and field == "lr")))
        found = {"experiment": config["experiment"], **answer.to_dict()}
        (probes / f"{name}.json").write_text(json.dumps(found, allow_nan=False))
    found = probe_evidence.rows(probes, results)
    assert [row.name for row in found] == ["cnn-fashion", "flipped", "fourth", "third"]
    assert [row.used for row in found] == ["the fit", "seen", "the test", "the test"]
    runs = [records.read(results / name) for name in ("a", "probes/again")]
    speedups = [analysis.analyse(run).speedups["adambs"] for run in runs]
    logs = [math.log(speedup["seconds"].overall.value) for speedup in speedups]
    for row in found:
        assert row.recorded.value == pytest.approx(math.exp((2 * logs[0] + 3 * logs[1]) / 5))
        assert row.recorded.steps > 0
        assert row.recorded.seeds == 5
        assert row.said == row.answer.expects(look=True)
        assert row.inside == (row.said / WIDTH <= row.recorded.value <= row.said * WIDTH)
    page = tmp_path / "page.md"
    page.write_text("# Before\n<!-- probes: begin -->\nold\n<!-- probes: end -->\nafter\n")
    monkeypatch.setattr("sys.argv", ["probe_evidence", "--results", str(results), "--docs", str(page)])
    probe_evidence.main()
    text = (probes / "README.md").read_text("utf-8")
    table = probe_evidence.markdown(found)
    whole = "# Before\n<!-- probes: begin -->\n\n{}\n<!-- probes: end -->\nafter\n"
    assert page.read_text("utf-8") == whole.format(table)
    assert table in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="must have the lines"):
        probe_evidence.insert("text", page)
    assert text in capsys.readouterr().out
    assert f"All: {sum(row.inside for row in found)} of 4 recorded speedups" in text
    held = sum(row.inside for row in found if row.used == "the test")
    assert f"not seen when the rule was chosen: {held} of 2 recorded speedups" in text
    assert "without a record of AdamBS yet: other-lr" in text
    assert "<svg" in (probes / "probes.svg").read_text("utf-8")


def test_like_is_compared_with_like(tmp_path):
    """Each method with what the probe says of that method, and only if it was asked about."""
    results, probes = tmp_path / "results", tmp_path / "results" / "probes"
    write_run(results / "a", ["adam", "adambs-loop", "adambs-loop:context=1"], seeds=2)
    config = records.read(results / "a").config
    probes.mkdir()
    for name, contexts in (("x", {"label": [(1, 2.0)]}), ("y", {})):
        answer = answer_with(contexts=contexts, epochs=float(config["epochs"]))
        answer.n, answer.lr, answer.batch_size = config["n"], config["lr"], config["batch_size"]
        found = {"experiment": config["experiment"], **answer.to_dict()}
        (probes / f"{name}.json").write_text(json.dumps(found, allow_nan=False))
    loop, context, other = probe_evidence.rows(probes, results)
    assert (loop.method, context.method, other.method) == (
        "adambs-loop",
        "adambs-loop:context=1",
        "adambs-loop",
    )
    assert loop.said == loop.answer.expects() == other.said
    assert context.said == context.answer.expects(context="label") > loop.said


def test_the_fit_finds_the_exponent_that_made_the_speedups():
    rows = []
    for k, potential in enumerate((1.2, 2.0, 5.0, 40.0)):
        values = {"potential": [(100, potential)], "learned": [(100, potential)]}
        answer = answer_with(**values, overhead=0.1 * k)
        x = sum(math.log(value) for value in answer.course()) / 100
        recorded = probe_evidence.Recorded(math.exp(0.4 * x) / (1 + 0.1 * k), math.exp(0.4 * x), 3, False)
        rows.append(probe_evidence.Row(str(k), "adambs-loop", answer, recorded))
    assert probe_evidence.fit(rows) == pytest.approx(0.4)
    assert probe_evidence.left_out(rows) == pytest.approx([row.recorded.value for row in rows])
