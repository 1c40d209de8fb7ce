"""Adam with bandit sampling: train on the examples that matter, without bias.

The parts, in the order in which a training loop meets them::

    sampler = adambs.BanditSampler(len(train), batch_size=128, seed=0)      # p over all examples
    optimizer = adambs.AdamBS(model.parameters(), sampler, lr=1e-3)         # Algorithm 1
    for (x, y), draw in adambs.BanditLoader(train, sampler, num_workers=2): # batches drawn from p
        logits = model(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        optimizer.zero_grad()
        scores = adambs.scores.cross_entropy(logits, y)                     # bounds on gradient norms
        draw.mean(losses, scores).backward()                                # eq. (1)
        optimizer.step(draw, scores)                                        # Adam's step, then p's

``adambs.reference`` is the slow, dense oracle in the paper's letters; nothing else here uses it.
"""

from adambs import reference, scores
from adambs.candidates import Candidates
from adambs.carried import Carried
from adambs.clipping import GradientClip
from adambs.diagnostics import Diagnostics
from adambs.draw import Draw
from adambs.history import History
from adambs.loader import BanditLoader
from adambs.noise import NoiseScale, noise_scale
from adambs.optim import AdamBS, with_bandit
from adambs.probing import Answer, probe
from adambs.rules import VRB, Avare, Calibrated, Exp3, Exp3M, Release, Rule, Tracking, Uniform
from adambs.sampler import BanditSampler
from adambs.sharded import ShardedSampler
from adambs.streams import BanditStream
from adambs.suspects import Suspect
from adambs.trees import SumTree

__version__ = "0.2.0"

__all__ = [
    "VRB",
    "AdamBS",
    "Answer",
    "Avare",
    "BanditLoader",
    "BanditSampler",
    "BanditStream",
    "Calibrated",
    "Candidates",
    "Carried",
    "Diagnostics",
    "Draw",
    "Exp3",
    "Exp3M",
    "GradientClip",
    "History",
    "NoiseScale",
    "Release",
    "Rule",
    "ShardedSampler",
    "SumTree",
    "Suspect",
    "Tracking",
    "Uniform",
    "noise_scale",
    "probe",
    "reference",
    "scores",
    "with_bandit",
]
