"""What the adapters share: the draw inside a batch, and the state of a run whose epoch is over."""

from collections.abc import Mapping
from typing import Any

from adambs.carried import Carried
from adambs.loader import BanditLoader
from adambs.sampler import BanditSampler

_ENTRIES = tuple(f"draw_{name}" for name in Carried._fields)


def missing(package: str, extra: str, error: ImportError) -> ImportError:
    """The error of an adapter whose library is not installed."""
    return ImportError(
        f"adambs.integrations.{extra} needs {package}, which is not installed: pip install 'adambs[{extra}]'"
        f" ({error})"
    )


def drawn_in(batch: Any) -> Carried:
    """The draw that a batch of ``BanditLoader(..., carry=True)`` carries; or an error."""
    if isinstance(batch, Mapping):
        if all(name in batch for name in _ENTRIES):
            drawn = Carried(*(batch[name] for name in _ENTRIES))
            drawn.lies_open()  # whoever has the batch has the weights
            return drawn
    elif isinstance(batch, list | tuple):
        for entry in reversed(batch):
            if isinstance(entry, Carried):
                return entry
    raise ValueError(
        f"the training batch ({type(batch).__name__}) carries no draw, so its weights are unknown: take "
        "batches from BanditLoader(dataset, sampler, carry=True), and let no hook or collate function that "
        f"comes after it drop the last entry (of a dict: {', '.join(_ENTRIES)})"
    )


def without_draw(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A dict batch as it was before the draw was put in."""
    return {name: value for name, value in batch.items() if name not in _ENTRIES}


def state_between_batches(sampler: BanditSampler, length: int) -> dict[str, Any]:
    """The sampler's state, for a trainer that resumes after the last batch of an epoch with the next epoch.

    Trainers count batches and never ask for one more, so that the loader does not know that it is done.
    ``length`` is where the trainer's epoch ends.
    """
    state = sampler.state_dict()
    epoch = state["epochs"]
    if epoch["delivered"] < length:
        return state
    # Nobody asks for what was fetched ahead.
    return {**state, "epochs": {**epoch, "finished": True, "ahead": []}}


def refuse_shards(sampler: BanditSampler) -> None:
    """Raise if p is in parts, one in each process: trainers save what one process has."""
    if sampler.in_parts:
        raise TypeError(
            "a ShardedSampler of several processes has p in parts, and the trainer saves the part of one "
            "process: use BanditSampler, whose p all processes have, or a loop of your own"
        )


def refuse_evaluation(loaders: Any) -> None:
    """Raise if a bandit's loader evaluates: the only one, or one in a list or a dict of them."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if any(map(is_a_bandits, loaders if isinstance(loaders, list | tuple) else [loaders])):
        raise TypeError(
            "an evaluation loader is a bandit's loader: it draws with replacement from a p that training "
            "learns, so a plain mean over it is no estimate. Evaluate with a plain DataLoader"
        )


def is_a_bandits(loader: Any) -> bool:
    """Whether this is a bandit's loader, or an adapter's loader around one."""
    return isinstance(loader, BanditLoader) or hasattr(loader, "bandit_loader")
