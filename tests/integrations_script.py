"""Trains a small net with each adapter whose library is installed, in one process or under torchrun.

Prints nothing; writes the parameters and p of each case to ``<folder>/<processes>-<rank>.pt``, and whether a
run that goes on from a checkpoint in the middle of an epoch, in new objects, ends with the same bits.
"""

import importlib.util
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import CAP, small_data, small_net
from torch.utils.data import TensorDataset

import adambs

N, K = 60, 10


def data():
    return TensorDataset(*small_data(N))


def a_sampler():
    return adambs.BanditSampler(N, K, seed=3, rule=adambs.Tracking(uniform=0.1), cap=CAP)


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def result(whole, resumed):
    """What both runs ended with, pairs of parameters and samplers; all but ``resumed`` is of the first."""
    (flat, sampler), (again, other) = [
        (torch.cat([p.detach().reshape(-1) for p in parameters]), sampler)
        for parameters, sampler in (whole, resumed)
    ]
    return {
        "parameters": flat.clone(),
        "p": sampler.probabilities(),
        "draws": sampler.diagnostics().draws,
        "capped": sampler.diagnostics().capped_weights,
        "resumed": torch.equal(flat, again) and torch.equal(sampler.probabilities(), other.probabilities()),
    }


def with_lightning(folder):
    import lightning.pytorch as L

    from adambs.integrations.lightning import BanditCallback

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def training_step(self, batch, batch_idx):
            x, y, drawn = batch
            logits = self.net(x)
            scores = adambs.scores.cross_entropy(logits, y)
            return {
                "loss": drawn.mean(F.cross_entropy(logits, y, reduction="none"), scores),
                "scores": scores,
            }

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trained(ckpt_path=None):
        bandit, model = BanditCallback(a_sampler()), Net()
        saving = L.callbacks.ModelCheckpoint(
            folder, filename=f"{processes()}-{{step}}", every_n_train_steps=8, save_top_k=-1
        )
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            accelerator="cpu", devices=processes(), strategy="ddp" if processes() > 1 else "auto",
            max_epochs=3, callbacks=[bandit, saving], default_root_dir=folder, **quiet,
        )  # fmt: skip
        trainer.fit(model, bandit.loader(data()), ckpt_path=ckpt_path)
        return model.net.parameters(), bandit.sampler

    return result(trained(), trained(folder / f"{processes()}-step=8.ckpt"))


def with_transformers(folder):
    import transformers

    from adambs.integrations.transformers import BanditTrainer

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return {"logits": self.net(x)}

    args = transformers.TrainingArguments(
        str(folder / f"hf-{processes()}"), per_device_train_batch_size=K // processes(), num_train_epochs=3,
        learning_rate=0.1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", report_to=[],
        save_strategy="steps", save_steps=8, use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        logging_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    x, y = small_data(N)
    train = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]

    def trained(checkpoint=None):
        trainer = BanditTrainer(Net(), args, train_dataset=train, sampler=a_sampler())
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.parameters(), trainer.sampler

    return result(trained(), trained(str(folder / f"hf-{processes()}" / "checkpoint-8")))


def with_accelerate(folder):
    from accelerate import Accelerator

    from adambs.integrations.accelerate import prepare

    saved = str(folder / f"accelerate-{processes()}")

    def trained(checkpoint=None):
        accelerator, net, sampler = Accelerator(cpu=True), small_net(), a_sampler()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = prepare(accelerator, data(), sampler)
        if checkpoint is not None:
            accelerator.load_state(checkpoint)
        while sampler.epochs.current.number < 3:
            for x, y, drawn in loader:
                with accelerator.accumulate(model):
                    logits = model(x)
                    scores = adambs.scores.cross_entropy(logits, y)
                    accelerator.backward(drawn.mean(F.cross_entropy(logits, y, reduction="none"), scores))
                    sampler.update(drawn.number, scores)
                    optimizer.step()
                    optimizer.zero_grad()
                if sampler.diagnostics().draws == 8:
                    accelerator.save_state(saved)
        return net.parameters(), sampler

    return result(trained(), trained(saved))


def with_keras(folder):
    import keras

    from adambs.integrations.keras import BanditBackup, BanditData, BanditModel

    def trained(*backup):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
        net, sampler = keras.Sequential(layers), a_sampler()
        model = BanditModel(net.inputs, net.outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
        batches = BanditData(data(), sampler)
        callbacks = [BanditBackup(path, batches, every) for path, every in backup]
        model.fit(batches, epochs=3, verbose=0, callbacks=callbacks)
        return [v.value for v in model.trainable_weights], sampler

    path = folder / f"keras-{processes()}.pt"
    return result(trained((path, 10)), trained((path, 100)))  # the second begins with what the first saved


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, start):
        self.start = start

    def __iter__(self):
        return iter(range(self.start, self.start + 500))


def with_streams(folder):
    """Each process reads its own part of the sources; p is one. One process reads in another order."""
    return streamed(workers=0)


def with_workers(folder):
    """The same, and two workers of each process part what it reads."""
    return streamed(workers=2)


def streamed(workers):
    def a_stream():
        sources = [Numbers(0), Numbers(1000)]
        patience = {"timeout": 100} if workers else {}  # a worker that hangs is told of
        return adambs.BanditStream(sources, batch_size=K, seed=2, num_workers=workers, **patience)

    def read(stream, until):
        values = []
        for batch, draw in stream:
            values += batch.tolist()
            stream.update(draw, 1.0 + 3.0 * draw.indices)
            if stream.progress.delivered == until:
                return values

    stream, again = a_stream(), a_stream()
    values = read(stream, 7)
    again.load_state_dict(stream.state_dict())
    rest = read(stream, 18)
    p = torch.tensor(list(stream.probabilities().values()))
    resumed = read(again, 18) == rest and again.probabilities() == stream.probabilities()
    values += rest
    return {"parameters": torch.zeros(1), "p": p, "draws": 18, "values": values, "resumed": resumed}


STREAMS = {"streams": with_streams, "streams, workers": with_workers}
CASES = STREAMS | {
    "lightning": with_lightning,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "keras": with_keras,
}


def run(folder):
    """The results of the cases that are installed here."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        for name, case in CASES.items():
            if name in STREAMS or importlib.util.find_spec(name) is not None:
                found[name] = case(folder)
    return found


if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "torch"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    where = Path(sys.argv[1])
    torch.save(run(where), where / f"{dist.get_world_size()}-{dist.get_rank()}.pt")
    dist.destroy_process_group()
