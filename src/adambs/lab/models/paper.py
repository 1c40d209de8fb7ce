"""The networks of the paper's experiments, as small as the paper leaves them, with a size to choose.

Where the paper is silent the Keras examples of its time are the likeliest originals, and our choice:
``cifar10_cnn``, ``mnist_cnn`` and ``imdb_cnn_lstm``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adambs.lab.models.transformers import LanguageModel, Transformer


class Standardised(nn.Module):
    """Colours in [0, 1], less the mean of CIFAR-10's training images, divided by their deviation."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        colours = {"mean": (0.491, 0.482, 0.447), "deviation": (0.247, 0.243, 0.262)}
        for name, values in colours.items():
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Images of shape (N, 3, H, W)."""
        return (images - self.mean) / self.deviation


def cifar_cnn(classes: int, *, channels: float = 1.0) -> nn.Module:
    """Section 5.2: four 3x3 convolutions, 2x2 pooling, dropout 0.25 after the 2nd and the 4th, FC 512.

    Ours, after ``cifar10_cnn``: 32-32-pool-64-64-pool channels, the first of each pair padded, ReLU; and
    standardised colours. ``channels`` is a share of those of the convolutions, which take nearly all the
    time; the FC layer stays whole.
    """
    a, b = round(32 * channels), round(64 * channels)
    return nn.Sequential(
        Standardised(),
        nn.Conv2d(3, a, 3, padding=1), nn.ReLU(), nn.Conv2d(a, a, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(b * 6 * 6, 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


def fashion_cnn(classes: int, *, channels: float = 1.0) -> nn.Module:
    """Section 5.2: two 3x3 convolutions, 2x2 pooling after the 2nd, FC 128.

    Ours, after ``mnist_cnn``: 32 and 64 channels, no padding, ReLU. ``channels`` is a share of those.
    """
    a, b = round(32 * channels), round(64 * channels)
    return nn.Sequential(
        nn.Conv2d(1, a, 3), nn.ReLU(), nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(b * 12 * 12, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


def digits_cnn(classes: int) -> nn.Module:
    """Ours: a small CNN for scikit-learn's 8x8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, classes),
    )  # fmt: skip


def augmented_digits_cnn(classes: int) -> nn.Module:
    """Ours: two 3x3 convolutions, for digits that were enlarged to 16x16."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


def mlp(features: int, classes: int, *, hidden: int = 128) -> nn.Module:
    """Ours: two hidden layers with ReLU, for tables."""
    return nn.Sequential(
        nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


class ReluLSTM(nn.Module):
    """An LSTM whose gates are ReLUs: Keras' ``recurrent_activation="relu"``. Returns the last state.

    The gates i, f, o are relu(.) instead of sigmoid(.); the cell keeps tanh. The forget bias starts at
    one, as in Keras. torch has no such layer, so time is a loop here.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        nn.init.xavier_uniform_(self.inputs.weight)
        nn.init.zeros_(self.inputs.bias)
        nn.init.ones_(self.inputs.bias[hidden : 2 * hidden])
        for gate in self.recurrent.weight.chunk(4):
            nn.init.orthogonal_(gate)

    def forward(self, x: Tensor) -> Tensor:
        """(K, T, inputs) -> (K, hidden)."""
        hidden = self.recurrent.in_features
        h = c = x.new_zeros(len(x), hidden)
        for projected in self.inputs(x).unbind(1):
            i, f, o, g = (projected + self.recurrent(h)).chunk(4, dim=1)
            c = F.relu(f) * c + F.relu(i) * g.tanh()
            h = F.relu(o) * c.tanh()
        return h


class PixelRNN(nn.Module):
    """Section 5.3: the pixels of an image as a sequence, LSTM 100 with ReLU recurrent activation, dense.

    ``step`` pixels at a time: 1 is the paper's, 28 a row of MNIST.
    """

    def __init__(self, classes: int, *, step: int = 1, hidden: int = 100) -> None:
        super().__init__()
        self.step = step
        self.lstm = ReluLSTM(step, hidden)
        self.dense = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(K, 1, H, W) -> (K, classes)."""
        logits: Tensor = self.dense(self.lstm(x.reshape(len(x), -1, self.step)))
        return logits


class RCNN(nn.Module):
    """Section 5.4: convolution of width 5, max pooling of 4, LSTM, one dense output.

    Ours, after ``imdb_cnn_lstm``: embedding 128, dropout 0.25, 64 filters, LSTM 70.
    """

    def __init__(self, vocabulary: int, *, width: float = 1.0) -> None:
        super().__init__()
        embedding, filters, hidden = round(128 * width), round(64 * width), round(70 * width)
        self.embedding = nn.Embedding(vocabulary, embedding)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)  # Keras' own
        self.dropout = nn.Dropout(0.25)
        self.convolution = nn.Conv2d(embedding, filters, (1, 5))  # a text is an image of height one
        self.lstm = nn.LSTM(filters, hidden, batch_first=True)
        self.dense = nn.Linear(hidden, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(K, T) token numbers -> (K,) logits."""
        x = self.dropout(self.embedding(tokens))
        # (K, C, 1, T) with its channels last, as the embedding has laid them: torch convolves such images on
        # a CPU in two thirds of the time that it takes for a Conv1d.
        x = x.transpose(1, 2).unsqueeze(2)
        x = F.max_pool2d(F.relu(self.convolution(x)), (1, 4)).squeeze(2).transpose(1, 2)
        states, _ = self.lstm(x)
        logits: Tensor = self.dense(states[:, -1]).squeeze(1)
        return logits


def _channels_last(model: nn.Module) -> nn.Module:
    """The same net with its channels last in memory: so torch convolves faster on a CPU, for all methods."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def build(
    name: str, *, classes: int, seed: int, tokens: int = 0, features: int = 0, **options: float
) -> nn.Module:
    """A network by its name; the same parameters for the same seed.

    ``tokens`` is a text's vocabulary, ``features`` a table's columns.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name == "cifar-cnn":
            return _channels_last(cifar_cnn(classes, **options))
        if name == "fashion-cnn":
            return _channels_last(fashion_cnn(classes, **options))
        if name == "pixel-rnn":
            return PixelRNN(classes, **{key: int(value) for key, value in options.items()})
        if name == "rcnn":
            return RCNN(tokens, **options)
        if name == "transformer":
            return Transformer(tokens, **{key: int(value) for key, value in options.items()})
        if name == "language-model":
            return LanguageModel(**{key: int(value) for key, value in options.items()})
        if name == "mlp":
            return mlp(features, classes, **{key: int(value) for key, value in options.items()})
        if name == "digits-cnn":
            return _channels_last(digits_cnn(classes))
        if name == "augmented-digits-cnn":
            return _channels_last(augmented_digits_cnn(classes))
    raise ValueError(f"model {name!r} is unknown")
