"""Importing, and the first calls."""

import subprocess
import sys

import numpy as np
from rich.table import Table

_IMPORT = """
import time
start = time.perf_counter()
import numba, torch, torch.utils.data, torch.optim
before = time.perf_counter()
import adambs
after = time.perf_counter()
sampler = adambs.BanditSampler(100_000, 128)
built = time.perf_counter()
draw = sampler.draw()
drawn = time.perf_counter()
sampler.update(draw, torch.ones(128))
updated = time.perf_counter()
print(before - start, after - before, built - after, drawn - built, updated - drawn)
"""


def measure(*, repeats: int) -> dict[str, float]:
    """Seconds, in processes of their own: what adambs adds to its dependencies, and the first calls."""
    runs = []
    for _ in range(repeats + 1):  # the first may compile
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
        runs.append([float(word) for word in done.stdout.split()])
    names = ("torch and numba", "adambs beyond them", "construction", "first draw", "first update")
    return dict(zip(names, np.median(runs[1:], axis=0).tolist(), strict=True))


def table(seconds: dict[str, float]) -> Table:
    """One row."""
    made = Table(title="Start-up, kernels cached: seconds")
    for name in seconds:
        made.add_column(name, justify="right")
    made.add_row(*(f"{value:.3f}" for value in seconds.values()))
    return made
