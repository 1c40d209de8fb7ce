"""The clip relative to the running norm, against a loop; in optimizers, closures, scalers and states."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded, small_net
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import adambs
from adambs.clipping import GradientClip


class ByHand:
    """The definition, in floats."""

    def __init__(self, factor):
        self.factor, self.mean, self.steps = factor, None, 0

    def __call__(self, norm):
        if not math.isfinite(norm):
            return norm
        self.steps += 1
        kept = norm if not self.mean else min(norm, self.factor * self.mean)
        self.mean = norm if not self.mean else self.mean + (kept - self.mean) / min(self.steps, 100)
        return kept


def sgd(shape=(3,)):
    """One parameter; a step of SGD moves it by its gradient."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    return parameter, torch.optim.SGD([parameter], lr=1.0)


@given(
    norms=st.lists(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0, 50.0, math.inf]), min_size=1, max_size=150),
    factor=st.sampled_from([1.0, 3.0, 10.0]),
)
def test_it_is_its_definition_and_the_same_on_a_device(norms, factor):
    by_hand, clip, on_device = ByHand(factor), GradientClip(factor), GradientClip(factor)
    parameter, optimizer = sgd()
    taken = []
    for norm in norms:
        kept = by_hand(norm)
        parameter.grad = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64) * norm
        parameter.grad[1] = 0.0
        clip.apply(optimizer)
        shrink = on_device._shrink_on_device(torch.tensor(norm, dtype=torch.float64))
        if math.isfinite(norm):
            assert parameter.grad.norm().item() == pytest.approx(kept, rel=1e-9, abs=1e-15)
            assert float(shrink) * norm == pytest.approx(kept, rel=1e-9, abs=1e-15)
            taken.append((norm - kept, norm))
        else:
            assert shrink == 1
    away = np.array(taken).reshape(-1, 2).sum(axis=0)
    assert on_device.state_dict() == pytest.approx(clip.state_dict(), rel=1e-9)
    assert clip.clipped == sum(t > 0 for t, _ in taken)
    assert clip.taken == pytest.approx(away[0] / away[1] if away[1] else 0.0, rel=1e-9)


def test_the_norm_is_that_of_all_parameters_and_those_without_a_gradient_do_not_count():
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b, c], "lr": 0.1}], lr=1.0)
    clip = GradientClip(2.0)
    clip.apply(optimizer)  # nothing there
    for size in (1.0, 10.0):
        a.grad, b.grad = torch.tensor([3.0 * size, 0.0]), torch.tensor([0.0, 4.0 * size])
        clip.apply(optimizer)
    assert torch.cat([a.grad, b.grad]).norm().item() == pytest.approx(10.0)
    assert (clip.clipped, clip.taken) == (1, pytest.approx(40 / 55))


def problem(optimizer_class, **options):
    """A net on a constant gradient whose scale jumps by 100 at step 30: without a clip it is thrown."""
    net = small_net(dtype=torch.float64)
    sampler = adambs.BanditSampler(60, 10, initial_weights=np.arange(1, 61), gate=0)
    return net, optimizer_class(net.parameters(), sampler, **options)


def steps(net, optimizer, count, jump=10**9, closure=False):
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(10, 6)
    for step in range(count):
        scale = 100.0 if step >= jump else 1.0

        def evaluate(scale=scale):
            optimizer.zero_grad()
            loss = scale * net(x).square().mean()
            loss.backward()
            return loss

        draw = optimizer.sampler.draw()
        if closure:
            optimizer.step(draw, np.linspace(1, 5, 10), evaluate)
        else:
            evaluate()
            optimizer.step(draw, np.linspace(1, 5, 10))


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", [adambs.AdamBS, adambs.with_bandit(torch.optim.SGD)])
def test_an_optimizer_clips_as_one_whose_gradients_were_clipped_before(kind, closure):
    net, optimizer = problem(kind, lr=0.01, clip=2.0)
    steps(net, optimizer, 40, jump=30, closure=closure)
    base = torch.optim.Adam if kind is adambs.AdamBS else torch.optim.SGD
    twin = small_net(dtype=torch.float64)
    plain = base(twin.parameters(), lr=0.01)
    clip = GradientClip(2.0).attach(plain)
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(10, 6)
    for step in range(40):
        plain.zero_grad()
        ((100.0 if step >= 30 else 1.0) * twin(x).square().mean()).backward()
        plain.step()
    assert same(net.state_dict(), twin.state_dict())
    assert optimizer.clip.clipped == clip.clipped > 0
    without, loose = problem(kind, lr=0.01, clip=math.inf)
    steps(without, loose, 40, jump=30)
    assert not same(without.state_dict(), net.state_dict())


