"""Keras on torch against a plain torch loop: draws matched by number, resumed in the middle of an epoch."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import CAP, capped_alike, capped_loop, learned, optional, same, small_data

import adambs

keras = optional("keras")
if keras.backend.backend() != "torch":
    pytest.skip("keras runs on another backend than torch", allow_module_level=True)
from adambs.integrations import keras as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Keras' own


def a_model(loss=None, optimizer="sgd", probabilities=False, kind=None, dropout=0.0):
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(3, activation="softmax" if probabilities else None),
        ]
    )
    model = (kind or ours.BanditModel)(net.inputs, net.outputs)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=not probabilities)
    optimizer = keras.optimizers.SGD(0.1) if optimizer == "sgd" else keras.optimizers.Adam(0.01)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def a_sampler(**options):
    return adambs.BanditSampler(60, 10, seed=3, rule=adambs.Tracking(uniform=0.1), **options)


def arrays():
    x, y = small_data()
    return x.numpy(), y.numpy()


def weights(model):
    return [v.value.detach().clone() for v in model.variables]


@pytest.mark.parametrize("probabilities", [False, True])
def test_the_parameters_are_those_of_the_plain_loop(probabilities):
    model, sampler = a_model(probabilities=probabilities), a_sampler(cap=math.inf)
    model.fit(ours.BanditData(arrays(), sampler), epochs=3, verbose=0)

    plain, expected = a_model(), a_sampler()
    parameters = [v.value for v in plain.trainable_weights]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    dataset = torch.utils.data.TensorDataset(*small_data())
    for _ in range(3):
        for (x, y), draw in adambs.BanditLoader(dataset, expected):
            logits = plain(x)
            optimizer.zero_grad()
            draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
            optimizer.step()
            expected.update(draw, adambs.scores.cross_entropy(logits, y))
    for found, wanted in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sampler.probabilities(), expected.probabilities(), rtol=1e-3, atol=0)
    assert sampler.diagnostics().draws == 18  # what Keras looked at before training was trained on
    assert learned(sampler)


def test_the_cap_lowers_weights_as_in_the_plain_loop():
    model, sampler = a_model(), a_sampler(cap=CAP)
    model.fit(ours.BanditData(arrays(), sampler), epochs=3, verbose=0)
    plain, expected = a_model(), a_sampler(cap=CAP)
    capped_loop(plain, expected, torch.optim.SGD([v.value for v in plain.trainable_weights], lr=0.1))
    for found, wanted in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert capped_alike(sampler, expected)
    uncapped = a_model()
    uncapped.fit(ours.BanditData(arrays(), a_sampler(cap=math.inf)), epochs=3, verbose=0)
    assert not torch.allclose(weights(uncapped)[0], weights(plain)[0], rtol=1e-3)


@pytest.mark.parametrize("stop", [8, 6], ids=["in the middle of an epoch", "after an epoch's last batch"])
def test_a_run_goes_on_bit_for_bit(tmp_path, stop):
    class Stop(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == stop:
                raise KeyboardInterrupt

    def run(*callbacks):
        model, data = a_model(optimizer="adam", dropout=0.2), ours.BanditData(arrays(), a_sampler())
        kept = ours.BanditBackup(tmp_path / "kept.pt", data, every=2) if callbacks or stop == 0 else None
        return model, data, [c for c in (kept, *callbacks) if c is not None]

    whole, data, _ = run()
    whole.fit(data, epochs=3, verbose=0)
    killed, killed_data, callbacks = run(Stop())
    with pytest.raises(KeyboardInterrupt):
        killed.fit(killed_data, epochs=3, verbose=0, callbacks=callbacks)
    again, other, callbacks = run(ours.BanditLogs(a_sampler()))
    history = again.fit(other, epochs=3, verbose=0, callbacks=callbacks)
    assert history.epoch == [1, 2]
    assert other.bandit.diagnostics().draws == 18
    assert all(map(torch.equal, weights(whole), weights(again)))
    assert same(data.bandit.state_dict()["rule"], other.bandit.state_dict()["rule"])


LOSSES = [
    (keras.losses.SparseCategoricalCrossentropy(from_logits=True), "classes"),
    (keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), "shares"),
    (keras.losses.BinaryCrossentropy(from_logits=True), "shares"),
    (keras.losses.MeanSquaredError(), "shares"),
    (keras.losses.Huber(), "shares"),
]


@pytest.mark.parametrize(("loss", "kind"), LOSSES, ids=lambda v: getattr(v, "name", v))
def test_scores_are_gradient_norms_at_the_output(loss, kind):
    """Up to a factor that is the same for all examples, which p does not see."""
    torch.manual_seed(0)
    model = a_model(loss)
    z = torch.randn(5, 3, requires_grad=True)
    y = torch.randint(3, (5,)) if kind == "classes" else torch.rand(5, 3).softmax(1)
    found = model.scores(y, z)
    norms = torch.stack(
        [torch.autograd.grad(loss(y[k : k + 1], z[k : k + 1]), z)[0].norm() for k in range(5)]
    )
    ratio = found / norms
    torch.testing.assert_close(ratio, ratio[:1].expand(5), rtol=1e-4, atol=0)


def test_diagnostics_in_the_history_and_after_batches():
    seen = []

    class Logger(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs.get("bandit/updates"))

    model, sampler = a_model(), a_sampler()
    callbacks = [ours.BanditLogs(sampler, log_every=2), Logger()]
    history = model.fit(ours.BanditData(arrays(), sampler), epochs=2, verbose=0, callbacks=callbacks)
    assert history.history["bandit/draws"] == [6, 12]
    assert "accuracy" in history.history
    assert seen == [None, 2, None, 4, None, 6, None, 8, None, 10, None, 12]


def test_draws_of_any_number_are_matched():
    """The number travels as a float64, beyond what a float32 could tell apart."""
    model, sampler = a_model(), a_sampler()
    sampler.awaited.following = 2**40
    model.fit(ours.BanditData(arrays(), sampler), epochs=1, verbose=0)
    assert sampler.diagnostics().updates == 6
    assert sampler.awaited.following == 2**40 + 6


def test_what_is_wrong_is_told():
    model, data = a_model(), ours.BanditData(arrays(), a_sampler())
    with pytest.raises(TypeError, match="fit wants a BanditData, not ndarray"):
        model.fit(*arrays(), verbose=0)
    with pytest.raises(TypeError, match="an evaluation loader is a bandit's"):
        model.fit(data, validation_data=data, verbose=0)
    for evaluate in (model.evaluate, model.predict):
        with pytest.raises(TypeError, match="an evaluation loader is a bandit's"):
            evaluate(data, verbose=0)
    with pytest.raises(TypeError, match="fit takes no class_weight"):
        model.fit(data, class_weight={0: 2.0}, verbose=0)
    with pytest.raises(TypeError, match="fit takes no steps_per_epoch"):  # named, or in its place
        model.fit(data, steps_per_epoch=4, verbose=0)
    with pytest.raises(TypeError, match="fit takes no steps_per_epoch"):
        model.fit(data, None, None, 1, 0, None, 0.0, None, False, None, None, 0, 4)
    with pytest.raises(ValueError, match="dataset has 60 examples but"):
        ours.BanditData(arrays(), adambs.BanditSampler(61, 10))
    summed = a_model(keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))
    with pytest.raises(ValueError, match="the loss has reduction 'sum'"):
        summed.fit(data, verbose=0)
    reduced = a_model(lambda y, z: keras.ops.mean(keras.ops.square(z - keras.ops.reshape(y, (-1, 1)))))
    with pytest.raises(ValueError, match=r"returned shape \(\) for 10 examples: it looks reduced already"):
        reduced.fit(data, verbose=0)

    class Dropping(ours.BanditData):
        def __iter__(self):
            for x, y, _ in super().__iter__():
                yield x, y

    with pytest.raises(ValueError, match="carries no draw"):
        a_model().fit(Dropping(arrays(), a_sampler()), verbose=0)
    assert model.evaluate(*arrays(), verbose=0, return_dict=True)["loss"] > 0


@pytest.mark.parametrize("size", [5, 10])  # of five examples the five numbers of a draw could be weights
def test_a_plain_model_is_told_to_be_a_bandits(size):
    sampler = adambs.BanditSampler(60, size)
    plain, data = a_model(kind=keras.Model), ours.BanditData(arrays(), sampler)
    for use in (plain.fit, plain.evaluate, plain.predict):
        with pytest.raises(TypeError, match=r"Train with model = BanditModel\(net.inputs, net.outputs\)"):
            use(data, verbose=0)
    with pytest.raises(TypeError, match="Keras reads a BanditData outside of BanditModel"):
        plain.fit(*arrays(), validation_data=data, verbose=0)
    assert sampler.diagnostics().draws == 0
    x, y, drawn = next(iter(data))  # whoever looks may look
    assert len(x) == len(y) == len(drawn) == size
    a_model().fit(data, verbose=0)
    assert sampler.diagnostics().updates == 60 // size
    with pytest.raises(TypeError, match="outside of BanditModel"):
        plain.fit(data, verbose=0)
