"""A stream on real text: IMDB's reviews as four sources of different worth, one of them shuffled words.

    python -m adambs.lab.experiments.text_sources --steps 1000 --seeds 3 > sources.jsonl

The language model of the lab is trained on the mixture of the sources, drawn by their shares and drawn by
what the bandit learns. Each line tells the loss on the same mixture of other reviews, source by source.
"""

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import adambs
from adambs.lab import datasets, models
from adambs.lab.models.transformers import WORDS
from adambs.lab.runs import training

NAMES = ("negative", "positive", "short", "shuffled")


class Rows(IterableDataset[Tensor]):
    """The rows of a tensor, one after the other."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


def split(tokens: Tensor, labels: Tensor, seed: int) -> dict[str, Tensor]:
    """Reviews by source, in random order: a quarter have their words shuffled, and of the others those of few
    words are a source of their own."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for k in rng.permutation(len(tokens)).tolist():
        row, length = tokens[k], int((tokens[k] != 0).sum())
        if rng.random() < 0.25:
            row = row.clone()
            row[-length:] = row[-length:][torch.from_numpy(rng.permutation(length))]
            found["shuffled"].append(row)
        elif length <= WORDS:
            found["short"].append(row)
        else:
            found[NAMES[int(labels[k])]].append(row)
    return {name: torch.stack(rows) for name, rows in found.items() if rows}


def with_repeated(train: dict[str, Tensor], test: dict[str, Tensor], count: int) -> None:
    """Add a source, as large as the largest, of ``count`` reviews again and again: what a crawl has most of.

    It is the same in training and test, as boilerplate is.
    """
    size = max(map(len, train.values()))
    few = train["negative"][:count]
    train["negative"] = train["negative"][count:]
    train["repeated"] = few.repeat(-(-size // count), 1)[:size]
    test["repeated"] = few.repeat(-(-max(map(len, test.values())) // count), 1)[: len(test["negative"])]


def compare(
    train: dict[str, Tensor],
    test: dict[str, Tensor],
    *,
    steps: int,
    seed: int,
    looks: int = 5,
    lr: float = 1e-3,
) -> Iterator[dict[str, Any]]:
    """Train twice from the same parameters, with p as the shares and with p learned; some looks at each."""
    loss = training.LOSSES["next-word"]
    shares = np.array([len(rows) for rows in train.values()], np.float64)
    for learns in (False, True):
        model = models.build("language-model", classes=2, seed=seed, width=32, vocabulary=500)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        sources = {name: Rows(rows) for name, rows in train.items()}
        stream = adambs.BanditStream(sources, 32, shares=shares, seed=seed, steps=steps)
        seconds = 0.0
        start = time.perf_counter()
        torch.manual_seed(seed)
        for step, (tokens, draw) in enumerate(stream, 1):
            model.train()
            outputs = model(tokens)
            optimizer.zero_grad()
            draw.mean(loss.losses(outputs, tokens)).backward()
            optimizer.step()
            if learns:
                stream.update(draw, loss.scores(outputs, tokens))
            if step % max(1, steps // looks) == 0:
                seconds += time.perf_counter() - start
                losses = {
                    name: training.evaluate(model, rows, torch.zeros(len(rows), dtype=torch.long), loss).loss
                    for name, rows in test.items()
                }
                mixture = float(np.average(list(losses.values()), weights=[len(r) for r in test.values()]))
                yield {
                    "seed": seed, "learns": learns, "step": step, "seconds": seconds, "test_loss": mixture,
                    "by_source": losses, "p": stream.probabilities(),
                    "variance_reduction": stream.worth.variance_reduction(),
                }  # fmt: skip
                start = time.perf_counter()


def main() -> None:
    """Print a line of JSON for each look."""
    parser = argparse.ArgumentParser(description="A bandit that chooses among sources of IMDB's reviews.")
    parser.add_argument("--data", default=None, help="data folder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--repeated", type=int, default=0, help="so many reviews again and again, as a source of their own"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = datasets.subset(datasets.load("imdb", options.data), 20_000, 2_000)
    train, test = (split(part.tensors[0], part.tensors[1], 0) for part in (data.train, data.test))
    if options.repeated:
        with_repeated(train, test, options.repeated)
    for seed in range(options.seeds):
        for line in compare(train, test, steps=options.steps, seed=seed):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
