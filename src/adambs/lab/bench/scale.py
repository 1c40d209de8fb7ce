"""A sampler of very many examples with the default rule: time, memory and the size of a checkpoint.

Measured in a process of its own, so that its memory is the sampler's.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

import adambs
from adambs.lab.bench import rules

# name in the result -> what it is called, unit, and what it may be
ROWS: dict[str, tuple[str, str, str]] = {
    "construction": ("construction", "s", "at most 3"),
    "first_draw": ("first draw", "ms", "under 10"),
    "new_pass": ("a draw that begins a new pass", "ms", "under 10"),
    "diagnostics": ("diagnostics()", "ms", "under 50"),
    "from_passes": ("draw and update, from reshuffled passes", "µs", ""),
    "from_p": ("draw and update, from p", "µs", ""),
    "resident": ("memory, all examples seen", "bytes an example", ""),
    "peak_saving": ("memory in all, with a state of it", "bytes an example", "at most 12"),
    "peak_loading": ("memory at the peak of loading a state", "bytes an example", "at most 16"),
    "peak_reloading": ("the same into a sampler in use", "bytes an example", ""),
    "checkpoint": ("checkpoint, torch.save", "bytes an example", "4 to 5"),
    "saving": ("state_dict() and torch.save", "s", ""),
    "loading": ("torch.load and load_state_dict()", "s", ""),
}


def measure(n: int, k: int = 128) -> dict[str, Any]:
    """All rows, measured in a new process."""
    code = f"from adambs.lab.bench import scale; scale.print_measured({n}, {k})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return {"n": n, "K": k, **measured}


def print_measured(n: int, k: int) -> None:
    """Measure in this process and print JSON. Memory is None where the system does not tell it."""
    _warm_up(k)
    before = _memory()[0]
    result: dict[str, Any] = {}
    clock = time.perf_counter

    def bytes_each(memory: int | None) -> float | None:
        return None if memory is None or before is None else (memory - before) / n

    start = clock()
    sampler = adambs.BanditSampler(n, k)
    built = clock()
    sampler.draw()
    drawn = clock()
    result["construction"], result["first_draw"] = built - start, 1e3 * (drawn - built)
    result["from_passes"] = _draw_and_update(sampler)
    result["new_pass"] = 1e3 * _new_pass(n, k)
    start = clock()
    sampler.diagnostics()
    result["diagnostics"] = 1e3 * (clock() - start)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        torch.save(sampler.state_dict(), file)
        result["checkpoint"] = file.stat().st_size / n
        del sampler

        _forget_peak()
        start = clock()
        state = torch.load(file)
        sampler = adambs.BanditSampler(n, k)  # as in a run that is resumed
        sampler.load_state_dict(state)
        del state
        result["loading"] = clock() - start
        now, peak = _memory()  # loading writes all of the sampler's memory, as if all had been seen
        result["resident"], result["peak_loading"] = bytes_each(now), bytes_each(peak)

        _forget_peak()
        start = clock()
        state = sampler.state_dict()
        torch.save(state, file)
        result["saving"] = clock() - start
        result["peak_saving"] = bytes_each(_memory()[1])

        _forget_peak()
        sampler.load_state_dict(state)
        result["peak_reloading"] = bytes_each(_memory()[1])

    del sampler, state
    result["from_p"] = _draw_and_update(adambs.BanditSampler(n, k, gate=0.0))
    print(json.dumps(result))


def _warm_up(k: int) -> None:
    """Compile what is not compiled, and load what is."""
    for gate in (0.0, 1.1):
        sampler = adambs.BanditSampler(100_000, k, gate=gate)
        sampler.update(sampler.draw(), np.ones(k))
        sampler.load_state_dict(sampler.state_dict())
        sampler.diagnostics()


def _draw_and_update(sampler: adambs.BanditSampler, steps: int = 2000) -> float:
    """Median in µs."""
    random = np.random.default_rng(1)
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        draw = sampler.draw()
        drawn = time.perf_counter()
        scores = rules.scores_of(draw, random)
        ready = time.perf_counter()
        sampler.update(draw, scores)
        taken.append(time.perf_counter() - ready + drawn - start)
    return 1e6 * float(np.median(taken))


def _new_pass(n: int, k: int) -> float:
    """Seconds of a draw that ends a pass and begins the next."""
    sampler = adambs.BanditSampler(n, k)
    state = sampler.passes.state_dict()
    sampler.passes = sampler.passes.with_state({**state, "position": n - k // 2})
    start = time.perf_counter()
    sampler.draw()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------
# Memory, as Linux tells it
# ------------------------------------------------------------------------------------------------


def _memory() -> tuple[int | None, int | None]:
    """Bytes of this process that are resident, now and at the peak."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return None, None
    now, peak = (1024 * int(lines[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return now, peak


def _forget_peak() -> None:
    """The peak is that of now, and grows from here on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def table(result: dict[str, Any]) -> Table:
    """A row for each number, with its bar."""
    made = Table(title=f"n = {result['n']:.0e}, the default rule, K = {result['K']}")
    for column in ("", "measured", "unit", "bar"):
        made.add_column(column, justify="right" if column == "measured" else "left")
    for name, (title, unit, bar) in ROWS.items():
        value = result[name]
        made.add_row(title, "-" if value is None else f"{value:.3g}", unit, bar)
    return made
