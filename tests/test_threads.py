"""Several threads at one sampler. Kernels release the interpreter's lock, so only the sampler's own helps."""

import sys
import threading
import time

import numpy as np
import pytest
import torch

import adambs
from adambs.rules import VRB, Avare, Calibrated, Exp3, Tracking

N, K, THREADS = 300, 8, 4
TRUTH = torch.from_numpy(np.random.default_rng(0).gamma(0.5, 1.0, N))


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    """Every few bytecodes instead of every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(work):
    """Run ``work(number)`` in all threads; what they raised."""
    errors, start = [], threading.Barrier(THREADS)

    def body(number):
        try:
            start.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def problems(sampler, seconds):
    """Draw and update in all threads for a time; then all that is not as it should be.

    Each draw is given back twice, by two threads: one of them must be refused.
    """
    taught, refused, drawn = [], [], []
    shared: list[adambs.Draw] = []
    stop = time.perf_counter() + seconds

    def give_back(draw):
        try:
            sampler.update(draw, TRUTH[draw.indices])
            taught.append(draw.number)
        except ValueError:
            refused.append(draw.number)

    def work(number):
        while time.perf_counter() < stop:
            draw = sampler.draw()
            drawn.append(draw.number)
            shared.append(draw)
            give_back(draw)
            give_back(shared[-1])  # of another thread, perhaps, that is giving it back now
            if len(drawn) % 16 == number:
                sampler.probabilities()
                sampler.state_dict()

    found = [f"{type(error).__name__}: {error}" for error in at_once(work)]
    counted = sampler.diagnostics()
    if sorted(drawn) != list(range(len(drawn))):
        found.append("numbers of draws are missing or double")
    if len(set(taught)) != len(taught):
        found.append("a draw was taught twice")
    if counted.draws != len(drawn) or counted.updates != len(taught) or counted.scores != K * len(taught):
        found.append(f"{len(drawn)} draws and {len(taught)} updates were counted as {counted}")
    if len(sampler.awaited._draws) + len(taught) != len(drawn) and len(drawn) - len(taught) < 1000:
        found.append("draws have been lost")
    if abs(sampler.probabilities().sum() - 1) > 1e-9:
        found.append("p does not sum to one")
    if isinstance(sampler.rule, Calibrated):
        members = sampler.rule.members
        slots = members.place ^ np.arange(N)
        if not (
            np.array_equal(np.sort(members.listed()), np.arange(N))
            and np.array_equal(members.order[slots] ^ slots, np.arange(N))
        ):
            found.append("the order is no permutation")
    try:
        sampler.parse_state(sampler.state_dict())
    except ValueError as error:
        found.append(str(error))
    return found, len(taught)


# With a ``sampler._lock`` that lets everybody in, 5 to 7 of the twelve cases failed in each of six trials of
# five seconds: draws with one number, draws that taught twice, wrong counts, errors from within. That
# is no test here, because kernels that run into each other may do anything.
@pytest.mark.filterwarnings("ignore:batches were drawn with unequal p")
@pytest.mark.parametrize(
    "rule",
    [Calibrated(), Tracking(), Exp3(L=10.0), Exp3(L=10.0, offset="baseline"), Avare(), VRB()],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_threads_wait_for_each_other(rule, feedback):
    sampler = adambs.BanditSampler(N, K, rule=rule, gate=1.02, feedback=feedback)
    found, updates = problems(sampler, seconds=0.3)
    assert not found
    assert updates > 20
