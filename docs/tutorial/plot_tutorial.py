"""
The first ten minutes
=====================

A training loop, the few lines that change, and a look at what the bandit has learned. Everything runs on the
handwritten digits that come with scikit-learn, in less than a minute.

The data: digits of which some are rare
---------------------------------------

Zeros and ones are kept whole, and only every twelfth of the other digits. So most images are soon learned,
and a few go on mattering: the situation in which choosing examples pays.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import adambs

pixels, digits = load_digits(return_X_y=True)
common = digits <= 1
kept = common | (torch.arange(len(digits)) % 12 == 0).numpy()
x = torch.from_numpy(pixels[kept]).float().view(-1, 1, 8, 8) / 16
y = torch.from_numpy(digits[kept])
train = TensorDataset(x, y)
print(f"{len(train)} images, {int((y > 1).sum())} of them of the rare digits 2 to 9")


def net():
    """A small convolutional net, always with the same initial parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )


@torch.no_grad()
def training_loss(model):
    """The mean loss over all training images."""
    return F.cross_entropy(model(x), y).item()


# %%
# An ordinary loop
# ----------------

model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
plain = [training_loss(model)]
torch.manual_seed(1)
for _epoch in range(30):
    for images, labels in DataLoader(train, batch_size=16, shuffle=True, drop_last=True):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    plain.append(training_loss(model))

# %%
# The same with bandit sampling
# -----------------------------
#
# The sampler keeps a probability for each of the n examples; a *draw* is a mini-batch of K of them with their
# weights 1/(n p), which keep the gradient unbiased. ``draw.mean`` takes the weighted mean, and ``step`` also
# tells the sampler how large each example's gradient was: its *score*. That is all.

model = net()
sampler = adambs.BanditSampler(len(train), batch_size=16, seed=1)
optimizer = adambs.AdamBS(model.parameters(), sampler, lr=2e-3)
bandit = [training_loss(model)]
for _epoch in range(30):
    for (images, labels), draw in adambs.BanditLoader(train, sampler, drop_last=True):
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        optimizer.zero_grad()
        scores = adambs.scores.cross_entropy(logits, labels)
        draw.mean(losses, scores).backward()
        optimizer.step(draw, scores)
    bandit.append(training_loss(model))

# %%
# What came of it
# ---------------
#
# One seed proves nothing; this is a picture of the idea, and the page on results has the measurements.

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(plain, label="Adam, reshuffled epochs", color="#8a8f98")
axes.plot(bandit, label="AdamBS", color="#1f6feb")
axes.set(xlabel="epoch", ylabel="training loss", yscale="log")
axes.legend(frameon=False)
print(f"after 30 epochs: Adam {plain[-1]:.4f}, AdamBS {bandit[-1]:.4f}")

# %%
# What p looks like
# -----------------
#
# ``diagnostics`` tells what the distribution is worth: how many times smaller than under uniform sampling the
# second moment of the gradient estimate is, and over how many examples p is spread.

told = sampler.diagnostics()
print(f"variance reduction {told.variance_reduction:.2f}")
print(f"p is spread over {told.effective_sample_size:.0f} of {sampler.n} examples")
print(f"{told.reshuffled} of {told.draws} batches were reshuffled ones, before p paid")

# %%
# The images that are drawn most, and those that are drawn least:

p = sampler.probabilities()
order = p.argsort(descending=True)
figure, rows = plt.subplots(2, 8, figsize=(6, 2.2), layout="constrained")
for row, chosen, title in zip(rows, (order[:8], order[-8:]), ("drawn most", "drawn least"), strict=True):
    row[0].set_title(title, loc="left", fontsize=9)
    for axes, j in zip(row, chosen, strict=True):
        axes.imshow(x[j, 0], cmap="gray_r")
        axes.set_axis_off()

# %%
# Going on
# --------
#
# A run is saved and resumed with ``optimizer.state_dict()``, which carries the sampler. For your own data,
# ask first whether there is anything to win: ``adambs.probe(model, train, F.cross_entropy, batch_size=16)``.
# More of that: :doc:`when to use it, and when not </when-to-use>`.