@pytest.mark.parametrize("closure", [False, True])
def test_batches_with_weights_of_one_make_plain_steps_and_are_measured(closure):
    """While p does not pay, the optimizer does what it would do without a bandit."""
    net, twin = small_net(dtype=torch.float64), small_net(dtype=torch.float64)
    ours = adambs.AdamBS(net.parameters(), adambs.BanditSampler(60, 10, rule=adambs.Uniform()), lr=0.01)
    plain = adambs.AdamBS(
        twin.parameters(), adambs.BanditSampler(60, 10, rule=adambs.Uniform()), lr=0.01, clip=math.inf
    )
    for model, optimizer in ((net, ours), (twin, plain)):
        steps(model, optimizer, 40, jump=30, closure=closure)
    assert same(net.state_dict(), twin.state_dict())
    assert ours.clip.clipped == 0
    assert ours.clip.state_dict()["steps"] == 39  # all but the first, which has no v to measure with


def test_step_without_a_draw_clips_too():
    net, optimizer = problem(adambs.AdamBS, clip=1.0)
    for size in (1.0, 1.0, 100.0):
        for p in net.parameters():
            p.grad = torch.full_like(p, size)
        optimizer.step()
    assert optimizer.clip.clipped == 1
    v = [0.001, 0.999 * 0.001 + 0.001]  # what Adam had when it met the second and the third
    assert next(net.parameters()).grad.max() == pytest.approx((v[1] / v[0]) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"betas": (0.5, 0.8)}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
    ],
)
def test_in_adams_family_the_norm_is_that_of_g_over_the_root_of_v(kind, options):
    """Against v that is kept by hand, for two groups with an eps each."""
    rng = np.random.default_rng(0)
    a, b = (nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (3, 2))
    optimizer = kind([{"params": [a], "eps": 1e-3}, {"params": [b]}], **options)
    clip, by_hand = GradientClip(1.5).attach(optimizer), ByHand(1.5)
    beta = options.get("betas", (0.9, 0.999))[1]
    eps = np.array([1e-3] * 3 + [1e-8] * 2)
    v, largest = np.zeros(5), np.zeros(5)
    for step in range(60):
        g = rng.gamma(0.2, 1.0, 5) * rng.choice([-1, 1], 5)
        a.grad, b.grad = torch.from_numpy(g[:3].copy()), torch.from_numpy(g[3:].copy())
        optimizer.step()
        if step:
            norm = np.linalg.norm(g / np.sqrt((largest if options.get("amsgrad") else v) + eps**2))
            g = g * (by_hand(norm) / norm)
        np.testing.assert_allclose(torch.cat([a.grad, b.grad]).numpy(), g, rtol=1e-9)
        v = beta * v + (1 - beta) * g**2
        largest = np.maximum(largest, v)
    assert clip.clipped > 5


@pytest.mark.parametrize(
    ("dtype", "eps"),
    [(torch.float32, 1e-25), (torch.float32, 0.0), (torch.float16, 1e-4), (torch.bfloat16, 1e-8)],
)
def test_entries_without_a_gradient_add_nothing_however_small_eps_is(dtype, eps):
    """Their v is zero, and eps squared may have no room in their type."""
    parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], eps=eps)
    clip = GradientClip(2.0).attach(optimizer)
    norms = []
    for k in range(3):
        parameter.grad = torch.tensor([0.5, 0.0, 0.25 * (k + 1), 0.0], dtype=dtype)
        if k:
            g, v = parameter.grad.double(), optimizer.state[parameter]["exp_avg_sq"].double()
            norms.append(float((g[::2] / (v[::2] + eps**2).sqrt()).norm()))
        optimizer.step()
    state = clip.state_dict()
    assert state["steps"] == 2
    assert state["all"] == pytest.approx(sum(norms), rel=1e-2 if dtype is torch.bfloat16 else 1e-3)


