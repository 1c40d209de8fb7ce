"""The paper's experiments, as data. Each value names its source; what the paper leaves open is ours."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from adambs.lab.errors import unknown

PAPER_METHODS = ("adam", "adam-impt", "adambs-exp3", "adambs-release")
SGD_METHODS = ("adam", "adambs-exp3", "sgd", "momentum", "adagrad", "rmsprop")


@dataclass(frozen=True)
class Experiment:
    """One row of the table: data, model and hyperparameters, with where they come from."""

    name: str
    title: str
    figure: str
    """Which figure of the paper it repeats."""
    dataset: str
    model: str
    loss: str
    batch_size: int
    lr: float
    epochs: float
    paper: str
    """Where the paper gives these values."""
    ours: str
    """What the paper leaves open, and what was chosen."""
    shows: str
    """What the paper says its figure shows."""
    quick: dict[str, Any]
    """What ``--scale quick`` changes."""
    quick_differs: str
    """The same in words, for the plot."""
    model_options: dict[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = PAPER_METHODS
    train_size: int | None = None
    test_size: int | None = None
    long_tail: float = 1.0
    flipped: float = 0.0
    """Share of the training labels that are replaced by another class."""
    schedule: str = ""
    """How the learning rate goes: constant, or ``"cosine"`` after a warm-up."""
    slices: int = 20
    """How often the losses are looked at."""

    def at(self, scale: str) -> "Experiment":
        """The experiment at ``"paper"`` or ``"quick"`` scale."""
        if scale not in ("paper", "quick"):
            raise ValueError(f"scale must be paper or quick, not {scale!r}")
        return replace(self, **self.quick) if scale == "quick" else self

    def settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on."""
        names = ("dataset", "model", "model_options", "loss", "batch_size", "lr", "epochs", "long_tail")
        settings = {name: asdict(self)[name] for name in names}
        extra = {name: getattr(self, name) for name in ("flipped", "schedule") if getattr(self, name)}
        return settings | extra


