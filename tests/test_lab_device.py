"""Runs on a device: the same numbers as on the CPU, and random streams that advance from turn to turn."""

import dataclasses

import numpy as np
import pytest
import torch
from device_stub import Device, OnDevice
from torch import nn

from adambs.lab import models
from adambs.lab.experiments import reproduce
from adambs.lab.methods import METHODS, Task
from adambs.lab.runs import budgets, randomness, runner, training

PLACE = "lazy:0"


@pytest.fixture
def device(monkeypatch):
    """The pretended device, with its stream of random numbers where torch looks for it."""
    with Device() as device:
        monkeypatch.setattr(torch, "lazy", device, raising=False)
        torch.get_device_module.cache_clear()  # it would remember another test's
        yield device


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_on_a_device_as_on_the_cpu(name, monkeypatch):
    """No method takes a tensor of the device for one of the host, or leaves its own on the wrong side."""
    monkeypatch.setattr("adambs.scores.forward._computes_in_bfloat16", lambda device: False)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 5, generator=generator)
    targets = torch.randint(3, (60,), generator=generator)

    def train(put):
        torch.manual_seed(1)
        model = put(nn.Linear(5, 3))
        task = Task(model, put(inputs), put(targets), training.LOSSES["softmax"], 8, 0.01, 30, seed=2)
        method = METHODS[name](task)
        training.train(method, 24)
        losses = task.evaluate(torch.arange(60), "losses")
        found = training.evaluate(model, task.inputs, task.targets, task.loss)
        return losses, method.probabilities(), found

    expected = train(lambda value: value)
    with Device() as device:
        found = train(device.put)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    if expected[1] is not None:
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-2)  # some rules blow roundings up
    assert found[2] == pytest.approx(expected[2], rel=1e-5)


def test_random_streams_advance_in_their_own_turns_alone(device):
    """Two methods in turns see what each would see alone, on the host and on the device."""

    def draw():
        return [*torch.rand(3).tolist(), *torch.rand(3, device=PLACE).tolist()]

    alone = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        device.manual_seed(seed)
        alone.append([draw() for _ in range(3)])
    outside = [torch.get_rng_state(), device.get_rng_state()]
    streams = [randomness.Streams(PLACE, seed) for seed in (0, 1)]
    found = [[], []]
    for _ in range(3):
        for k, stream in enumerate(streams):
            with stream.turn():
                found[k].append(draw())
    assert found == alone
    assert torch.equal(torch.get_rng_state(), outside[0])
    assert torch.equal(device.get_rng_state(), outside[1])


def test_a_run_on_a_device_sees_new_dropout_masks_in_every_turn(device, tmp_path, monkeypatch):
    """From the plan to the record; the net's only layer shows the masks that it used."""
    masks = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            dropped = nn.functional.dropout(torch.ones_like(x.flatten(1)), 0.5, self.training)
            if self.training:
                assert isinstance(dropped, OnDevice)
                masks.append(device.read(dropped).flatten().tolist())
            return self.layer(x.flatten(1) * dropped)

    def build(*_, seed, **__):
        torch.manual_seed(seed)
        return Net()

    monkeypatch.setattr(models, "build", build)
    monkeypatch.setattr(budgets, "TURN", 2)
    monkeypatch.setattr(nn.Module, "to", lambda module, *_, **__: device.put(module))
    changes = reproduce.Overrides(("adam", "adambs"), epochs=0.2, slices=2, threads=1, device=PLACE)
    plan = reproduce.make_plan("digits", "paper", changes)
    data = reproduce.prepare(dataclasses.replace(plan, device="cpu"), None)
    run = runner.run(plan, data, [0], tmp_path, command="")
    steps = run.config["steps"]
    assert run.finished == {0}
    assert run.config["device"] == PLACE
    assert len(masks) == 2 * steps + 3 * 3  # Adam rehearses once, AdamBS twice, three steps each
    seen = {tuple(mask) for mask in masks}
    assert len(seen) == steps  # both methods and their rehearsals have the same ones, and no turn repeats any
    assert "synchronize" in device.waits


def test_a_device_that_cannot_compute_is_refused():
    for name in ("meta", "cuda:99", "nonsense"):
        with pytest.raises(ValueError, match=rf"device '{name}' cannot be used here \(.+\): leave --device"):
            randomness.usable(name)
    assert randomness.usable("cpu") == torch.device("cpu")
