"""A forward pass that only scores: modes, gradients, precision, and the loader that looks with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import adambs
from adambs.scores import forward, forward_only


def a_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def on_any_processor(monkeypatch):
    monkeypatch.setattr(forward, "_computes_in_bfloat16", lambda device: True)


def test_within_there_is_no_dropout_and_no_gradient_and_afterwards_all_is_as_it_was():
    model = a_net()
    model[1].eval()  # frozen by the user
    before = [module.training for module in model.modules()]
    x = torch.randn(6, 4)
    with forward_only(model):
        once, twice = model(x), model(x)
    assert torch.equal(once, twice)
    assert not once.requires_grad
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(model[1].running_mean, torch.zeros(8))


def test_layers_that_do_more_than_set_a_flag_are_told():
    """As LoRA layers do, which merge their weights for evaluation."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(4, 3))
    with forward_only(model):
        assert model[0].merged
    assert not model[0].merged
    with forward_only(model.eval()):
        pass
    assert model[0].merged


def test_an_error_within_leaves_the_model_as_it_was():
    model = a_net()
    with pytest.raises(RuntimeError), forward_only(model):
        model(torch.randn(6, 5))
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("half", "dtype"), [(True, torch.bfloat16), (False, torch.float32), (None, torch.bfloat16)]
)
def test_half_precision_is_for_whoever_wants_it(monkeypatch, half, dtype):
    on_any_processor(monkeypatch)
    with forward_only(model := a_net(), half=half):
        assert model(torch.randn(6, 4)).dtype is dtype
    assert model.train()(torch.randn(6, 4)).dtype is torch.float32


def test_no_half_precision_unasked_where_it_is_not_computed_with(monkeypatch):
    monkeypatch.setattr(forward, "_computes_in_bfloat16", lambda device: False)
    with forward_only(model := a_net()):
        assert model(torch.randn(6, 4)).dtype is torch.float32


def test_nor_for_float64_nor_for_layers_that_have_a_faster_way(monkeypatch):
    on_any_processor(monkeypatch)
    with forward_only(model := a_net().double()):
        assert model(torch.randn(6, 4).double()).dtype is torch.float64
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    with forward_only(model := nn.Sequential(layer)):
        assert model(torch.randn(2, 3, 8)).dtype is torch.float32
    with forward_only(model := nn.ReLU()):  # without parameters
        assert model(torch.randn(3)).dtype is torch.float32


def test_within_an_autocast_of_the_user_the_next_step_still_has_gradients():
    """autocast keeps weights that it has cast, and what was cast without gradients has none."""
    model = a_net()
    with torch.autocast("cpu", torch.bfloat16):
        with forward_only(model, half=True):
            assert model(torch.randn(6, 4)).dtype is torch.bfloat16
        with forward_only(model, half=False):
            assert model(torch.randn(6, 4)).dtype is torch.float32
        loss = model(torch.randn(6, 4)).float().square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("first", ["a look", "a step"])
def test_a_users_autocast_may_be_of_another_type(first):
    """torch keeps what it has cast by tensor, not by type."""
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    with torch.autocast("cpu", torch.float16):
        if first == "a step":
            model(x)
        with forward_only(model, half=True):
            assert model(x).dtype is torch.bfloat16
        loss = model(x).float().square().mean()
    loss.backward()
    assert model.weight.grad is not None


def test_rough_scores_are_nearly_the_scores():
    model, x, y = a_net().eval(), torch.randn(200, 4), torch.randint(3, (200,))
    with forward_only(model, half=True):
        rough = adambs.scores.cross_entropy(model(x), y)
    exact = adambs.scores.cross_entropy(model(x), y)
    assert rough.dtype is torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.01)
    assert not torch.equal(rough, exact)


def test_a_loader_looks_with_it_and_the_choice_stays_unbiased():
    """The mean over many looks of the weighted mean of x is the mean of x, to three standard errors."""
    torch.manual_seed(0)
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    model, train = a_net(), TensorDataset(x, y)

    def score(batch):
        with forward_only(model, half=True):
            return adambs.scores.cross_entropy(model(batch[0]), batch[1])

    sampler = adambs.BanditSampler(300, 10, seed=1, gate=0.0, candidates=adambs.Candidates(cost=1e-9))
    loader = adambs.BanditLoader(train, sampler, score=score)
    means = []
    for _ in range(20):
        for (inputs, labels), draw in loader:
            means.append(draw.mean(inputs[:, 0]))
            sampler.update(draw, adambs.scores.cross_entropy(model.eval()(inputs), labels))
    found, looks = torch.stack(means).double(), sampler.diagnostics().looks
    assert looks > 500
    z = (found.mean() - x[:, 0].double().mean()) / (found.std() / len(found) ** 0.5)
    assert abs(z) < 3
    assert F.cross_entropy(model(x), y).requires_grad
