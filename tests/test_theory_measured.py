"""The experiments: small ones against dense oracles, and the whole quick run with its page."""

import io
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from scipy.optimize import minimize

from adambs import BanditSampler, reference
from adambs.lab.theory import bandit, bounds, lemmas, page, regret, run_theory, table1
from adambs.lab.theory.heavy_tailed import expected_norms
from adambs.rules import Exp3, Uniform


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("theory") / "new" / "folder"
    text = io.StringIO()
    file = run_theory(Console(file=text, width=200), out, quick=True, seed=0)
    return file, json.loads((out / "theory.json").read_text()), text.getvalue()


# ------------------------------------------------------------------------------------------ Lemmas 2 and 3


def test_lemmas_see_what_the_sums_say():
    setting = lemmas.Setting([10**2, 10**4, 10**6], 50, {2.0: 0, 4.0: 0}, 20, 1, [])
    result = lemmas.measure(setting, 0, lambda text: None)
    heavy, light = result["fits"]
    for fit in (heavy, light):
        assert fit["uniform"]["power_of_n"] == pytest.approx(1, abs=0.01)  # n, not n log n
        assert fit["lemma_2_line"]["power_of_n"] > 1.08
    assert heavy["best_p"]["power_of_log_n"] == pytest.approx(2, abs=0.2)  # log^2 n at gamma = 2
    assert light["best_p"]["power_of_log_n"] < 0.05  # bounded above 2
    for row in result["rows"]:
        assert row["best_p"] <= row["best_p_in_P"] * (1 + 1e-12) <= row["best_p"] / (1 - result["c"])
        limits = lemmas.limits(row["gamma"], 50)
        assert row["uniform"] <= row["n"] * limits["uniform_over_n"] * (1 + 1e-9)
        assert row["best_p"] <= limits["best_p"]


def test_printed_data_is_the_mean_over_dense_data_sets():
    from adambs.lab.theory.heavy_tailed import power_sum

    setting = lemmas.Setting([10], 8, {2.0: 0}, 4000, 1, [])
    found = lemmas.printed_data(10, 2.0, setting, 0)
    assert found["non_zeros"] == pytest.approx(power_sum(10, 2.0) * power_sum(8, 2.0), rel=0.03)
    assert found["network_best_p"] <= found["network_uniform"]
    # half of the rows are dead, and the slope is at most one
    assert found["network_uniform"] < 10 * found["non_zeros"] / 2 * 1.05


def test_learned_cost_is_the_samplers():
    norms = expected_norms(200, 5)
    uniform = lemmas.learned_cost(norms, Uniform(), 50, 0)
    assert uniform == pytest.approx(200 * (norms**2).sum())
    rule = Exp3(L=float(norms[0]), p_min=0.3, step=0.2)
    learned = lemmas.learned_cost(norms, rule, 50, 0)
    sampler = BanditSampler(200, lemmas.K, rule=rule, seed=0)
    p = np.full(200, 1 / 200)
    for _ in range(50):  # the dense reference on the same draws
        draw = sampler.draw()
        I = draw.indices.numpy()
        sampler.update(draw, norms[I])
        alpha_p = sampler.rule.alpha_p
        p = reference.update(p, I, norms[I], L=float(norms[0]), p_min=0.3 / 200, alpha_p=alpha_p)
    assert learned == pytest.approx((norms**2 / p).sum(), rel=1e-6)


def test_fits_recover_powers():
    n = [10, 100, 1000]
    assert lemmas.power_of_n(n, [3 * k**0.7 for k in n]) == pytest.approx(0.7)
    assert lemmas.power_of_log_n(n, [3 * np.log(k) ** 2 for k in n]) == pytest.approx(2)


# ------------------------------------------------------------------------------------------------ Lemma 1


