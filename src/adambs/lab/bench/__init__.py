"""``adambs bench``: what the sampler and the scores cost, beside their peers, in one run, as ratios.

The candidates take turns, so that a busy machine slows all of them alike. Bars are printed beside the
numbers and never asserted: machines are shared.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from adambs.lab import machine
from adambs.lab.bench import processes, rules, scale, startup, steps, trees


def run_bench(console: Console, out: Path, *, quick: bool) -> None:
    """Measure everything; each part is printed, and written to the JSON file, as soon as it is there."""
    sizes = [10**4, 10**5, 10**6] if quick else [10**4, 10**5, 10**6, 10**7, 10**8]
    parts: list[tuple[str, ModuleType, Callable[[], Any]]] = [
        ("training steps", steps, lambda: steps.measure_all(quick=quick)),
        (
            "drawing and updating with each rule",
            rules,
            lambda: [
                rules.measure(n, k, seconds=0.2 if quick else 1.5)
                for n, k in [(1437, 32), *((n, 128) for n in sizes if n <= 10**7)]
            ],
        ),
        (
            "drawing and updating trees",
            trees,
            lambda: [trees.measure(n, k, seconds=1 if quick else 8) for n in sizes for k in (128, 1024)],
        ),
        ("very many examples", scale, lambda: scale.measure(10**6 if quick else 10**8)),
        ("several processes", processes, lambda: processes.measure(quick=quick)),
        ("imports", startup, lambda: startup.measure(repeats=2 if quick else 5)),
    ]
    result: dict[str, Any] = {"machine": machine.describe(), "quick": quick}
    console.print(result["machine"])
    out.parent.mkdir(parents=True, exist_ok=True)
    for words, part, measure in parts:
        name = part.__name__.rpartition(".")[2]
        with console.status(words):
            result[name] = measure()
        console.print(part.table(result[name]))
        out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written: [bold]{out}[/bold]")
