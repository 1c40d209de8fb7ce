"""Checkpoints of every kind: torch's distributed ones, pickles and copies, old states and damaged ones."""

import copy
import math
import pickle
import random
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers import same, saved_and_loaded, small_data, small_net, taught
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.utils.data import TensorDataset

import adambs

# Some samplers are taught here without training anything.
pytestmark = [
    pytest.mark.filterwarnings("ignore:batches were drawn with unequal p"),
    pytest.mark.filterwarnings("ignore:an epoch of .* batches is over"),
]

X, Y = small_data()
DATA = TensorDataset(X, Y)

RULES = {
    "default": lambda: None,
    "Calibrated": adambs.Calibrated,
    "Exp3": lambda: adambs.Exp3(step=0.5),
    "Exp3 baseline": lambda: adambs.Exp3(step=0.5, offset="baseline"),
    "Tracking": adambs.Tracking,
    "VRB": adambs.VRB,
    "Avare": adambs.Avare,
    "Release": adambs.Release,
    "Exp3M": lambda: adambs.Exp3M(step=2.0),
    "Uniform": adambs.Uniform,
}

OPTIMIZERS = {
    "AdamBS": (adambs.AdamBS, torch.optim.Adam, {"lr": 0.01}),
    "AdamBS, amsgrad": (adambs.AdamBS, torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "SGD": (adambs.with_bandit(torch.optim.SGD), torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (adambs.with_bandit(torch.optim.SGD), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (adambs.with_bandit(torch.optim.AdamW), torch.optim.AdamW, {"lr": 0.01}),
    "RMSprop": (adambs.with_bandit(torch.optim.RMSprop), torch.optim.RMSprop, {"lr": 0.01}),
}


def learning(rule="Exp3", seed=0):
    return adambs.BanditSampler(len(X), 10, rule=RULES[rule](), seed=seed)


def train(net, optimizer, steps):
    for _ in range(steps):
        draw = optimizer.sampler.draw()
        logits = net(X[draw.indices])
        losses = F.cross_entropy(logits, Y[draw.indices], reduction="none")
        optimizer.zero_grad()
        draw.mean(losses).backward()
        optimizer.step(draw, adambs.scores.cross_entropy(logits, Y[draw.indices]))


# ----------------------------------------------------------------------------------------------
# torch.distributed.checkpoint
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 5])
def test_a_distributed_state_is_that_of_the_optimizer(name, steps):
    """What torch gives for the plain optimizer, and the clip's; a plain optimizer can go on with it."""
    bandit, base, options = OPTIMIZERS[name]
    net, twin = small_net(), small_net()
    sampler = learning()
    optimizer = bandit(net.parameters(), sampler, **options)
    plain = base(twin.parameters(), **options)
    train(net, optimizer, steps)
    before = sampler.state_dict()
    state = get_optimizer_state_dict(net, optimizer)
    assert same(sampler.state_dict(), before)  # torch steps an optimizer that was never stepped
    assert same(twin.state_dict(), net.state_dict()) == (steps == 0)
    if steps == 0:
        unclipped = copy.deepcopy(state)
        assert ("clip" in unclipped["param_groups"][0]) == (optimizer.clip is not None)
        unclipped["param_groups"][0].pop("clip", None)
        assert same(unclipped, get_optimizer_state_dict(twin, plain))
    both = get_state_dict(net, optimizer)
    assert same(both[0], net.state_dict())
    assert same(both[1], state)
    set_state_dict(twin, plain, model_state_dict=both[0], optim_state_dict=copy.deepcopy(state))
    assert same(get_optimizer_state_dict(twin, plain), state)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 5])