_CIFAR = {
    "model": "cifar-cnn",
    "loss": "softmax",
    "batch_size": 128,
    "lr": 1e-3,
    "epochs": 10,
    "paper": "Section 5.2: layers, dropout, FC 512, batch 128, lr 0.001, 10 epochs",
    "ours": "32-32-pool-64-64-pool channels and ReLU, after Keras' cifar10_cnn; standardised colours; "
    "no augmentation",
    "quick": {"model_options": {"channels": 0.25}, "slices": 12},
    "quick_differs": "a quarter of the channels",
}
_CIFAR10 = Experiment(
    name="cnn-cifar10",
    title="CNN on CIFAR-10",
    figure="Figures 2a and 6a",
    dataset="cifar10",
    shows="AdamBS is below the others within 1 or 2 epochs",
    **_CIFAR,  # type: ignore[arg-type]
)
_RNN = {
    "model": "pixel-rnn",
    "loss": "softmax",
    "batch_size": 32,
    "lr": 1e-6,
    "epochs": 200,
    "paper": "Section 5.3: LSTM 100, ReLU recurrent activation, batch 32, lr 1e-6, at most 200 epochs",
    "ours": "gates are ReLUs, as Keras' recurrent_activation; Keras' initialisation; pixels in [0, 1]",
    "shows": "AdamBS quickly reaches a lower loss than the others",
    "quick": {"model_options": {"step": 28}, "lr": 1e-3, "epochs": 2, "train_size": 20_000, "slices": 12},
    "quick_differs": "rows of 28 pixels instead of single pixels, lr 1e-3 instead of 1e-6, 2 epochs instead "
    "of 200, 20,000 training examples",
}
_IMDB = Experiment(
    name="rcnn-imdb",
    title="RCNN on IMDB",
    figure="Figures 4 and 7b",
    dataset="imdb",
    model="rcnn",
    loss="sigmoid",
    batch_size=30,
    lr=1e-3,
    epochs=10,
    paper="Section 5.4: convolution of width 5, pooling 4, LSTM, batch 30, lr 0.001, 10 epochs",
    ours="vocabulary 20,000, the last 100 words, embedding 128, dropout 0.25, 64 filters, LSTM 70, after "
    "Keras' imdb_cnn_lstm",
    shows="all methods converge to the same loss, AdamBS much sooner",
    quick={"model_options": {"width": 0.5}, "epochs": 3, "slices": 12},
    quick_differs="half the width, 3 epochs instead of 10",
)
_FASHION = Experiment(
    name="cnn-fashion",
    title="CNN on Fashion-MNIST",
    figure="Figures 2c and 6c",
    dataset="fashion-mnist",
    model="fashion-cnn",
    loss="softmax",
    batch_size=128,
    lr=1e-3,
    epochs=10,
    paper="Section 5.2: layers, FC 128, batch 128, lr 0.001, 10 epochs",
    ours="32 and 64 channels without padding and ReLU, after Keras' mnist_cnn; pixels scaled to [0, 1]",
    shows="AdamBS is worse at first, and below the others after about 300 seconds",
    quick={"model_options": {"channels": 0.25}, "slices": 12},
    quick_differs="a quarter of the channels",
)
_KDD = Experiment(
    name="kdd",
    title="MLP on KDD Cup 1999",
    figure="none; redundant, heavy-tailed data, which the paper's theory is about",
    dataset="kddcup99",
    model="mlp",
    loss="softmax",
    batch_size=256,
    lr=1e-3,
    epochs=10,
    paper="nothing: no experiment of the paper has such data; lr 0.001 and 10 epochs are those of its CNNs",
    ours="everything else: 444,021 connections of the 10 % file, 50,000 others as test set, two hidden "
    "layers of 128, batch 256",
    shows="no figure",
    quick={"epochs": 2.6, "slices": 30},
    quick_differs="2.6 epochs instead of 10",
    methods=("adam", "adambs-exp3", "adambs"),
    slices=40,
)
_TRANSFORMER = Experiment(
    name="transformer-imdb",
    title="Small transformer on IMDB, warm-up and cosine decay",
    figure="none; the Related Work section names learning rates that change as common practice",
    dataset="imdb",
    model="transformer",
    loss="sigmoid",
    batch_size=32,
    lr=1e-3,
    epochs=10,
    paper="nothing",
    ours="everything: two layers of width 64 with four heads, the last 100 words of a vocabulary of 20,000, "
    "dropout 0.1, 10 % of the steps warm-up, then a cosine to zero",
    shows="no figure",
    quick={
        "epochs": 4,
        "model_options": {"width": 32, "length": 50},
        "slices": 8,
        "train_size": 5_000,
        "test_size": 2_000,
    },
    quick_differs="half the width, the last 50 words instead of 100, 4 epochs instead of 10, 5,000 reviews "
    "to train on and 2,000 to test",
    methods=("adam", "adambs", "adambs-exp3", "infobatch"),
    schedule="cosine",
)
_LANGUAGE_MODEL = replace(
    _TRANSFORMER,
    name="lm-imdb",
    title="Small causal language model on IMDB",
    figure="none; most training is on text now",
    model="language-model",
    loss="next-word",
    ours="everything: two layers of width 64 with four heads, the last 50 words of each review, of the "
    "998 most frequent words and one for the others, dropout 0.1, 10 % of the steps warm-up, then a cosine "
    "to zero; an example's loss is the sum over its words divided by 50",
    quick={
        "epochs": 4,
        "model_options": {"width": 32, "vocabulary": 500},
        "slices": 8,
        "train_size": 5_000,
        "test_size": 2_000,
    },
    quick_differs="half the width, 500 words instead of 1,000, 4 epochs instead of 10, 5,000 reviews to "
    "train on and 2,000 to test",
)
_DIGITS = Experiment(
    name="digits",
    title="Small CNN on scikit-learn's digits",
    figure="none",
    dataset="digits",
    model="digits-cnn",
    loss="softmax",
    batch_size=32,
    lr=1e-3,
    epochs=20,
    paper="nothing: it is here because it needs no files",
    ours="everything",
    shows="nothing",
    quick={},
    quick_differs="",
    methods=("adam", "adam-impt", "adambs"),
)

