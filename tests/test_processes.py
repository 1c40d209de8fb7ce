"""Several processes share one p. Real processes with gloo; the cases are those of ``processes_script.py``.

All run in one start of 2 and one of 3 processes. ``ADAMBS_SEEDS=6000`` in the environment runs so many seeds
of the z-tests; the suite runs fewer.
"""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes_script as script
import pytest
import sharded_cases
import torch
import torch.distributed.checkpoint as dcp
from helpers import same
from test_unbiased import LeavesPasses, z

import adambs
from adambs.gathering import Message, digested
from adambs.proposals import Passes

HERE = Path(__file__).parent


def torchrun(processes, *arguments, timeout=400 + sharded_cases.SEEDS // 5):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return subprocess.run(
        [str(a) for a in (*command, *arguments)], check=True, timeout=timeout, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A folder, and the results of one process."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(script.go_on(script.elastic_sampler(), 31)["state"], folder / "one.pt")
    torch.save(
        sharded_cases.go_on(sharded_cases.sampler_to_go_on(), 31)[1],
        folder / "one-sharded.pt",
    )
    return folder, script.run(folder)


@pytest.fixture(scope="module", params=[2, 3])
def many(request, one):
    """The results of each of 2 or 3 ranks."""
    folder, _ = one
    try:
        torchrun(request.param, HERE / "processes_script.py", folder)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr[-8000:])
    return [torch.load(folder / f"{request.param}-{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", script.CASES)
def test_several_processes_do_what_one_does(one, many, name):
    expected = one[1][name]
    # Carried weights are float32, and so is the net of the case of single precision.
    tolerance = {"carried": 1e-7, "single": 1e-4}.get(name, 1e-12)
    for rank in many:
        found = rank[name]
        for key in found.keys() & {"parameters", "p"}:
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=tolerance)
        for key in found.keys() - {"parameters", "p", "digests"}:
            assert same(found[key], expected[key]), key
        assert len(found["digests"]) > 15
        assert found["digests"] == many[0][name]["digests"]  # p is the same to the bit at every step


def test_the_cases_are_what_they_are_called(one):
    assert 0 < one[1]["default"]["reshuffled"] < 301  # the gate was closed, and open
    assert one[1]["looking"]["looks"] > 20
    assert one[1]["looking_and_gated"]["looks"] > 20
    assert 0 < one[1]["sharded"]["reshuffled"] < 301
    assert len(one[1]["default"]["digests"]) == len(set(one[1]["default"]["digests"])) == 300
    for name in ("sharded", "sharded_and_stratified"):
        assert len(one[1][name]["digests"]) == len(set(one[1][name]["digests"])) == 301
    assert one[1]["context_cap_and_clip"]["capped"] > 0
    assert one[1]["context_cap_and_clip"]["clipped"] > 0
    assert one[1]["clip_where_a_pass_ends"]["reshuffled"] == 8
    assert one[1]["clip_where_a_pass_ends"]["clipped"] > 0
    assert one[1]["sharded_and_clipped"]["reshuffled"] == 300
    assert one[1]["sharded_and_clipped"]["clipped"] == 0
    p = one[1]["calibrated_without_a_gate"]["p"]
    assert p.max() > 1.3 * p.min()


@pytest.mark.parametrize("name", ["single_fsdp", "single_looking", "single_gated"])
def test_p_is_the_same_to_the_bit_in_single_precision(many, name):
    """Rounding may lead to other draws than in one process, but to the same on all ranks."""
    found = many[0][name]
    for rank in many:
        assert same(rank[name], found)
    assert len(found["digests"]) == 60
    assert len(set(found["digests"])) > (10 if name == "single_looking" else 55)  # a look serves four batches
    assert (found["looks"] > 20) == (name == "single_looking")
    assert (0 < found["reshuffled"] < 50) == (name != "single_fsdp")  # the gate was closed, and open


