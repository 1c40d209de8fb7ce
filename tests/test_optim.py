"""AdamBS and with_bandit: torch's optimizers in every respect, and a sampler that learns."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same, saved_and_loaded, small_data, small_net

import adambs
from adambs import reference

X, Y = small_data()


def uniform(seed=0):
    return adambs.BanditSampler(len(X), 10, rule=adambs.Uniform(), seed=seed)


def learning(seed=0):
    return adambs.BanditSampler(len(X), 10, rule=adambs.Exp3(step=0.5), seed=seed)


def forward(net, draw):
    logits = net(X[draw.indices].to(next(net.parameters())))
    return logits, F.cross_entropy(logits, Y[draw.indices], reduction="none")


def train(net, optimizer, steps, after=lambda: None):
    for _ in range(steps):
        draw = optimizer.sampler.draw()
        logits, losses = forward(net, draw)
        optimizer.zero_grad()
        draw.mean(losses).backward()
        optimizer.step(draw, adambs.scores.cross_entropy(logits, Y[draw.indices]))
        after()


PARITY = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"lr": 0.02}),
    (torch.optim.NAdam, {}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("base", "options"), PARITY)
def test_with_the_uniform_rule_it_is_the_torch_optimizer_bit_for_bit(base, options, dtype):
    ours, theirs = small_net(dtype=dtype), small_net(dtype=dtype)
    sampler = uniform()
    bandit = adambs.AdamBS if base is torch.optim.Adam else adambs.with_bandit(base)
    optimizer = bandit(ours.parameters(), sampler, **options)
    plain = base(theirs.parameters(), **options)
    assert isinstance(optimizer, base)
    same_draws = uniform()

    def plain_step():
        draw = same_draws.draw()
        _, losses = forward(theirs, draw)
        plain.zero_grad()
        losses.mean().backward()
        plain.step()
        assert same(ours.state_dict(), theirs.state_dict())

    train(ours, optimizer, 30, plain_step)
    assert not same(ours.state_dict(), small_net(dtype=dtype).state_dict())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_with_exp3_it_is_algorithm_1(amsgrad):
    """Against the dense reference for p, and torch.optim.Adam fed with the estimate of eq. (1)."""
    ours, theirs = small_net(dtype=torch.float64), small_net(dtype=torch.float64)
    sampler = learning()
    optimizer = adambs.AdamBS(ours.parameters(), sampler, lr=0.01, amsgrad=amsgrad)
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01, amsgrad=amsgrad)
    n = len(X)
    rule = sampler.rule
    p = np.full(n, 1 / n)
    for _ in range(100):
        draw = sampler.draw()
        indices = draw.indices.numpy()
        logits, losses = forward(ours, draw)
        optimizer.zero_grad()
        draw.mean(losses).backward()
        optimizer.step(draw, adambs.scores.cross_entropy(logits, Y[draw.indices]))

        plain.zero_grad()
        norms = np.zeros(len(indices))
        for k, j in enumerate(indices):  # one example at a time
            logit = theirs(X[j : j + 1].double())
            loss = F.cross_entropy(logit, Y[j : j + 1])
            norms[k] = torch.autograd.grad(loss, logit, retain_graph=True)[0].norm()
            (loss / (n * p[j]) / len(indices)).backward()
        plain.step()
        p = reference.update(p, indices, norms, L=rule.L, p_min=rule.p_min / n, alpha_p=rule.alpha_p)
        np.testing.assert_allclose(sampler.probabilities(), p, rtol=1e-7)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert np.ptp(p) * n > 0.1


@pytest.mark.parametrize("stratified", [False, True])
def test_the_gradient_is_unbiased(stratified):
    """The mean of the gradient of draw.mean over many draws, against the gradient of the whole data."""
    net = small_net(dtype=torch.float64)
    teacher = np.random.default_rng(0).gamma(0.5, 1.0, len(X))
    sampler = adambs.BanditSampler(len(X), 10, initial_weights=teacher, stratified=stratified)

    def gradient(loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    full = gradient(F.cross_entropy(net(X.double()), Y))
    estimates = torch.stack(
        [gradient(draw.mean(forward(net, draw)[1])) for draw in (sampler.draw() for _ in range(3000))]
    )
    error = estimates.std(0) / math.sqrt(len(estimates))
    z = (estimates.mean(0) - full) / error
    assert z.abs().max() < 4.5  # of 83 coordinates
    assert 0.7 < z.std() < 1.3


def test_the_loop_of_the_readme_learns():
    net, sampler = small_net(), learning()
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=0.05)
    loss_before = F.cross_entropy(net(X), Y).item()
    train(net, optimizer, 300)
    assert F.cross_entropy(net(X), Y).item() < 0.6 * loss_before
    assert sampler.diagnostics().updates == 300


@pytest.mark.parametrize("plain_first", [False, True])
def test_step_hooks_run_once(plain_first):
    if plain_first:
        torch.optim.SGD(small_net().parameters(), lr=0.1)  # torch wraps SGD.step from now on
    net = small_net()
    optimizer = adambs.with_bandit(torch.optim.SGD)(net.parameters(), learning(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("after"))
    train(net, optimizer, 2)
    assert calls == ["before", "after"] * 2


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    ],
)
def test_schedulers_do_to_it_what_they_do_to_adam(scheduler):
    ours, theirs = small_net(), small_net()
    optimizer = adambs.AdamBS(ours.parameters(), uniform(), lr=0.01)
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    schedule, plain_schedule = scheduler(optimizer), scheduler(plain)
    same_draws = uniform()

    def plain_step():
        _, losses = forward(theirs, same_draws.draw())
        plain.zero_grad()
        losses.mean().backward()
        plain.step()
        schedule.step()
        plain_schedule.step()
        assert schedule.get_last_lr() == plain_schedule.get_last_lr()

    train(ours, optimizer, 15, plain_step)
    assert same(ours.state_dict(), theirs.state_dict())


def test_parameter_groups():
    net = small_net()
    groups = [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}]
    optimizer = adambs.AdamBS(groups, learning(), lr=0.01)
    train(net, optimizer, 3)
    fresh = small_net()
    assert same(net[0].state_dict(), fresh[0].state_dict())
    assert not same(net[2].state_dict(), fresh[2].state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.5})
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    net = small_net()
    sampler = learning()
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        draw = sampler.draw()
        logits, losses = forward(net, draw)
        scores = adambs.scores.cross_entropy(logits, Y[draw.indices])
        if step == 2:  # an overflow: gradients and scores are infinite, and the step is skipped
            losses = losses * math.inf
            scores = scores * math.inf
            before = copy.deepcopy((net.state_dict(), sampler.state_dict()))
        optimizer.zero_grad()
        scaler.scale(draw.mean(losses)).backward()
        scaler.step(optimizer, draw, scores)
        if step == 2:
            assert same(before, (net.state_dict(), sampler.state_dict()))
        scaler.update()
    assert sampler.diagnostics().updates == 3
    assert scaler.get_scale() == 32.0


def test_autocast():
    net = small_net()
    sampler = learning()
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=0.05)
    before = F.cross_entropy(net(X), Y).item()
    for _ in range(300):
        draw = sampler.draw()
        with torch.autocast("cpu", torch.bfloat16):
            logits, losses = forward(net, draw)
            assert logits.dtype == torch.bfloat16
            scores = adambs.scores.cross_entropy(logits, Y[draw.indices])
        optimizer.zero_grad()
        draw.mean(losses).backward()
        optimizer.step(draw, scores)
    assert F.cross_entropy(net(X), Y).item() < 0.75 * before


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.LBFGS, {"max_iter": 3}),
    ],
)
def test_closures(base, options):
    ours, theirs = small_net(), small_net()
    sampler, same_draws = uniform(), uniform()
    optimizer = adambs.with_bandit(base)(ours.parameters(), sampler, **options)
    plain = base(theirs.parameters(), **options)
    for _ in range(5):
        draw, same_draw = sampler.draw(), same_draws.draw()
        found = {}

        def closure(draw=draw, found=found):
            optimizer.zero_grad()
            found["logits"], losses = forward(ours, draw)
            loss = draw.mean(losses)
            loss.backward()
            return loss

        def plain_closure(draw=same_draw):
            plain.zero_grad()
            loss = forward(theirs, draw)[1].mean()
            loss.backward()
            return loss

        def scores(draw=draw, found=found):
            return adambs.scores.cross_entropy(found["logits"], Y[draw.indices])

        loss = optimizer.step(draw, scores, closure)
        assert loss.item() == pytest.approx(plain.step(plain_closure).item(), rel=1e-6)
    assert same(ours.state_dict(), theirs.state_dict())
    assert sampler.diagnostics().updates == 5


@pytest.mark.parametrize(("base", "options"), [*PARITY, (torch.optim.LBFGS, {"max_iter": 3})])
def test_without_a_draw_a_step_is_the_optimizers_own(base, options):
    """``step()`` and ``step(closure)``, by place and by name: what any framework calls."""
    ours, theirs = small_net(), small_net()
    sampler = learning()
    optimizer = adambs.with_bandit(base)(ours.parameters(), sampler, **options)
    plain = base(theirs.parameters(), **options)
    before = sampler.state_dict()
    for call in range(6):
        losses = []
        for net, own in ((ours, optimizer), (theirs, plain)):

            def closure(net=net, own=own):
                own.zero_grad()
                loss = F.cross_entropy(net(X), Y)
                loss.backward()
                return loss

            if base is torch.optim.LBFGS or call % 3:
                losses.append(own.step(closure) if call % 2 else own.step(closure=closure))
            else:
                closure()
                losses.append(own.step())
        assert losses[0] == losses[1]
    assert same(ours.state_dict(), theirs.state_dict())
    assert same(sampler.state_dict(), before)


def test_any_optimizer_left_untouched_and_update_anywhere_after_the_forward_pass():
    """The general way gives the parameters and the p of ``step(draw, scores)``, bit for bit."""
    ours, theirs = small_net(), small_net()
    sampler, other = learning(), learning()
    optimizer = adambs.AdamBS(ours.parameters(), sampler, lr=0.01)
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for step in range(40):
        train(ours, optimizer, 1)
        draw = other.draw()
        logits, losses = forward(theirs, draw)
        scores = adambs.scores.cross_entropy(logits, Y[draw.indices])
        plain.zero_grad()
        if step % 3 == 0:
            other.update(draw, scores)
        draw.mean(losses).backward()
        if step % 3 == 1:
            other.update(draw.number, scores)
        plain.step()
        if step % 3 == 2:
            other.update(draw.carried().number, scores)
    assert same(ours.state_dict(), theirs.state_dict())
    assert same(sampler.state_dict(), other.state_dict())


def test_a_state_without_the_sampler_is_taken_with_a_warning():
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), learning())
    plain = torch.optim.Adam(net.parameters(), lr=0.5).state_dict()
    before = optimizer.sampler.state_dict()
    with pytest.warns(RuntimeWarning, match="state_dict has no 'sampler'.* save the sampler beside"):
        optimizer.load_state_dict(plain)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert same(optimizer.sampler.state_dict(), before)
    optimizer.sampler.load_state_dict(before)
    optimizer.load_state_dict(plain)  # the sampler was loaded by itself: nothing to say


def everything(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_refused_step_changes_nothing(bad, with_closure):
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), learning())
    train(net, optimizer, 5)
    draw = optimizer.sampler.draw()
    draw.mean(forward(net, draw)[1]).backward()
    before = everything(net, optimizer)
    scores = torch.ones(10)
    scores[3] = bad
    closure = (lambda: torch.tensor(1.0)) if with_closure else None
    with pytest.raises(ValueError, match=r"scores\[3\] is"):
        optimizer.step(draw, (lambda: scores) if with_closure else scores, closure)
    with pytest.raises(ValueError, match="another sampler"):
        optimizer.step(learning(seed=7).draw(), torch.ones(10))
    assert same(everything(net, optimizer), before)


def test_a_nan_loss_is_caught_before_it_reaches_the_parameters():
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), learning())
    draw = optimizer.sampler.draw()
    logits = net(X[draw.indices] * math.nan)
    losses = F.cross_entropy(logits, Y[draw.indices], reduction="none")
    draw.mean(losses).backward()
    with pytest.raises(ValueError, match=r"scores\[0\] is nan"):
        optimizer.step(draw, adambs.scores.cross_entropy(logits, Y[draw.indices]))
    assert same(net.state_dict(), small_net().state_dict())


def test_the_state_carries_the_sampler():
    net, other_net = small_net(), small_net(seed=1)
    optimizer = adambs.AdamBS(net.parameters(), learning(), lr=0.01)
    train(net, optimizer, 20)
    resumed = adambs.AdamBS(other_net.parameters(), learning(), lr=0.5)
    other_net.load_state_dict(net.state_dict())
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(net, optimizer, 20)
    train(other_net, resumed, 20)
    assert same(everything(net, optimizer), everything(other_net, resumed))


def test_a_refused_state_changes_nothing():
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), learning())
    train(net, optimizer, 3)
    before = everything(net, optimizer)
    fewer = adambs.AdamBS(net[0].parameters(), learning()).state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(fewer)
    other_sampler = {**optimizer.state_dict(), "sampler": uniform().state_dict()}
    with pytest.raises(ValueError, match="rule_name = 'Uniform'"):
        optimizer.load_state_dict(other_sampler)
    assert same(everything(net, optimizer), before)


def test_copies_and_pickles_keep_the_sampler():
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), learning())
    train(net, optimizer, 3)
    sgd = adambs.with_bandit(torch.optim.SGD)(net.parameters(), learning(), lr=0.1, momentum=0.9)
    train(net, sgd, 3)
    for own in (optimizer, sgd):
        for twin in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert type(twin) is type(own)
            assert same(twin.state_dict(), own.state_dict())
            assert twin.sampler is not own.sampler


def test_gradient_accumulation():
    """Two half batches in one step: the earlier draw is given to the sampler, the last to the step."""
    net, sampler = small_net(), learning()
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=0.01)
    draws = [sampler.draw(), sampler.draw()]
    optimizer.zero_grad()
    for draw in draws:
        logits, losses = forward(net, draw)
        (draw.mean(losses) / 2).backward()
        scores = adambs.scores.cross_entropy(logits, Y[draw.indices])
        if draw is draws[0]:
            sampler.update(draw, scores)
    optimizer.step(draw, scores)
    assert sampler.diagnostics().updates == 2


def test_bad_arguments():
    net = small_net()
    with pytest.raises(TypeError, match="sampler must be a BanditSampler, not float"):
        adambs.AdamBS(net.parameters(), 1e-3)
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer class"):
        adambs.with_bandit(torch.nn.Linear)
    with pytest.raises(TypeError, match=r"not nothing: AdamBS\(params, sampler, ...\) with sampler = "):
        adambs.AdamBS(net.parameters())
    with pytest.raises(TypeError, match="scores and no draw"):
        adambs.AdamBS(net.parameters(), learning()).step(scores=torch.ones(10))
    with pytest.raises(TypeError, match="a draw and no scores"):
        adambs.AdamBS(net.parameters(), learning()).step(learning().draw())
    with pytest.raises(ValueError, match="Invalid learning rate"):
        adambs.AdamBS(net.parameters(), learning(), lr=-1)
    assert adambs.with_bandit(torch.optim.SGD) is adambs.with_bandit(torch.optim.SGD)


def test_a_profiler_sees_the_step_and_nobody_else_pays_for_its_mark():
    sampler = adambs.BanditSampler(20, 4, seed=0, gate=0)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = adambs.AdamBS([parameter], sampler, lr=0.1)

    def step():
        parameter.grad = torch.ones(3)
        optimizer.step(sampler.draw(), torch.ones(4))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    assert [event.count for event in seen.key_averages() if event.key == "Optimizer.step#AdamBS.step"] == [1]
    order = []
    optimizer.register_step_pre_hook(lambda *_: order.append("before"))
    optimizer.register_step_post_hook(lambda *_: order.append("after"))
    step()
    assert order == ["before", "after"]
    assert sampler.diagnostics().updates == 2


def test_a_step_leaves_the_gradient_mode_as_it_was():
    """Also one that raises: Adam refuses sparse gradients."""
    sampler = adambs.BanditSampler(20, 4, seed=0, gate=0)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = adambs.AdamBS([parameter], sampler, lr=0.1, clip=math.inf)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            parameter.grad = torch.ones(3)
            optimizer.step(sampler.draw(), torch.ones(4))
            assert torch.is_grad_enabled() == enabled
            parameter.grad = torch.ones(3).to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step(sampler.draw(), torch.ones(4))
            assert torch.is_grad_enabled() == enabled
            parameter.grad = None


def test_gradients_flow_through_a_step_that_is_differentiable():
    """p' = p - lr g with p = w and g = 3 w, so dp'/dw = 1 - 3 lr."""
    sampler = adambs.BanditSampler(20, 4, seed=0, gate=0)
    w = torch.ones(2, requires_grad=True)
    p = w.clone()
    p.grad = 3 * w
    optimizer = adambs.with_bandit(torch.optim.SGD)([p], sampler, lr=0.1, differentiable=True)
    optimizer.step(sampler.draw(), torch.ones(4))
    p.sum().backward()
    torch.testing.assert_close(w.grad, torch.full((2,), 0.7))


def test_torchs_default_device_and_dtype_do_not_matter():
    """Compiled code writes to the addresses of tensors that are made for it: they must be on the CPU."""

    def trained(device, dtype):
        torch.manual_seed(0)
        net, sampler = small_net(), learning()
        optimizer = adambs.AdamBS(net.parameters(), sampler)
        train(net, optimizer, 1)  # in which torch makes the optimizer's own state
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        try:
            for _ in range(20):
                draw = sampler.draw()
                logits, losses = forward(net, draw)
                scores = adambs.scores.cross_entropy(logits, Y[draw.indices])
                optimizer.zero_grad()
                draw.mean(losses, scores).backward()
                optimizer.step(draw, scores)
            carried = sampler.draw().carried()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        return [*net.parameters()], sampler.probabilities(), carried

    assert same(trained(None, torch.float32), trained("meta", torch.float64))


def test_zero_grad_is_torchs_whatever_is_asked_for():
    """Gradients are let go, or filled with zeros; an optimizer's own way, and a profiler, are respected."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    sampler = adambs.BanditSampler(10, 2)
    optimizer = adambs.AdamBS([{"params": [p]} for p in parameters], sampler)
    for p in parameters:
        p.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros(3)) for p in parameters)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    with torch.profiler.profile() as profile:
        optimizer.zero_grad()
    assert any("zero_grad" in event.key for event in profile.key_averages())

    class Counting(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none=True):
            self.calls += 1
            super().zero_grad(set_to_none)

    counting = adambs.with_bandit(Counting)(parameters, sampler, lr=0.1)
    counting.zero_grad()
    assert counting.calls == 1
