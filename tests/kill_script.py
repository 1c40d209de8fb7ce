"""A training run that is killed at random moments and started again until it ends; see ``test_kills.py``.

usage: kill_script.py KILLS SEED FOLDER

For each configuration one undisturbed run writes FOLDER/NAME/expected.pt. Then runs are made whose process is
killed at random moments and started again from its last checkpoint; each that ends writes a file
FOLDER/NAME/run-I.pt. KILLS is the number of kills in all. Prints as JSON how many kills and runs there were.

Importing torch takes seconds, so this process does it once, and every life is a fork of it.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from helpers import small_data, small_net
from torch.utils.data import Dataset

import adambs

N, K = 100, 7  # 15 batches an epoch
BATCHES = 100  # 50 steps of two batches each, in the seventh epoch at last
EVERY = 6  # batches from checkpoint to checkpoint: in the middle of an epoch mostly
OVERFLOWS = 17  # every so many batches the gradient is infinite, and the scaler skips the step

CONFIGURATIONS = {
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3},
    "looking": {"num_workers": 0},
}


class Augmented(Dataset):
    """Points with noise from torch's, numpy's and Python's global streams."""

    def __init__(self):
        self.x, self.y = small_data(N)

    def __len__(self):
        return N

    def __getitem__(self, i):
        noise = torch.randn(6) + np.random.rand() + random.random()  # noqa: NPY002
        return self.x[i] + 0.1 * noise, self.y[i]


def norms(logits, x, y):
    """Gradient norms, roughly: inputs of very different length make some examples matter more, so p pays."""
    return adambs.scores.cross_entropy(logits, y) * x.norm(dim=1)


class Run:
    """Everything that a training run consists of."""

    def __init__(self, configuration):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(small_net(), torch.nn.Dropout(0.2), torch.nn.Linear(3, 3))
        looking = configuration == "looking"
        self.sampler = adambs.BanditSampler(
            N, K, seed=1, candidates=adambs.Candidates(3, cost=0.01) if looking else None
        )
        self.optimizer = adambs.AdamBS(self.net.parameters(), self.sampler, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=BATCHES)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        self.loader = adambs.BanditLoader(
            Augmented(), self.sampler, score=self.score if looking else None, **CONFIGURATIONS[configuration]
        )
        self.done = 0

    def score(self, batch):
        x, y = batch
        with torch.no_grad():
            return norms(self.net[0](x), x, y)

    def parts(self):
        return {
            name: getattr(self, name) for name in ("net", "optimizer", "schedule", "scaler")
        }  # the optimizer has the sampler

    def save(self, file):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**state, "rng": torch.get_rng_state(), "done": self.done}, f"{file}.new")
        os.replace(f"{file}.new", file)  # whole, or not at all

    def load(self, file):
        state = torch.load(file, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        self.done = state["done"]

    def train(self, batches, checkpoint=None):
        while self.done < batches:
            for (x, y), draw in self.loader:
                last = self.done % 2 == 1  # of the two batches of a step
                logits = self.net(x)
                losses = F.cross_entropy(logits, y, reduction="none")
                scores = norms(logits.detach(), x, y)
                if self.done % OVERFLOWS == OVERFLOWS - 1:
                    losses = losses * torch.inf
                self.scaler.scale(draw.mean(losses) / 2).backward()
                if last:
                    self.scaler.step(self.optimizer, draw, scores)
                    self.scaler.update()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                else:
                    self.sampler.update(draw, scores)
                self.done += 1
                if checkpoint is not None and self.done % EVERY == 0:
                    self.save(checkpoint)
                if self.done == batches:
                    return


def live(configuration, checkpoint, result):
    """One life: from the last checkpoint, if there is one, to the end."""
    run = Run(configuration)
    if checkpoint is not None and checkpoint.exists():
        run.load(checkpoint)
    run.train(BATCHES, checkpoint)
    run.save(result)


def fork(*arguments):
    """The id of a process, and of its group, that lives such a life."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # so that its workers die with it
        live(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid, seconds):
    """Whether the process has ended by itself within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            if status:
                sys.exit(f"a life has failed with status {status}")
            return True
        time.sleep(0.005)
    return False


def kill(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main(kills, seed, folder):
    torch.set_num_threads(1)
    Run("looking").train(30)  # kernels are compiled, or read from their cache, once
    rng = random.Random(seed)
    report = {}
    for k, configuration in enumerate(CONFIGURATIONS):
        home = folder / configuration
        home.mkdir(parents=True)
        start = time.monotonic()
        assert ended(fork(configuration, None, home / "expected.pt"), 3600)
        whole = time.monotonic() - start
        left = kills // len(CONFIGURATIONS) + (k < kills % len(CONFIGURATIONS))
        runs = killed = 0
        while killed < left:
            checkpoint, result = home / f"checkpoint-{runs}.pt", home / f"run-{runs}.pt"
            while True:
                pid = fork(configuration, checkpoint, result)
                if ended(pid, rng.uniform(0, 0.6 * whole) if killed < left else 3600):
                    break
                kill(pid)
                killed += 1
            runs += 1
        report[configuration] = {"kills": killed, "runs": runs}
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