def test_a_saved_run_goes_on_with_any_number_of_processes(one, many):
    """1 -> W -> 1: the draws on their way and all later ones are those of a run in one process."""
    sampler = script.elastic_sampler()
    sampler.load_state_dict(torch.load(one[0] / "one.pt"))
    straight = script.go_on(sampler, 44)
    for rank in many:
        assert same(rank["elastic"], straight)
    sampler.load_state_dict(straight["state"])
    back = script.elastic_sampler()
    back.load_state_dict(many[-1]["elastic"]["state"])
    assert same(script.go_on(back, 25), script.go_on(sampler, 25))


def test_random_numbers_differ_between_the_parts_of_a_batch(many):
    for rank in many:
        assert torch.equal(*rank["noise"]["plain"].values())  # whoever fetches them
    values = torch.cat([rank["noise"]["plain"][0][:, 1:] for rank in many])
    assert len(values.unique()) == values.numel()


def test_what_one_rank_has_scored_another_trains_on_unchanged(many):
    candidates = adambs.Candidates()
    looks = [
        [{tuple(row.tolist()) for row in part} for part in parts]
        for parts in zip(*(rank["noise"]["scored"] for rank in many), strict=True)
    ]
    assert len(looks) > 5
    for shown in looks:  # all candidates of a look, each scored once, by one rank
        sizes = [len(part) for part in shown]
        examples = {index for part in shown for index, *_ in part}
        assert len(examples) == sum(sizes) <= candidates.ahead * candidates.multiple * script.B
        assert max(sizes) - min(sizes) <= 1
    batches = foreign = 0
    for own, rank in enumerate(many):
        for k, (place, batch) in enumerate(rank["noise"]["trained_on"]):
            assert place == k // candidates.ahead  # a look serves so many batches
            rows = {tuple(row.tolist()) for row in batch}
            assert rows <= set.union(*looks[place])
            batches, foreign = batches + 1, foreign + len(rows - looks[place][own])
    assert batches > 20 * len(many)
    assert foreign > batches


@pytest.mark.parametrize("name", ["measured_cost", "skipped", "late", "in_flight"])
def test_all_ranks_end_alike(many, name):
    assert all(rank[name] == many[0][name] for rank in many)


def test_a_group_of_ones_own(many):
    lengths = [rank["groups"].get("length") for rank in many]
    assert lengths == [6, 7, None][: len(many)]
    assert many[0]["groups"]["p"] == many[1]["groups"]["p"]
    assert all("group must be a" in rank["groups"]["message"] for rank in many[2:])


def test_a_part_says_what_it_is(many):
    size, start = (7, 6) if len(many) == 2 else (4, 4)
    assert many[1]["parts"]["repr"] == f"Draw(23: {size} of 120, from {start} in a batch of 13)"


SAID = {
    "seed": r"differ in seed: 0 on ranks? 0.*, 1 on rank 1\. Build the sampler with the same arguments",
    "n": r"differ in n: 120 on ranks? 0.*, 121 on rank 1\.",
    "batch_size": r"differ in batch_size: 13 on ranks? 0.*, 14 on rank 1\.",
    "gate": r"differ in gate_threshold: 1.2 on ranks? 0.*, 1.5 on rank 1\.",
    "rule": r"differ in rule_name: 'Tracking' on ranks? 0.*, 'Exp3' on rank 1\.",
    "rule_settings": r"differ in rule_settings: .*'step': .* on ranks? 0.*on rank 1\.",
    "correction": r"differ in correction: 1.0 on ranks? 0.*, 0.5 on rank 1\.",
    "initial_weights": r"differ in state\['rule'\]: digest \w+ on ranks? 0.*, digest \w+ on rank 1\.",
    "state": r"differ in the number of the next draw: 0 on ranks? 0.*, 1 on rank 1\. .*load the same state",
    "the same state": "^nothing$",
    "a state later": r"out of step: in an update on ranks? 0.*, in a comparison of samplers on rank 1\.",
    "too many ranks": r"batch_size is \d and there are \d processes: batch_size counts the examples of all",
    "nan": r"scores\[\d+\] is nan \(draw 0, example \d+ of the data set\).*draw 0 has taught nothing",
    "a refresh of nan": r"scores\[\d+\] is nan: every entry must be finite",
    "a look at nan": r"scores\[\d+\] is nan \(draw 1, example \d+ of the data set\)",
    "another draw": r"out of step: after 3 draws on ranks? 0.*, after 4 draws on rank 1\.",
    "another order": r"out of step: at draw 0 on ranks? 0.*, at draw 1 on rank 1\.",
    "another correction": r"out of step: with draws of digest \d+ on ranks? 0",
    "another p": r"out of step: with draws of digest \d+ on ranks? 0",
    "not a group": r"group must be a torch.distributed.ProcessGroup, False or nothing, not 'all'",
}


