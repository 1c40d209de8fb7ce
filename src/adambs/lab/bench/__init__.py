"""``adambs bench``: what the sampler and the scores cost, beside their peers, in one run, as ratios.

The candidates take turns, so that a busy machine slows all of them alike. Bars are printed beside the
numbers and never asserted: machines are shared.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from adambs.lab import machine
from adambs.lab.bench import many, rules, scale, startup, steps, trees


def run_bench(console: Console, out: Path, *, quick: bool) -> None:
    """Measure everything, print the tables, write JSON."""
    result: dict[str, Any] = {"machine": machine.describe(), "quick": quick}
    console.print(result["machine"])
    sizes = [10**4, 10**5, 10**6] if quick else [10**4, 10**5, 10**6, 10**7, 10**8]
    with console.status("training steps") as status:
        result["steps"] = steps.measure_all(quick=quick)
        status.update("drawing and updating with each rule")
        result["rules"] = [
            rules.measure(n, k, seconds=0.2 if quick else 1.5)
            for n, k in [(1437, 32), *((n, 128) for n in sizes if n <= 10**7)]
        ]
        result["trees"] = []
        for n in sizes:
            for k in (128, 1024):
                status.update(f"drawing and updating: n = {n:.0e}, K = {k}")
                result["trees"].append(trees.measure(n, k, seconds=1 if quick else 8))
        status.update("very many examples")
        result["scale"] = scale.measure(10**6 if quick else 10**8)
        status.update("several processes")
        result["many"] = many.measure(quick=quick)
        status.update("imports")
        result["startup"] = startup.measure(repeats=2 if quick else 5)
    for part in (steps, rules, trees, scale, many, startup):
        console.print(part.table(result[part.__name__.rpartition(".")[2]]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written: [bold]{out}[/bold]")