def test_a_distributed_state_is_taken_and_what_it_lacks_is_told(name, steps):
    bandit, _, options = OPTIMIZERS[name]
    net = small_net()
    optimizer = bandit(net.parameters(), learning(), **options)
    train(net, optimizer, steps)
    state = get_optimizer_state_dict(net, optimizer)

    def resumed(load):
        other = small_net(seed=1)
        new = bandit(other.parameters(), learning(), **options)
        other.load_state_dict(net.state_dict())
        load(other, new)
        return other, new

    def load(other, new):
        set_optimizer_state_dict(other, new, copy.deepcopy(state))

    def load_all(other, new):
        set_state_dict(other, new, model_state_dict=net.state_dict(), optim_state_dict=copy.deepcopy(state))

    def load_the_sampler_first(other, new):
        new.sampler.load_state_dict(saved_and_loaded(optimizer.sampler.state_dict()))
        load(other, new)

    for careless in (load, load_all):
        with pytest.warns(RuntimeWarning, match="state_dict has no 'sampler'.* load it first"):
            other, new = resumed(careless)
        assert same(new.sampler.state_dict(), learning().state_dict())
        assert same(get_optimizer_state_dict(other, new), state)
    other, new = resumed(load_the_sampler_first)  # in silence
    train(net, optimizer, 10)
    train(other, new, 10)
    assert same(other.state_dict(), net.state_dict())
    assert same(new.state_dict(), optimizer.state_dict())