def test_a_parameter_that_slept_and_wakes_is_a_surprise_that_the_plain_norm_does_not_see():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter], lr=1.0)
    clip = GradientClip(3.0).attach(optimizer)
    for _ in range(50):
        parameter.grad = torch.tensor([1.0, 1e-6])
        optimizer.step()
    before = clip.clipped
    parameter.grad = torch.tensor([1.0, 1e-2])  # as long as ever
    optimizer.step()
    assert clip.clipped == before + 1
    assert parameter.grad[1] < 1e-4


def test_a_scaler_does_not_change_what_is_clipped():
    """With a fused step the scaler leaves gradients scaled: the norm is taken of what they stand for."""
    results = []
    for scale in (1.0, 1024.0):
        parameter, _ = sgd()
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        optimizer.grad_scale = torch.tensor(scale)
        clip = GradientClip(2.0)
        for norm in (1.0, 1.0, 50.0):
            parameter.grad = torch.tensor([norm, 0.0, 0.0], dtype=torch.float64) * scale
            clip.apply(optimizer)
        results.append((parameter.grad.norm().item() / scale, clip.state_dict()["mean"], clip.clipped))
    assert results[0] == pytest.approx(results[1])
    assert results[0][0] == pytest.approx(2.0)


def test_it_resumes_from_states_pickles_and_copies():
    net, optimizer = problem(adambs.AdamBS, lr=0.01, clip=1.5)
    steps(net, optimizer, 20, jump=10)
    other, loaded = problem(adambs.AdamBS, lr=0.01, clip=1.5)
    other.load_state_dict(net.state_dict())
    loaded.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for twin_net, twin in (
        (other, loaded),
        copy.deepcopy((net, optimizer)),
        pickle.loads(pickle.dumps((net, optimizer))),
    ):
        straight_net, straight = copy.deepcopy((net, optimizer))
        steps(straight_net, straight, 10)
        steps(twin_net, twin, 10)
        assert same(straight_net.state_dict(), twin_net.state_dict())
        assert same(straight.state_dict(), twin.state_dict())
    assert optimizer.clip.clipped > 0


def test_a_state_without_a_clip_begins_anew_and_a_damaged_one_changes_nothing():
    net, optimizer = problem(adambs.AdamBS, clip=2.0)
    steps(net, optimizer, 5)
    state = optimizer.state_dict()
    plain = problem(adambs.AdamBS, clip=math.inf)[1]
    plain.load_state_dict(state)  # the clip's part is not needed
    assert "clip" not in plain.state_dict()["param_groups"][0]
    assert "clip" not in plain.param_groups[0]
    del state["param_groups"][0]["clip"]
    fresh = problem(adambs.AdamBS, clip=2.0)[1]
    fresh.load_state_dict(state)
    assert fresh.clip.state_dict() == GradientClip(2.0).state_dict()
    before = fresh.state_dict()
    for name, value in (("mean", -1.0), ("steps", 0.5), ("taken", math.inf), ("clipped", None)):
        bad = optimizer.state_dict()
        bad["param_groups"][0]["clip"][name] = value
        with pytest.raises(ValueError, match=name):
            fresh.load_state_dict(bad)
        assert same(fresh.state_dict(), before)


@pytest.mark.parametrize("bad", [0.5, -1, math.nan, -math.inf])
def test_a_bad_factor_is_refused(bad):
    with pytest.raises(ValueError, match="clip must be finite and at least 1"):
        problem(adambs.AdamBS, clip=bad)


@pytest.mark.parametrize(
    ("kind", "usual"),
    [
        (adambs.AdamBS, 1.5),
        (adambs.with_bandit(torch.optim.AdamW), 1.5),
        (adambs.with_bandit(torch.optim.Adam), 1.5),
        (adambs.with_bandit(torch.optim.SGD), None),
    ],
)
def test_adams_family_clips_unless_told_not_to(kind, usual):
    clip = problem(kind, lr=0.01)[1].clip
    assert (clip and clip.factor) == usual
    assert problem(kind, lr=0.01, clip=math.inf)[1].clip is None


def adam_about_to_step(gradients, squares, eps):
    """An Adam whose parameters have these gradients and second moments, a group for each."""
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    optimizer = torch.optim.Adam([{"params": [p], "eps": e} for p, e in zip(parameters, eps, strict=True)])
    for p, g, v in zip(parameters, gradients, squares, strict=True):
        p.grad = g
        optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(v), "exp_avg_sq": v}
    return optimizer


def measured(optimizer, clip=None):
    """The norm that a clip takes the gradients for."""
    clip = GradientClip(1e9) if clip is None else clip
    before = clip.state_dict()["all"]
    clip.apply(optimizer)
    return clip.state_dict()["all"] - before


