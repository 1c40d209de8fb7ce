"""Lightning against the plain loop: the same parameters from the same draws, and resumes bit for bit."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import CAP, capped_alike, capped_loop, learned, optional, same, small_data, small_net
from torch.utils.data import DataLoader, TensorDataset

import adambs

L = optional("lightning.pytorch")
from adambs.integrations import lightning as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


class Net(L.LightningModule):
    def __init__(self, capped=False, dropout=0.0):
        super().__init__()
        self.net, self.capped, self.dropout = small_net(), capped, dropout

    def training_step(self, batch, batch_idx):
        x, y, drawn = batch
        logits = self.net(F.dropout(x, self.dropout))
        scores = adambs.scores.cross_entropy(logits, y)
        loss = drawn.mean(F.cross_entropy(logits, y, reduction="none"), scores if self.capped else None)
        return {"loss": loss, "scores": scores}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


def a_sampler(**options):
    return adambs.BanditSampler(60, 10, seed=3, rule=adambs.Tracking(uniform=0.1), **options)


def data():
    return TensorDataset(*small_data())


def a_trainer(folder, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False, "max_epochs": 3, **quiet, **options}
    return L.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks), **options)


def plain_loop(epochs, accumulate=1, clip=None, half=False):
    sampler, net = a_sampler(), small_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = adambs.BanditLoader(data(), sampler, carry=True)
    for _ in range(epochs):
        for b, (x, y, drawn) in enumerate(loader):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = net(x)
                loss = drawn.mean(F.cross_entropy(logits, y, reduction="none"))
            (loss / accumulate).backward()
            if (b + 1) % accumulate == 0:
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            sampler.update(drawn.number, adambs.scores.cross_entropy(logits, y))
        schedule.step()
    return net, sampler


@pytest.mark.parametrize(
    ("accumulate", "clip", "precision"),
    [(1, None, "32-true"), (3, 0.5, "32-true"), (1, None, "bf16-mixed")],
    ids=["plain", "accumulated, clipped", "bf16"],
)
def test_the_parameters_are_those_of_the_plain_loop(tmp_path, accumulate, clip, precision):
    sampler, model = a_sampler(), Net()
    bandit = ours.BanditCallback(sampler)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "precision": precision}
    trainer = a_trainer(tmp_path, bandit, **options)
    trainer.fit(model, bandit.loader(data()))
    net, expected = plain_loop(3, accumulate, clip, half=precision == "bf16-mixed")
    assert same(model.net.state_dict(), net.state_dict())
    assert same(sampler.state_dict()["rule"], expected.state_dict()["rule"])
    assert learned(sampler)
    assert trainer.global_step == 18 // accumulate


def test_the_cap_lowers_weights_as_in_the_plain_loop(tmp_path):
    class Constant(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    bandit, model = ours.BanditCallback(a_sampler(cap=CAP)), Constant(capped=True)
    a_trainer(tmp_path, bandit).fit(model, bandit.loader(data()))
    net, expected = small_net(), a_sampler(cap=CAP)
    capped_loop(net, expected, torch.optim.Adam(net.parameters(), lr=0.01))
    for found, wanted in zip(model.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert capped_alike(bandit.sampler, expected)
    uncapped, plain = ours.BanditCallback(a_sampler(cap=CAP)), Constant()  # mean is not given the scores
    a_trainer(tmp_path, uncapped).fit(plain, uncapped.loader(data()))
    assert uncapped.sampler.diagnostics().capped_weights == 0
    assert not torch.allclose(plain.net[0].weight, net[0].weight, rtol=1e-3)


def test_bf16_and_diagnostics_in_a_logger(tmp_path):
    logged = []

    class Logger(L.loggers.logger.DummyLogger):
        def log_metrics(self, metrics, step=None):
            logged.append(metrics)

    bandit = ours.BanditCallback(a_sampler(), log_every=2)
    options = {"precision": "bf16-mixed", "logger": Logger(), "log_every_n_steps": 1}
    a_trainer(tmp_path, bandit, **options).fit(Net(), bandit.loader(data()))
    seen = [m for m in logged if "bandit/variance_reduction" in m]
    assert len(seen) >= 9
    assert seen[-1]["bandit/draws"] == 18
    assert learned(bandit.sampler)


@pytest.mark.parametrize(
    ("stop", "accumulate", "workers"),
    [(8, 1, 0), (6, 1, 0), (3, 4, 0), (8, 1, 1)],
    ids=["in the middle of an epoch", "after an epoch's last batch", "accumulated", "with a worker"],
)
def test_a_run_goes_on_bit_for_bit(tmp_path, stop, accumulate, workers):
    """Saved after a batch, in mid-epoch or at an epoch's end, and loaded in new objects. With dropout."""
    options = {"enable_checkpointing": True, "accumulate_grad_batches": accumulate}
    bandit, model = ours.BanditCallback(a_sampler()), Net(dropout=0.2)
    saving = L.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    a_trainer(tmp_path, bandit, saving, **options).fit(model, bandit.loader(data(), num_workers=workers))
    path = tmp_path / f"step={stop}.ckpt"
    assert len(torch.load(path, weights_only=True)["callbacks"]) == 2  # and it holds no code
    again, other = ours.BanditCallback(a_sampler()), Net(dropout=0.2)
    trainer = a_trainer(tmp_path, again, L.callbacks.ModelCheckpoint(tmp_path / "2"), **options)
    trainer.fit(other, again.loader(data(), num_workers=workers), ckpt_path=str(path))
    assert trainer.global_step == (18 if accumulate == 1 else 6)  # an epoch's last batch ends a group
    assert same(model.state_dict(), other.state_dict())
    assert same(bandit.state_dict(), again.state_dict())


