"""Every example runs as it is, and is short."""

import importlib.util
import os
import re
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
    shown = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert {name for name in files if f"{{literalinclude}} ../examples/{name}" in shown} == files.keys()


# How many lines more than a plain script, at most, and how many are different.
LINES = {
    "with_lightning.py": (5, 4),
    "hf_classification.py": (4, 1),
    "hf_causal_lm.py": (4, 1),
    "with_keras.py": (6, 1),
}


@pytest.mark.parametrize("name", LINES)
def test_the_lines_of_a_bandit_are_few_and_all_marked(name):
    """Up to where the example looks at what was learned, which a plain script has not."""
    text = (EXAMPLES / name).read_text().split('"""', 2)[2]
    lines = re.split("^(?:seen|steps) = ", text, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    marks = {line: line.rsplit("  # ")[-1] for line in lines if line.endswith(("# added", "# changed"))}
    ours = [line for line in lines if re.search("adambs|bandit|drawn|scores", line, re.IGNORECASE)]
    assert [line for line in ours if line not in marks] == []
    added, changed = (list(marks.values()).count(kind) for kind in ("added", "changed"))
    most, different = LINES[name]
    assert 0 < added <= most
    assert changed == different


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


def test_accelerate_launches_it_on_two_processes(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "with_accelerate.py")], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()  # of the first process
    assert float(re.search(r"variance reduction ([\d.]+)", line)[1]) > 1