def in_adams_metric(optimizer):
    """The same in float64, parameter by parameter."""
    parts = [
        (p.grad.double() / (optimizer.state[p]["exp_avg_sq"].double() + group["eps"] ** 2).sqrt()).flatten()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]
    return torch.cat(parts).norm().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_norm_is_in_adams_metric_whatever_the_memory_is_like(dtype, transposed):
    stream = torch.Generator().manual_seed(0)
    shapes = [(300, 7), (1,), (1030,), (0,)]
    gradients = [torch.randn(shape, generator=stream, dtype=dtype) for shape in shapes]
    squares = [torch.rand(shape, generator=stream, dtype=dtype) for shape in shapes]
    squares[1].zero_()
    if transposed:
        gradients[0], squares[0] = (tensor[0].t().contiguous().t() for tensor in (gradients, squares))
        assert not gradients[0].is_contiguous()
    optimizer = adam_about_to_step(gradients, squares, [1e-8, 0.1, 1e-3, 1e-8])
    assert measured(optimizer) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf])
def test_rows_of_an_embedding_without_a_gradient_add_nothing(wrong):
    """Whole blocks of zeros are passed over; one entry among them is not."""
    stream = torch.Generator().manual_seed(0)
    g = torch.zeros(1000, 32)
    g[3], g[700, 5], g[999, 31] = 1.0, -2.0, 0.5
    optimizer = adam_about_to_step([g], [torch.rand(1000, 32, generator=stream)], [1e-8])
    expected = in_adams_metric(optimizer)
    clip = GradientClip(1.5)
    assert measured(optimizer, clip) == pytest.approx(expected, rel=1e-6)
    if wrong is not None:
        g[500, 0] = wrong
        assert measured(optimizer, clip) == 0.0  # not finite, so it is not counted
        assert clip.state_dict()["steps"] == 1


def test_a_parameter_that_has_shrunk_is_not_read_beyond_its_end():
    """torch itself refuses such a step; what the clip reads must be the gradient's own memory."""
    model = nn.Embedding(1000, 32)
    optimizer = torch.optim.Adam(model.parameters())
    clip = GradientClip(1.5)
    for rows in (1000, 1000, 100):
        model.weight.data = model.weight.data[:rows].clone()
        model.weight.grad = torch.ones(rows, 32)
        if rows == 100:
            assert clip._memory.is_of(optimizer)
            assert clip._memory.norm() is None
        else:
            clip.apply(optimizer)
            optimizer.step()


def test_a_state_that_is_filled_later_is_found():
    """Somebody has looked at ``optimizer.state[p]``, which makes an empty one, before the first step."""
    parameter = nn.Parameter(torch.ones(300))
    optimizer = torch.optim.Adam([parameter])
    assert not optimizer.state[parameter]
    clip = GradientClip(1e9)
    for _ in range(3):
        parameter.grad = torch.ones(300)
        clip.apply(optimizer)
        optimizer.step()
    assert clip._memory.is_of(optimizer)
    assert clip._memory.norm() == pytest.approx(in_adams_metric(optimizer), rel=1e-6)


@pytest.mark.parametrize("formats", [("channels_last",) * 2, ("channels_last", "contiguous_format")])
def test_weights_of_convolutions_may_have_their_channels_last(formats, monkeypatch):
    """Pairs in the same order are measured by the compiled loop, others by torch."""
    stream = torch.Generator().manual_seed(0)
    g, v = (
        torch.rand(4, 3, 5, 5, generator=stream).contiguous(memory_format=getattr(torch, name))
        for name in formats
    )
    optimizer = adam_about_to_step([g], [v], [1e-8])
    expected = in_adams_metric(optimizer)
    if formats[0] == formats[1]:
        monkeypatch.setattr("adambs.clipping._norm_by_torch", None)
    assert measured(optimizer) == pytest.approx(expected, rel=1e-6)