@pytest.mark.parametrize("name", SAID)
def test_all_ranks_are_told_the_same(many, name):
    messages = {rank["mistakes"][name] for rank in many}
    assert len(messages) == 1
    assert re.search(SAID[name], messages.pop())


def test_a_wrong_shape_is_told_where_it_is(many):
    for rank in many:
        assert "scores must have shape (" in rank["mistakes"]["shape"]


def test_nobody_waits_longer_than_the_group_s_time(many):
    for number, rank in enumerate(many):
        assert len(rank["absent"]) == (0 if number == 1 else 6)
        for kind, told in rank["absent"].items():
            assert told["message"].startswith("RuntimeError: "), kind
            assert re.search("imed out|closed", told["message"]), kind
            assert told["seconds"] < 10 * script.TIMEOUT, kind  # a slow machine's time, not for ever


# ----------------------------------------------------------------------------------------------
# In shards
# ----------------------------------------------------------------------------------------------


def test_shards_go_on_with_any_number_of_processes(one, many):
    """1 -> W by a file, W -> 1 by the files of all and by torch.distributed.checkpoint: the same draws."""
    folder, _ = one
    sampler = sharded_cases.sampler_to_go_on()
    sampler.load_state_dict(torch.load(folder / "one-sharded.pt"))
    drawn, state = sharded_cases.go_on(sampler, 30)

    def of_all(name):
        parts = zip(*(rank["moved_shards"][name] for rank in many), strict=True)
        return [list(itertools.chain(*part)) for part in parts]

    assert of_all("drawn") == drawn
    assert sum(len(part["moved_shards"]["state"]["rule"]["shards"]) for part in many) == 6
    further = sharded_cases.sampler_to_go_on()
    further.load_state_dict(state)
    expected = sharded_cases.go_on(further, 12)[0]
    assert of_all("further") == expected

    united = sharded_cases.sampler_to_go_on()
    united.load_state_dict([rank["moved_shards"]["state"] for rank in many])
    assert same(united.state_dict(), state)
    assert sharded_cases.go_on(united, 12)[0] == expected

    loaded = sharded_cases.sampler_to_go_on()
    found = {"sampler": loaded.state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.load(found, checkpoint_id=folder / f"sharded-{len(many)}", no_dist=True)
    loaded.load_state_dict(found["sampler"])
    assert sharded_cases.go_on(loaded, 12)[0] == expected


def test_a_rank_to_which_nothing_falls_takes_part(many):
    assert min(many[0]["nothing_here"]["empty"]) > 0


def deviations(estimates):
    return (torch.stack(estimates).mean(0) - (38 + 2 * 10) / 40).numpy()


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_unbiased_over_processes(many, kind):
    found = deviations([rank["estimates"][kind] for rank in many])
    assert len(found) == sharded_cases.SEEDS
    assert np.abs(z(found.sum(axis=1)[:, None])) < 3
    assert (np.abs(z(found)) < 4).all()
    assert found.std() > 0.1


class LeftHalfWay(Passes):
    """Broken: says of no pass that it has to be finished."""

    under_way = False


class ShardedLeavesPasses(adambs.ShardedSampler):
    """Broken: its gate decides in the middle of a pass."""

    def __init__(self, n, batch_size, seed):
        super().__init__(n, batch_size, shards=3, seed=seed)
        self.passes = LeftHalfWay(n, seed, batch_size)


@pytest.mark.parametrize("kind", [LeavesPasses, ShardedLeavesPasses])
def test_so_many_seeds_show_a_gate_that_opens_in_the_middle_of_a_pass(kind):
    """Draws depend on the shards and not on the number of processes: what one process shows, several do."""
    found = deviations([sharded_cases.estimated(kind)])
    assert z(found.sum(axis=1)[:, None]) > 4.5


SAID_OF_SHARDS = {
    "seed": r"differ in seed: 0 on ranks? 0.*, 1 on rank 1\.",
    "batch_size": r"differ in batch_size: 13 on ranks? 0.*, 14 on rank 1\.",
    "lengths": r"differ in lengths: '\w+' on ranks? 0.*, '\w+' on rank 1\.",
    "kind": r"differ in cap_factor: 10.0 on ranks? 0.*, inf on rank 1\.",
    "state": r"differ in the number of the next draw: 0 on ranks? 0.*, 1 on rank 1\. .*load the same state",
    "state of the rule": r"differ in state\['rule'\]: digest \w+ on ranks? 0.*, digest \w+ on rank 1\.",
    "state on one rank": r"differ in the number of the next draw: 0 on ranks? 0.*, 1 on rank 1\.",
    "the same state": "^nothing$",
    "a state later": r"out of step: in an update on ranks? 0.*, in a comparison of samplers on rank 1\.",
    "too few shards": r"there are 1 shards and \d processes: every process needs one of its own",
    "too many ranks": r"batch_size is \d and there are \d processes",
    "nan": r"scores\[0\] of rank 1 is nan \(draw 0\).*draw 0 has taught nothing",
    "another order": r"out of step: at draw \d on ranks? 0.*, at draw \d on rank 1\.",
    "another p": r"out of step: with draws of digest \d+ on ranks? 0",
}


@pytest.mark.parametrize("name", SAID_OF_SHARDS)
def test_all_ranks_are_told_the_same_of_shards(many, name):
    messages = {rank["mistakes_in_shards"][name] for rank in many}
    assert len(messages) == 1, messages
    assert re.search(SAID_OF_SHARDS[name], messages.pop())


# ----------------------------------------------------------------------------------------------
# Without a group
# ----------------------------------------------------------------------------------------------


def test_processes_without_a_group_are_warned_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = adambs.BanditSampler(20, 4)
    with pytest.warns(RuntimeWarning, match="WORLD_SIZE is 4 and torch.distributed is not initialised"):
        sampler.draw()
    list(sampler)
    adambs.BanditSampler(20, 4, group=False).draw()
    monkeypatch.setenv("WORLD_SIZE", "1")
    adambs.BanditSampler(20, 4).draw()


def test_it_works_where_torch_has_no_distributed(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "ProcessGroup")
    monkeypatch.delattr(torch.distributed, "is_initialized")
    sampler = adambs.BanditSampler(20, 4)
    sampler.update(sampler.draw(), np.ones(4))
    assert sampler.diagnostics().updates == 1
    with pytest.raises(TypeError, match="group must be"):
        adambs.BanditSampler(20, 4, group=object())


def test_a_digest_depends_on_every_bit():
    rng = np.random.default_rng(0)
    indices, ratios = rng.integers(0, 10**6, 9), rng.random(9)
    digests = {digested(7, indices, ratios, 1.0, 5.0), digested(8, indices, ratios, 1.0, 5.0)}
    digests |= {digested(7, indices, ratios, value, 5.0) for value in (0.0, 0.5, np.nextafter(1, 0))}
    digests |= {digested(7, indices, ratios, 1.0, value) for value in (0.0, np.inf, np.nextafter(5, 0))}
    for array in (indices.view(np.uint64), ratios.view(np.uint64)):
        for k, bit in itertools.product(range(9), range(64)):
            array[k] ^= np.uint64(1) << np.uint64(bit)
            digests.add(digested(7, indices, ratios, 1.0, 5.0))
            array[k] ^= np.uint64(1) << np.uint64(bit)
    digests |= {digested(7, other, ratios, 1.0, 5.0) for other in (indices[::-1].copy(), indices[:-1])}
    assert len(digests) == 8 + 2 * 9 * 64 + 2
    assert all(float(digest) == digest >= 0 for digest in digests)  # messages are of float64


def test_a_thread_that_gathers_lets_go_of_tensors_without_pythons_lock():
    """Torch takes that lock if nobody but Python is left who owns the tensor. A worker that is forked just
    then hangs, with Python 3.11: two of about 700 did, in busy processes, before each tensor had a view."""
    message = Message(3, 8)
    tensors = [*message.inputs, *message.outputs[0]]
    assert len(tensors) == 4
    assert all(tensor._use_count() > 1 for tensor in tensors)
    message.rows[:] = [[rank] * 8 for rank in range(3)]
    assert [tensor.tolist() for tensor in message.outputs[0]] == message.rows.tolist()


def test_a_part_weighs_as_the_whole():
    """Any cut into parts: the mean of the parts' means is the mean of the whole, whatever the correction."""
    rng = np.random.default_rng(0)
    losses, scores = torch.from_numpy(rng.normal(size=11)), torch.from_numpy(rng.gamma(1.0, 4.0, size=11))
    for correction in (1.0, 0.5, 0.0):
        for ratios in (rng.uniform(0.1, 1.5, 11), np.ones(11), np.r_[np.ones(6), rng.uniform(0.1, 1.5, 5)]):
            draw = adambs.Draw(0, rng.integers(0, 50, 11), ratios, 50, correction=correction)
            for W in (1, 2, 3, 11):
                cuts = [(r * 11 // W, (r + 1) * 11 // W) for r in range(W)]
                parts = [draw.part(start, stop, W) for start, stop in cuts]
                means = [part.mean(losses[a:b]) for part, (a, b) in zip(parts, cuts, strict=True)]
                torch.testing.assert_close(sum(means) / W, draw.mean(losses))
                assert torch.equal(torch.cat([part.weights for part in parts]), draw.weights)
                means = [part.carried().mean(losses[a:b]) for part, (a, b) in zip(parts, cuts, strict=True)]
                torch.testing.assert_close(sum(means) / W, draw.mean(losses), rtol=1e-6, atol=1e-7)
                draw.limit = 1.5
                capped = [
                    draw.part(a, b, W).carried().mean(losses[a:b], scores[a:b]) for a, b in cuts
                ]  # in unequal parts, too
                expected = draw.mean(losses, scores)
                torch.testing.assert_close(sum(capped) / W, expected, rtol=1e-6, atol=1e-7)
                lowered = not torch.isclose(expected, draw.mean(losses), rtol=1e-3)
                assert lowered == (not draw.even and correction > 0)
                assert all(draw.same_as(part) and draw.same_as(part.alone()) for part in parts)
                assert not draw.same_as(adambs.Draw(0, draw._indices[:-1], ratios[:-1], 50))


def test_the_example_runs_and_goes_on_with_another_number_of_processes(tmp_path):
    example, saved = HERE.parent / "examples" / "torchrun.py", tmp_path / "run.pt"
    lines = torchrun(2, example, "--epochs", 3, "--checkpoint", saved).stdout.splitlines()
    assert len(lines) == 3
    assert all("32 of 64 examples here" in line for line in lines)
    command = [sys.executable, str(example), "--epochs", "5", "--checkpoint", str(saved)]
    output = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True).stdout
    assert re.findall(r"epoch +(\d+): (\d+) of 64", output) == [("4", "64"), ("5", "64")]
    assert float(re.findall(r"test error (\S+),", output)[-1]) < 0.25