# The panels of `adambs demo`: they need no files.
_BUILT_IN = {
    "figure": "none",
    "paper": "nothing: it is here because it needs no files",
    "ours": "everything",
    "shows": "nothing",
    "quick": {},
    "quick_differs": "",
    "methods": ("adam", "adambs-loop"),
    "slices": 12,
}
_DEMO = [
    Experiment(
        name="heavy-tailed",
        title="Heavy tails, generated",
        dataset="heavy-tailed",
        model="mlp",
        model_options={"hidden": 256},
        loss="squares",
        batch_size=128,
        lr=1e-3,
        epochs=6.4,
        **_BUILT_IN,  # type: ignore[arg-type]
    ),
    Experiment(
        name="photograph",
        title="A photograph, from place to colour",
        dataset="photograph",
        model="mlp",
        model_options={"hidden": 256},
        loss="squares",
        batch_size=256,
        lr=1e-3,
        epochs=30,
        **_BUILT_IN,  # type: ignore[arg-type]
    ),
    Experiment(
        name="balanced-digits",
        title="Balanced digits, passed over twice",
        dataset="augmented-digits",
        model="augmented-digits-cnn",
        loss="softmax",
        batch_size=64,
        lr=1e-3,
        epochs=2,
        **_BUILT_IN | {"slices": 6},  # type: ignore[arg-type]
    ),
]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in [
        _CIFAR10,
        replace(
            _CIFAR10,
            name="cnn-cifar100",
            title="CNN on CIFAR-100",
            figure="Figures 2b and 6b",
            dataset="cifar100",
        ),
        _FASHION,
        Experiment(
            name="rnn-mnist",
            title="RNN on MNIST",
            figure="Figure 3a",
            dataset="mnist",
            **_RNN,  # type: ignore[arg-type]
        ),
        Experiment(
            name="rnn-fashion",
            title="RNN on Fashion-MNIST",
            figure="Figures 3b and 7a",
            dataset="fashion-mnist",
            **_RNN,  # type: ignore[arg-type]
        ),
        _IMDB,
        replace(
            _CIFAR10,
            name="sgd-variants-cifar10",
            title="CNN on CIFAR-10, with the SGD family",
            figure="Figure 5a",
            methods=SGD_METHODS,
            shows="the basic SGD variants do worse than the Adam-based methods",
        ),
        replace(
            _IMDB,
            name="sgd-variants-imdb",
            title="RCNN on IMDB, with the SGD family",
            figure="Figure 5b",
            methods=SGD_METHODS,
            shows="the basic SGD variants do worse than the Adam-based methods",
        ),
        replace(
            _FASHION,
            name="imbalanced",
            title="CNN on Fashion-MNIST, long-tailed by 100",
            figure="none; the Broader Impact section claims the most for imbalanced data",
            long_tail=100.0,
            shows="no figure",
        ),
        replace(
            _FASHION,
            name="flipped",
            title="CNN on Fashion-MNIST, 20 % of the labels flipped",
            figure="none; what a method does with labels that are wrong",
            flipped=0.2,
            shows="no figure",
        ),
        replace(
            _FASHION,
            name="cnn-mnist",
            title="CNN on MNIST",
            figure="none; data on which nothing was tuned",
            dataset="mnist",
            shows="no figure",
        ),
        _KDD,
        _TRANSFORMER,
        _LANGUAGE_MODEL,
        _DIGITS,
        *_DEMO,
    ]
}


def find(name: str) -> Experiment:
    """The experiment of that name; an unknown one gets the nearest."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS, "adambs experiments")
    return EXPERIMENTS[name]
