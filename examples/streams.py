"""Streams: which source the next text comes from. One of four sources is shuffled words. Some seconds.

python examples/streams.py
"""

import random

import torch
from torch import nn
from torch.utils.data import IterableDataset

import adambs

torch.set_num_threads(1)
torch.manual_seed(0)
ALPHABET = "abcdefghijklmnopqrstuvwxyz "
WORDS = ["the", "bandit", "learns", "what", "source", "is", "worth", "drawing", "from", "now", "and", "how"]


class Texts(IterableDataset):
    """Endless sentences of some words, in their order or shuffled."""

    def __init__(self, words: list[str], shuffled: bool = False, seed: int = 0) -> None:
        self.words, self.shuffled, self.seed = words, shuffled, seed

    def __iter__(self):
        """The same sentences each time."""
        rng = random.Random(self.seed)
        for _ in range(2000):
            start = rng.randrange(len(self.words))
            words = [self.words[(start + k) % len(self.words)] for k in range(8)]
            if self.shuffled:
                rng.shuffle(words)
            text = " ".join(words)[:32].ljust(32)
            yield torch.tensor([ALPHABET.index(letter) for letter in text])


sources = {
    "one word": Texts(WORDS[:1]),
    "some words": Texts(WORDS[:6], seed=1),
    "all words": Texts(WORDS, seed=2),
    "shuffled": Texts(WORDS, shuffled=True, seed=3),
}
stream = adambs.BanditStream(sources, batch_size=32, seed=0, steps=400)


class Model(nn.Module):
    """The next letter from all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.head = nn.Embedding(27, 32), nn.Linear(64, 27)
        self.memory = nn.GRU(32, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, (K, T, 27)."""
        return self.head(self.memory(self.letters(x))[0])


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, (texts, draw) in enumerate(stream, 1):
    losses, scores = adambs.scores.causal_lm(model(texts), texts, constant=31)
    optimizer.zero_grad()
    draw.mean(losses).backward()
    optimizer.step()
    stream.update(draw, scores)
    if step % 100 == 0:
        p = ", ".join(f"{name} {value:.2f}" for name, value in stream.probabilities().items())
        print(f"step {step}: loss {losses.mean():.3f}, p: {p}")
