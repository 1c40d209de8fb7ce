"""Lightning on scikit-learn's handwritten digits. Some seconds.

What a plain script does not have is marked: five lines more, and four that are different.

pip install 'adambs[lightning]' scikit-learn
python examples/with_lightning.py
"""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import adambs  # added
from adambs.integrations.lightning import BanditCallback  # added

torch.set_num_threads(1)
x, y = load_digits(return_X_y=True)
x, y = torch.from_numpy(x).float() / 16, torch.from_numpy(y)
train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


class Net(L.LightningModule):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        """Return the weighted loss, and a score for each example."""
        x, y, drawn = batch  # changed
        logits = self.net(x)
        scores = adambs.scores.cross_entropy(logits, y)  # added
        loss = drawn.mean(F.cross_entropy(logits, y, reduction="none"), scores)  # changed
        return {"loss": loss, "scores": scores}  # changed

    def validation_step(self, batch, batch_idx):
        """As ever."""
        x, y = batch
        self.log("error", (self.net(x).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        """As ever."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


L.seed_everything(0)
bandit = BanditCallback(adambs.BanditSampler(len(train), batch_size=64, seed=0))  # added
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=10,
    callbacks=[bandit],  # added
    enable_checkpointing=False,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Net(), bandit.loader(train), DataLoader(test, batch_size=297))  # changed
seen = bandit.sampler.diagnostics()
print(f"test error {trainer.callback_metrics['error']:.3f}, variance reduction {seen.variance_reduction:.2f}")
