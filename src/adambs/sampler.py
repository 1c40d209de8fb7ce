"""BanditSampler keeps the distribution p, draws mini-batches from it and lets it learn."""

import copy
import threading
from typing import Any

import torch

from adambs import _check
from adambs._types import Floats, Indices
from adambs.candidates import Candidates, Look, Score
from adambs.cap import Cap
from adambs.diagnostics import Counters, Diagnostics, diagnose
from adambs.draw import Draw
from adambs.epochs import Epoch, Epochs, InEpochs
from adambs.feedback import Awaited, Feedback, Observer
from adambs.fingerprints import fingerprint
from adambs.gate import Gate
from adambs.learning import Learning
from adambs.looking import Looking
from adambs.mistakes import Mistakes
from adambs.processes import Processes
from adambs.proposals import Passes, RandomStream, Sources
from adambs.ready import Ready
from adambs.rules.base import Rule
from adambs.rules.contextual import chosen
from adambs.states import MadeOfParts

# Unless the user says otherwise, p must lower the second moment of the gradient so much to be drawn from.
_GATE = 1.1


class BanditSampler(MadeOfParts, InEpochs, Learning, Looking):
    """A distribution p over n examples that learns from the gradient norms of the examples it drew.

    Draws are independent and with replacement, as in the paper, as soon as p is worth it (see ``gate``). A
    draw may come back late, out of order or never: each update uses the probabilities of its own draw.

    The sampler is wiring. Its parts each do one job and keep their own state: the ``rule`` (how feedback
    changes p), ``random``, ``passes`` (reshuffled batches), ``gate``, ``candidates`` (looking first),
    ``ready`` (what was chosen then), ``awaited`` (draws without feedback), ``epochs`` (where a loader
    stands), ``counters`` and ``cap``. Draws and updates from several threads wait for each other.

    Args:
        n: number of training examples.
        batch_size: K, of all processes together if there are several.
        rule: how feedback changes p; :class:`Calibrated` if nothing is given. :class:`Exp3` is the paper's
            Algorithm 2.
        seed: of the sampler's own random stream. No global stream is read or changed.
        stratified: draw one example from each K-th of the mass: still unbiased, with less variance, shuffled.
        initial_weights: n weights, for instance a teacher's opinion of how much each example matters.
        context: n labels of any hashable kind, what is known of each example beforehand (class, source,
            cluster). Unseen examples of a context learn from each other, and p is drawn from at once.
        correction: exponent of the weights 1/(n p). One, the paper's, keeps the gradient unbiased, less
            favours examples of large norm: see docs/what-was-tried.md first. A choice among candidates is
            always corrected in full. The attribute ``correction`` may be changed at any time.
        cap: what ``draw.mean(losses, scores)`` lets weight x score be, in running means of it; infinity is
            no cap, and without scores there is none. See :class:`adambs.cap.Cap`.
        gate: p is drawn from while it lowers the second moment of the gradient by more than this factor, by a
            running estimate. While it does not, batches come from reshuffled passes with weights of one, as
            without a bandit, and p learns from them. 0 is no gate, as in the paper. If nothing is given, 1.1;
            but no gate if you have chosen a rule or initial weights. A pass that has begun is finished first.
        candidates: how many candidates :meth:`draw` scores first when it is given a way to, and whether that
            pays; :class:`Candidates()` if nothing is given.
        feedback: how scores come home. ``"at once"`` reads them in :meth:`update`; ``"late"`` copies them
            without waiting for their device and learns at the next draw, where bad scores raise;
            ``"automatic"`` is at once for scores on the CPU and late for all others. p learns the same.
        group: who shares the draws: a process group of ``torch.distributed``, False for none, or nothing for
            the default one, if there is one at the first draw. See docs/many-processes.md.
    """

    PARTS = (
        *("rule", "random", "passes", "gate", "candidates", "ready"),
        *("awaited", "epochs", "counters", "cap"),
    )

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        rule: Rule | None = None,
        seed: int = 0,
        stratified: bool = False,
        initial_weights: Any = None,
        context: Any = None,
        correction: float = 1.0,
        cap: float = 10.0,
        gate: float | None = None,
        candidates: Candidates | None = None,
        feedback: str = "automatic",
        group: Any = None,
    ) -> None:
        self.n = _check.whole("n", n, least=1)
        self.batch_size = _check.whole("batch_size", batch_size, least=1)
        if self.batch_size > self.n:
            raise ValueError(f"batch_size must be at most n = {self.n}, not {batch_size}: choose less")
        _check.instance("rule", rule, Rule, "such as Exp3()")
        _check.instance("candidates", candidates, Candidates)
        self.seed = _check.whole("seed", seed, least=0)
        self.stratified = bool(stratified)
        if initial_weights is not None:
            initial_weights = _check.positive_somewhere("initial_weights", initial_weights, self.n)
        self.correction = correction
        if gate is None:
            gate = _GATE if rule is None and initial_weights is None else 0.0

        self.gate = Gate(gate, 0 if context is None else -(-self.n // self.batch_size))
        self.candidates = copy.deepcopy(candidates) if candidates is not None else Candidates()
        self.rule = chosen(rule, context)
        self.rule.start(self.n, self.batch_size, initial_weights)
        self.random = RandomStream(self.seed)
        self.passes = Passes(self.n, self.seed, self.batch_size)
        self.ready = Ready(self.n, self.batch_size)
        self.awaited = Awaited(self.batch_size)
        self.epochs = Epochs(self.n, self.batch_size)
        self.counters = Counters()
        self.cap = Cap(cap)
        self._connect()
        self.feedback = Feedback(feedback)
        self.processes = Processes(group)
        self.observers: list[Observer] = []
        self.mistakes = Mistakes()
        self.loaded = False  # whether a state was ever loaded
        self._lock = threading.RLock()

    def _connect(self) -> None:
        """Tell the parts of each other."""
        self._sources = Sources(self.rule, self.random, self.passes, self.gate, self.stratified)

    @property
    def in_parts(self) -> bool:
        """Whether p is in parts, one in each of several processes."""
        return False

    @property
    def correction(self) -> float:
        """Exponent of the weights of the draws to come."""
        return self._correction

    @correction.setter
    def correction(self, value: float) -> None:
        self._correction = _check.unit_interval("correction", value)

    def begin_epoch(self) -> Epoch:
        """A new epoch, or the rest of the one that a loaded state was in."""
        # Trainers and plain DataLoaders do not say that one is over. It may have done without its last batch.
        self.mistakes.epoch_over(self.returned(), max(2, self.n // self.batch_size))
        epoch = super().begin_epoch()
        self.mistakes.epoch_begins(epoch, self.returned())
        return epoch

    def draw(self, score: Score | None = None) -> Draw:
        """A mini-batch of K examples, or this process's part of it, from p if that pays. O(K log n).

        ``score`` maps a tensor of indices to the scores of those examples, by a forward pass. If it is given,
        and whenever it pays (see :class:`Candidates`), some candidates are drawn from p and scored, the rule
        learns from them, and the batch is chosen among them.
        """
        return self.draw_after(None if score is None else lambda candidates: score(candidates.indices))

    def draw_after(self, look: Look | None) -> Draw:
        """As :meth:`draw`, with a function from this process's part of the candidates to their scores."""
        with self._lock:
            if self.feedback.late:
                self._learn_what_is_late()
            if not self.processes.settled:
                self._settle()
            if look is None:
                draw = self._plain()
            else:
                self.candidates.entered()
                free = not (self.ready.choices or self.passes.under_way)
                if free and self.candidates.pays(self.batch_size):
                    self._look(look)
                draw = self._chosen() if self.ready.choices else self._until_a_look()
                self.candidates.left()
            return draw if self.processes.group is None else self.processes.handed_out(draw)

    def part(self, draw: Draw) -> Draw:
        """This process's part of a draw of all processes."""
        with self._lock:
            self._settle()
            return self.processes.part(draw)

    def _settle(self) -> None:
        """Find out with whom draws are shared, and that all of them would make the same."""
        if self.processes.settled:
            return
        self.mistakes.alone(self.processes.left_alone())
        self.processes.settle(self.batch_size, lambda: fingerprint(self.identity(), self.state_dict()))
        if self.processes.group is not None:
            self.feedback.gather(self.processes.group, self.batch_size)

    def _until_a_look(self) -> Draw:
        """A plain batch while a look does not pay, or is not possible yet: one begins between passes."""
        if not self.passes.under_way:
            self.passes.growing = True
        return self._plain()

    def _plain(self) -> Draw:
        indices, ratios, reshuffled = self._sources.batch(self.batch_size)
        self.counters.reshuffled += reshuffled
        return self._numbered(indices, ratios)

    def _numbered(
        self, indices: Indices, ratios: Floats, p_ratios: Floats | None = None, learned: bool = False
    ) -> Draw:
        """The draw with the next number, awaited from now on."""
        following, limit = self.awaited.following, self.cap.limit
        draw = Draw(following, indices, ratios, self.n, self._correction, p_ratios, learned, limit)
        self.awaited.add(draw)
        self.counters.draws += 1
        return draw

    def probabilities(self, indices: Any = None) -> torch.Tensor:
        """p of the examples ``indices``, or of all n. A copy, float64."""
        chosen = None if indices is None else _check.indices("indices", indices, self.n)
        with self._lock:
            self._learn_what_is_late()
            return torch.from_numpy(self.rule.ratios(chosen) / self.n)

    def diagnostics(self) -> Diagnostics:
        """What the distribution looks like and what it is worth. O(1) with the default rule."""
        with self._lock:
            self._learn_what_is_late()
            return diagnose(self.n, self.counters, self.rule, self.candidates, self.cap)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draws depend on, and those on their way, as tensors and plain numbers."""
        with self._lock:
            self._learn_what_is_late()
            return {**super().state_dict(), "correction": self.correction}

    def parse_state(self, state: Any) -> dict[str, Any]:
        """Read and check a state, for :meth:`adopt`; changes nothing."""
        new = super().parse_state(state)
        new["correction"] = _check.number(state, "correction", 0.0, 1.0)
        new["awaited"].expect(new["epochs"].current.ahead)
        return new

    def adopt(self, parts: dict[str, Any]) -> None:
        """Take what :meth:`parse_state` has returned; cannot fail."""
        with self._lock:
            self.feedback.drop()
            for name, part in parts.items():
                setattr(self, name, part)
            self._connect()
            self.loaded = True
            self.mistakes.loaded()
            self.processes.unsettle(loaded=True)

    def identity(self) -> dict[str, Any]:
        """What a state must share with the sampler that loads it."""
        return {
            **{name: getattr(self, name) for name in ("n", "batch_size", "seed", "stratified")},
            "gate_threshold": self.gate.threshold,
            "cap_factor": self.cap.factor,
            "rule_name": type(self.rule).__name__,
            "rule_settings": self.rule.settings(),
            "candidates_settings": self.candidates.settings(),
        }

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._learn_what_is_late()
            return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        settings = f"rule={self.rule!r}, seed={self.seed}, stratified={self.stratified}"
        return f"BanditSampler(n={self.n}, batch_size={self.batch_size}, {settings})"
