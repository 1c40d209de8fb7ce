"""A table with rare events: a generated data set in which one row in fifty matters. Some seconds.

python examples/tabular.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import adambs

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(20_000, 12)
rare = x[:, 0] + 0.3 * x[:, 1] * x[:, 2] > 2.05
train = TensorDataset(x, rare.float())
print(f"{rare.float().mean():.1%} of {len(train)} rows are positive")


def losses_after(steps: int, bandit: bool) -> list[float]:
    """The loss over all rows after each quarter of the steps."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))
    gate = 1.1 if bandit else 1e9  # no p pays 1e9-fold: then all batches are reshuffled, as in a plain loop
    sampler = adambs.BanditSampler(len(train), batch_size=64, seed=0, gate=gate)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    found: list[float] = []
    done = 0
    while done < steps:
        for (rows, wanted), draw in adambs.BanditLoader(train, sampler):
            logits = net(rows).squeeze(1)
            optimizer.zero_grad()
            losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            scores = adambs.scores.binary_cross_entropy_with_logits(logits, wanted)
            draw.mean(losses, scores).backward()
            optimizer.step()
            sampler.update(draw, scores)
            done += 1
            if done % (steps // 4) == 0:
                with torch.no_grad():
                    all_rows = F.binary_cross_entropy_with_logits(net(x).squeeze(1), rare.float())
                found.append(all_rows.item())
            if done == steps:
                break
    return found


for name, bandit in (("reshuffled", False), ("bandit", True)):
    losses = ", ".join(f"{loss:.4f}" for loss in losses_after(2000, bandit))
    print(f"{name:10}: training loss {losses}")
