"""The default path whole: 1,000 steps, save, new process, load, 1,000 more: as 2,000 straight, to the bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import same

import adambs


def run(workers, steps, load, save):
    script = Path(__file__).with_name("resume_script.py")
    # Two workers are more than torch likes where there is one core.
    strict = ["-W", "error", "-W", "ignore:This DataLoader will create"]
    arguments = [sys.executable, *strict, script, workers, steps, load, save]
    subprocess.run([str(a) for a in arguments], check=True, timeout=600)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_in_two_processes_is_the_run_in_one(tmp_path, workers):
    half, whole, straight = (tmp_path / name for name in ("half.pt", "whole.pt", "straight.pt"))
    run(workers, 1000, "-", half)  # 43 batches an epoch: in the middle of the 24th
    run(workers, 2000, half, whole)
    run(workers, 2000, "-", straight)
    resumed, expected = (torch.load(file, weights_only=True) for file in (whole, straight))
    assert same(resumed, expected)

    draws = []
    for state in (resumed, expected):
        sampler = adambs.BanditSampler(300, 7, seed=1)
        sampler.load_state_dict(state["optimizer"]["sampler"])
        draws.append([sampler.draw().indices for _ in range(10)])
        p = sampler.probabilities()
        assert p.max() > 1.2 * p.min()
        seen = sampler.diagnostics()
        assert seen.updates == 2000
        assert 0 < seen.reshuffled < seen.draws  # the gate was closed, and open
    assert same(*draws)