@pytest.mark.parametrize("name", bandit.ADVERSARIES)
def test_regret_is_what_the_dense_reference_pays(name):
    setting = bandit.Setting(20, 3, 0.5, [40], 1)
    T = 40
    run = bandit.play(bandit.ADVERSARIES[name](setting, T, 0), setting, T, 0)
    adversary = bandit.ADVERSARIES[name](setting, T, 0)
    sampler = BanditSampler(20, 3, rule=Exp3(L=1.0, p_min=0.5, horizon=T), seed=0)
    p, paid, squares = np.full(20, 0.05), 0.0, np.zeros(20)
    R_squared = reference.lemma_1_R_squared(20, 0.025)
    alpha_p = reference.lemma_1_alpha_p(n=20, T=T, L=1.0, p_min=0.025, R_squared=R_squared)
    for t in range(T):
        norms = adversary(t, sampler.probabilities().numpy())
        paid += (norms**2 / p).sum()
        squares += norms**2
        draw = sampler.draw()
        I = draw.indices.numpy()
        sampler.update(draw, norms[I])
        p = reference.update(p, I, norms[I], L=1.0, p_min=0.025, alpha_p=alpha_p)
    assert run.bandit == pytest.approx(paid, rel=1e-6)
    assert run.uniform == pytest.approx(20 * squares.sum())
    best = minimize(
        lambda q: (squares / q).sum(),
        np.full(20, 0.05),
        bounds=[(0.025, 1)] * 20,
        constraints={"type": "eq", "fun": lambda q: q.sum() - 1},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert run.best_fixed == pytest.approx(best.fun, rel=1e-3)
    assert run.regret == run.bandit - run.best_fixed


def test_norms_stay_at_or_below_L():
    assert bandit.training_norms(30, 50, 0).max() <= 1
    setting = bandit.QUICK
    for make in bandit.ADVERSARIES.values():
        adversary = make(setting, 64, 0)
        for t in (0, 31, 63):
            norms = adversary(t, np.linspace(0.5, 1.5, setting.n))
            assert norms.shape == (setting.n,)
            assert 0 <= norms.min() <= norms.max() <= 1


def test_the_adaptive_adversary_picks_the_least_likely():
    norms = bandit.smallest_p(bandit.Setting(20, 2, 0.5, [1], 1), 1, 0)(0, np.arange(20.0))
    np.testing.assert_array_equal(np.flatnonzero(norms), [0, 1])


def test_lemma_1_holds(quick):
    for row in quick[1]["lemma_1"]["rows"]:
        assert row["regret"] <= row["bound_with_K"] <= row["bound"]


# ---------------------------------------------------------------------------------- Theorem 1 and Table 1


def test_the_minimum_is_scipys():
    problem = regret.make_problem(200, 4, 0)
    found = minimize(problem.f, np.zeros(4), options={"gtol": 1e-12})
    assert problem.f_star == pytest.approx(found.fun, abs=1e-10)
    np.testing.assert_allclose(problem.theta_star, found.x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["AdamBS", "Adam-apt"])
def test_training_is_the_reference_step_by_step(name):
    """G_hat, the moments and p against the dense reference, for beta_{1,t} = beta_1 (lambda = 1)."""
    problem = regret.make_problem(24, 3, 1)
    method = regret.METHODS[name]
    groups = regret.make_groups(24, 4, method.prefixed, 5)
    m = len(groups)

    def gradients(theta, I):
        z, y = problem.z[groups[I]], problem.y[groups[I]]
        return (-y / (1 + np.exp(y * (z @ theta))))[..., None].__mul__(z).mean(axis=1)

    sampler = regret._sampler(problem, method, groups, 4, 12, 5)
    state = reference.initial_state(np.zeros(3), m)
    for t in range(1, 13):
        draw = sampler.draw()
        I = draw.indices.numpy()
        sampler.update(draw, np.linalg.norm(gradients(state.theta, I), axis=1))
        state = reference.step(
            state, I, gradients, L=sampler.rule.L, p_min=regret.C / m, alpha_p=sampler.rule.alpha_p,
            alpha_theta=0.5 / np.sqrt(t), eps=1e-300,
        )  # fmt: skip
    regret_lambda = regret.LAMBDA
    try:
        regret.LAMBDA = 1.0
        run = regret.train(problem, method, K=4, T=12, alpha=0.5, seed=5)
    finally:
        regret.LAMBDA = regret_lambda
    assert run.gap[-1] == pytest.approx(problem.f(state.theta) - problem.f_star, rel=1e-6)
    steps = np.concatenate([[0], regret.looks(12)])
    np.testing.assert_array_equal(run.t, steps)


@pytest.mark.parametrize("name", regret.METHODS)
def test_every_method_is_unbiased(name):
    problem = regret.make_problem(60, 3, 0)
    method = regret.METHODS[name]
    groups = regret.make_groups(60, 5, method.prefixed, 0)
    sampler = regret._sampler(problem, method, groups, 5, 1000, 0)
    g = -0.5 * problem.y[:, None] * problem.z
    G_b = g[groups].mean(axis=1)
    norms = np.linalg.norm(G_b, axis=1)
    estimates = []
    for _ in range(4000):
        draw = sampler.draw()
        I = draw.indices.numpy()
        estimates.append(draw.weights.numpy() @ G_b[I] / len(I))
        sampler.update(draw, norms[I])
    estimates = np.array(estimates)
    error = (estimates.mean(axis=0) - g.mean(axis=0)) / (estimates.std(axis=0) / len(estimates) ** 0.5)
    assert np.abs(error).max() < 4


def test_moments_are_those_of_the_draws():
    n, K, d = 40, 4, 3
    found = table1.moments(n, K, d, 0)
    from adambs.lab.theory.heavy_tailed import expected_squares

    z, y = expected_squares(n, d, seed=0)
    g = -0.5 * y[:, None] * z
    rng = np.random.default_rng(0)
    p = bounds.water_filling(np.linalg.norm(g, axis=1), regret.C / n)
    for name, q in (("Adam", np.full(n, 1 / n)), ("AdamBS", p)):
        I = rng.choice(n, (40_000, K), p=q)
        squares = (((g[I] / (n * q[I])[..., None]).mean(axis=1)) ** 2).sum(axis=1)
        assert found[name] == pytest.approx(squares.mean(), abs=5 * squares.std() / 200)
    assert found["AdamBS"] <= found["Adam"]
    assert found["Adam-apt"] <= found["Adam-uni"]


def test_prefixed_batches_need_a_divisor():
    with pytest.raises(ValueError, match="K must divide n = 10"):
        regret.make_groups(10, 3, True, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"T": 0}, "T must be at least 1"),
        ({"K": 0}, "K must be at least 1"),
        ({"alpha": 0.0}, "alpha must be"),
    ],
)
def test_bad_training_is_named(change, words):
    arguments = {"K": 2, "T": 3, "alpha": 0.1, "seed": 0, **change}
    with pytest.raises(ValueError, match=words):
        regret.train(regret.make_problem(20, 2, 0), regret.METHODS["Adam"], **arguments)


