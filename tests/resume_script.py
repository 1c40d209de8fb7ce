"""A training script that can be stopped and resumed; ``test_resume.py`` runs it in processes of its own.

The default path whole: default rule and gate, a loader with workers, random augmentation.

usage: resume_script.py WORKERS STEPS LOAD SAVE   (LOAD may be '-')
"""

import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from helpers import small_data, small_net
from torch.utils.data import Dataset

import adambs


class Augmented(Dataset):
    """Points with noise from torch's, numpy's and Python's global streams."""

    def __init__(self, n):
        self.x, self.y = small_data(n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(6) + np.random.rand() + random.random()  # noqa: NPY002
        return self.x[i] + 0.1 * noise, self.y[i]


def main(workers: int, steps: int, load: str, save: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(small_net(), torch.nn.Dropout(0.2), torch.nn.Linear(3, 3))
    sampler = adambs.BanditSampler(300, batch_size=7, seed=1)
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2000)
    loader = adambs.BanditLoader(Augmented(300), sampler, num_workers=workers)
    done = 0
    if load != "-":
        checkpoint = torch.load(load, weights_only=True)
        net.load_state_dict(checkpoint["net"])
        schedule.load_state_dict(checkpoint["schedule"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        done = checkpoint["done"]
    while True:
        for (inputs, targets), draw in loader:
            logits = net(inputs)
            losses = F.cross_entropy(logits, targets, reduction="none")
            optimizer.zero_grad()
            draw.mean(losses).backward()
            # Inputs of very different length make some examples matter more, so p pays.
            optimizer.step(draw, adambs.scores.cross_entropy(logits, targets) * inputs.norm(dim=1))
            schedule.step()
            done += 1
            if done == steps:
                state = {
                    "net": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "rng": torch.get_rng_state(),
                    "done": done,
                }
                torch.save(state, save)
                return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
