"""Data sets that need no files: scikit-learn's digits, its photograph, and heavy tails made here.

The two that are fitted and not classified have float32 targets of shape (N, outputs), standardised so that
their mean square over the training set is 1: a mean squared error is then the share that is not explained.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from adambs.lab.datasets.data import Data
from adambs.lab.datasets.images import Split, read_digits

# How many altered copies of each digit there are, and their width in pixels.
_COPIES, _WIDTH = 4, 16
# Every so many pixels of the photograph, along both sides, and how finely its place is told to a network.
_EVERY, _WAVES, _FINEST = 4, 64, 4.0


def built_in(name: str, classes: tuple[str, ...]) -> Data:
    """One of them, by its name; always the same."""
    if name == "heavy-tailed":
        return _data(name, *heavy_tailed(), classes)
    if name == "photograph":
        return _data(name, *photograph(), classes)
    train, test = read_digits()
    return _labelled(name, augmented(train) if name == "augmented-digits" else train, test, classes)


def heavy_tailed(
    n: int = 20_000, d: int = 4, sigma: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Generated: y = s f(x), where the sizes s of the examples are log-normal, exp(sigma times a Gaussian).

    x is Gaussian, f a random network of 32 tanh units. The inputs are x and log s. A few large examples then
    have most of the gradient, as the paper's theory wants it. A fifth of n more are the test set.
    """
    chooser = np.random.default_rng(seed)
    total = n + n // 5
    x = chooser.standard_normal((total, d))
    logarithm = sigma * chooser.standard_normal((total, 1))
    inner = chooser.standard_normal((d, 32)) / math.sqrt(d)
    outer = chooser.standard_normal((32, 1)) / math.sqrt(32)
    y = np.exp(logarithm) * (np.tanh(2 * x @ inner) @ outer)
    y /= np.sqrt(np.square(y[:n]).mean())
    inputs, targets = (torch.from_numpy(each).float() for each in (np.hstack([x, logarithm]), y))
    return inputs[:n], targets[:n], inputs[n:], targets[n:]


def photograph(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's photograph of a temple: from a pixel's place to its colour.

    A place is told as sines and cosines of random waves across the picture. Every fifth pixel is for testing.
    """
    from sklearn.datasets import load_sample_image

    colours = torch.from_numpy(load_sample_image("china.jpg")[::_EVERY, ::_EVERY] / 255).float()
    height, width, _ = colours.shape
    sides = torch.linspace(-1, 1, height), torch.linspace(-1, 1, width)
    places = torch.cartesian_prod(*sides)
    waves = np.random.default_rng(seed).standard_normal((2, _WAVES)) * _FINEST
    angles = places @ torch.from_numpy(waves).float()
    inputs, targets = torch.cat([angles.sin(), angles.cos()], 1), colours.reshape(-1, 3)
    test = torch.arange(len(targets)) % 5 == 0
    targets = targets - targets[~test].mean(0)
    targets = targets / targets[~test].square().sum(1).mean().sqrt()
    return inputs[~test], targets[~test], inputs[test], targets[test]


def augmented(split: Split, seed: int = 0) -> Split:
    """Copies of images, turned by up to 20 degrees, scaled by up to a fifth and shifted by up to a tenth."""
    chooser = np.random.default_rng(seed)
    labels = np.tile(split.labels, _COPIES)
    n = len(labels)
    angle, size = chooser.uniform(-0.35, 0.35, n), chooser.uniform(0.8, 1.2, n)
    maps = np.empty((n, 2, 3))
    maps[:, 0, 0] = maps[:, 1, 1] = np.cos(angle) * size
    maps[:, 1, 0] = np.sin(angle) * size
    maps[:, 0, 1] = -maps[:, 1, 0]
    maps[:, :, 2] = chooser.uniform(-0.2, 0.2, (n, 2))
    images = torch.from_numpy(split.inputs).repeat(_COPIES, 1, 1, 1)
    return Split(_resampled(images, torch.from_numpy(maps).float()), labels)


def _resampled(images: Tensor, maps: Tensor) -> NDArray[np.float32]:
    grid = F.affine_grid(maps, [len(images), 1, _WIDTH, _WIDTH], align_corners=False)
    pixels: NDArray[np.float32] = F.grid_sample(images, grid, align_corners=False).numpy()
    return pixels


def _enlarged(split: Split) -> Split:
    """As large as the altered copies, and otherwise as they are."""
    images = torch.from_numpy(split.inputs)
    return Split(_resampled(images, torch.eye(2, 3).expand(len(images), 2, 3)), split.labels)


def _labelled(name: str, train: Split, test: Split, classes: tuple[str, ...]) -> Data:
    if train.inputs.shape[2:] != test.inputs.shape[2:]:
        test = _enlarged(test)
    x, y, test_x, test_y = map(torch.from_numpy, (train.inputs, train.labels, test.inputs, test.labels))
    return _data(name, x, y, test_x, test_y, classes)


def _data(name: str, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, classes: tuple[str, ...]) -> Data:
    return Data(
        name=name,
        train=TensorDataset(x, y),
        test=TensorDataset(test_x, test_y),
        classes=classes,
        rows=torch.arange(len(y)),
        true_labels=y,
    )
