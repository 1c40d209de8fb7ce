"""The figures of theory.html: SVG without a background, in colours that read on white and on black."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np

from adambs.lab.theory.errata import online_adam

COLOURS = ["#d1495b", "#2e86ab", "#3fa34d", "#b07aa1", "#e08e2b", "#6c8ebf", "#9c755f", "#8a8a8a"]
GREY = "#8a8a8a"
Result = dict[str, Any]


@contextmanager
def _style() -> Iterator[None]:
    colours = dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), GREY
    )
    settings: dict[Any, Any] = {"svg.hashsalt": "adambs", "axes.grid": True, "grid.alpha": 0.25, **colours}
    with matplotlib.rc_context({**settings, "legend.frameon": False, "font.size": 10, "legend.fontsize": 8}):
        yield


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 if count == 1 else 3.9 * count, 5.0), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots(1, count, squeeze=False)[0].tolist()
    for each in axes:
        each.patch.set_alpha(0)
    return figure, axes


def _uri(figure: Any, legend_of: Any) -> str:
    """The figure as a data URI, with one legend below."""
    handles, labels = legend_of.get_legend_handles_labels()
    columns = min(len(labels), 2 * len(figure.axes))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def lemmas(result: Result) -> str:
    """sum ||g||^2 / p against n, one panel a gamma."""
    gammas = list(dict.fromkeys(row["gamma"] for row in result["rows"]))
    with _style():
        figure, panels = _panels(len(gammas))
        for axes, gamma in zip(panels, gammas, strict=True):
            rows = [row for row in result["rows"] if row["gamma"] == gamma]
            n = [row["n"] for row in rows]
            lines = {
                "uniform p": ("uniform", COLOURS[0], "-"),
                "best p": ("best_p", COLOURS[1], "-"),
                "best p in P": ("best_p_in_P", COLOURS[1], ":"),
                "paper: n log n log d": ("lemma_2_line", COLOURS[0], "--"),
                "paper: log d log² n": ("lemma_3_line", COLOURS[1], "--"),
                "printed data, uniform p": ("network_uniform", COLOURS[4], "-"),
                "printed data, best p": ("network_best_p", COLOURS[2], "-"),
            }
            for label, (key, colour, style) in lines.items():
                axes.plot(n, [row[key] for row in rows], style, color=colour, label=label)
            learnt = [row for row in rows if "learned" in row]
            for k, name in enumerate(learnt[0]["learned"] if learnt else []):
                values = [row["learned"][name] for row in learnt]
                axes.plot(
                    [row["n"] for row in learnt], values, "ox^vs*"[k % 6], color=GREY, label=name, alpha=0.8
                )
            axes.set(xscale="log", yscale="log", xlabel="n", title=f"γ = {gamma:g}")
        panels[0].set_ylabel("sum of ‖g_j‖² / p_j")
        return _uri(figure, panels[0])


def learning(result: Result) -> str:
    """What the rules have learned against steps, n = 1000."""
    curve, at = result["curve"], next(row for row in result["rows"] if row["n"] == 1000)
    with _style():
        figure, panels = _panels(1)
        axes = panels[0]
        T = [row["T"] for row in curve]
        for k, name in enumerate(curve[0]["learned"]):
            axes.plot(T, [row["learned"][name] for row in curve], "o-", color=COLOURS[k % 8], label=name)
        axes.axhline(at["best_p_in_P"], linestyle="--", color=GREY, label="best p in P")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="steps T",
            ylabel="sum of ‖g_j‖² / p_j",
            title="n = 1000, γ = 2",
        )
        return _uri(figure, panels[0])


def bandit(result: Result) -> str:
    """Lemma 1: regret and bound against T."""
    names = list(dict.fromkeys(row["losses"] for row in result["rows"]))
    with _style():
        figure, panels = _panels(len(names))
        for axes, name in zip(panels, names, strict=True):
            rows = [row for row in result["rows"] if row["losses"] == name]
            T = [row["T"] for row in rows]
            regret = np.array([row["regret"] for row in rows])
            sd = np.array([row["regret_sd"] for row in rows])
            axes.errorbar(
                T,
                regret,
                np.minimum(sd, 0.99 * np.abs(regret)),
                fmt="o-",
                color=COLOURS[0],
                label="Algorithm 2",
            )
            axes.plot(T, [row["uniform_regret"] for row in rows], "s:", color=GREY, label="uniform p")
            axes.plot(T, [row["bound"] for row in rows], "--", color=COLOURS[1], label="Lemma 1")
            axes.plot(
                T, [row["bound_with_K"] for row in rows], "-.", color=COLOURS[2], label="Lemma 1, with K"
            )
            axes.set(xscale="log", yscale="log", xlabel="T", title=name)
        panels[0].set_ylabel("regret against the best fixed p in P")
        return _uri(figure, panels[0])


def training(result: Result) -> str:
    """Loss gap against steps, one panel for each n at the middle K."""
    Ks = sorted({row["K"] for row in result["rows"]})
    K = Ks[len(Ks) // 2]
    sizes = sorted({row["n"] for row in result["rows"] if row["K"] == K})
    with _style():
        figure, panels = _panels(len(sizes))
        for axes, n in zip(panels, sizes, strict=True):
            rows = [row for row in result["rows"] if row["n"] == n and row["K"] == K]
            for k, row in enumerate(rows):
                style = "--" if "best" in row["method"] else "-"
                axes.plot(row["t"][1:], row["curve"][1:], style, color=COLOURS[k % 8], label=row["method"])
            axes.axhline(result["target"], color=GREY, linewidth=0.8)
            axes.set(xscale="log", yscale="log", xlabel="steps", title=f"n = {n}, K = {K}")
        panels[0].set_ylabel("(f(θ_t) - f*) / (f(0) - f*)")
        return _uri(figure, panels[0])


def counter_example(result: Result) -> str:
    """Reddi et al.: R(T)/T of Adam and of AMSGrad."""
    T = result["T"]
    g = np.where(np.arange(T) % 3 == 0, 3.0, -1.0)
    t = np.arange(1, T + 1)
    with _style():
        figure, panels = _panels(1)
        axes = panels[0]
        for k, (name, amsgrad) in enumerate({"Adam": False, "AMSGrad": True}.items()):
            run = online_adam(g, alpha=0.5, beta_2=0.1, amsgrad=amsgrad)
            axes.plot(t[9::10], (run.regret / t)[9::10], color=COLOURS[k], label=name)
        axes.set(xscale="log", xlabel="T", ylabel="R(T) / T", title="f_t(x) = 3x, -x, -x, 3x, ... on [-1, 1]")
        return _uri(figure, panels[0])
