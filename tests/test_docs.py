"""The code in the documentation runs."""

import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

import adambs
from adambs.lab import methods, models
from adambs.lab.runs import training

ROOT = Path(__file__).parent.parent


def blocks(file, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / file).read_text(), flags=re.DOTALL)


def test_the_new_method_of_the_docs_learns(monkeypatch):
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    [code] = [block for block in blocks("docs/methods.md") if "class RootLoss" in block]
    exec(compile(code, "docs/methods.md", "exec"), {"__name__": "docs"})
    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x).float().view(-1, 1, 8, 8) / 16, torch.from_numpy(y)
    model = models.build("digits-cnn", classes=10, seed=0)
    task = methods.Task(model, x, y, training.LOSSES["softmax"], 32, 2e-3, 300, 0)
    method = methods.find("root-loss")(task)
    training.train(method, 300)
    assert training.evaluate(model, x, y, task.loss)[0] < 0.6


@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker:UserWarning")  # on one processor
@pytest.mark.parametrize("side", ["-", "+"])
def test_the_loops_of_the_readme_run(side):
    """Both sides of the diff: the ordinary loop, and ours."""
    [diff] = blocks("README.md", "diff")
    kept = [line[1:] for line in diff.splitlines() if line[:1] in (" ", side)]
    torch.manual_seed(0)
    x, y = torch.randn(300, 5), torch.randint(0, 3, (300,))
    names = {}
    exec(
        "import adambs, torch\nimport torch.nn.functional as F\nfrom torch.utils.data import DataLoader",
        names,
    )
    model = torch.nn.Linear(5, 3)
    before = model.weight.detach().clone()
    names.update(train=torch.utils.data.TensorDataset(x, y), model=model)
    exec(compile("\n".join(kept), "README.md", "exec"), names)
    assert not torch.equal(model.weight, before)
    changed = [line for line in diff.splitlines() if line.startswith("+")]
    assert len(changed) == 6


def test_the_look_of_the_docs_runs():
    [code] = [block for block in blocks("docs/training-loops.md") if "def score" in block]
    x, y = torch.randn(300, 5), torch.randint(0, 3, (300,))
    train, model = torch.utils.data.TensorDataset(x, y), torch.nn.Linear(5, 3)
    sampler = adambs.BanditSampler(300, 10, candidates=adambs.Candidates(cost=1e-6))
    names = {"adambs": adambs, "torch": torch, "train": train, "model": model, "sampler": sampler}
    exec(compile(code, "docs/training-loops.md", "exec"), names)
    for (batch, labels), draw in names["loader"]:
        logits = model(batch)
        draw.mean(torch.nn.functional.cross_entropy(logits, labels, reduction="none")).backward()
        sampler.update(draw, adambs.scores.cross_entropy(logits, labels))
    assert sampler.diagnostics().looks > 20


@pytest.mark.parametrize(
    ("file", "words"), [("README.md", "# p learns"), ("docs/training-loops.md", "carry=True")]
)
def test_the_general_loops_of_the_docs_run_with_any_optimizer(file, words):
    [code] = [block for block in blocks(file) if words in block]
    x, y = torch.randn(300, 5), torch.randint(0, 3, (300,))
    model = torch.nn.Linear(5, 3)
    sampler = adambs.BanditSampler(300, 10, gate=0)
    names = {
        "adambs": adambs,
        "F": torch.nn.functional,
        "train": torch.utils.data.TensorDataset(x, y),
        "model": model,
        "sampler": sampler,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(compile(code, file, "exec"), names)
    assert sampler.diagnostics().updates == 30
    assert model.weight.grad is not None


def test_the_history_and_the_probe_of_the_docs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    probe, kept = (block for block in blocks("docs/data-insight.md"))
    x, y = torch.randn(300, 5), torch.randint(0, 3, (300,))
    train, model = torch.utils.data.TensorDataset(x, y), torch.nn.Linear(5, 3)
    sampler = adambs.BanditSampler(300, 10)
    names = {
        "adambs": adambs,
        "torch": torch,
        "F": torch.nn.functional,
        "train": train,
        "model": model,
        "labels": y,
        "sampler": sampler,
        "loader": adambs.BanditLoader(train, sampler),
        "optimizer": adambs.AdamBS(model.parameters(), sampler, lr=1e-3),
    }
    exec(compile(kept, "docs/data-insight.md", "exec"), names)
    assert names["table"]["visits"].sum() == 300
    quick = probe.replace("batch_size=128)", "batch_size=128, seconds=0.1)")
    assert quick != probe
    exec(compile(quick, "docs/data-insight.md", "exec"), names)
    assert (tmp_path / "probe.html").exists()


def test_the_map_of_the_code_is_true():
    text = (ROOT / "docs/code.md").read_text()
    tree = text[text.index("src/adambs/\n") :].split("```")[0]
    inside = tree.split("\ntests/")[0].splitlines()[1:]
    named = {line.split()[0].rstrip("/") for line in inside if re.match(r"  \S", line)}
    there = {
        path.name
        for path in (ROOT / "src/adambs").iterdir()
        if not path.name.startswith("_") and path.name != "py.typed"
    }
    assert named == there


def test_every_link_of_the_docs_leads_somewhere():
    for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", file.read_text()):
            source = re.sub(
                r"^built/(.*)\.rst$", r"tutorial/\1.py", target
            )  # a page that the site makes of it
            assert (file.parent / source).exists(), f"{file.name}: {target}"
