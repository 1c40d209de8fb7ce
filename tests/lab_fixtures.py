"""Synthetic runs, written through records.Writer, so that the format is the runner's; and small data."""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np

from adambs.lab.runs import records

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \"'\u2028\u2029 $\\frac{$ 语"

# Speed of the loss relative to Adam's, seconds a step, whether it has a distribution, whether it is biased.
METHODS: dict[str, tuple[float, float, bool, bool]] = {
    "adam": (1.0, 0.020, False, False),
    "adambs": (1.9, 0.023, True, False),
    "adambs-exp3": (1.3, 0.023, True, False),
    "adam-impt": (1.5, 0.045, False, False),
    "adambs-release": (0.8, 0.021, True, True),
}
TITLES = {
    "adam": "Adam",
    "adambs": "AdamBS",
    "adambs-exp3": "AdamBS (Exp3)",
    "adam-impt": "Adam-impt",
    "adambs-release": "AdamBS as released",
    "sgd": "SGD",
}
CITATIONS = {
    "adam": "Kingma and Ba, ICLR 2015",
    "adam-impt": "Katharopoulos and Fleuret, ICML 2018",
}


def about(method: str) -> dict[str, Any]:
    return {
        "title": TITLES.get(method, method),
        "summary": "A line on what it does with each batch.",
        "citation": CITATIONS.get(method, "Liu, Wu and Mozafari, NeurIPS 2020"),
        "biased": METHODS.get(method, (0, 0, False, False))[3],
    }


def config(methods: list[str], **changes: Any) -> dict[str, Any]:
    return {
        "experiment": "cnn-fashion",
        "title": "CNN on Fashion-MNIST",
        "scale": "quick",
        "differs": "4 epochs instead of 10, half the width, 12,000 training examples",
        "dataset": "fashion-mnist",
        "model": "cnn-fashion",
        "n": 12000,
        "classes": ["T-shirt", "Trouser", "Pullover"],
        "batch_size": 128,
        "lr": 0.001,
        "epochs": 4,
        "steps": 400,
        "slices": 20,
        "methods": methods,
        "threads": 1,
        "device": "cpu",
        **changes,
    }


def machine() -> dict[str, Any]:
    return {
        "processor": "Test CPU <8 GHz>",
        "cores": 2,
        "python": "3.11.7",
        "torch": "2.13.0",
        "date": "2026-11-15",
    }


def slice_line(
    method: str, seed: int, step: int, steps: int, rng: np.random.Generator, noise: float
) -> dict[str, Any]:
    speed, cost, distribution, _ = METHODS.get(method, (0.5, 0.018, False, False))
    part = step / steps
    wobble = math.exp(noise * rng.normal()) if step else 1.0
    loss = 2.303 * math.exp(-1.2 * math.log1p(6 * speed * part)) * wobble
    warm = min(1.0, 5 * part)
    return {
        "kind": "slice",
        "seed": seed,
        "method": method,
        "step": step,
        "epoch": 4 * part,
        "seconds": step * cost * (1 + 0.03 * seed) + (0.004 * rng.random() if step else 0),
        "examples": 128 * step,
        "train_loss": loss,
        "train_error": 0.9 * (loss / 2.303) ** 0.9,
        "test_loss": 0.2 + loss,
        "test_error": 0.06 + 0.84 * (loss / 2.303),
        "ess": 1 - 0.6 * warm / speed if distribution else None,
        "variance_reduction": 1 + warm * (speed - 0.6) if distribution else None,
    }


def picture(index: int, *, size: int = 14, colour: bool = False) -> list[Any]:
    rng = np.random.default_rng(index)
    y, x = np.mgrid[:size, :size] / size - 0.5
    angle = rng.uniform(0, math.pi)
    rings = np.cos((6 + 10 * rng.random()) * np.hypot(x * math.cos(angle), y) + index) * np.exp(
        -5 * (x * x + y * y)
    )
    grey = np.clip(255 * np.abs(rings), 0, 255).astype(int)
    if colour:
        return np.stack([grey, np.roll(grey, 2, 0), 255 - grey], axis=-1).tolist()  # type: ignore[no-any-return]
    return grey.tolist()  # type: ignore[no-any-return]


def example(index: int, ratio: float, *, text: str | None = None, colour: bool = False) -> dict[str, Any]:
    shown: dict[str, Any] = {"index": index, "ratio": ratio, "label": "Pullover", "guess": "Pullover"}
    if ratio > 1 and index % 3:
        shown["guess"] = "Trouser"
    return shown | ({"text": text} if text is not None else {"image": picture(index, colour=colour)})


