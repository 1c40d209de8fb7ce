"""The idea in one picture: which examples a batch holds, and with which weights."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch

BLUE, ORANGE, GREY, INK = "#1f6feb", "#d9730d", "#b6bcc6", "#30363d"


def arrow(axes, start, stop, text, *, bend=0.0, offset=(0.0, 0.0)):
    axes.add_patch(
        FancyArrowPatch(
            start,
            stop,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=14,
            color=INK,
            lw=1.2,
        )
    )
    x, y = (start[0] + stop[0]) / 2 + offset[0], (start[1] + stop[1]) / 2 + offset[1]
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)


def main():
    """Five stations of a step, in a circle."""
    _, axes = plt.subplots(figsize=(8.6, 4.3), layout="constrained", facecolor="white")
    axes.set(xlim=(0, 10), ylim=(0, 5), aspect="equal")
    axes.set_axis_off()
    random = np.random.default_rng(3)
    p = np.sort(random.gamma(0.45, 1.0, 18))[::-1] + 0.12
    p /= p.sum()
    batch = np.array([0, 1, 1, 3, 5, 11])

    # p over all examples
    left, width = 0.4, 0.17
    for j, height in enumerate(p / p.max()):
        axes.bar(left + width * j, 1.5 * height, 0.13, 3.1, color=BLUE if j in batch else GREY, align="edge")
    axes.plot([left, left + width * 18], [3.1, 3.1], color=INK, lw=1)
    axes.text(left, 4.75, "p over all n examples", fontsize=10, color=INK, weight="bold")

    # the batch
    axes.text(6.1, 4.75, "a batch of K, drawn from p", fontsize=10, color=INK, weight="bold")
    for k, j in enumerate(batch):
        weight = 1 / (18 * p[j])
        axes.scatter(6.4 + 0.6 * k, 3.75, s=230, color=BLUE, zorder=3)
        axes.text(
            6.4 + 0.6 * k, 3.75, f"{j + 1}", ha="center", va="center", fontsize=8, color="white", zorder=4
        )
        axes.text(6.4 + 0.6 * k, 3.2, f"×{weight:.1f}", ha="center", fontsize=8, color=ORANGE)
    axes.text(6.1, 2.85, "weights 1/(n p): often drawn counts less,", fontsize=8.5, color=ORANGE)
    axes.text(6.1, 2.6, "so the mean stays that of all examples", fontsize=8.5, color=ORANGE)

    # the step and the feedback
    axes.text(6.1, 1.05, "Adam's step", fontsize=10, color=INK, weight="bold")
    axes.text(6.1, 0.75, "on the weighted mean gradient", fontsize=8.5, color=INK)
    axes.text(0.4, 1.05, "the bandit learns", fontsize=10, color=INK, weight="bold")
    axes.text(0.4, 0.75, "examples of large gradient get a larger p,", fontsize=8.5, color=INK)
    axes.text(0.4, 0.5, "those that are learned a smaller one", fontsize=8.5, color=INK)

    arrow(axes, (3.7, 3.8), (5.8, 3.8), "draw", offset=(0, 0.22))
    arrow(axes, (7.8, 2.4), (7.8, 1.5), "gradients", offset=(0.75, 0))
    arrow(axes, (5.9, 0.9), (3.7, 0.9), "gradient norms", offset=(0, 0.22))
    arrow(axes, (1.9, 1.5), (1.9, 2.8), "p", offset=(0.25, 0))


main()
