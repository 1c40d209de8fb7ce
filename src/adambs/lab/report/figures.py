"""Figures fit for a paper, as PNG and SVG, and the colours that a method has everywhere.

Only matplotlib's object interface: no pyplot, no current figure, no settings changed for good.
"""

import base64
import colorsys
import struct
import textwrap
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from adambs.lab.report.analysis import Analysis
from adambs.lab.report.phrases import run_title, scale_note, times
from adambs.lab.report.series import AXES
from adambs.lab.report.speedups import Speedup

INK, MUTED, RULE = "#1f2328", "#656d76", "#d0d7de"
X_LABELS = {"seconds": "training time (s)", "step": "steps", "epoch": "epochs"}
SPEEDUP_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50, 100)
WIDTH = 125  # characters of a note before it is wrapped


# ---------------------------------------------------------------------------------------------- colours


@dataclass(frozen=True)
class Style:
    """How a method is drawn. Colour is never the only difference between two methods of one family."""

    light: str
    dash: str = "solid"

    @property
    def dark(self) -> str:
        """The same hue, light enough for a dark page."""
        r, g, b = (int(self.light[i : i + 2], 16) / 255 for i in (1, 3, 5))
        hue, lightness, saturation = colorsys.rgb_to_hls(r, g, b)
        rgb = colorsys.hls_to_rgb(hue, max(lightness, 0.66), saturation)
        return "#" + "".join(f"{round(255 * value):02x}" for value in rgb)


# Okabe and Ito's and Tol's colours, which stay apart for colour-blind readers, a little darker on white.
STYLES = {
    "adam": Style("#3d444d"),
    "adambs": Style("#d1480a"),
    "adambs-loop": Style("#d1480a", "dot"),
    "adambs-fast": Style("#d1480a", "dashdot"),
    "oracle": Style("#888888", "dot"),
    "adambs-exp3": Style("#a97800", "dash"),
    "adambs-release": Style("#aa4499", "dashdot"),
    "adam-impt": Style("#0072b2"),
    "adam-apt": Style("#00875f"),
    "adam-uni": Style("#3a93c8", "dot"),
    "amsgrad": Style("#3d444d", "dash"),
    "amsgrad-bs": Style("#d1480a", "dash"),
    "infobatch": Style("#332288", "dash"),
    "selective-backprop": Style("#882255", "dash"),
    "online-batch-selection": Style("#117733", "dash"),
    "loss-proportional": Style("#7a7a20", "dash"),
    "sgd": Style("#117733", "dot"),
    "momentum": Style("#882255", "dot"),
    "adagrad": Style("#7a7a20", "dot"),
    "rmsprop": Style("#332288", "dot"),
    "adamw": Style("#6699cc", "dash"),
    "nadam": Style("#0072b2", "dot"),
    "adadelta": Style("#cc6677", "dot"),
}
_SPARE = ("#44aa99", "#cc6677", "#6699cc", "#661100", "#888888")
_DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": (0, (5, 2, 1, 2)),
}


def style(method: str) -> Style:
    """Always the same for the same name; ``sgd-bs`` is ``sgd`` with a solid line."""
    if method in STYLES:
        return STYLES[method]
    base = method.removesuffix("-bs")
    if base in STYLES:
        return Style(STYLES[base].light)
    return Style(_SPARE[zlib.crc32(method.encode()) % len(_SPARE)], "dashdot")


# -------------------------------------------------------------------------------------------- thumbnails


