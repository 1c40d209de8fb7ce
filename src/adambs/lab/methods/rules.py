"""AdamBS with each rule of the library, without looking, to compare the rules alone; and the oracle."""

import time

import numpy as np
import torch

import adambs
from adambs.lab.methods.bandit import LIU, Bandit
from adambs.lab.methods.base import Floats, Method, Task, Weighted


def with_rule(
    name: str, summary: str, citation: str, rule: type[adambs.Rule], **options: float | str
) -> type[Bandit]:
    """AdamBS with that rule."""
    return type(
        f"AdamBS{name.title()}",
        (Bandit,),
        {
            "name": f"adambs-{name}",
            "title": f"AdamBS ({name})",
            "summary": summary,
            "citation": citation,
            "rule_class": rule,
            "rule_options": options,
            "__doc__": f"AdamBS: {summary}.",
            "__module__": __name__,
        },
    )


class Oracle(Method):
    """Knows the score of every example, anew every 50 steps, and draws by it with 0.1 of uniform mixed in.

    Its knowledge costs nothing: the clock stands still meanwhile. It shows what a rule could win that
    learns p perfectly, at 50 steps' notice.
    """

    name = "oracle"
    title = "Oracle"
    summary = "draws by the true scores of all examples, known for nothing every 50 steps"
    citation = "a bound, not a method"

    every = 50
    uniform = 0.1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.steps = 0
        self.p = np.full(task.n, 1 / task.n)

    def choose(self) -> Weighted:
        start = time.perf_counter()
        if self.steps % self.every == 0:
            scores = self.task.evaluate(torch.arange(self.task.n), "scores", rough=False)
            self.p = (1 - self.uniform) * scores / scores.sum() + self.uniform / self.task.n
            self._sums = self.p.cumsum()
        self.steps += 1
        self.untimed += time.perf_counter() - start
        u = self.rng.random(self.task.batch_size) * self._sums[-1]
        indices = np.searchsorted(self._sums, u, side="right").clip(max=self.task.n - 1)
        return Weighted(torch.from_numpy(indices), torch.from_numpy(1 / (self.task.n * self.p[indices])))

    def probabilities(self) -> Floats:
        return self.p


SCHAUL = "after Schaul et al., ICLR 2016, and Katharopoulos and Fleuret, 2017"
BORSOS = "Borsos, Krause and Levy, COLT 2018"

ALL: list[type[Method]] = [
    with_rule("calibrated", "the library's default rule, without looking", "ours", adambs.Calibrated),
    with_rule("tracking", "last seen scores with 0.3 of uniform", SCHAUL, adambs.Tracking),
    with_rule(
        "forgetting", "the same, stale scores drifting to the mean", SCHAUL, adambs.Tracking, forgetting=0.3
    ),
    with_rule("vrb", "sums of squared norms", BORSOS, adambs.VRB),
    with_rule("vrb-forgetting", "the same, half forgotten in an epoch", BORSOS, adambs.VRB, forgetting=0.5),
    with_rule(
        "avare",
        "the best p above a floor for the last seen scores",
        "El Hanchi and Stephens, NeurIPS 2020",
        adambs.Avare,
    ),
    with_rule(
        "baseline",
        "Algorithm 2 with a running baseline for its offset",
        LIU,
        adambs.Exp3,
        offset="baseline",
        step=1.0,
    ),
    with_rule("no-offset", "Algorithm 2 without its offset", LIU, adambs.Exp3, offset="none", step=1.0),
    with_rule(
        "release-unbiased",
        "the rule of the published code, with unbiased weights",
        f"{LIU}, published code",
        adambs.Release,
    ),
    Oracle,
]