@pytest.mark.parametrize(("limit", "workers"), [(4, 0), (0.7, 0), (4, 1)])
@pytest.mark.parametrize("stop", [4, 5, 8])
def test_a_run_of_shorter_epochs_goes_on_bit_for_bit(tmp_path, stop, limit, workers):
    """Four of six batches: the trainer's epoch ends before the loader's, which may have fetched more."""
    options = {"enable_checkpointing": True, "limit_train_batches": limit}
    bandit, model = ours.BanditCallback(a_sampler()), Net()
    saving = L.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    a_trainer(tmp_path, bandit, saving, **options).fit(model, bandit.loader(data(), num_workers=workers))
    again, other = ours.BanditCallback(a_sampler()), Net()
    trainer = a_trainer(tmp_path, again, L.callbacks.ModelCheckpoint(tmp_path / "2"), **options)
    loader = again.loader(data(), num_workers=workers)
    trainer.fit(other, loader, ckpt_path=str(tmp_path / f"step={stop}.ckpt"))
    assert trainer.global_step == 12
    assert same(model.state_dict(), other.state_dict())
    assert same(bandit.state_dict()["sampler"], again.state_dict()["sampler"])


@pytest.mark.parametrize("way", ["mean", "by hand", "unweighted"])
def test_losses_without_weights_are_told_once(tmp_path, way):
    class Maybe(Net):
        def training_step(self, batch, batch_idx):
            x, y, drawn = batch
            logits = self.net(x)
            losses = F.cross_entropy(logits, y, reduction="none")
            if way == "by hand":
                losses = losses * drawn[2]
            loss = drawn.mean(losses) if way == "mean" else losses.mean()
            return {"loss": loss, "scores": adambs.scores.cross_entropy(logits, y)}

    bandit = ours.BanditCallback(a_sampler())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a_trainer(tmp_path, bandit, max_epochs=6).fit(Maybe(), bandit.loader(data()))
    told = [w for w in caught if "nobody asked for their weights" in str(w.message)]
    assert len(told) == (way == "unweighted")


def fit(model, loader, bandit, tmp_path, **options):
    a_trainer(tmp_path, bandit, max_epochs=1, **options).fit(model, loader)


def test_what_is_wrong_is_told(tmp_path):
    sampler = a_sampler()
    bandit = ours.BanditCallback(sampler)
    plain = DataLoader(data(), 10)
    with pytest.raises(TypeError, match="the training loader is a DataLoader"):
        fit(Net(), plain, bandit, tmp_path)
    with pytest.raises(TypeError, match="second training loader"):
        fit(Net(), [bandit.loader(data()), bandit.loader(data())], bandit, tmp_path)
    with pytest.raises(ValueError, match="dataset has 50 examples but"):
        bandit.loader(TensorDataset(*small_data(50)))
    with pytest.raises(TypeError, match="sampler must be a BanditSampler"):
        ours.BanditCallback(plain)

    class Reduced(Net):
        def training_step(self, batch, batch_idx):
            x, y, drawn = batch
            return drawn.mean(F.cross_entropy(self.net(x), y))

    with pytest.raises(ValueError, match="it looks reduced already"):
        fit(Reduced(), bandit.loader(data()), bandit, tmp_path)

    class Scoreless(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"]

    with pytest.raises(ValueError, match="training_step must return"):
        fit(Scoreless(), bandit.loader(data()), bandit, tmp_path)

    class Dropping(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[:2]

        def training_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            losses = F.cross_entropy(logits, batch[1], reduction="none")
            return {"loss": losses.mean(), "scores": losses}

    with pytest.raises(ValueError, match="carries no draw"):
        fit(Dropping(), bandit.loader(data()), bandit, tmp_path)

    class Validating(Net):
        def validation_step(self, batch, batch_idx):
            pass

        def val_dataloader(self):
            return bandit.loader(data())

    with pytest.raises(TypeError, match="an evaluation loader is a bandit's"):
        fit(Validating(), bandit.loader(data()), bandit, tmp_path)

    class Evaluating(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

        test_step = predict_step = validation_step

    trainer, several = a_trainer(tmp_path, bandit), {"one": plain, "two": bandit.loader(data())}
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        for loaders in (bandit.loader(data()), [plain, bandit.loader(data())], several):
            with pytest.raises(TypeError, match="an evaluation loader is a bandit's"):
                evaluate(Evaluating(), loaders)
