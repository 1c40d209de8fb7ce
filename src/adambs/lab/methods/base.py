"""What a method is: which examples enter a step, with what weights, and which optimizer takes it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

import adambs
from adambs._types import Floats as Floats
from adambs._types import Indices as Indices
from adambs.clipping import GradientClip
from adambs.proposals import Passes
from adambs.shares import plain_mean

# Examples in a forward pass without gradients: as many as fit a processor's cache.
FORWARD_BATCH = 100


def on_host(values: Tensor) -> Floats:
    """Values of whatever device and precision as float64 in NumPy."""
    host: Floats = values.detach().cpu().double().numpy()
    return host


@dataclass(frozen=True)
class Loss:
    """A loss for single examples, with what else the lab wants to know of it."""

    losses: Callable[[Any, Tensor], Tensor]
    """(outputs, targets) -> (K,) losses."""
    scores: Callable[[Any, Tensor], Tensor]
    """(outputs, targets) -> (K,) bounds on the gradient norms."""
    guesses: Callable[[Any], Tensor]
    """outputs -> (K,) classes."""
    L: float
    """A bound on the scores."""
    wrong: Callable[[Any, Tensor], Tensor] | None = None
    """(outputs, targets) -> (K,) shares of wrong guesses, where an example has many; None if it has one."""


@dataclass(frozen=True)
class Task:
    """What a method trains, and with what."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Loss
    batch_size: int
    lr: float
    steps: int
    """The budget: how many steps this run will take; 0 if it is a time."""
    seed: int
    one_lr: bool = False
    """Whether methods with a learning rate of their own must use ``lr`` too."""
    context: Indices | None = None
    """What is known of each example before it is seen, for methods that want to know."""
    seconds: float = math.inf
    """The budget, if it is a time of training."""
    schedule: str = ""
    """How the learning rate goes: constant, or ``"cosine"``, which is warmed up and falls to zero."""

    @property
    def n(self) -> int:
        """Number of training examples."""
        return len(self.targets)

    def evaluate(self, indices: Tensor | Indices, what: str, *, rough: bool = True) -> Floats:
        """``"losses"`` or ``"scores"`` of some examples: a forward pass without gradients or dropout.

        Those that choose examples may be ``rough``: in half precision, where that is faster.
        """
        measure = getattr(self.loss, what)
        with adambs.scores.forward_only(self.model, half=None if rough else False):
            parts = [
                on_host(measure(self.model(self.inputs[part]), self.targets[part]))
                for part in torch.split(torch.as_tensor(indices), FORWARD_BATCH)
            ]
        return np.concatenate(parts)


class Batch(Protocol):
    """The examples of a step. ``adambs.Draw`` is one."""

    @property
    def indices(self) -> Tensor:
        """Which examples."""

    def mean(self, losses: Tensor) -> Tensor:
        """The (weighted) mean of their losses, whose gradient the optimizer is given."""


@dataclass(frozen=True)
class Plain:
    """A batch without weights."""

    indices: Tensor

    def mean(self, losses: Tensor) -> Tensor:
        """The plain mean."""
        return plain_mean(losses)


@dataclass(frozen=True)
class Weighted:
    """A batch with a weight for each example."""

    indices: Tensor
    weights: Tensor

    def mean(self, losses: Tensor) -> Tensor:
        """(1/K) sum of weights times losses."""
        return torch.dot(losses, (self.weights / len(self.weights)).to(losses))


class Method(ABC):
    """One way to choose the examples of each step. A new one is a short class like those beside this file.

    The loop that calls it is ``adambs.lab.runs.training.train``: :meth:`choose`, forward, ``batch.mean``,
    backward, :meth:`step`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    summary: ClassVar[str]
    citation: ClassVar[str]
    biased: ClassVar[bool] = False
    """Whether the expected gradient differs from the full one, by more than a cap or a clip takes away."""

    optimizer_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    options: ClassVar[dict[str, Any]] = {}
    """Of the optimizer; ``lr`` is the task's unless it stands here."""

    clip: ClassVar[float] = 0.0
    """Shorten gradients so many times as long as usual, :class:`adambs.clipping.GradientClip`; 0: none."""

    batch_size: ClassVar[int] = 0
    """Its own, in the place of the task's; 0: none. The runner makes the task accordingly."""

    untimed = 0.0
    """Seconds excluded from timing: what the oracle spends on knowing everything."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.rng = np.random.default_rng([task.seed, 1])
        self.passes = Passes(task.n, task.seed)  # the same for all of a seed: who reshuffles sees one order
        self.optimizer: Any = self.make_optimizer()
        self.done = 0  # steps
        self.spent = 0.0  # seconds of training, told by the runner before each turn
        if self.clip:
            self.clip_gradients()

    @property
    def share(self) -> float:
        """How much of the budget is used, from 0 to 1. Of a time, as of the beginning of the turn."""
        used = self.done / self.task.steps if self.task.steps else self.spent / self.task.seconds
        return min(used, 1.0)

    def clip_gradients(self) -> None:
        """Let the optimizer clip."""
        GradientClip(self.clip).attach(self.optimizer)

    @classmethod
    def rehearsals(cls) -> list[type[Self]]:
        """What is trained for a few steps before the clock starts, so that nothing compiles on it."""
        return [cls]

    @classmethod
    def with_setting(cls, name: str, value: float) -> type[Self]:
        """A variant with another learning rate, or another value of a number that the class has."""
        if name == "lr":
            changed: dict[str, Any] = {"options": {**cls.options, "lr": value}}
        elif name in cls.setting_names():
            changed = {name: type(getattr(cls, name))(value)}
        else:
            raise ValueError(f"{cls.name} has no setting {name!r}; it has {', '.join(cls.setting_names())}")
        return cls.variant(changed)

    @classmethod
    def variant(cls, changed: dict[str, Any]) -> type[Self]:
        """A subclass with some class attributes changed."""
        return type(cls.__name__, (cls,), {**changed, "__doc__": cls.__doc__, "__module__": cls.__module__})

    @classmethod
    def setting_names(cls) -> list[str]:
        """What :meth:`with_setting` knows."""
        numbers = {
            name
            for owner in cls.__mro__
            for name, value in vars(owner).items()
            if isinstance(value, int | float) and not name.startswith("_")
        }
        return ["lr", *sorted(numbers - {"biased", "untimed"})]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that takes the steps."""
        make: Any = self.optimizer_class
        return make(self.task.model.parameters(), **self.optimizer_options())  # type: ignore[no-any-return]

    def optimizer_options(self) -> dict[str, Any]:
        """``options`` with the learning rate."""
        lr = self.task.lr if self.task.one_lr else self.options.get("lr", self.task.lr)
        return {**self.options, "lr": lr}

    @abstractmethod
    def choose(self) -> Batch:
        """The examples of the next step. May run forward passes; their time counts."""

    def objective(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
        """What the gradient is taken of."""
        return batch.mean(losses)  # type: ignore[no-any-return]

    def step(self, batch: Any, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        """Gradients are there: take the optimizer's step, and learn what there is to learn."""
        self.optimizer.step()

    def probabilities(self) -> Floats | None:
        """The distribution over all examples, if the method has one. For the records; not timed."""
        return None

    def variance_reduction(self) -> float | None:
        """Running estimate of the variance reduction against uniform sampling, if there is one."""
        return None
