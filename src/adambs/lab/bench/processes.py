"""Several processes with gloo: what a step costs beyond the model's, replicated and in shards.

A step of the model is a sleep of 20 ms, as if a device did it. What is timed is what the training loop waits
for: ``update``, which starts the gathering; the two halves of the next ``draw``, which waits for what was
gathered and learns from it, and then draws. The bar is on gathering and learning. Processes of their own, one
for each rank.

Twice for each n: beginning with nothing seen, where the few steps that are timed are first visits if n is
large and not if it is small; and after all examples have been seen, where only n differs.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Group
from rich.table import Table

import adambs
from adambs._types import Floats
from adambs.lab.bench import rules, scale
from adambs.moments import second_moments
from adambs.rules.grouping import Members
from adambs.rules.sharded import Lesson, ShardedCalibrated
from adambs.sampler import BanditSampler
from adambs.sharded import ShardedSampler

STEP = 0.020
"""Seconds of the model's step."""
PART = 128
"""Examples of each process in a batch."""
BAR = 0.03
"""What gathering and learning may cost of a step with two processes."""
MOST_BYTES, MOST_TIMES = 14, 2
TURNS = 10
"""In so many parts the steps of a sampler are made, the others' between them."""
LATENCY, BANDWIDTH = 20e-6, 10e9
"""Seconds for each exchange between two machines and bytes a second, for the model: assumed, not measured."""

Times = tuple[float, float, float, float]
"""Seconds of a step: of ``update``, which starts the gathering; of waiting for it and learning; of the rest
of the draw; and of the processor for all three."""


def measure(*, quick: bool) -> dict[str, Any]:
    """For 1 to 4 processes and several n; and for as many examples as there is memory for, in shards."""
    counts, sizes, steps = ((2,), [10**4], 20) if quick else ((1, 2, 3, 4), [10**5, 10**7], 200)
    many = [10**4, 10**5] if quick else [10**6, 10**9]
    found = [_started(W, sizes, many if counts[-1] == W else [], steps) for W in counts]
    return {
        "step": STEP,
        "part": PART,
        "rows": [row for each in found for row in each["rows"]],
        "shards": found[-1]["shards"],
        "kernels": kernel_times(10**5 if quick else 10**7),
    }


def kernel_times(n: int = 10**7) -> dict[str, float]:
    """Nanoseconds a score, in one process: what the model of docs/many-processes.md is made of.

    All examples have been seen.

    ``everything`` is to draw and to learn from a score with the whole of p, ``heard`` to learn from one of
    another process: slopes between two sizes of batch. ``fixed`` and ``fixed, sharded`` are the microseconds
    of a step with next to no scores.
    """
    small, large = 256, 2**15
    samplers = [adambs.BanditSampler(n, B, initial_weights=_seen(n)) for B in (small, large)]
    both = [_median(partial(_one, sampler)) for sampler in samplers]
    everything = (both[1] - both[0]) / (large - small)
    heard = [_median(_hearing(n, B)) for B in (small, large)]
    return {
        "everything": 1e9 * everything,
        "heard": 1e9 * (heard[1] - heard[0]) / (large - small),
        "fixed": 1e6 * _median(partial(_one, adambs.BanditSampler(1000, 8, gate=0.0))),
        "fixed, sharded": 1e6 * _median(partial(_one, ShardedSampler(1000, 8, gate=0.0, group=False))),
    }


def model(kernels: dict[str, float], part: int = PART) -> list[dict[str, float]]:
    """What a step costs with up to 4,096 processes, in µs: computing, and bytes and latency on the wire.

    The times of the kernels, :data:`LATENCY` for each of log2(W) exchanges, and :data:`BANDWIDTH`. What is
    on the wire overlaps with the optimizer's step, what is computed does not.
    """
    rows = []
    for W in (1, 4, 16, 64, 256, 1024, 4096):
        a, h, B = 1e-3 * kernels["everything"], 1e-3 * kernels["heard"], W * part
        room = part + 5 * math.isqrt(part) + 8  # in shards messages have room for parts that vary
        sent = 40 + 8 * part, 40 + 10 * room
        wire = [1e6 * (LATENCY * math.log2(W) + W * each / BANDWIDTH) for each in sent]
        masses = 1e-3 * W * 91  # a nanosecond for each group of each shard
        rows.append(
            {
                "W": W,
                "replicated": kernels["fixed"] + B * a,
                "sharded": kernels["fixed, sharded"] + part * a + B * h + masses,
                "wire": wire[0],
                "wire, sharded": wire[1],
                "bytes": W * sent[0],
            }
        )
    return rows


def _seen(n: int) -> Floats:
    """A score of each example, about what ``scores_of`` will say."""
    return (np.arange(n) * 2654435761 % 1000 / 1000) ** 2 * 0.75 + 1e-9