def distribution_line(method: str, seed: int, step: int, steps: int, kind: str) -> dict[str, Any]:
    spread = 3 * step / steps * METHODS[method][0]
    quantiles = np.exp(spread * (np.linspace(0, 1, 101) ** 3 - 0.25))
    text = {"hostile": HOSTILE, "text": "a film that <i>means</i> well, and is two hours long " * 6}.get(kind)

    def examples(ratio: float) -> list[dict[str, Any]]:
        return [
            example(7 * k + seed, ratio * (1 - 0.02 * k), text=text, colour=kind == "colour")
            for k in range(12)
        ]

    return {
        "kind": "distribution",
        "seed": seed,
        "method": method,
        "step": step,
        "quantiles": quantiles.tolist(),
        "highest": examples(float(quantiles[-1])),
        "lowest": examples(float(quantiles[0])),
    }


def write_run(
    folder: Path,
    methods: list[str] | None = None,
    *,
    seeds: int = 3,
    finished: int | None = None,
    slices: int = 20,
    noise: float = 0.03,
    examples: str = "image",
    hostile: bool = False,
    balanced: bool = False,
    **changes: Any,
) -> records.Run:
    """A run of ``seeds`` seeds, the first ``finished`` of them finished, the last of the others cut short."""
    methods = methods or list(METHODS)
    finished = seeds if finished is None else finished
    described = {method: about(method) for method in methods}
    if hostile:
        changes = {
            "title": HOSTILE,
            "differs": HOSTILE,
            "dataset": HOSTILE,
            "experiment": "../" + HOSTILE,
        } | changes
        for method in methods:
            described[method] |= {"title": method + HOSTILE, "summary": HOSTILE, "citation": HOSTILE}
    writer = records.Writer(folder, config(methods, **changes), described)
    command = (
        f"adambs reproduce {HOSTILE}" if hostile else "adambs reproduce cnn-fashion --scale quick --seeds 3"
    )
    writer.append({"kind": "session", "command": command, "machine": machine()})
    for seed in range(seeds):
        writer.append({"kind": "begin", "seed": seed})
        rngs = {method: np.random.default_rng([seed, k]) for k, method in enumerate(methods)}
        for k in range(slices + 1 if seed < finished else slices // 2):
            for method in methods:
                step, steps = 20 * k, 20 * slices
                line = slice_line(method, seed, step, steps, rngs[method], noise)
                if balanced:  # older records do not have it
                    line["balanced_test_error"] = min(1.0, 2 * line["test_error"])
                writer.append(line)
                if METHODS.get(method, (0, 0, False))[2] and k % 5 == 0:
                    line = distribution_line(method, seed, step, steps, "hostile" if hostile else examples)
                    if hostile:
                        for shown in line["highest"] + line["lowest"]:
                            shown |= {"label": HOSTILE, "guess": HOSTILE}
                    writer.append(line)
        if seed < finished:
            writer.append({"kind": "end", "seed": seed})
    return records.read(folder)


# --------------------------------------------------------------------------- KDD Cup 1999, in small

KDD = "kddcup.data_10_percent.gz"


def connection(k: int, kind: str = "normal", protocol: str = "tcp", **columns: float) -> str:
    """A line of 41 columns and a kind: column 4 is ``k``, ``c7=3`` sets another, the rest are 0."""
    values = ["0"] * 41
    values[1:5] = protocol, f"service_{k % 3}", "SF" if k % 2 else "REJ", f"{k}"
    for name, value in columns.items():
        values[int(name[1:])] = f"{value}"
    return ",".join([*values, f"{kind}."])


def connections(n: int = 60) -> list[str]:
    """Every fifth a copy of one line, as most are in the publisher's file."""
    kinds = ("smurf", "neptune", "normal", "back")
    return [
        connection(7, "smurf", "icmp", c22=511)
        if k % 5 == 0
        else connection(k, kinds[k % 4], ("tcp", "udp")[k % 2], c22=k * k, c36=f"{(k % 10) / 10:.2f}")
        for k in range(n)
    ]


def kdd_files(lines: list[str] | None = None) -> dict[str, bytes]:
    return {KDD: gzip.compress(("\n".join(lines or connections()) + "\n").encode())}
