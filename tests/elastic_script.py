"""A run under torchrun whose ranks are killed at random moments; ``test_elastic.py`` starts it.

usage: elastic_script.py KILLS SEED FOLDER   (under torch.distributed.run --max-restarts KILLS)

Every life but the last ends with the death of one rank, and torchrun starts all of them anew. A life goes on
from the last checkpoint, in turns from rank 0's file and from the folder of ``torch.distributed.checkpoint``;
rank 1 is late now and then. The last life saves FOLDER/W-RANK-ended.pt, and then trains from the beginning,
left alone, and saves FOLDER/W-RANK-expected.pt.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers import small_data, small_net
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import adambs

N, B = 120, 13
EVERY = 8  # steps from checkpoint to checkpoint: 10 make an epoch
MOST = 30  # steps that a life has at most before a rank is killed


def steps(kills):
    """So many that no run ends before its last kill."""
    return 20 + MOST * kills


class Run:
    """The README's loop with checkpoints, in one process or in several."""

    def __init__(self):
        x, y = small_data(N)
        self.net = small_net(dtype=torch.float64)
        self.model = DistributedDataParallel(self.net) if dist.is_initialized() else self.net
        self.sampler = adambs.BanditSampler(N, B, seed=3, gate=1.005)
        self.optimizer = adambs.AdamBS(self.net.parameters(), self.sampler, lr=3e-3)
        self.loader = adambs.BanditLoader(TensorDataset(x.double(), y), self.sampler, num_workers=1)
        self.done, self.drawn = 0, []

    def train(self, total, folder=None, before_step=lambda done: None):
        while self.done < total:
            for (x, y), draw in self.loader:
                before_step(self.done)
                logits = self.model(x)
                self.optimizer.zero_grad()
                draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
                self.optimizer.step(draw, adambs.scores.cross_entropy(logits, y))
                self.drawn.append(draw.whole.indices.tolist())
                self.done += 1
                if folder is not None and self.done % EVERY == 0:
                    self.save(folder)
                if self.done == total:
                    break

    def state(self):
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "drawn": list(self.drawn),
        }

    def distributed_state(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "sampler": self.sampler}

    def save(self, folder):
        """Both ways. The file comes last: it says which folder is whole."""
        dcp.save(self.distributed_state(), checkpoint_id=folder / f"steps-{self.done}")
        if dist.get_rank() == 0:
            torch.save(self.state(), folder / "last.new")
            os.replace(folder / "last.new", folder / "last.pt")
        dist.barrier()

    def load(self, file, *, distributed=False):
        state = torch.load(file, weights_only=True)
        self.done, self.drawn = state["done"], state["drawn"]
        if distributed:
            found = self.distributed_state()
            alone = not dist.is_initialized()
            dcp.load(found, checkpoint_id=file.parent / f"steps-{self.done}", no_dist=alone)
            set_state_dict(
                self.net,
                self.optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optimizer"],
            )
        else:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])


class Fate:
    """Kills one rank at a random moment of a random step, and makes rank 1 late."""

    def __init__(self, seed, life, *, deadly):
        rng = random.Random(f"{seed}, {life}")
        self._victim = rng.randrange(dist.get_world_size()) if deadly else None
        self._left, self._delay = rng.randrange(MOST), rng.uniform(0, 0.05)
        self._life = life

    def __call__(self, done):
        if self._victim == dist.get_rank() and self._left == 0:
            threading.Thread(target=self._kill, daemon=True).start()
        self._left -= 1
        if dist.get_rank() == 1 and done % 17 == self._life:
            time.sleep(0.2)

    def _kill(self):
        time.sleep(self._delay)
        os.kill(os.getpid(), signal.SIGKILL)


def main(kills, seed, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo")
    life, here = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), f"{dist.get_world_size()}-{dist.get_rank()}"
    run, file = Run(), folder / "last.pt"
    if file.exists():
        if dist.get_rank() == 0:  # for another number of processes to go on with
            shutil.copy(file, folder / "moved.pt")
            (folder / f"life-{life}").write_text(str(torch.load(file, weights_only=True)["done"]))
        run.load(file, distributed=life % 2 == 0)
    dist.barrier()
    run.train(steps(kills), folder, Fate(seed, life, deadly=life < kills))
    torch.save({**run.state(), "life": life}, folder / f"{here}-ended.pt")
    alone = Run()
    alone.train(steps(kills))
    torch.save(alone.state(), folder / f"{here}-expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
