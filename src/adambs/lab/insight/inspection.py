"""``adambs inspect``: a page on what a training has shown of each example."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adambs
from adambs import pages
from adambs.lab.datasets import Data
from adambs.lab.experiments import reproduce
from adambs.lab.report.figures import thumbnail
from adambs.lab.report.markup import finite_numbers
from adambs.lab.runs import records

# So many dots are drawn on the map, and so many examples can be searched for.
_DOTS, _SEARCHED = 3000, 100_000

# Told apart by people who see few colours: Okabe and Ito's, and paler ones on dark ground.
_COLOURS = [
    {"light": light, "dark": dark}
    for light, dark in (
        ("#0072b2", "#56a8e0"),
        ("#d55e00", "#ff8a3d"),
        ("#009e73", "#3fd0a4"),
        ("#cc79a7", "#e8a5c8"),
        ("#8a6d00", "#e6c229"),
        ("#56b4e9", "#9ad4f7"),
        ("#6a3d9a", "#b692e0"),
        ("#b2182b", "#ff7a88"),
        ("#4d4d4d", "#c4c4c4"),
        ("#1b7837", "#7fcf8f"),
    )
]


def load(path: Path) -> adambs.History:
    """A history from ``torch.save(history.state_dict(), file)``, or from a dict with it as ``"history"``."""
    try:
        state = torch.load(path, weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except Exception:  # torch would advise to load it without care
        raise ValueError(f"{path} is no file of torch.save, or holds more than tensors and numbers") from None
    if isinstance(state, dict) and isinstance(state.get("history"), dict):
        state = state["history"]
    if not isinstance(state, dict) or not {"n", "learned", "with_losses"} <= state.keys():
        raise ValueError(
            f"{path} holds no history: save it with torch.save(history.state_dict(), file), or in a dict as "
            '"history"'
        )
    try:
        history = adambs.History(state["n"], learned=state["learned"], with_losses=state["with_losses"])
        history.load_state_dict(state)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds a damaged history: {error}") from error
    return history


def _lines(path: Path, n: int) -> list[str]:
    """A line for each of n examples."""
    lines = path.read_text("utf-8").splitlines()
    if len(lines) != n:
        raise ValueError(f"{path} has {len(lines)} lines and the history {n} examples: give a line for each")
    return lines


def inspect(
    what: Path,
    out: Path | None = None,
    *,
    experiment: str | None = None,
    labels: Path | None = None,
    texts: Path | None = None,
    k: int = 60,
    folder: Path | None = None,
) -> Path:
    """Write the page of a run's first history, or of a saved one; the path of the page.

    ``labels`` and ``texts`` are files with a line for each example.
    """
    data, notes, tail = None, [], 1.0
    if what.is_dir():
        found = sorted(what.glob("history-*.pt"))
        if not found:
            raise ValueError(f"{what} has no history: run it again with --history, into a new folder")
        config = records.read(what).config
        file, title = found[0], f"{config['title']}, {found[0].stem.removeprefix('history-')}"
        experiment, scale, tail = experiment or config["experiment"], config["scale"], config["long_tail"]
        target = out or what / "inspect.html"
    else:
        file, title, scale = what, what.stem, "quick"
        target = out or what.with_name("inspect.html")
    history = load(file)
    if experiment is not None:
        plan = reproduce.make_plan(experiment, scale, reproduce.Overrides(long_tail=tail))
        data = reproduce.prepare(plan, folder)
        if len(data.train) != history.n:
            raise ValueError(
                f"{file} is a history of {history.n} examples and {experiment} has {len(data.train)}: they "
                "do not belong together"
            )
    elif labels is None:
        notes.append("No labels were given, so all examples are one class here. See --labels and --texts.")
    words = [None if path is None else _lines(path, history.n) for path in (labels, texts)]
    write(history, target, title=title, data=data, labels=words[0], texts=words[1], k=k, notes=notes)
    return target


def write(
    history: adambs.History,
    target: Path,
    *,
    title: str,
    data: Data | None = None,
    labels: Any = None,
    texts: Any = None,
    k: int = 60,
    notes: list[str] | None = None,
) -> None:
    """Write the page. Labels and texts are words for each example, or taken from ``data``."""
    if labels is None and data is not None and not data.labels.is_floating_point():
        labels = np.asarray(data.classes)[data.labels.numpy()]
    values = _values(history, labels, k)
    for each in values["suspects"]:
        shown = {} if data is None else data.example(each["index"])
        each["text"] = shown.get("text") if texts is None else str(texts[each["index"]])
        each["image"] = thumbnail(shown["image"]) if "image" in shown else None
    values["texts"] = any(each["text"] is not None for each in values["suspects"])
    page = pages.render("inspect.html", script="inspect.js", title=title, notes=notes or [], **values)
    partial = target.with_name(target.name + ".partial")
    partial.write_bytes(page.encode("utf-8", "replace"))
    os.replace(partial, target)


def _values(history: adambs.History, labels: Any, k: int) -> dict[str, Any]:
    table = history.table()
    found = history.suspects(labels=labels, k=k)
    given = np.zeros(history.n, np.int64) if labels is None else np.asarray(labels)
    names, classes = np.unique(given, return_inverse=True)
    shown = ["all"] if labels is None else [str(name) for name in names]
    visited = np.flatnonzero(table["visits"] > 0)
    some = visited
    if len(visited) > _DOTS:
        some = np.sort(np.random.default_rng(0).choice(visited, _DOTS, replace=False))
    right = float(np.nanmax(table["mean_score"], initial=1e-9))
    top = float(np.nanmax(table["scatter"], initial=1e-9))

    def dots(indices: Any) -> list[dict[str, Any]]:
        return [
            {
                "index": int(j),
                "label": shown[classes[j]],
                "colour": int(classes[j]) % len(_COLOURS),
                "x": round(50 + 700 * float(table["mean_score"][j]) / right, 1),
                "y": round(380 - 370 * float(table["scatter"][j]) / top, 1),
            }
            for j in indices
        ]

    suspects = [
        {
            "index": s.index,
            "label": shown[classes[s.index]],
            "reason": s.reason,
            "suspicion": s.suspicion,
            "text": None,
            "image": None,
        }
        for s in found
    ]
    per_class = np.bincount(classes[[s.index for s in found]] if found else [], minlength=len(shown))
    return {
        "n": history.n,
        "seen": len(visited),
        "visits": int(table["visits"].sum()),
        "never": int((table["learned_at"][visited] == 0).sum()),
        "right": right,
        "top": top,
        "colours": _COLOURS,
        "dots": dots(some),
        "rings": dots([s.index for s in found]),
        "classes": [_class(table, classes == c, name, c, int(per_class[c])) for c, name in enumerate(shown)],
        "suspects": suspects,
        "data": _searchable(table, classes, shown, suspects, labels is not None),
    }


def _class(table: dict[str, Any], here: Any, name: str, c: int, suspects: int) -> dict[str, Any]:
    visited = here & (table["visits"] > 0)
    any_visit = bool(visited.any())
    return {
        "name": name,
        "colour": c % len(_COLOURS),
        "count": int(here.sum()),
        "visits": float(table["visits"][here].mean()),
        "median": f"{np.median(table['mean_score'][visited]):.3f}" if any_visit else "–",
        "never": float((table["learned_at"][visited] == 0).mean()) if any_visit else 0.0,
        "forgotten": float((table["forgotten"][visited] > 0).mean()) if any_visit else 0.0,
        "suspects": suspects,
    }


def _searchable(
    table: dict[str, Any], classes: Any, names: list[str], suspects: list[dict[str, Any]], labelled: bool
) -> dict[str, Any]:
    """What the page's script searches: everything, or of very many the suspects and the first ones."""
    n = len(classes)
    kept = np.arange(n)
    if n > _SEARCHED:
        kept = np.unique(np.append([s["index"] for s in suspects], np.arange(_SEARCHED)).astype(np.int64))
    columns = {
        name.replace("_", " "): column[kept].tolist()
        if column.dtype.kind == "i"
        else finite_numbers(column[kept].tolist())
        for name, column in table.items()
    }
    return {
        "n": n,
        "indices": None if n <= _SEARCHED else kept.tolist(),
        "columns": columns,
        "names": names,
        "labels": classes[kept].tolist() if labelled else None,
        "suspects": [[s["index"], s["label"], round(s["suspicion"], 5), s["reason"]] for s in suspects],
    }
