"""p in shards: the p of one process, in parts. Several processes of it: ``test_processes.py``."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import same, saved_and_loaded, small_data
from test_unbiased import assert_unbiased, both
from torch.utils.data import TensorDataset

import adambs
from adambs.integrations._common import refuse_shards
from adambs.rules.sharded import SharedStream

N, B = 200, 13
NORMS = np.random.default_rng(0).gamma(0.5, 0.5, N)


def taught(sampler, steps):
    """After so many steps of scores that wobble; and what was drawn."""
    drawn = []
    for _ in range(steps):
        draw = sampler.draw()
        draw.mean(torch.ones(len(draw)))  # as whoever trains does
        drawn.append(draw.indices.tolist())
        sampler.update(draw, NORMS[draw.indices] * (1 + 0.3 * np.sin(draw.number)))
    return drawn


@pytest.mark.parametrize("options", [{}, {"gate": 0.0}, {"gate": 1.01}])
def test_one_shard_is_the_sampler_without_shards(options):
    """Bit for bit: the same draws, p and diagnostics."""
    plain = adambs.BanditSampler(N, B, seed=4, **options)
    sharded = adambs.ShardedSampler(N, B, seed=4, shards=1, **options)
    assert taught(plain, 150) == taught(sharded, 150)
    assert torch.equal(plain.probabilities(), sharded.probabilities())
    assert plain.diagnostics() == sharded.diagnostics()


@pytest.mark.parametrize("lengths", [[70, 130], [1, 199], [40] * 5, [1] * N])
@pytest.mark.parametrize("stratified", [False, True])
def test_p_in_shards_is_p(lengths, stratified):
    """What the rule makes of the same batches without shards, to the bit."""
    sampler = adambs.ShardedSampler(lengths, B, seed=1, gate=0.0, stratified=stratified)
    rule = adambs.Calibrated()
    rule.start(N, B, None)
    for _ in range(80):
        draw = sampler.draw()
        assert len(draw) == B
        np.testing.assert_array_equal(draw.probabilities, rule.ratios(draw.indices.numpy()) / N)
        scores = NORMS[draw.indices] * (1 + 0.3 * np.sin(draw.number))
        sampler.update(draw, scores)
        rule.update(draw.indices.numpy(), None, scores)
        np.testing.assert_array_equal(sampler.probabilities(), rule.ratios() / N)
    assert draw.weights.max() > 2 * draw.weights.min()


def test_nothing_that_is_done_to_a_draw_reaches_the_sampler():
    sampler = adambs.ShardedSampler([30, 100, 70], B, gate=0.0)
    taught(sampler, 5)
    untouched = copy.deepcopy(sampler)
    draw = sampler.draw()
    for array in (draw.own, draw.counts, draw.indices, draw.weights):
        array += 50_000_000
    same_draw = untouched.draw()
    for each, drawn in ((sampler, draw), (untouched, same_draw)):
        each.update(drawn, np.linspace(0.1, 1, B))
    assert same(sampler.state_dict(), untouched.state_dict())


@pytest.mark.parametrize("stratified", [False, True])
def test_draws_follow_p(stratified):
    """Each example as often as p says, and how many a shard gets varies as it should."""
    sampler = adambs.ShardedSampler([30, 100, 70], B, seed=2, gate=0.0, stratified=stratified)
    taught(sampler, 60)
    p, rounds = sampler.probabilities().numpy(), 4000
    indices, sizes = np.zeros(N), []
    for _ in range(rounds):
        draw = sampler.draw()
        indices += np.bincount(draw.indices, minlength=N)
        sizes.append(draw.counts)
    mass = np.array([p[:30].sum(), p[30:130].sum(), p[130:].sum()])
    assert scipy.stats.chisquare(indices, rounds * B * p).pvalue > 1e-3
    spread = np.var(sizes, axis=0) / (B * mass * (1 - mass))  # in units of independent draws
    if stratified:
        assert np.abs(np.array(sizes) - B * mass).max() < 2
    else:
        np.testing.assert_allclose(spread, 1, atol=0.1)


def test_a_pass_is_a_pass():
    sampler = adambs.ShardedSampler([30, 100, 70], 10, seed=2)
    drawn = [sampler.draw() for _ in range(20)]
    assert sorted(torch.cat([draw.indices for draw in drawn]).tolist()) == list(range(N))
    assert all((draw.weights == 1).all() for draw in drawn)
    assert all(
        (np.diff(np.searchsorted([30, 130], draw._indices, side="right")) >= 0).all() for draw in drawn
    )


@both
def test_unbiased_by_default(K):
    kind = partial(adambs.ShardedSampler, shards=3)
    assert assert_unbiased("shards", K, 400, kind=kind) > 0.2


@pytest.mark.parametrize("late", [0, 3])
def test_unbiased_stratified(late):
    kind = partial(adambs.ShardedSampler, shards=3)
    name = f"stratified shards, {late} late"
    assert assert_unbiased(name, 3, 250, kind=kind, stratified=True, late=late) > 0.04


def test_a_part_of_the_numbers_is_that_part_of_all():
    for start, stop in [(0, 0), (0, 50), (17, 31), (50, 50)]:
        plain, shared = SharedStream(3), SharedStream(3)
        assert np.array_equal(shared.part(50, start, stop), plain.uniform(50)[start:stop])
        assert shared.state_dict() == plain.state_dict()


# ----------------------------------------------------------------------------------------------
# States
# ----------------------------------------------------------------------------------------------


def make(**options):
    return adambs.ShardedSampler([30, 100, 70], B, **{"seed": 3, **options})


@pytest.mark.parametrize("steps", [0, 5, 60])
def test_a_state_goes_on(steps):
    sampler = make()
    taught(sampler, steps)
    other = make()
    other.load_state_dict(saved_and_loaded(sampler.state_dict()))
    assert same(other.state_dict(), sampler.state_dict())
    assert taught(other, 30) == taught(sampler, 30)


def test_a_state_has_the_draws_on_their_way(tmp_path):
    data = TensorDataset(torch.arange(N), small_data(N)[0])

    def batches(sampler):
        loader = adambs.BanditLoader(data, sampler, num_workers=1)
        for (i, _), draw in loader:
            assert torch.equal(i, draw.indices)
            draw.mean(torch.ones(len(draw)))
            sampler.update(draw, NORMS[i])
            yield i.tolist()

    sampler = make()
    taught(sampler, 40)
    running = batches(sampler)
    begun = [next(running) for _ in range(3)]
    state = copy.deepcopy(sampler.state_dict())
    assert len(begun) == 3
    assert len(state["epochs"]["ahead"]) > 0
    other = make()
    other.load_state_dict(saved_and_loaded(state))
    assert list(batches(other)) == list(running)


def test_a_batch_is_plain_if_all_of_it_is_from_a_pass_or_p_is_uniform():
    """As of a sampler without shards, in a pass, where it ends, and after it; also in a state."""
    one = adambs.BanditSampler(N, B, seed=4, gate=1.01)
    sharded = adambs.ShardedSampler([70, 130], B, seed=4, gate=1.01)
    found = []
    for step in range(60):
        draws = one.draw(), sharded.draw()
        assert draws[0].plain == draws[1].plain
        found.append(draws[0].plain)
        assert sharded.restored(draws[1].to_list(), parts_of(draws[1])).plain == found[-1]
        for sampler, draw in zip((one, sharded), draws, strict=True):
            draw.mean(torch.ones(len(draw)))
            sampler.update(draw, NORMS[draw.indices] * (1 + 0.3 * np.sin(step)))
    assert True in found
    assert False in found
    assert adambs.ShardedSampler([70, 130], B, gate=0.0).draw().plain


def test_what_knows_of_one_process_only_refuses_shards_of_several():
    sampler = adambs.ShardedSampler([70, 130], B)
    refuse_shards(sampler)
    refuse_shards(adambs.BanditSampler(N, B))
    sampler.processes.size = 2
    with pytest.raises(TypeError, match="the trainer saves the part of one process"):
        refuse_shards(sampler)
    with pytest.raises(ValueError, match="a history with losses cannot watch a ShardedSampler"):
        adambs.History(N, with_losses=True).watch(sampler)


def parts_of(draw):
    """The examples and groups of each shard, as a state has them."""
    ends = np.cumsum(draw.counts)
    return [
        [draw.own[end - count : end].tolist(), draw._drawn[end - count : end].tolist()]
        for count, end in zip(draw.counts, ends, strict=True)
    ]


def test_copies_and_pickles_go_on():
    sampler = make()
    taught(sampler, 40)
    copies = [copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    expected = taught(sampler, 20)
    assert [taught(one, 20) for one in copies] == [expected] * 2


def damage(**parts):
    def change(state):
        for name, value in parts.items():
            part, key = name.split("__")
            state[part][key] = value
        return state

    return change


DAMAGED = {
    "sizes": (damage(rule__sizes=torch.zeros(3, 91, dtype=torch.int64)), "must have the lengths"),
    "negative": (damage(rule__sizes=-torch.ones(3, 91, dtype=torch.int64)), r"state\['rule'\] is damaged"),
    "no shards": (damage(rule__shards={}), r"state\['shards'\] has no '0'"),
    "order": (
        damage(rule__shards={str(v): torch.zeros(n, dtype=torch.int32) for v, n in enumerate((30, 100, 70))}),
        "must hold each of 30 examples once, but it has 0 at 1",
    ),
    "means": (damage(rule__means=torch.full((91,), torch.nan, dtype=torch.float64)), "means"),
    "ahead": (damage(epochs__ahead=[[3, [1, 2, 3], [1.0] * 91]]), r"state\['epochs'\] is damaged"),
    "another sampler": (lambda state: {**state, "lengths": "00000000"}, "with lengths = '00000000'"),
    "states of two moments": (
        lambda state: [state, {**state, "awaited": {"following": 3}}],
        "differ in 'awaited': load those of one moment",
    ),
    "no states": (lambda state: [], "not an empty list"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_and_nothing_changes(name):
    change, words = DAMAGED[name]
    sampler = make()
    taught(sampler, 20)
    before = copy.deepcopy(sampler.state_dict())
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict(change(copy.deepcopy(before)))
    assert same(sampler.state_dict(), before)


def test_what_is_not_for_shards_says_so():
    sampler = make()
    with pytest.raises(ValueError, match="score is not for shards"):
        sampler.draw(lambda indices: NORMS[indices])
    with pytest.raises(ValueError, match=r"correction must be 1 with shards, not 0\.5"):
        sampler.correction = 0.5
    with pytest.raises(TypeError, match="refresh is not for shards"):
        sampler.refresh(lambda indices: NORMS[indices])
    with pytest.raises(TypeError, match=r"rule must be Calibrated\(...\), not Exp3"):
        adambs.ShardedSampler(N, B, rule=adambs.Exp3())
    with pytest.raises(ValueError, match="shards is 2 and n has the lengths of 3"):
        adambs.ShardedSampler([30, 100, 70], B, shards=2)
    with pytest.raises(ValueError, match=r"n\[1\] must be"):
        adambs.ShardedSampler([30, 0], B)
    with pytest.raises(ValueError, match=f"dataset has 77 examples but sampler.n is {N}"):
        adambs.BanditLoader(TensorDataset(torch.zeros(77)), sampler)


def test_processes_without_a_group_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) before ShardedSampler"):
        adambs.ShardedSampler(N, B)
    assert len(adambs.ShardedSampler(N, B, group=False).draw()) == B


def test_the_rule_given_is_the_rule_used():
    sampler = make(rule=adambs.Calibrated(uniform=0.5))
    taught(sampler, 30)
    assert sampler.probabilities().min() * N >= 0.5
    assert "uniform=0.5" in repr(sampler)
    assert "shards 0 to 2 of 3 here" in repr(sampler)
    assert sampler.diagnostics().reshuffled == 0  # a rule of one's own has no gate


def test_wrong_scores_change_nothing():
    sampler = make(gate=0.0)
    taught(sampler, 10)
    draw = sampler.draw()
    before = copy.deepcopy(sampler.state_dict())
    for scores, words in [(np.ones(B + 1), "shape"), (np.full(B, np.nan), "nan"), (-np.ones(B), "negative")]:
        with pytest.raises(ValueError, match=words):
            sampler.update(draw, scores)
    with pytest.raises(ValueError, match="indices must lie in"):
        sampler.probabilities([N])
    assert same(sampler.state_dict(), before)
