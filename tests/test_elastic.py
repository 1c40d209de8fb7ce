"""Ranks that are killed at random moments: torchrun starts them anew, and the run ends as if they had lived.

ADAMBS_RESTARTS=20 kills that often; the suite is content with fewer.
"""

import os
import subprocess
import sys
from pathlib import Path

import elastic_script as script
import pytest
import torch
from helpers import same

# torchrun keeps one store for all lives, in which the addresses of the dead are found (pytorch issue 167288);
# the variable that is set below gives every life its own.

SEED = 18  # the first two lives get as far as a checkpoint, and end with the deaths of different ranks
KILLS = int(os.environ.get("ADAMBS_RESTARTS", "2"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a run of two ranks, one of which is killed every now and then, has left behind."""
    folder = tmp_path_factory.mktemp("elastic")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    options = ["--max-restarts", KILLS, "--monitor-interval", 0.1]
    arguments = [script.__file__, KILLS, SEED, folder]
    try:
        subprocess.run(
            [str(a) for a in (*command, *options, *arguments)],
            check=True,
            timeout=600 + 60 * KILLS,
            capture_output=True,
            text=True,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr[-8000:])
    return folder


def test_a_run_whose_ranks_were_killed_ends_as_one_that_was_left_alone(folder):
    for rank in (0, 1):
        ended, expected = (torch.load(folder / f"2-{rank}-{name}.pt") for name in ("ended", "expected"))
        assert ended.pop("life") == KILLS
        assert ended.keys() == expected.keys()
        for name in expected:
            assert same(ended[name], expected[name]), name
        assert expected["done"] == len(expected["drawn"]) == script.steps(KILLS)
        counters = expected["optimizer"]["sampler"]["counters"]
        assert 0 < counters["reshuffled"] < counters["draws"]  # the gate was closed, and open
    begun = [int(file.read_text()) for file in sorted(folder.glob("life-*"), key=lambda f: int(f.name[5:]))]
    assert begun == sorted(begun)
    assert len(begun) > KILLS // 2  # most lives went on from a checkpoint


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process reads what several have saved
def test_another_number_of_processes_goes_on_with_the_same_draws(folder, distributed):
    run = script.Run()
    run.load(folder / "moved.pt", distributed=distributed)
    before = run.done
    run.train(script.steps(KILLS))
    expected = torch.load(folder / "2-0-expected.pt")
    assert 0 < before < len(run.drawn)
    assert run.drawn == expected["drawn"]
    for name, value in run.net.state_dict().items():
        torch.testing.assert_close(value, expected["net"][name], rtol=0, atol=1e-12)


def test_no_checkpoint_was_read_in_one_way_only(folder):
    """Lives take turns between rank 0's file and the folder of torch.distributed.checkpoint."""
    lives = [int(file.name[5:]) for file in Path(folder).glob("life-*")]
    assert {life % 2 for life in lives} == {0, 1}