def thumbnail(image: list[Any]) -> str:
    """Rows of grey levels or of (r, g, b), 0..255, as the address of an inline PNG."""
    pixels = np.clip(np.asarray(image, dtype=float), 0, 255).astype(np.uint8)
    if pixels.ndim not in (2, 3) or not pixels.size or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"image must be rows of grey levels or of (r, g, b), not of shape {pixels.shape}")
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">2I5B", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    png = (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


# ------------------------------------------------------------------------------------------------ words


def plain(text: object, width: int = 30, lines: int = 1) -> str:
    """At most so many lines that matplotlib draws as they are: no mathematics, no missing glyphs."""
    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    drawn = "".join(char if ord(char) in known or char.isspace() else "□" for char in str(text))
    wrapped = textwrap.wrap(drawn, width) or [""]
    if len(wrapped) > lines:
        wrapped = [*wrapped[: lines - 1], wrapped[lines - 1][: width - 1] + "…"]
    return "\n".join(wrapped).replace("$", r"\$")


# ---------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Saved:
    """A figure on the disk: ``name.png`` and ``name.svg``."""

    name: str
    caption: str


def save_figures(analysis: Analysis, folder: Path, prefix: str) -> list[Saved]:
    """All figures of a run that it has the numbers for."""
    makers: list[tuple[str, str, Callable[[Analysis], Figure | None]]] = [
        ("loss", "Training loss against wall clock", loss_figure),
        ("curves", "Loss and errors against wall clock, steps and epochs", curves_figure),
        ("speedup", "Speedup over the baseline", speedup_figure),
        ("distribution", "The sampling distribution, sorted, as it evolves", distribution_figure),
        ("sampling", "Effective sample size and variance reduction", sampling_figure),
    ]
    saved = []
    for name, caption, make in makers:
        figure = make(analysis)
        if figure is None:
            continue
        stem = f"{prefix}-{name}"
        save(figure, folder, stem)
        saved.append(Saved(stem, caption))
    return saved


def save(figure: Figure, folder: Path, stem: str) -> None:
    """As PNG and as SVG; the same figure is the same file."""
    save_png(figure, folder, stem)
    with matplotlib.rc_context({"svg.hashsalt": stem}):
        figure.savefig(folder / f"{stem}.svg", metadata={"Date": None})


def save_png(figure: Figure, folder: Path, stem: str) -> None:
    """As PNG alone; the same figure is the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{stem}.png", dpi=150)


def loss_figure(analysis: Analysis) -> Figure:
    """The paper's figure: training loss against wall clock, as in figures 2 to 4."""
    figure = _figure(analysis, 6.4, 4.0)
    axes = figure.add_subplot()
    draw_curves(axes, analysis, "train_loss", "seconds")
    axes.set_ylabel("training loss", color=INK)
    axes.set_xlabel(X_LABELS["seconds"], color=INK)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure


def curves_figure(analysis: Analysis) -> Figure:
    """Small multiples: a row for each metric, a column for each axis."""
    metrics = analysis.metrics
    figure = _figure(analysis, 10, 8 * len(metrics) / 3)
    grid = figure.subplots(len(metrics), len(AXES), sharey="row", sharex="col", squeeze=False)
    for row, (metric, label) in enumerate(metrics.items()):
        for column, axis in enumerate(AXES):
            draw_curves(grid[row, column], analysis, metric, axis)
            if row == len(metrics) - 1:
                grid[row, column].set_xlabel(X_LABELS[axis], color=INK)
        grid[row, 0].set_ylabel(label, color=INK)
    _legend(figure, grid[0, 0])
    return figure


def speedup_figure(analysis: Analysis) -> Figure | None:
    """A forest plot: the geometric mean with its interval, and the four it is made of, faint."""
    methods = [name for name in analysis.speedups if name != analysis.baseline]
    if not methods:
        return None
    figure = _figure(analysis, 8, 1.7 + 0.42 * len(methods))
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, axis in zip(panels, ("seconds", "step"), strict=True):
        tidy(axes)
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=0.8, zorder=0)
        for row, method in enumerate(methods):
            _draw_speedup(axes, len(methods) - 1 - row, analysis.speedups[method][axis])
        axes.set_title(AXES[axis], fontsize=9, color=INK, loc="left")
        axes.set_xlabel(f"times as fast as {plain(analysis.title(analysis.baseline))}", fontsize=8, color=INK)
        axes.grid(False, axis="y")
    low, high = speedup_range(analysis)
    ticks = [tick for tick in SPEEDUP_TICKS if low < tick < high]
    panels[0].set_xlim(low, high)
    panels[0].set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    panels[0].set_xticks([], minor=True)
    names = [plain(analysis.title(method)) for method in reversed(methods)]
    panels[0].set_yticks(range(len(methods)), names)
    panels[0].set_ylim(-0.6, len(methods) - 0.4)
    return figure


def speedup_range(analysis: Analysis) -> tuple[float, float]:
    """A range of the logarithmic axis that holds every speedup, and 1 well inside.

    It holds their intervals too, unless these are wider than three times the speedups on either side, as
    Student's t makes them of two seeds that disagree: those are cut off at the edge.
    """
    found = [each for by_axis in analysis.speedups.values() for speedup in by_axis.values()
             for each in (*speedup.at, speedup.overall) if each.value > 0]  # fmt: skip
    values = [each.value for each in found]
    low, high = min([0.8, *values]), max([1.25, *values])
    lows, highs = (
        [end for end in ends if end is not None]
        for ends in ((each.low for each in found), (each.high for each in found))
    )
    return max(min([low, *lows]), low / 3) / 1.4, min(max([high, *highs]), 3 * high) * 1.4


