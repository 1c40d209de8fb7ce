"""Several processes, one distribution, on scikit-learn's handwritten digits. Under a minute on two cores.

    torchrun --nproc_per_node 2 examples/torchrun.py

Runs without torchrun too, as one process, with the same draws. With `--checkpoint FILE` it is written after
each epoch, and another run with any number of processes goes on from it; so does torchrun itself after a
crash, with `--max-restarts 3` and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (see docs/many-processes.md).
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import adambs

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--checkpoint", type=Path, default=None)
options = parser.parse_args()

torch.set_num_threads(1)
several = int(os.environ.get("WORLD_SIZE", "1")) > 1
if several:
    dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank() if several else 0

x, y = load_digits(return_X_y=True)
x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
train, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])

torch.manual_seed(0)
net: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = DistributedDataParallel(net) if several else net
sampler = adambs.BanditSampler(len(train), batch_size=64, seed=0)  # 64 examples in all processes together
optimizer = adambs.AdamBS(model.parameters(), sampler, lr=2e-3)
loader = adambs.BanditLoader(train, sampler, num_workers=0)

if options.checkpoint and options.checkpoint.exists():
    saved = torch.load(options.checkpoint)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])  # the sampler's state is in it

while sampler.epochs.current.number < options.epochs:
    for (inputs, labels), draw in loader:  # this process's part of the batch
        logits = model(inputs)
        optimizer.zero_grad()
        scores = adambs.scores.cross_entropy(logits, labels)
        draw.mean(F.cross_entropy(logits, labels, reduction="none"), scores).backward()
        optimizer.step(draw, scores)  # gathered from all processes
    if rank == 0:
        with torch.no_grad():
            error = (net(test[0]).argmax(1) != test[1]).float().mean()
        seen = sampler.diagnostics()
        print(
            f"epoch {sampler.epochs.current.number:3}: {len(draw)} of {len(draw.whole)} examples here, "
            f"test error {error:.3f}, p lowers the second moment {seen.variance_reduction:.2f}-fold",
            flush=True,
        )
        if options.checkpoint:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, options.checkpoint.with_suffix(".new"))
            options.checkpoint.with_suffix(".new").replace(options.checkpoint)  # whole or not at all

if several:
    dist.destroy_process_group()
