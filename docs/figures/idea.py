"""The idea in one picture: which examples a batch holds, and with which weights. In two palettes."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch

N = 18
BATCH = (0, 1, 1, 3, 5, 11)


@dataclass(frozen=True)
class Palette:
    ink: str
    drawn: str
    rest: str
    weight: str
    number: str


def light():
    draw(Palette(ink="#30363d", drawn="#1f6feb", rest="#b6bcc6", weight="#b35900", number="white"))


def dark():
    draw(Palette(ink="#d5dae1", drawn="#58a6ff", rest="#4c5561", weight="#f0a35e", number="#0d1117"))


def draw(colors):
    """Four stations of a step, in a circle. Letters are large: on a phone the picture is half as wide."""
    figure, axes = plt.subplots(figsize=(6.6, 4.5), layout="constrained")
    figure.patch.set_alpha(0)
    axes.set(xlim=(0, 10), ylim=(0, 6.6), aspect="equal")
    axes.set_axis_off()
    p = np.sort(np.random.default_rng(3).gamma(0.45, 1.0, N))[::-1] + 0.12
    p /= p.sum()

    def title(x, y, text):
        axes.text(x, y, text, fontsize=11, color=colors.ink, weight="bold")

    def words(x, y, text, color=colors.ink):
        axes.text(x, y, text, fontsize=10, color=color, va="top", linespacing=1.35)

    def arrow(start, stop, text, at, side="center"):
        axes.add_patch(
            FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=15, color=colors.ink, lw=1.3)
        )
        axes.text(*at, text, ha=side, va="center", fontsize=10, color=colors.ink)

    title(0.1, 6.2, "p over all n examples")
    for j, height in enumerate(p / p.max()):
        color = colors.drawn if j in BATCH else colors.rest
        axes.bar(0.1 + 0.19 * j, 1.8 * height, 0.15, 4.1, color=color, align="edge")
    axes.plot([0.1, 0.1 + 0.19 * N], [4.1, 4.1], color=colors.ink, lw=1)

    title(5.4, 6.2, "a batch, drawn from p")
    for k, j in enumerate(BATCH):
        x = 5.7 + 0.78 * k
        axes.scatter(x, 5.5, s=260, color=colors.drawn, zorder=3)
        axes.text(x, 5.5, f"{j + 1}", ha="center", va="center", fontsize=9.5, color=colors.number, zorder=4)
        axes.text(x, 4.72, f"×{1 / (N * p[j]):.1f}", ha="center", fontsize=9.5, color=colors.weight)
    words(
        5.4,
        4.5,
        "weights 1/(n p): what is drawn\noften counts less, so the mean\nis that of all examples",
        colors.weight,
    )

    title(5.4, 1.3, "Adam's step")
    words(5.4, 1.1, "on the weighted mean\nof the gradients")
    title(0.1, 1.3, "the bandit learns")
    words(0.1, 1.1, "large gradient: larger p;\nlearned: smaller p")

    arrow((3.7, 5.5), (5.2, 5.5), "draw", (4.4, 5.75))
    arrow((7.3, 2.85), (7.3, 1.75), "gradients", (7.5, 2.3), "left")
    arrow((5.2, 0.8), (3.8, 0.8), "how large?", (4.5, 1.05))
    arrow((1.8, 1.75), (1.8, 3.85), "new p", (2.0, 2.8), "left")