def _median(work: Callable[[], float]) -> float:
    """Seconds, as ``work`` says."""
    return float(np.median([work() for _ in range(40)][5:]))


def _one(sampler: adambs.BanditSampler) -> float:
    """Processor seconds of a draw and its update: what the processor does for others does not count."""
    start = time.thread_time()
    draw = sampler.draw()
    drawn = time.thread_time() - start
    scores = rules.scores_of(draw, np.random.default_rng(draw.number))
    start = time.thread_time()
    sampler.update(draw, scores)
    return time.thread_time() - start + drawn


def _hearing(n: int, B: int) -> Callable[[], float]:
    """Learns from B scores of which none is of this process."""
    rule = ShardedCalibrated(np.full(64, n // 64), range(0, 1))
    rule.start(n // 64 * 64, B, None)
    counts = np.zeros(64, np.int64)
    counts[1:] = B // 63
    counts[1] += B - counts.sum()
    random, none = np.random.default_rng(0), np.empty(0, np.int64)

    def work() -> float:
        groups = random.integers(40, 60, (B, 2)).astype(np.uint8)
        lesson = Lesson(random.exponential(size=B), groups)
        start = time.thread_time()
        ratios = lesson.ratios(rule.group_ratios)
        second_moments(ratios, ratios, lesson.scores)
        rule.learn(lesson, counts, none)
        return time.thread_time() - start

    return work


def _started(W: int, *arguments: Any) -> dict[str, Any]:
    """What rank 0 of W processes has measured."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from {__name__} import print_measured; print_measured(%d, {W}, {folder!r}, *{arguments!r})"
        running = [
            subprocess.Popen(
                [sys.executable, "-c", code % rank], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(W)
        ]
        told = [process.communicate() for process in running]
        for process, (_, errors) in zip(running, told, strict=True):
            if process.returncode:
                raise RuntimeError(f"a rank has failed: {errors[-2000:]}")
    found: dict[str, Any] = json.loads(told[0][0])
    return found


def print_measured(rank: int, W: int, folder: str, sizes: list[int], many: list[int], steps: int) -> None:
    """Measure in this process of W: steps for each of ``sizes``, shards of ``many``. Rank 0 prints JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=W)
    result = {"rows": _steps(sizes, steps), "shards": [_shards(n, steps) for n in many]}
    if rank == 0:
        print(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
    # Not by way of the interpreter's end: a thread of torch's that lets go of a tensor then ends the process.
    sys.stdout.flush()
    os._exit(0)


def _steps(sizes: list[int], steps: int) -> list[dict[str, Any]]:
    """A row for each n and kind of sampler. They take turns, so that a busy machine slows all alike."""
    W = dist.get_world_size()
    kinds: list[type[BanditSampler]] = [BanditSampler, ShardedSampler]
    cases = list(product(sizes, kinds, (False, True)))
    samplers = [_sampler(n, kind, PART * W, seen=seen) for n, kind, seen in cases]
    taken: list[list[Times]] = [[] for _ in cases]
    for _ in range(TURNS):
        for sampler, own in zip(samplers, taken, strict=True):
            own += _timed(sampler, steps // TURNS, STEP)
    return [
        {"W": W, "n": n, "kind": kind.__name__, "seen": seen, **_medians(own)}
        for (n, kind, seen), own in zip(cases, taken, strict=True)
    ]


def _sampler(n: int, kind: type[BanditSampler], batch_size: int, *, seen: bool) -> BanditSampler:
    """One that has made some steps, so that kernels are compiled, or read from their cache."""
    options: dict[str, Any] = {"initial_weights": _seen(n)} if seen and kind is BanditSampler else {}
    sampler = kind(n, batch_size, gate=0.0, **options)
    if seen and isinstance(sampler, ShardedSampler):
        _all_seen(sampler)
    _timed(sampler, 10, 0.0)
    return sampler


def _shards(n: int, steps: int) -> dict[str, Any]:
    """After all examples have been seen; with the memory of all ranks."""
    W = dist.get_world_size()
    _timed(ShardedSampler(10_000, PART * W, gate=0.0), 10, 0.0)
    before, start = scale._memory()[0], time.perf_counter()
    sampler = ShardedSampler(n, PART * W, gate=0.0)
    built = time.perf_counter() - start
    _all_seen(sampler)
    took = _medians(_timed(sampler, steps, 0.0))
    now = scale._memory()[0]
    grown = torch.tensor([0.0 if now is None or before is None else now - before], dtype=torch.float64)
    dist.all_reduce(grown)
    return {"W": W, "n": n, "construction": built, "bytes": grown.item() / n, **took}


def _timed(sampler: adambs.BanditSampler, steps: int, seconds: float) -> list[Times]:
    """What each step took, with so long a step of the model between ``update`` and ``draw``."""
    random = np.random.default_rng(dist.get_rank())
    taken: list[Times] = []
    draw = sampler.draw()
    for _ in range(steps):
        scores = rules.scores_of(draw, random)
        start, busy = time.perf_counter(), time.thread_time()
        sampler.update(draw, scores)
        updated = time.perf_counter()
        time.sleep(seconds)
        ready = time.perf_counter()
        with sampler._lock:
            sampler._learn_what_is_late()  # as the draw itself would
        learned = time.perf_counter()
        draw = sampler.draw()
        drawn = time.perf_counter()
        taken.append((updated - start, learned - ready, drawn - learned, time.thread_time() - busy))
    sampler.update(draw, rules.scores_of(draw, random))
    return taken


def _medians(taken: list[Times]) -> dict[str, float]:
    """In µs. ``gather`` is update and learn together, ``both`` all three."""
    update, learn, draw, processor = 1e6 * np.array(taken).T
    times = {"update": update, "learn": learn, "draw": draw, "gather": update + learn}
    times |= {"both": update + learn + draw, "processor": processor}
    return {name: float(np.median(each)) for name, each in times.items()}


def _all_seen(sampler: ShardedSampler) -> None:
    """As if every example had been seen once, with exponential scores: every page of memory is written."""
    rule, random = sampler.rule, np.random.default_rng(dist.get_rank())
    rule.unit = 1.0
    for v in rule.owned:
        scores = random.standard_exponential(int(rule.lengths[v]), dtype=np.float32)
        del rule.shards[v]  # before there is another
        rule.shards[v] = Members.by_score(scores, 1.0)
        rule.sizes[v] = rule.shards[v].sizes
        del scores
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {v: rule.sizes[v] for v in rule.shards})
    for kept in told:
        for v, row in kept.items():
            rule.sizes[v] = row
    rule._settle()


def table(result: dict[str, Any]) -> Group:
    """What was measured, and the model made of it."""
    return Group(_measured(result), _modelled(result))


def _modelled(result: dict[str, Any]) -> Table:
    made = Table(
        title=f"A model of it, {result['part']} examples each: µs a step, {1e6 * LATENCY:.0f} µs of latency "
        f"and {BANDWIDTH / 1e9:.0f} GB/s assumed"
    )
    for column in ("processes", "replicated", "in shards", "on the wire", "in shards", "bytes received"):
        made.add_column(column, justify="right")
    for row in model(result["kernels"], result["part"]):
        times = (row[name] for name in ("replicated", "sharded", "wire", "wire, sharded", "bytes"))
        made.add_row(f"{row['W']:,}", *(f"{value:,.0f}" for value in times))
    return made


def _measured(result: dict[str, Any]) -> Table:
    """A row for each kind of sampler, number of processes and n."""
    made = Table(
        title=f"Several processes, {result['part']} examples each: µs, and shares of a step of 20 ms"
    )
    for column in ("", "processes", "n", "update", "learn", "draw", "gathered, learned", "and drawn", "bar"):
        made.add_column(column, justify="left" if column in ("", "bar") else "right")
    for row in sorted(result["rows"], key=lambda row: (row["W"], row["kind"], row["seen"], row["n"])):
        bar = f"at most {BAR:.0%}" if row["W"] == 2 and row["kind"] == "BanditSampler" else ""
        times = [f"{row[name]:.0f}" for name in ("update", "learn", "draw")]
        times += [f"{row[name] / (1e6 * result['step']):.1%}" for name in ("gather", "both")]
        made.add_row(row["kind"] + ", all seen" * row["seen"], str(row["W"]), f"{row['n']:,}", *times, bar)
    least = result["shards"][0]
    for row in result["shards"]:
        bar = f"at most {MOST_BYTES} bytes, {MOST_TIMES} times" if row is not result["shards"][0] else ""
        times = [f"{row[name]:.0f}" for name in ("update", "learn", "draw")]
        times += ["", f"{row['both'] / least['both']:.2f} times"]
        processor = row["processor"] / least["processor"]
        title = f"all seen, {row['bytes']:.1f} bytes an example, {processor:.2f} times the processor's time"
        made.add_row(title, str(row["W"]), f"{row['n']:,}", *times, bar)
    kernels = result["kernels"]
    made.caption = (
        f"kernels: {kernels['everything']:.0f} ns to draw and learn a score, {kernels['heard']:.0f} ns to "
        f"hear of another's, {kernels['fixed']:.0f} µs a step without scores, in shards "
        f"{kernels['fixed, sharded']:.0f}"
    )
    return made