def distribution_figure(analysis: Analysis) -> Figure | None:
    """n p of the examples from the least to the most likely, darker as training goes on."""
    found = analysis.last_distributions()
    if not found:
        return None
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = _figure(analysis, max(4.2, 3.1 * columns), 0.9 + 2.5 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    for axes, (method, lines) in zip(grid.flat, found.items(), strict=False):
        tidy(axes)
        _log_ticks(axes)
        axes.axhline(1, color=MUTED, linewidth=0.8, zorder=0)
        for k, line in enumerate(lines):
            ratios = np.array(line["quantiles"], dtype=float)
            ratios[ratios <= 0] = np.nan
            part = (k + 1) / len(lines)
            axes.plot(
                np.linspace(0, 1, len(ratios)), ratios, color=style(method).light, alpha=0.2 + 0.8 * part,
                linewidth=0.8 + 0.8 * part,
            )  # fmt: skip
        steps = (
            f"step {lines[0]['step']:,} to {lines[-1]['step']:,}"
            if len(lines) > 1
            else f"step {lines[0]['step']:,}"
        )
        axes.set_title(f"{plain(analysis.title(method))}\n{steps}", fontsize=8, loc="left", color=INK)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.supylabel("n p (1 is uniform); examples from the least to the most likely", fontsize=7, color=INK)
    return figure


def sampling_figure(analysis: Analysis) -> Figure | None:
    """Effective sample size and variance reduction against steps."""
    if not analysis.curves("ess", "step"):
        return None
    figure = _figure(analysis, 9, 3.6)
    left, right = figure.subplots(1, 2)
    for axes, metric, label in (
        (left, "ess", "effective sample size / n"),
        (right, "variance_reduction", "variance reduction (×)"),
    ):
        draw_curves(axes, analysis, metric, "step")
        axes.set_ylabel(label, color=INK)
        axes.set_xlabel(X_LABELS["step"], color=INK)
        axes.axhline(1, color=MUTED, linewidth=0.8, zorder=0)
    left.set_ylim(0, 1.05)
    _legend(figure, left)
    return figure


# ------------------------------------------------------------------------------------------------- parts


def _figure(analysis: Analysis, width: float, height: float) -> Figure:
    note = plain(scale_note(analysis), int(WIDTH * width / 6.4), lines=4)
    figure = Figure(
        figsize=(width, height + 0.16 * (note.count("\n") + 1 if note else 0)), layout="constrained"
    )
    title = plain(run_title(analysis), int(10 * width), lines=2)
    figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left", weight="bold")
    if note:
        figure.supxlabel(note, fontsize=6.5, color=MUTED, x=0.01, ha="left")
    return figure


def tidy(axes: Axes) -> None:
    """The look of all axes: a light grid, no frame."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.tick_params(colors=MUTED, labelsize=8, length=3, which="both")
    axes.grid(True, color=RULE, linewidth=0.5, alpha=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.label.set_fontsize(8)


def draw_curves(
    axes: Axes, analysis: Analysis, metric: str, axis: str, methods: Collection[str] | None = None
) -> None:
    """The mean over seeds of all methods, or of some, with a band from the lowest seed to the highest."""
    tidy(axes)
    curves = [each for each in analysis.curves(metric, axis) if methods is None or each.method in methods]
    for each in curves:
        look = style(each.method)
        line = {"color": look.light, "linestyle": _DASHES[look.dash], "linewidth": 1.5}
        axes.plot(each.x, each.mean, label=plain(analysis.title(each.method)), **line)
        if each.seeds > 1:
            axes.fill_between(each.x, each.low, each.high, color=look.light, alpha=0.14, linewidth=0)
    # An untrained model's numbers would flatten all the rest: show what comes after the first twentieth.
    tops = [np.nanmax(each.high[each.x >= each.x[-1] / 20], initial=0) for each in curves]
    top = max(tops, default=0) or 1.0
    if metric == "train_loss" and any((each.low > 0).any() for each in curves):
        _log_ticks(axes)
        axes.set_ylim(top=1.3 * top)
    if metric.endswith("_error"):
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set_ylim(0, 1.05 * top)


def _log_ticks(axes: Axes) -> None:
    """A logarithmic axis with plain numbers: 0.1, 0.2, 0.5, 1, ..."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_speedup(axes: Axes, y: float, speedup: Speedup) -> None:
    color, overall = style(speedup.method).light, speedup.overall
    if not np.isfinite(overall.value):
        axes.text(1, y, " cannot be told", va="center", fontsize=7, color=MUTED)
        return
    values = [each.value for each in speedup.at if np.isfinite(each.value)]
    axes.plot(values, [y] * len(values), "|", color=color, alpha=0.5, markersize=6)
    if overall.low is not None and overall.high is not None:
        axes.plot([overall.low, overall.high], [y, y], color=color, linewidth=1.8, solid_capstyle="butt")
    face = "white" if speedup.bounded() else color
    axes.plot([overall.value], [y], "o", color=color, markerfacecolor=face, markersize=6)
    label = f"{times(speedup)}  {speedup.verdict}"
    axes.annotate(
        label, (overall.value, y), (0, 8), textcoords="offset points", ha="center", fontsize=6.5, color=MUTED
    )


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8, labelcolor=INK)