def test_bad_horizons_are_named():
    with pytest.raises(ValueError, match="T must be at least 1"):
        bandit.play(lambda t, p: np.ones(50), bandit.QUICK, 0, 0)
    with pytest.raises(ValueError, match="T must be at least 1"):
        lemmas.learned_cost(np.ones(10), Uniform(), 0, 0)


# ------------------------------------------------------------------------------------------ the whole run


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.images: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        elif tag not in ("meta", "link"):
            self.stack.append(tag)
        self.tables += tag == "table"

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


def test_the_page_is_whole_and_self_contained(quick):
    file, _, _ = quick
    html = file.read_text()
    tags = Tags()
    tags.feed(html)
    assert tags.stack == ["html"] or not tags.stack
    assert len(tags.images) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in tags.images)
    assert tags.tables >= 6
    assert "http:" not in html
    assert "https:" not in html
    assert "<script" not in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_the_numbers_are_written_and_finite(quick):
    _, result, text = quick
    assert {"lemmas", "lemma_1", "table_1", "moments", "errata", "machine", "seed"} <= result.keys()
    assert {row["method"] for row in result["table_1"]["rows"]} == set(regret.METHODS)
    assert "theory.html" in text
    for row in result["table_1"]["rows"]:
        assert row["theorem_1"]["regret"] < row["theorem_1"]["first"]


def test_table_1s_K_powers(quick):
    powers = quick[1]["moments"]["powers"]
    assert powers["Adam"]["K_of_deviation"] == pytest.approx(-0.5, abs=1e-6)
    assert powers["Adam-uni"]["K"] < -0.35  # the paper's rate has 0
    assert powers["Adam-uni"]["K_paper"] == pytest.approx(0, abs=1e-9)


def test_the_same_seed_gives_the_same_numbers():
    setting = regret.QUICK._replace(sizes=[100], T=20, alphas=[0.3])
    first, second, other = (regret.measure(setting, seed, lambda text: None) for seed in (3, 3, 4))
    assert first == second
    assert first != other


def test_everything_is_escaped():
    assert page.table(["<a>"], [["<b>&"]]).count("&lt;") == 2
    assert "<script>" not in page.paragraph("<script>alert(1)</script>")
    assert '"><x' not in page.figure("data:,", '"><x')


def test_numbers_for_people():
    assert page.number(None) == "not reached"
    assert [page.number(x) for x in (0.0, 3, 1234, 1.5, 2e9, 1e-7)] == [
        "0", "3", "1,234", "1.5", "2.00e+09", "1.00e-07",
    ]  # fmt: skip


def test_a_bad_seed_is_named(tmp_path):
    with pytest.raises(ValueError, match="seed must be at least 0"):
        run_theory(Console(file=io.StringIO()), tmp_path, quick=True, seed=-1)
