"""The lab's nets for texts: what they see of a text, their losses, and the schedule."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from adambs.lab import experiments, methods, models
from adambs.lab.experiments import text_sources
from adambs.lab.models.transformers import WORDS
from adambs.lab.report import phrases
from adambs.lab.report.analysis import analyse
from adambs.lab.runs import records, training

ROOT = Path(__file__).parent.parent


def texts(n=24, T=100, seed=0):
    """Token numbers with padding at the front, some rows almost nothing else."""
    torch.manual_seed(seed)
    tokens = torch.randint(1, 60, (n, T))
    for row, length in enumerate(torch.randint(2, T, (n,)).tolist()):
        tokens[row, : T - length] = 0
    tokens[0, :-1] = 0
    return tokens


def language_model(vocabulary=40):
    return models.build("language-model", classes=2, seed=0, width=16, layers=1, vocabulary=vocabulary).eval()


def test_the_language_model_sees_only_what_came_before():
    model, tokens = language_model(), texts()
    outputs = model(tokens)
    logits, labels = outputs.logits, outputs.labels
    assert logits.shape == (24, WORDS, 40)
    assert labels.shape == (24, WORDS)
    assert labels.max() < 40
    changed = tokens.clone()
    changed[:, -10:] = 7
    other = model(changed).logits
    torch.testing.assert_close(other[:, : WORDS - 10 + 1], logits[:, : WORDS - 10 + 1])
    assert not torch.equal(other, logits)


def test_its_loss_is_a_sum_over_words_that_are_no_padding():
    model, tokens = language_model(), texts()
    outputs = model(tokens)
    logits, labels = outputs.logits, outputs.labels
    loss = training.LOSSES["next-word"]
    found, scores = loss.losses(outputs, None), loss.scores(outputs, None)
    for k in range(len(tokens)):
        z = logits[k].detach().requires_grad_()
        expected = F.cross_entropy(z, labels[k], ignore_index=0, reduction="sum") / WORDS
        assert found[k].item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)
        (gradient,) = torch.autograd.grad(expected, z)
        assert scores[k].item() == pytest.approx(gradient.norm().item(), rel=1e-5, abs=1e-7)
    assert scores.max() <= loss.L
    words = labels != 0
    wrong = ((logits.argmax(2) != labels) & words).sum(1) / words.sum(1).clamp_min(1)
    found = training.evaluate(model, tokens, torch.zeros(24, dtype=torch.long), loss)
    assert found.error == pytest.approx(wrong.double().mean().item())


def test_the_judging_transformer_ignores_padding():
    model = models.build("transformer", classes=2, seed=0, tokens=60, width=16, layers=1).eval()
    tokens = texts()
    assert model(tokens).shape == (24,)
    assert model(tokens).isfinite().all()
    padded = model.words.weight.detach().clone()
    padded[0] += 5.0  # what stands at padding is not attended to, nor averaged
    before = model(tokens[1:])
    model.words.weight.data = padded
    torch.testing.assert_close(model(tokens[1:]), before)


def test_the_papers_net_for_texts_is_a_convolution_over_words_and_an_lstm():
    model, tokens = models.build("rcnn", classes=2, seed=0, tokens=60, width=0.1).double().eval(), texts()
    words = model.embedding(tokens).transpose(1, 2)
    weight = model.convolution.weight.squeeze(2)
    features = F.max_pool1d(F.conv1d(words, weight, model.convolution.bias).relu(), 4)
    states, _ = model.lstm(features.transpose(1, 2).contiguous())
    expected = model.dense(states[:, -1]).squeeze(1)
    torch.testing.assert_close(model(tokens), expected)


def test_the_schedule_warms_up_and_falls_to_zero():
    assert training.rate("cosine", 0.0) == 0.0
    assert training.rate("cosine", 0.05) == pytest.approx(0.5)
    assert training.rate("cosine", 0.1) == 1.0
    assert training.rate("cosine", 0.55) == pytest.approx(0.5)
    assert training.rate("cosine", 1.0) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="schedule 'linear' is unknown"):
        training.rate("linear", 0.5)


@pytest.mark.parametrize("name", ["adam", "adambs", "adambs-exp3", "infobatch"])
def test_each_method_trains_with_the_schedule(name):
    """The learning rates of all steps, and a loss that falls."""
    tokens = texts(60)
    task = methods.Task(
        language_model().train(), tokens, torch.zeros(60, dtype=torch.long), training.LOSSES["next-word"],
        10, 0.01, 60, 0, schedule="cosine",
    )  # fmt: skip
    before = training.evaluate(task.model, tokens, task.targets, task.loss).loss
    method = methods.find(name)(task)
    rates = []
    for _ in range(60):
        training.train(method, 1)
        rates.append(method.optimizer.param_groups[0]["lr"])
    expected = [0.01 * training.rate("cosine", (k + 0.5) / 60) for k in range(60)]
    assert rates == pytest.approx(expected)
    assert training.evaluate(task.model, tokens, task.targets, task.loss).loss < 0.98 * before


def test_the_experiments_are_in_the_table():
    for name in ("transformer-imdb", "lm-imdb"):
        experiment = experiments.find(name).at("quick")
        assert experiment.settings()["schedule"] == "cosine"
        assert set(experiment.methods) == {"adam", "adambs", "adambs-exp3", "infobatch"}
        assert experiment.loss in training.LOSSES
    assert "schedule" not in experiments.find("rcnn-imdb").settings()
    assert math.isclose(training.LOSSES["next-word"].L, math.sqrt(2 / WORDS))


def test_a_source_of_few_reviews_again_and_again():
    train, test = (text_sources.split(texts(200), torch.arange(200) % 2, seed) for seed in (0, 1))
    sizes = {name: len(rows) for name, rows in train.items()}
    text_sources.with_repeated(train, test, 3)
    assert len(train["negative"]) == sizes["negative"] - 3
    assert len(train["repeated"]) == max(sizes.values())
    assert len(train["repeated"].unique(dim=0)) == len(test["repeated"].unique(dim=0)) == 3
    assert len(test["repeated"]) == len(test["negative"])


def test_the_sources_of_reviews():
    """Every review is in one source; shuffled ones keep their words; the bandit leaves the shares."""
    tokens, labels = texts(200), torch.arange(200) % 2
    found = text_sources.split(tokens, labels, seed=0)
    assert sum(map(len, found.values())) == 200
    counted = sorted(tuple(row.sort().values.tolist()) for rows in found.values() for row in rows)
    assert counted == sorted(tuple(row.sort().values.tolist()) for row in tokens)
    assert (found["short"] != 0).sum(1).max() <= WORDS < (found["positive"] != 0).sum(1).min()
    lines = list(text_sources.compare(found, found, steps=12, seed=0, looks=3))
    assert [(line["learns"], line["step"]) for line in lines] == [
        (b, s) for b in (False, True) for s in (4, 8, 12)
    ]
    shares = {name: len(rows) / 200 for name, rows in found.items()}
    assert lines[2]["p"] == pytest.approx(shares)
    assert lines[5]["p"]["short"] < 0.95 * shares["short"]  # sums over fewer words have smaller gradients
    assert lines[5]["test_loss"] < lines[3]["test_loss"]


def test_the_table_of_the_docs_is_what_was_recorded():
    text = (ROOT / "docs" / "text.md").read_text()
    judge, model = (analyse(records.read(ROOT / "results" / n)) for n in ("transformer-imdb", "lm-imdb"))
    assert f"classifier ({len(judge.seeds)} seeds)" in text
    assert f"language model ({len(model.seeds)} seeds)" in text
    assert len(judge.seeds) >= 3
    assert len(model.seeds) >= 3
    names = ["Adam", "AdamBS", "AdamBS, Algorithm 2", "InfoBatch", "InfoBatch, even weights"]
    for method, name in zip(judge.methods, names, strict=True):
        finals, speed = judge.finals[method], judge.speedups[method]
        ratios = [speed["seconds"], speed["step"], speed["seconds"].last]
        cells = [
            name,
            f"{finals['train_loss'].value:.3f}",
            f"{finals['test_error'].value:.1%}".replace("%", " %"),
            *(phrases.times_and_interval(each.overall, each.bounded()) for each in ratios),
            f"{model.finals[method]['train_loss'].value:.3f}",
        ]
        if method == "adam":
            cells[3:6] = ["1"] * 3
        assert f"| {' | '.join(cells)} |" in text
    for method, axis in (("adambs", "seconds"), ("infobatch", "step"), ("infobatch:even=1", "step")):
        found = model.speedups[method][axis].overall
        assert f"{found.value:.2f}, {found.low:.2f} to {found.high:.2f}" in text


@pytest.mark.parametrize(
    ("file", "source", "change"),
    [("sources", "shuffled", (0.252, 0.256)), ("repeated", "repeated", (0.268, 0.161))],
)
def test_what_the_docs_say_of_sources_is_what_was_recorded(file, source, change):
    lines = (ROOT / "results" / "text-sources" / f"{file}.jsonl").read_text().splitlines()
    ends = [line for line in map(json.loads, lines) if line["step"] == 1000]
    assert sorted({line["seed"] for line in ends}) == [0, 1, 2]
    for learns, expected in zip((False, True), change, strict=True):
        p = np.mean([line["p"][source] for line in ends if line["learns"] is learns])
        assert p == pytest.approx(expected, abs=0.001)
    gaps = [
        after["test_loss"] - before["test_loss"]
        for before in ends
        for after in ends
        if before["seed"] == after["seed"] and after["learns"] > before["learns"]
    ]
    low, high = sorted(abs(gap) for gap in (min(gaps), max(gaps)))
    word = "lower" if max(gaps) < 0 else r"\*higher\*"
    text = (ROOT / "docs" / "text.md").read_text()
    assert re.search(rf"{low:.3f} to {high:.3f} {word}", text)
