"""Every example runs as it is, and is short."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# What each needs, and what it prints at the end.
NEEDS = {
    "plain_loop.py": ("sklearn", "variance reduction"),
    "tabular.py": ("torch", "training loss"),
    "with_lightning.py": ("lightning", "variance reduction"),
    "hf_classification.py": ("transformers", "variance reduction"),
    "hf_causal_lm.py": ("transformers", "times as likely"),
    "with_accelerate.py": ("accelerate", "variance reduction"),
    "with_keras.py": ("keras", "variance reduction"),
    "streams.py": ("torch", "p: one word"),
    "torchrun.py": ("sklearn", "p lowers the second moment"),
}


def test_the_list_is_whole_and_each_is_short():
    files = {path.name: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert files.keys() == NEEDS.keys()
    assert {name: len(lines) for name, lines in files.items() if len(lines) > 80} == {}


@pytest.mark.parametrize(("name", "most"), [("with_lightning.py", 5), ("with_keras.py", 6)])
def test_the_lines_of_a_bandit_are_few(name, most):
    marks = [line for line in (EXAMPLES / name).read_text().splitlines() if line[-3:-1] == "# "]
    assert len(marks) == most


@pytest.mark.parametrize("name", NEEDS)
def test_it_runs(name, tmp_path):
    package, words = NEEDS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, **quiet},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert words in done.stdout.splitlines()[-1]
