"""``adambs theory``: measure, write theory.json and theory.html, print what is seen."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from adambs import _check
from adambs.lab import machine
from adambs.lab.theory import bandit, errata, lemmas, page, regret, table1
from adambs.lab.theory.heavy_tailed import ONE_NEURON


def run_theory(console: Console, out: Path, *, quick: bool, seed: int) -> Path:
    """Measure everything, write ``out``/theory.json and ``out``/theory.html, and return the page's path."""
    seed = _check.whole("seed", seed, least=0)
    out.mkdir(parents=True, exist_ok=True)
    result = measure(console, quick=quick, seed=seed)
    (out / "theory.json").write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
    file = out / "theory.html"
    file.write_text(page.render(result), encoding="utf-8")
    for text in page.findings(result):
        console.print(f"• {escape(text)}")
    console.print(f"The page: [bold]{escape(str(file.resolve()))}[/bold]", soft_wrap=True)
    return file


def measure(console: Console, *, quick: bool, seed: int) -> dict[str, Any]:
    """All experiments, with a progress bar."""
    lemma, lemma_1, table = (
        (lemmas.QUICK, bandit.QUICK, regret.QUICK) if quick else (lemmas.FULL, bandit.FULL, regret.FULL)
    )
    total = (
        len(lemma.learn_up_to) * len(lemma.sizes)
        + len(lemma.curve_epochs)
        + len(bandit.ADVERSARIES) * len(lemma_1.horizons)
        + len(table.pairs()) * len(regret.METHODS)
        + 2
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("theory", total=total)
        started = 0

        def advance(description: str) -> None:  # called before each piece of work
            nonlocal started
            progress.update(task, completed=started, description=description)
            started += 1

        result: dict[str, Any] = {"seed": seed, "quick": quick, "machine": machine.describe()}
        result["lemmas"] = lemmas.measure(lemma, seed, advance)
        result["lemma_1"] = bandit.measure(lemma_1, seed, advance)
        result["table_1"] = regret.measure(table, seed, advance)
        advance("Table 1: exact second moments")
        result["moments"] = table1.measure(table.moment_sizes, table.d, seed)
        advance("errata")
        result["errata"] = counter_examples(seed)
        progress.update(task, completed=total, description="done")
    return result


def counter_examples(seed: int) -> dict[str, dict[str, Any]]:
    """The errata that are numbers."""
    equal = errata.second_moments(np.ones((3, 1)), np.full(3, 1 / 3), 2)
    mean, most = errata.mean_non_zeros(10**6, 1000, 2.0, 1.0, 2000, seed)
    left, right = errata.kingma_ba_lemma_10_3(np.array([0.1]))
    l, p = np.ones(100), np.full(100, 0.01)
    exact, printed = errata.squared_estimates(l, p, 10)
    one, small = errata.scaled_terms(1.0), errata.scaled_terms(0.01)
    return {
        "reddi": errata.reddi()._asdict(),
        "reddi_sampled": errata.sampled_reddi(20_000, seed)._asdict(),
        "second_moment_of_equal_gradients_K_2": equal._asdict(),
        "non_zeros_n_1e6_d_1000": {"mean_of_2000_sets": mean, "bound": most},
        "rho_3_quoted_over_printed": {
            f"lambda = 1 - {1 - lam:.0e}": errata.rho_3_ratio(0.9, 0.999, lam)
            for lam in (0.99, 0.999, 1 - 1e-8)
        },
        "log_n_at_n_4": {"sum": errata.log_n_against_the_sum(2.0, [4])[0][1], "log": math.log(4)},
        "sure_mistake_u_5": errata.loss_of_a_sure_mistake(5.0)._asdict(),
        "not_convex_y_1": {"gap": errata.convexity_gap(ONE_NEURON, -1, 1, 1.0)},
        "kingma_ba_lemma_10_3_g_0.1": {"left": left, "right": right},
        "squared_estimates_n_100_K_10": {"exact": exact, "printed": printed},
        "second_term_over_scale": {"scale_1": one[1], "scale_0.01": small[1]},
    }


def finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
