"""Diagnostics as numbers for loggers."""

import math

import pytest
import torch
from helpers import taught

import adambs


def test_numbers_are_flat_and_finite():
    fresh = adambs.BanditSampler(50, 5).diagnostics().numbers()
    assert "variance_reduction" not in fresh  # not known yet
    found = taught(adambs.BanditSampler(50, 5), 60).diagnostics()
    numbers = found.numbers("bandit/")
    assert numbers["bandit/draws"] == 60
    assert numbers["bandit/variance_reduction"] == found.variance_reduction
    assert all(type(value) is float and math.isfinite(value) for value in numbers.values())
    assert len(numbers) >= 10


def test_no_example_is_looked_at(monkeypatch):
    """O(1) with the default rule: p of single examples is never asked for."""
    sampler = taught(adambs.BanditSampler(50, 5), 60)

    def ratios(*_):
        raise AssertionError("O(n)")

    monkeypatch.setattr(type(sampler.rule), "ratios", ratios)
    assert sampler.diagnostics().numbers()["effective_sample_size"] <= 50


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_tensorboard_takes_them(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    torch.manual_seed(0)
    sampler = adambs.BanditSampler(50, 5)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            taught(sampler, 1)
            for name, value in sampler.diagnostics().numbers("bandit/").items():
                writer.add_scalar(name, value, step)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.value for event in events.Scalars("bandit/draws")] == [1, 2, 3]
