"""A plain training loop on scikit-learn's handwritten digits, with and without a bandit. Some seconds.

python examples/plain_loop.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import adambs

torch.set_num_threads(1)
x, y = load_digits(return_X_y=True)
x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
train = TensorDataset(x[:1500], y[:1500])


def trained(sampler: adambs.BanditSampler, epochs: int = 20) -> nn.Module:
    """A net that was trained on the batches of a sampler."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=2e-3)
    loader = adambs.BanditLoader(train, sampler)
    for _ in range(epochs):
        for (inputs, labels), draw in loader:
            logits = net(inputs)
            optimizer.zero_grad()
            scores = adambs.scores.cross_entropy(logits, labels)
            draw.mean(F.cross_entropy(logits, labels, reduction="none"), scores).backward()
            optimizer.step(draw, scores)
    return net


for name, gate in (("reshuffled", 1e9), ("bandit", 1.1)):  # no p pays 1e9-fold: the first is plain Adam
    sampler = adambs.BanditSampler(len(train), batch_size=64, seed=0, gate=gate)
    net = trained(sampler)
    with torch.no_grad():
        loss = F.cross_entropy(net(x[:1500]), y[:1500]).item()
        error = (net(x[1500:]).argmax(1) != y[1500:]).float().mean().item()
    seen = sampler.diagnostics()
    print(
        f"{name:10}: training loss {loss:.4f}, test error {error:.3f}, {seen.reshuffled} of {seen.draws} "
        f"batches reshuffled, variance reduction {seen.variance_reduction:.2f}"
    )
