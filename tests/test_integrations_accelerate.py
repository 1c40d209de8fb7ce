"""accelerate against the plain loop: accumulation to the end of an epoch, checkpoints in the middle."""

import pytest
import torch
import torch.nn.functional as F
from helpers import CAP, capped_alike, capped_loop, learned, optional, same, small_data, small_net
from torch.utils.data import TensorDataset

import adambs

accelerate = optional("accelerate")
from adambs.integrations import accelerate as ours  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate's own


def data():
    return TensorDataset(*small_data())


def a_sampler(**options):
    return adambs.BanditSampler(60, 10, seed=3, rule=adambs.Tracking(uniform=0.1), **options)


class Run:
    """A model, its optimizer and its loader, prepared, and the loop over one epoch."""

    def __init__(self, accumulate=4, capped=False, **options):
        self.capped = capped
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        net = small_net()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        self.net, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.sampler = a_sampler(**options)
        self.loader = ours.prepare(self.accelerator, data(), self.sampler)

    def epoch(self, batches=None):
        for b, (x, y, drawn) in enumerate(self.loader):
            with self.accelerator.accumulate(self.net):
                logits = self.net(x)
                scores = adambs.scores.cross_entropy(logits, y)
                losses = F.cross_entropy(logits, y, reduction="none")
                self.accelerator.backward(drawn.mean(losses, scores if self.capped else None))
                self.sampler.update(drawn.number, scores)
                self.optimizer.step()
                self.optimizer.zero_grad()
            yield b


def plain_loop(epochs, accumulate):
    sampler, net = a_sampler(), small_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loader = adambs.BanditLoader(data(), sampler, carry=True)
    for _ in range(epochs):
        for b, (x, y, drawn) in enumerate(loader):
            logits = net(x)
            (drawn.mean(F.cross_entropy(logits, y, reduction="none")) / accumulate).backward()
            sampler.update(drawn.number, adambs.scores.cross_entropy(logits, y))
            if (b + 1) % accumulate == 0 or b + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return net, sampler


def test_the_parameters_are_those_of_the_plain_loop():
    """Six batches in groups of four: the last two end the epoch."""
    run = Run()
    for _ in range(3):
        assert list(run.epoch()) == list(range(6))
    net, sampler = plain_loop(3, 4)
    assert same(run.net.state_dict(), net.state_dict())
    assert same(run.sampler.state_dict()["rule"], sampler.state_dict()["rule"])
    assert learned(run.sampler)


def test_the_cap_lowers_weights_as_in_the_plain_loop():
    run, uncapped = Run(accumulate=2, capped=True, cap=CAP), Run(accumulate=2, cap=CAP)
    for _ in range(3):
        list(run.epoch())
        list(uncapped.epoch())
    net, expected = small_net(), a_sampler(cap=CAP)
    capped_loop(net, expected, torch.optim.Adam(net.parameters(), lr=0.01), accumulate=2)
    for found, wanted in zip(run.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert capped_alike(run.sampler, expected)
    assert uncapped.sampler.diagnostics().capped_weights == 0
    assert not torch.allclose(uncapped.net[0].weight, net[0].weight, rtol=1e-3)


@pytest.mark.parametrize("stop", [3, 5], ids=["in the middle of an epoch", "after an epoch's last batch"])
def test_a_run_goes_on_bit_for_bit(tmp_path, stop):
    whole = Run(accumulate=1)
    for epoch in range(3):
        for b in whole.epoch():
            if (epoch, b) == (1, stop):
                whole.accelerator.save_state(str(tmp_path / "state"))
    again = Run(accumulate=1)
    again.accelerator.load_state(str(tmp_path / "state"))
    rest = [list(again.epoch()) for _ in range(2 if stop < 5 else 1)]
    assert [len(epoch) for epoch in rest] == ([5 - stop, 6] if stop < 5 else [6])
    assert same(whole.net.state_dict(), again.net.state_dict())
    assert same(whole.sampler.state_dict()["rule"], again.sampler.state_dict()["rule"])


def test_diagnostics_in_a_tracker(tmp_path):
    logged = []

    class Tracker(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "list", False, None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **_):
            logged.append((step, values["bandit/updates"]))

    accelerator = accelerate.Accelerator(cpu=True, log_with=Tracker())
    accelerator.init_trackers("run")
    sampler = a_sampler()
    loader = ours.prepare(accelerator, data(), sampler, log_every=4)
    for _ in range(2):
        for x, y, drawn in loader:
            sampler.update(drawn.number, adambs.scores.cross_entropy(small_net()(x), y))
    assert logged == [(4, 4), (8, 8), (12, 12)]


def test_what_is_wrong_is_told():
    accelerator = accelerate.Accelerator(cpu=True)
    sampler = adambs.BanditSampler(60, 10)
    with pytest.raises(TypeError, match="accelerator must be an Accelerator, not TensorDataset"):
        ours.prepare(data(), accelerator, sampler)
    with pytest.raises(ValueError, match="dataset has 50 examples but"):
        ours.prepare(accelerator, TensorDataset(*small_data(50)), sampler)
    loader = ours.prepare(accelerator, data(), sampler)
    with pytest.raises(ValueError, match="sampler has a training loader already"):
        ours.prepare(accelerator, data(), sampler)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Evaluate with a plain DataLoader"):
        next(iter(loader))
    x, y, drawn = next(iter(loader))
    with pytest.raises(ValueError, match="it looks reduced already"):
        drawn.mean(F.cross_entropy(small_net()(x), y))
