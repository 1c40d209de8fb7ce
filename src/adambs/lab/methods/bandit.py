"""The paper's own: a bandit over examples, over prefixed batches, and the rule of the published code."""

import inspect
import math
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

import adambs
from adambs.candidates import NOISE
from adambs.lab.methods.base import Floats, Method, Plain, Task, Weighted, on_host

LIU = "Liu, Wu and Mozafari, NeurIPS 2020"


class Bandit(Method):
    """Draws from p, weights by 1/(n p), and teaches p the scores. Subclasses name rule and optimizer."""

    looks: ClassVar[bool] = False
    """Whether the sampler may score candidates before it draws, when that pays."""
    correction: ClassVar[float] = 1.0
    """Exponent of the weights."""
    drift: ClassVar[float] = 0.0
    """How much the exponent changes over the budget, evenly."""
    gate: ClassVar[float] = 0.0
    """From what variance reduction on p is drawn from; before that, reshuffled passes."""
    candidates: ClassVar[int] = 3
    """How many times K are scored when it looks."""
    ahead: ClassVar[int] = 4
    """For how many batches candidates are scored at once."""
    look_cost: ClassVar[float] = 0.0
    """What a look takes, :class:`adambs.Candidates`; 0: it is measured."""
    noise: ClassVar[float] = NOISE
    """How many examples are taken to have as much noise as signal, where a look is decided on."""
    cap: ClassVar[float] = math.inf
    """Weight x score is limited to so many times its running mean."""
    context: ClassVar[int] = 0
    """Whether unseen examples are grouped by the task's context."""
    rule_class: ClassVar[type[adambs.Rule]] = adambs.Calibrated
    """The library's default, unless a subclass has another."""
    rule_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, task: Task) -> None:
        self.sampler = adambs.BanditSampler(
            task.n,
            task.batch_size,
            rule=self.rule(task),
            seed=task.seed,
            correction=self.correction,
            gate=self.gate,
            cap=self.cap,
            context=task.context if self.context else None,
            candidates=adambs.Candidates(self.candidates, self.look_cost or None, self.ahead, self.noise),
        )
        self._scores: Tensor
        super().__init__(task)

    def rule(self, task: Task) -> adambs.Rule:
        """The rule, for a task whose loss bounds the scores."""
        bound = {"L": task.loss.L} if issubclass(self.rule_class, adambs.Exp3 | adambs.Exp3M) else {}
        return self.rule_class(**bound, **self.rule_options)

    @classmethod
    def rehearsals(cls) -> list[type[Self]]:
        """Also one that draws from p, and looks if it may, at once."""
        return [cls, cls.variant({"gate": 0.0, "look_cost": 1e-9})]

    @classmethod
    def with_setting(cls, name: str, value: float) -> type[Self]:
        """Also the arguments of the rule."""
        if name not in inspect.signature(cls.rule_class).parameters:
            return super().with_setting(name, value)
        options = {**cls.rule_options, name: value}
        cls.rule_class(**options)  # complains about a bad value now
        return cls.variant({"rule_options": options})

    @classmethod
    def setting_names(cls) -> list[str]:
        """Also the arguments of the rule."""
        return [*super().setting_names(), *inspect.signature(cls.rule_class).parameters]

    def make_optimizer(self) -> torch.optim.Optimizer:
        make = adambs.with_bandit(self.optimizer_class)
        options = {**self.optimizer_options(), "clip": self.clip or math.inf}
        return make(self.task.model.parameters(), self.sampler, **options)

    def clip_gradients(self) -> None:
        """It does, :meth:`make_optimizer`."""

    def choose(self) -> adambs.Draw:
        if self.drift:
            self.sampler.correction = min(max(self.correction + self.drift * self.share, 0.0), 1.0)
        return self.sampler.draw(self.look if self.looks else None)

    def look(self, indices: Tensor) -> Floats:
        """The present scores of some examples."""
        return self.task.evaluate(indices, "scores")

    def objective(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
        self._scores = self.task.loss.scores(outputs, targets)
        return batch.mean(losses, self._scores)  # type: ignore[no-any-return]

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step(batch, self._scores)

    def probabilities(self) -> Floats:
        return self.sampler.probabilities().numpy()

    def variance_reduction(self) -> float | None:
        estimate = self.sampler.diagnostics().variance_reduction
        return None if math.isnan(estimate) else estimate


class AdamBS(Bandit):
    name = "adambs"
    title = "AdamBS"
    summary = (
        "Algorithm 1 with the library's defaults: a gate, a cap and a clip against surprises, and a look "
        "before it draws when that pays"
    )
    citation = LIU
    looks = True
    gate = 1.1
    cap = 10.0
    clip = 1.5


class AdamBSLoop(AdamBS):
    name = "adambs-loop"
    title = "AdamBS"
    summary = "the README's loop: the library's defaults without looking before it draws"
    looks = False


class AdamBSFast(AdamBS):
    name = "adambs-fast"
    title = "AdamBS (fast)"
    summary = "the same with weights to the power 0.5: faster where a net can fit its data; biased"
    biased = True
    correction = 0.5


class AdamBSExp3(Bandit):
    name = "adambs-exp3"
    title = "AdamBS (Algorithm 2)"
    summary = "Algorithms 1 and 2 of the paper, whatever the library's default is"
    citation = LIU
    rule_class = adambs.Exp3


class AMSGradBS(Bandit):
    name = "amsgrad-bs"
    title = "AMSGrad-BS"
    summary = "AMSGrad with bandit sampling (the paper's appendix)"
    citation = LIU
    options = {"amsgrad": True}


def with_bandit(method: type[Method]) -> type[Bandit]:
    """Any of the plain optimizers with bandit sampling: ``sgd`` becomes ``sgd-bs``."""

    return type(
        f"{method.__name__}BS",
        (Bandit,),
        {
            "name": f"{method.name}-bs",
            "title": f"{method.title}-BS",
            "summary": f"{method.title} with bandit sampling",
            "citation": f"{method.citation}; {LIU}",
            "optimizer_class": method.optimizer_class,
            "options": method.options,
            "__doc__": f"{method.title} with bandit sampling.",
            "__module__": __name__,
        },
    )


class AdamApt(Method):
    """A distribution over batches that were fixed beforehand, one of them drawn at each step.

    With m batches the batch b is drawn with probability p_b and its mean gradient weighted by
    (m |b| / n) / (m p_b): unbiased, also when the last batch is smaller. The score of a batch is the mean
    of its examples' bounds, which bounds the norm of its mean gradient.
    """

    name = "adam-apt"
    title = "Adam-apt"
    summary = "a learned distribution over prefixed batches"
    citation = "Namkoong, Sinha, Yadlowsky and Duchi, ICML 2017"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        order = torch.from_numpy(self.rng.permutation(task.n))
        self.batches = torch.split(order, task.batch_size)
        self.sampler = adambs.BanditSampler(len(self.batches), 1, rule=self.rule(task), seed=task.seed)
        self._draw: adambs.Draw

    def rule(self, task: Task) -> adambs.Rule:
        """Algorithm 2 with K = 1, over batches."""
        return adambs.Exp3(L=task.loss.L)

    def choose(self) -> Weighted:
        self._draw = self.sampler.draw()
        indices = self.batches[int(self._draw.indices)]
        share = len(indices) * len(self.batches) / self.task.n  # one, except for a smaller last batch
        return Weighted(indices, self._draw.weights.expand(len(indices)) * share)

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step()
        self.sampler.update(self._draw, self.task.loss.scores(outputs, targets).mean(0, keepdim=True))


class AdamUni(AdamApt):
    name = "adam-uni"
    title = "Adam-uni"
    summary = "a uniform distribution over prefixed batches"

    def rule(self, task: Task) -> adambs.Rule:
        return adambs.Uniform()


class Release(Method):
    """The rule of the authors' published code, which is not Algorithm 2: described, not copied.

    Norms are rescaled to [0, 1] by their running range; the offset is left out; the weight of a drawn
    example is multiplied by exp(g^2 / (n p)^3), clipped to [1e-5/n, 1000/n] and all are divided by their
    sum, O(n) a step. Gradients are not weighted by 1/(n p), so the estimate is biased. Ours: an example
    drawn twice is updated once.
    """

    name = "adambs-release"
    title = "AdamBS (published code)"
    summary = "the rule of the authors' published code: weights of one, so biased"
    citation = f"{LIU}, published code"
    biased = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.p = np.full(task.n, 1 / task.n)
        self.low, self.high = math.inf, -math.inf

    def choose(self) -> Plain:
        sums = self.p.cumsum()
        u = self.rng.random(self.task.batch_size) * sums[-1]
        indices = np.searchsorted(sums, u, side="right").clip(max=self.task.n - 1)
        return Plain(torch.from_numpy(indices))

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step()
        self.learn(batch.indices.numpy(), on_host(self.task.loss.scores(outputs, targets)))

    def learn(self, indices: np.ndarray[Any, Any], norms: Floats) -> None:
        """One update of p."""
        n = self.task.n
        self.low, self.high = min(self.low, norms.min()), max(self.high, norms.max())
        g = (norms - self.low) / max(self.high - self.low, 1e-12)
        ratio = n * self.p[indices]
        with np.errstate(over="ignore"):
            self.p[indices] *= np.exp(g**2 / ratio**3)
        self.p.clip(1e-5 / n, 1000 / n, out=self.p)
        self.p /= self.p.sum()

    def probabilities(self) -> Floats:
        return self.p


class AdamImpt(Method):
    """Presample B = 3K examples, score them by a forward pass, draw K of them by their scores.

    A drawn example i has the weight 1/(B g_i), g being the scores divided by their sum: unbiased. The gate
    tau = sqrt(B sum g^2), smoothed with 0.9, estimates how many times larger a uniform batch would have to
    be for the same variance; as long as it is below (B + 3K)/(3K), presampling does not pay and the batch
    is an ordinary one, whose own scores keep the estimate up to date.
    """

    name = "adam-impt"
    title = "Adam-impt"
    summary = "presample 3K, score, choose K by score; uniform until that pays"
    citation = "Katharopoulos and Fleuret, ICML 2018"

    presample = 3
    smoothing = 0.9

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.tau = 0.0

    @property
    def threshold(self) -> float:
        """(B + 3K) / (3K): a backward pass costs about two forward passes."""
        return (self.presample + 3) / 3

    def choose(self) -> Plain | Weighted:
        if self.tau <= self.threshold:
            return Plain(torch.from_numpy(self.passes.take(self.task.batch_size)))
        size = min(self.presample * self.task.batch_size, self.task.n)
        candidates = self.passes.take(size)
        scores = self.task.evaluate(candidates, "scores")
        self._observe(scores)
        return self.draw(candidates, scores)

    def draw(self, candidates: np.ndarray[Any, Any], scores: Floats) -> Weighted:
        """K of the candidates, with replacement, in proportion to their scores."""
        total = scores.sum()
        g = scores / total if total > 0 else np.full(len(scores), 1 / len(scores))
        chosen = self.rng.choice(len(candidates), self.task.batch_size, p=g)
        weights = 1 / (len(candidates) * g[chosen])
        return Weighted(torch.from_numpy(candidates[chosen]), torch.from_numpy(weights))

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        self.optimizer.step()
        if isinstance(batch, Plain):
            self._observe(on_host(self.task.loss.scores(outputs, targets)))

    def _observe(self, scores: Floats) -> None:
        total = scores.sum()
        now = math.sqrt(len(scores) * float((scores**2).sum())) / total if total > 0 else 1.0
        self.tau = self.smoothing * self.tau + (1 - self.smoothing) * now
