"""What p over the sources of a stream has learned, from results/text-sources/: writes the picture of it.

python docs/figures/sources.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parents[2] / "results"
COLOURS = {
    "negative": "#3d444d", "positive": "#0072b2", "short": "#00875f", "shuffled": "#d1480a",
    "repeated": "#aa4499",
}  # fmt: skip
TITLES = {
    "sources": "four sources, one of shuffled words",
    "repeated": "the same, and 20 reviews again and again",
}


def main():
    """A panel for each record: p over the share of each source, all seeds."""
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.2), sharey=True, layout="constrained")
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        text = (RESULTS / "text-sources" / f"{name}.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        shares = next(line["p"] for line in lines if not line["learns"])
        for seed in sorted({line["seed"] for line in lines if line["learns"]}):
            looks = [line for line in lines if line["learns"] and line["seed"] == seed]
            for source, share in shares.items():
                ratios = [1.0, *(look["p"][source] / share for look in looks)]
                label = f"{source} ({share:.0%} of the stream)" if seed == 0 else None
                steps = [0, *(look["step"] for look in looks)]
                axes.plot(steps, ratios, color=COLOURS[source], lw=1.4, alpha=0.8, label=label)
        axes.axhline(1.0, color="#b6bcc6", lw=0.8, zorder=0)
        axes.set(title=title, xlabel="steps")
        axes.title.set_fontsize(10)
        axes.legend(fontsize=7.5, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("p over the share")
    figure.savefig(RESULTS / "figures" / "text-sources.png", dpi=140)


if __name__ == "__main__":
    main()
