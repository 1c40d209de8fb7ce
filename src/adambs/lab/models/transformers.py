"""Small transformers for the reviews of IMDB: one that judges them, one that continues them. All ours."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

import adambs

# How many words of each review the language model predicts: the last ones.
WORDS = 50


def _stack(width: int, layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, max(1, width // 16), 2 * width, dropout=0.1, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)


class Transformer(nn.Module):
    """Embedding and positions, encoder layers with the norm first, mean over the words, one dense output."""

    def __init__(self, vocabulary: int, *, width: int = 64, layers: int = 2, length: int = 100) -> None:
        super().__init__()
        self.length = length
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.05)
        self.stack, self.dense = _stack(width, layers), nn.Linear(width, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(K, T) token numbers, 0 is padding at the front -> (K,) logits. Reads the last ``length`` words."""
        tokens = tokens[:, -self.length :]
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        padded = tokens == 0
        padded[:, -1] = False  # attention to nothing would be no number
        x = self.stack(self.words(tokens) + self.places(places), src_key_padding_mask=padded)
        kept = (~padded).unsqueeze(2).to(x)
        logits: Tensor = self.dense((x * kept).sum(1) / kept.sum(1)).squeeze(1)
        return logits


@dataclass(frozen=True)
class NextWords:
    """What the language model makes of a batch of texts."""

    logits: Tensor
    """(K, T, V), of the word at each position from those before it."""
    labels: Tensor
    """(K, T), the words; 0 is padding."""

    @cached_property
    def text(self) -> adambs.scores.TokenLosses:
        """Sums of the words' losses over the number of words in a full text, and their scores: one pass."""
        return adambs.scores.causal_lm(
            self.logits, self.labels, shift=False, ignore_index=0, constant=float(WORDS)
        )


class LanguageModel(nn.Module):
    """The next word of a review. Of the vocabulary the most frequent words; the others are one word."""

    def __init__(self, *, width: int = 64, layers: int = 2, vocabulary: int = 1000) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(WORDS, width)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.05)
        self.stack, self.head = _stack(width, layers), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> NextWords:
        """(K, T) token numbers: 0 is padding at the front, 1 an unknown word, then by frequency."""
        tokens = tokens[:, -WORDS - 1 :]
        tokens = torch.where(tokens < self.vocabulary, tokens, torch.ones_like(tokens))
        known, labels = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(known.shape[1], device=known.device).expand_as(known)
        later = nn.Transformer.generate_square_subsequent_mask(known.shape[1], device=known.device)
        x = self.stack(self.words(known) + self.places(places), mask=later, is_causal=True)
        return NextWords(self.head(x), labels)