def test_whatever_changes_in_the_optimizer_is_seen_at_the_next_step():
    stream = torch.Generator().manual_seed(0)
    tensors = [torch.rand(5, generator=stream) for _ in range(4)]
    optimizer, clip = adam_about_to_step(tensors[:2], tensors[2:], [1e-8, 1e-8]), GradientClip(1e9)
    first, second = (group["params"][0] for group in optimizer.param_groups)

    def holds():
        return measured(optimizer, clip) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)

    assert holds()
    first.grad = 3 * torch.ones(5)
    assert holds()
    second.grad = None
    assert holds()
    optimizer.param_groups[0]["eps"] = 0.5
    assert holds()
    optimizer.state[first] = {**optimizer.state[first], "exp_avg_sq": torch.full((5,), 9.0)}
    assert holds()
    optimizer.state[first]["exp_avg_sq"] = torch.full((5,), 4.0)
    assert holds()
    optimizer.state[first]["exp_avg_sq"].fill_(2.0)
    assert holds()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert holds()
    third = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [third]})
    assert holds()
    third.grad = torch.ones(3)  # it has no second moment yet: nothing can be measured
    assert measured(optimizer, clip) == 0
    optimizer.step()
    assert holds()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_measured(wrong):
    gradients = [torch.ones(600)]
    gradients[0][555] = wrong
    assert measured(adam_about_to_step(gradients, [torch.ones(600)], [1e-8])) == 0


def test_a_second_moment_that_was_given_other_memory_is_measured_there():
    """``state[...].data = ...`` keeps the tensor and frees what it pointed to."""
    stream = torch.Generator().manual_seed(0)
    tensors = [torch.rand(500, generator=stream) for _ in range(4)]
    optimizer, clip = adam_about_to_step(tensors[:2], tensors[2:], [1e-8, 1e-8]), GradientClip(1e9)
    assert measured(optimizer, clip) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)
    for state in optimizer.state.values():
        state["exp_avg_sq"].data = 4 * state["exp_avg_sq"].data.double().float()
    kept = [torch.full((500,), math.nan) for _ in range(50)]  # in what was freed, perhaps
    assert measured(optimizer, clip) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)
    assert measured(optimizer, clip) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)
    assert len(kept) == 50


def test_a_parameter_in_the_place_of_another_is_measured():
    stream = torch.Generator().manual_seed(0)
    tensors = [torch.rand(5, generator=stream) for _ in range(2)]
    optimizer, clip = adam_about_to_step(tensors[:1], tensors[1:], [1e-8]), GradientClip(1e9)
    assert measured(optimizer, clip) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)
    old, new = optimizer.param_groups[0]["params"][0], nn.Parameter(torch.zeros(5))
    new.grad = 7 * torch.ones(5)
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new
    assert measured(optimizer, clip) == pytest.approx(in_adams_metric(optimizer), rel=1e-6)


def test_sparse_gradients_are_measured_and_shortened_beside_others():
    embedding, layer = nn.Embedding(9, 2, sparse=True), nn.Linear(2, 1, bias=False)
    optimizer, clip = torch.optim.SGD([embedding.weight, layer.weight], lr=0.1), GradientClip(2.0)
    for size in (1.0, 10.0):
        row = torch.tensor([[3.0 * size, 0.0], [0.0, 0.0]])
        embedding.weight.grad = torch.sparse_coo_tensor([[4, 4]], row, (9, 2), check_invariants=True)
        layer.weight.grad = torch.tensor([[0.0, 4.0 * size]])
        clip.apply(optimizer)
    assert clip.clipped == 1
    assert embedding.weight.grad.to_dense()[4, 0].item() == pytest.approx(6)
    assert layer.weight.grad[0, 1].item() == pytest.approx(8)


@pytest.mark.parametrize("way", ["draw", "number", "carried"])
def test_a_plain_batch_is_not_shortened_however_the_draw_is_named(way):
    """While the gate is closed, steps are those of plain Adam."""
    net, plain = small_net(), small_net()
    sampler = adambs.BanditSampler(60, 10, gate=1e6)
    optimizer, adam = adambs.AdamBS(net.parameters(), sampler, clip=1.0), torch.optim.Adam(plain.parameters())
    x = torch.linspace(-1, 1, 360).reshape(60, 6)
    for step in range(30):
        draw = sampler.draw()
        scale = 50.0 if step % 10 == 9 else 1.0
        for model, one in ((net, optimizer), (plain, adam)):
            one.zero_grad()
            (scale * model(x[draw.indices]).square().mean()).backward()
        adam.step()
        optimizer.step(
            {"draw": draw, "number": draw.number, "carried": draw.carried().number}[way], np.ones(10)
        )
    assert optimizer.clip.clipped == 0
    assert same(net.state_dict(), plain.state_dict())
