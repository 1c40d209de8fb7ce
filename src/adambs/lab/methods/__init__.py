"""Methods for choosing examples, behind one interface. A new one is one short class; see docs/methods.md."""

from adambs.lab.errors import unknown
from adambs.lab.methods import bandit, competitors, rules, shuffled, yardsticks
from adambs.lab.methods.base import Batch, Loss, Method, Plain, Task, Weighted

_PLAIN: list[type[Method]] = [
    shuffled.SGD,
    shuffled.Momentum,
    shuffled.Adagrad,
    shuffled.RMSprop,
    shuffled.NAdam,
    shuffled.AdamW,
    shuffled.Adadelta,
]

_ALL: list[type[Method]] = [
    shuffled.Adam,
    bandit.AdamBS,
    bandit.AdamBSLoop,
    bandit.AdamBSFast,
    bandit.AdamBSExp3,
    bandit.AdamImpt,
    bandit.AdamApt,
    bandit.AdamUni,
    shuffled.AMSGrad,
    bandit.AMSGradBS,
    bandit.Release,
    competitors.InfoBatch,
    competitors.SelectiveBackprop,
    competitors.OnlineBatchSelection,
    competitors.LossProportional,
    *yardsticks.ALL,
    *rules.ALL,
    *_PLAIN,
    *(bandit.with_bandit(method) for method in _PLAIN),
]

METHODS = {method.name: method for method in _ALL}


def find(name: str) -> type[Method]:
    """The method of that name; an unknown one gets the nearest.

    ``adam:lr=0.002`` and ``adambs-tracking:uniform=0.1:smoothing=0.5`` are variants with other settings.
    """
    base, *settings = name.split(":")
    if base not in METHODS:
        raise unknown("method", base, METHODS, "adambs methods")
    method = METHODS[base]
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"in {name!r}, {setting!r} must be a setting and a number: lr=0.002") from None
        method = method.with_setting(key, number)
    if settings:
        method.name, method.title = name, f"{METHODS[base].title}, {', '.join(settings)}"
    return method


__all__ = ["METHODS", "Batch", "Loss", "Method", "Plain", "Task", "Weighted", "find"]