def fetch(sampler, loader, batches):
    """So many batches, with feedback; the iterator is kept, so the epoch goes on."""
    for _ in range(batches):
        (x, _), draw = next(loader)
        assert torch.equal(x, X[draw.indices])
        draw.mean(x[:, 0])
        sampler.update(draw, x.abs().mean(1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_folder_holds_the_draws_on_their_way(rule, tmp_path):
    """{"model", "optimizer", "sampler"}, the sampler as it is, saved in the middle of an epoch."""

    def fresh(seed):
        net = small_net(seed)
        sampler = learning(rule)
        optimizer = adambs.AdamBS(net.parameters(), sampler, lr=0.01)
        loader = adambs.BanditLoader(DATA, sampler, num_workers=2)
        return net, sampler, optimizer, loader

    net, sampler, optimizer, loader = fresh(seed=0)
    train(net, optimizer, 30)
    batches = iter(loader)
    fetch(sampler, batches, 2)
    assert len(sampler.epochs.current.ahead) == 4
    saved = {
        "model": net.state_dict(),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "sampler": sampler,
    }
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint", no_dist=True)

    other, fresh_sampler, fresh_optimizer, fresh_loader = fresh(seed=1)
    found = {
        "model": other.state_dict(),
        "optimizer": get_optimizer_state_dict(other, fresh_optimizer),
        "sampler": fresh_sampler,
    }
    dcp.load(found, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert same(fresh_sampler.state_dict(), sampler.state_dict())
    set_state_dict(
        other,
        fresh_optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )  # in silence: the sampler was loaded by itself
    fetch(sampler, batches, 4)
    fetch(fresh_sampler, iter(fresh_loader), 4)
    train(net, optimizer, 3)
    train(other, fresh_optimizer, 3)
    for a, b in ((net, other), (optimizer, fresh_optimizer)):
        # One epoch was left open by its iterator, the other closed.
        assert same(without_epochs(a.state_dict()), without_epochs(b.state_dict()))


def without_epochs(state):
    if "sampler" not in state:
        return state
    return {**state, "sampler": {name: part for name, part in state["sampler"].items() if name != "epochs"}}


# ----------------------------------------------------------------------------------------------
# Files, pickles and copies
# ----------------------------------------------------------------------------------------------


class OurAdam(adambs.AdamBS):
    """A subclass of somebody's own."""


class OurSGD(adambs.with_bandit(torch.optim.SGD)):
    """A subclass of a class that has no name to be found by."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, _, options in OPTIMIZERS.values()] + [(OurAdam, {}), (OurSGD, {"lr": 0.1})],
)
def test_files_pickles_and_copies(kind, options):
    net = small_net()
    optimizer = kind(net.parameters(), learning(), **options)
    train(net, optimizer, 5)
    for twin_net, twin in (
        copy.deepcopy((net, optimizer)),
        pickle.loads(pickle.dumps((net, optimizer))),
        from_a_file(net, optimizer, kind, options),
    ):
        assert type(twin) is kind
        assert twin.sampler is not optimizer.sampler
        assert same(twin.state_dict(), optimizer.state_dict())
        straight_net, straight = copy.deepcopy((net, optimizer))
        train(twin_net, twin, 5)
        train(straight_net, straight, 5)
        assert same(twin_net.state_dict(), straight_net.state_dict())
        assert same(twin.state_dict(), straight.state_dict())
        assert not same(twin.state_dict(), optimizer.state_dict())


def from_a_file(net, optimizer, kind, options):
    other = small_net(seed=1)
    other.load_state_dict(net.state_dict())
    twin = kind(other.parameters(), learning(), **options)
    twin.load_state_dict(saved_and_loaded(optimizer.state_dict()))  # with weights_only=True
    return other, twin


def test_a_subclass_may_add_to_the_state():
    class Counting(adambs.AdamBS):
        steps = 0

        def step(self, *args, **kwargs):
            self.steps += 1
            return super().step(*args, **kwargs)

    net = small_net()
    optimizer = Counting(net.parameters(), learning(), lr=0.01)
    train(net, optimizer, 3)
    assert optimizer.steps == 3
    assert optimizer.sampler.diagnostics().updates == 3


# ----------------------------------------------------------------------------------------------
# Old and damaged states
# ----------------------------------------------------------------------------------------------


def test_a_state_of_0_1_is_refused_in_words():
    old = {"n": 60, "batch_size": 10, "rule": "Exp3", "rule_state": {}, "draws": 3}
    sampler = learning()
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=r"state is of adambs 0.1, which this version does not read"):
        sampler.load_state_dict(old)
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), sampler)
    with pytest.raises(ValueError, match=r"state is of adambs 0.1"):
        optimizer.load_state_dict({**torch.optim.Adam(net.parameters()).state_dict(), "sampler": old})
    assert same(sampler.state_dict(), before)


def in_flight(rule="default"):
    """A sampler after some steps, with draws on their way in a loader that is in the middle of an epoch."""
    sampler = taught(learning(rule), 25)
    epoch = sampler.epochs.begin()
    epoch.number, epoch.delivered = 3, 2
    epoch.ahead.extend(sampler.draw() for _ in range(3))
    return sampler


def put(*path):
    """A damage: the last of ``path`` in the place that the others name."""
    *place, last, value = path

    def damage(state):
        for name in place:
            state = state[name]
        state[last] = value

    return damage


def without(*path):
    *place, last = path

    def damage(state):
        for name in place:
            state = state[name]
        del state[last]

    return damage


def a_draw(position, value, draw=0):
    """An entry of a draw on its way: number, correction, learned, indices, ratios, p_ratios."""
    return put("epochs", "ahead", draw, position, value)


TEN = [1.0] * 10
PARTS = ("rule", "random", "passes", "gate", "candidates", "ready", "awaited", "epochs", "counters")
IDENTITY = ("format", "n", "batch_size", "seed", "stratified", "gate_threshold", "rule_name", "rule_settings")
DAMAGES = {
    **{f"no {name}": without(name) for name in (*PARTS, *IDENTITY, "correction", "candidates_settings")},
    **{f"{name} is None": put(name, None) for name in (*PARTS, *IDENTITY, "correction")},
    **{f"{name} is a tensor": put(name, torch.zeros(3)) for name in (*PARTS, *IDENTITY, "correction")},
    **{f"{name} is a list": put(name, [1]) for name in (*PARTS, *IDENTITY, "correction")},
    "another seed": put("seed", 1),
    "another format": put("format", 3),
    "another setting": put("rule_settings", "uniform", 0.06),
    "another noise": put("candidates_settings", "noise", 50.0),
    "a setting is a tensor": put("rule_settings", "uniform", torch.ones(2)),
    "correction above one": put("correction", 1.5),
    "correction is nan": put("correction", math.nan),
    "nan means": put("rule", "means", torch.full((91,), math.nan, dtype=torch.float64)),
    "infinite means": put("rule", "means", torch.full((91,), math.inf, dtype=torch.float64)),
    "negative draws of groups": put("rule", "draws", torch.full((91,), -1.0, dtype=torch.float64)),
    "denormal draws of groups": put("rule", "draws", torch.full((91,), 1e-310, dtype=torch.float64)),
    "an example twice": put("rule", "order", torch.zeros(60, dtype=torch.int32)),
    "an example outside": put("rule", "order", torch.arange(1, 61, dtype=torch.int32)),
    "examples in float": put("rule", "order", torch.arange(60.0)),
    "too few examples": put("rule", "order", torch.arange(59, dtype=torch.int32)),
    "bounds that fall": put("rule", "bounds", torch.arange(92).flip(0)),
    "denormal unit": put("rule", "unit", 1e-310),
    "nan unit": put("rule", "unit", math.nan),
    "no order": without("rule", "order"),
    "another generator": put("random", "bit_generator", "MT19937"),
    "negative random state": put("random", "state", "state", -1),
    "random state is text": put("random", "state", "state", "x"),
    "no random state": without("random", "state"),
    "negative pass": put("passes", "number", -1),
    "beyond the pass": put("passes", "position", 60),
    "position is a float": put("passes", "position", 3.0),
    "position is a flag": put("passes", "position", True),
    "nan moment": put("gate", "uniform", math.nan),
    "infinite moment": put("gate", "ours", math.inf),
    "negative moment": put("gate", "ours", -1.0),
    "moment is text": put("gate", "ours", "1"),
    "gate half open": put("gate", "open", 0.5),
    "no gate": without("gate", "open"),
    "nan scatter": put("candidates", "squares", math.nan),
    "negative scatter": put("candidates", "sum", -1.0),
    "infinite cost": put("candidates", "cost", math.inf),
    "negative cost": put("candidates", "cost", -0.1),
    "denormal cost": put("candidates", "cost", 1e-310),
    "nan seconds": put("candidates", "step_seconds", [math.nan]),
    "too many seconds": put("candidates", "look_seconds", [1.0] * 6),
    "seconds is a tensor": put("candidates", "look_seconds", torch.ones(2)),
    "negative number": put("awaited", "following", -1),
    "number is a float": put("awaited", "following", 28.0),
    "enormous number": put("awaited", "following", 10**30),
    "draws not made yet": put("awaited", "following", 26),
    "negative count": put("counters", "updates", -1),
    "count is nan": put("counters", "draws", math.nan),
    "no count": without("counters", "looks"),
    "nan trained moments": put("counters", "trained", "ours", math.nan),
    "trained is a list": put("counters", "trained", [0.0, 0.0]),
    "negative epoch": put("epochs", "number", -1),
    "more batches than an epoch has": put("epochs", "delivered", 4),
    "enormous delivered": put("epochs", "delivered", 2**50),
    "finished with draws on their way": put("epochs", "finished", True),
    "finished is a number": put("epochs", "finished", 0),
    "ahead is a tuple": put("epochs", "ahead", ()),
    "ahead is of numbers": put("epochs", "ahead", [1, 2]),
    "a draw too short": put("epochs", "ahead", 0, [25, 1.0, False]),
    "a draw of a dict": put("epochs", "ahead", 0, {}),
    "a draw twice": a_draw(0, 26),
    "a draw not made yet": a_draw(0, 28, draw=2),
    "a negative draw": a_draw(0, -1),
    "a draw with correction 2": a_draw(1, 2.0),
    "a draw that learned 1": a_draw(2, 1),
    "a draw outside": a_draw(3, [60] * 10),
    "a draw before": a_draw(3, [-1] * 10),
    "a draw in float": a_draw(3, TEN),
    "a draw too small": a_draw(3, [1] * 9),
    "a draw too large": a_draw(4, [1.0] * 11),
    "a draw with nan": a_draw(4, [*TEN[1:], math.nan]),
    "a draw with infinity": a_draw(5, [*TEN[1:], math.inf]),
    "a draw with nothing": a_draw(4, [*TEN[1:], 0.0]),
    "a draw with a denormal": a_draw(5, [*TEN[1:], 1e-310]),
    "a draw with enormous integers": a_draw(4, [10**400] * 10),
    "a draw of a tensor": a_draw(4, torch.ones(10)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    state = in_flight().state_dict()
    state["rule_settings"] = dict(state["rule_settings"])
    sampler = taught(learning("default"), 3)
    sampler.load_state_dict(copy.deepcopy(state))
    assert same(sampler.state_dict(), state)

    sampler = taught(learning("default"), 3)
    before = sampler.state_dict()
    DAMAGES[damage](state)
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict(state)
    assert same(sampler.state_dict(), before)


@pytest.mark.parametrize("state", [None, [], "state", 3, torch.ones(2), {}])
def test_what_is_no_state_is_refused(state):
    sampler = taught(learning(), 3)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict(state)
    assert same(sampler.state_dict(), before)


def leaves(value, path=()):
    """The path of everything in a state, containers too."""
    if path:
        yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for name, entry in entries:
        yield from leaves(entry, (*path, name))


def something(rng, old):
    """Anything that a damaged file may hold, often like what was there."""
    numbers = [math.nan, math.inf, -math.inf, -1, 0, 1, 2, -1.0, 0.0, 0.5, 1e-310, 1e-300, 1e300, 5e-324]
    numbers += [2**31, 2**52, 2**63 - 1, 2**64, 10**30, 10**400, True, False]
    others = [None, "x", "", [], {}, (), [math.nan], [1.0] * 10, b"x", 1j, object()]
    tensors = [
        torch.zeros(()),
        torch.ones(3),
        torch.ones(60),
        torch.ones(60, dtype=torch.float64),
        torch.full((60,), math.nan, dtype=torch.float64),
        torch.zeros(60, dtype=torch.int32),
        torch.empty(0),
        torch.ones(2, 2).to_sparse(),
        torch.ones(60, device="meta"),
    ]
    if isinstance(old, torch.Tensor) and old.numel() and rng.random() < 0.7:  # one entry of it
        new = old.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if new.dtype == torch.bool:
                new[rng.randrange(len(new))] ^= True
            elif new.is_floating_point():
                new[rng.randrange(len(new))] = float(rng.choice(numbers[:14]))
            else:
                new[rng.randrange(len(new))] = rng.choice([-1, 0, 1, 59, 60, 2**31 - 1])
        return new
    if isinstance(old, float) and rng.random() < 0.3:
        return old * rng.choice([1e-200, 0.5, 2.0, 1e200])
    if isinstance(old, int) and rng.random() < 0.3:
        return old + rng.choice([-1, 1])
    return rng.choice(rng.choice([numbers, others, tensors]))


def damaged(state, rng):
    """A copy of the state with one thing replaced, or missing."""
    state = copy.deepcopy(state)
    *place, last = rng.choice(list(leaves(state)))
    at = state
    for name in place:
        at = at[name]
    if rng.random() < 0.1:
        del at[last]
        return state, f"{[*place, last]} is gone"
    new = at[last] = something(rng, at[last])
    return state, f"{[*place, last]} is {new!r}"


@pytest.mark.parametrize("rule", RULES)
def test_fuzzed_states_are_refused_or_work(rule):
    """2,000 damages of a valid state in all: a ValueError that changes nothing, or a sampler that works."""
    rng = random.Random(rule)
    state = in_flight(rule).state_dict()
    sampler = learning(rule)
    before = sampler.state_dict()
    refused = 0
    for _ in range(2000 // len(RULES) + 1):
        bad, what = damaged(state, rng)
        try:
            sampler.load_state_dict(bad)
        except ValueError:
            refused += 1
            assert same(sampler.state_dict(), before), what
            continue
        try:
            works(sampler)
        except Exception as error:
            raise AssertionError(f"after {what}: {type(error).__name__}: {error}") from error
        sampler = learning(rule)
    assert refused > 100


def works(sampler):
    """It can draw and learn, the draws on their way too, and look; and what it saves can be loaded."""
    for draw in [*sampler.epochs.current.ahead]:
        sampler.update(draw, torch.linspace(0, 1, 10))
    for _ in range(3):
        draw = sampler.draw()
        assert torch.isfinite(draw.mean(torch.ones(10)))
        sampler.update(draw.number, torch.linspace(0, 1, 10))
        draw.carried()
    sampler.draw(lambda indices: torch.ones(len(indices)))
    sampler.diagnostics()
    p = sampler.probabilities()
    assert p.min() >= 0
    assert p.sum().item() == pytest.approx(1)
    again = adambs.BanditSampler(60, 10, rule=copy.copy(sampler.rule), gate=sampler.gate.threshold)
    again.load_state_dict(saved_and_loaded(sampler.state_dict()))
    assert sum(1 for _ in adambs.BanditLoader(DATA, sampler)) <= 6
