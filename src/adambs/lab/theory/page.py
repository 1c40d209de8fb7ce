"""theory.html: words, tables and figures from the numbers of one run. One file, no scripts, nothing
fetched.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from adambs.lab.theory import figures

Result = dict[str, Any]

_CSS = """
:root { color-scheme: light dark; --ink: #1c1c1c; --quiet: #666; --paper: #fff; --line: #ddd; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e6e3; --quiet: #9a9a9a; --paper: #16181a; --line: #383c40; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
h1 { line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
.scroll { overflow-x: auto; }
figure { margin: 1rem 0; }
figure img { display: block; min-width: 20rem; max-width: 100%; }
figure img.wide { min-width: 46rem; width: 100%; }
figcaption, .quiet { color: var(--quiet); font-size: .9rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def number(value: Any) -> str:
    """A number for people."""
    if value is None:
        return "not reached"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table that scrolls sideways on a phone."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(number(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    """Escaped words."""
    return f"<p>{escape(text)}</p>"


def figure(uri: str, caption: str, *, wide: bool = False) -> str:
    """A picture that scrolls sideways on a phone."""
    alt = escape(caption, quote=True)
    image = f'<img{" class=wide" if wide else ""} src="{uri}" alt="{alt}">'
    return f'<figure class="scroll">{image}<figcaption>{escape(caption)}</figcaption></figure>'


def render(result: Result) -> str:
    """The whole page."""
    machine = ", ".join(f"{key}: {value}" for key, value in result["machine"].items())
    quick = " (quick run: smaller and rougher)" if result["quick"] else ""
    parts = [
        "<h1>The theory of Adam with bandit sampling, running</h1>",
        paragraph(
            "The bounds of Liu, Wu and Mozafari (NeurIPS 2020), measured. The arguments and the errata "
            "are in "
            f"docs/theory.md. Made by adambs theory --seed {result['seed']}{quick}."
        ),
        _findings(result),
        _lemmas(result["lemmas"]),
        _bandit(result["lemma_1"]),
        _table_1(result["table_1"], result["moments"]),
        _errata(result["errata"]),
        f'<p class="quiet">{escape(machine)}</p>',
    ]
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>adambs: the theory, running</title><style>{_CSS}</style>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def findings(result: Result) -> list[str]:
    """The headline sentences, each from this run's numbers."""
    last = [row for row in result["lemmas"]["rows"] if row["gamma"] == 2][-1]
    powers, reddi = result["moments"]["powers"], result["errata"]["reddi"]
    largest = max(row["n"] for row in result["table_1"]["rows"])
    trained = {row["method"]: row for row in result["table_1"]["rows"] if row["n"] == largest}
    terms = trained["Adam"]["theorem_1"]
    return [
        f"The best p is worth what Lemma 3 says and more: at n = {number(last['n'])} and γ = 2 it makes "
        "the sum of "
        f"‖g‖²/p {number(last['uniform'] / last['best_p_in_P'])} times smaller than uniform sampling.",
        f"The paper's data has almost nothing in it: at n = {number(last['n'])} the mean of "
        f"{number(result['lemmas']['sets'])} data sets is {number(last['non_zeros'])} non-zero entries; "
        "whatever n and d are, the expectation is below 2.71.",
        "Lemma 1 promises nothing in practice: before its bound says less than uniform sampling costs, "
        f"n = {number(last['n'])} needs {number(last['steps_before_lemma_1_helps'])} steps.",
        f"Training, n = {number(largest)}: Adam's regret over that with the best p is "
        f"{_ratio(trained['Adam'], trained['AdamBS, best p'])}; over that with p learned by Algorithm 2 and "
        f"Lemma 1's step it is {_ratio(trained['Adam'], trained['AdamBS'])}.",
        "Table 1 says that prefixed batches gain nothing from K. Measured, the root of E‖Ĝ‖² goes like K "
        "to the "
        f"{powers['Adam-uni']['K']:.2f} for Adam-uni and to the {powers['Adam']['K']:.2f} for Adam.",
        "The first term hides everything in the bound: for Adam it is "
        f"{number(terms['first'] / terms['second'])} times "
        f"the second; the regret itself is {number(terms['regret'])} and the bound's first two terms "
        f"{number(terms['first'] + terms['second'])}.",
        f"Theorem 1 is false as it stands: on the example of Reddi et al. Adam's regret is above the bound "
        f"from step {number(reddi['broken_from'])} on; AMSGrad's stays below its own.",
    ]


def _ratio(a: Result, b: Result) -> str:
    """a's regret over b's: of the means, and the range over seeds, which share their data."""
    ratios = sorted(x / y for x, y in zip(a["relative_regrets"], b["relative_regrets"], strict=True))
    mean = number(a["relative_regret"] / b["relative_regret"])
    return f"{mean} (over the seeds {number(ratios[0])} to {number(ratios[-1])})"


def _findings(result: Result) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in findings(result))
    return f"<h2>What is seen</h2><ul>{items}</ul>"


def _lemmas(result: Result) -> str:
    keys = (
        "n",
        "uniform",
        "best_p",
        "best_p_in_P",
        "lemma_2_line",
        "lemma_3_line",
        "network_uniform",
        "network_best_p",
    )
    headers = (
        "n",
        "uniform",
        "best p",
        "best p in P",
        "n log n log d",
        "log d log² n",
        "network, uniform",
        "network, best p",
    )
    parts = [
        "<h2>Lemmas 2 and 3: the sum of ‖g_j‖² / p_j</h2>",
        paragraph(
            f"d = {result['d']}, p_min = {result['c']}/n, β₃ = 1. The first columns put E‖z_j‖² for "
            "‖g_j‖², as both lemmas "
            "do; the last two are the one-neuron network on the paper's data, means over "
            f"{result['sets']} data sets. "
            "Since γ ≥ 2 the sums of j^-γ are bounded, so the paper's log n in Lemma 2 and, for γ > 2, its "
            "log² n in Lemma 3 are not seen. The floor costs at most a factor 1/(1 - c)."
        ),
        figure(
            figures.lemmas(result),
            "The sum under uniform p, the best p, and p as the rules have learned it.",
            wide=len(result["fits"]) > 1,
        ),
    ]
    for fit in result["fits"]:
        gamma = fit["gamma"]
        rows = [row for row in result["rows"] if row["gamma"] == gamma]
        parts += [f"<h3>γ = {gamma:g}</h3>", table(headers, [[row[key] for key in keys] for row in rows])]
        names = dict(zip(keys, headers, strict=True))
        fits = [
            (names.get(key, key), f"{f['power_of_n']:.2f}", f"{f['power_of_log_n']:.2f}")
            for key, f in fit.items()
            if key != "gamma"
        ]
        parts += [
            paragraph("Fitted growth:"),
            table(("column", "n to the power", "or log n to the power"), fits),
        ]
        learnt = [row for row in rows if "learned" in row]
        if learnt:
            cells = [[row["n"], row["T"], *row["learned"].values()] for row in learnt]
            parts += [
                paragraph(f"Learned in {result['epochs']:g} epochs of batches of {result['K']}:"),
                table(("n", "steps", *learnt[0]["learned"]), cells),
            ]
    parts += [
        figure(figures.learning(result), "The same, learned for longer."),
        paragraph(
            "From when Lemma 1's bound is below the cost of uniform sampling, for norms that stand still:"
        ),
        table(
            ("γ", "n", "steps"),
            [(f"{r['gamma']:g}", r["n"], r["steps_before_lemma_1_helps"]) for r in result["rows"]],
        ),
    ]
    return "".join(parts)


def _bandit(result: Result) -> str:
    keys = ("losses", "T", "regret", "regret_sd", "uniform_regret", "bound", "bound_with_K")
    headers = ("losses", "T", "regret", "± sd", "uniform's regret", "Lemma 1", "Lemma 1, with K")
    ratios = [row["bound"] / row["regret"] for row in result["rows"]]
    powers = ", ".join(f"{power:.2f} ({name})" for name, power in result["powers_of_T"].items())
    return "".join(
        [
            "<h2>Lemma 1: the regret of Algorithm 2</h2>",
            paragraph(
                f"n = {result['n']}, K = {result['K']}, p_min = {result['c']}/n, L = 1, Lemma 1's step "
                "for each T, "
                f"{result['seeds']} seeds. The bound holds everywhere, {number(min(ratios))} to "
                f"{number(max(ratios))} times above the regret. 'With K' replaces n by 1 + (n - 1)/K, which "
                f"the proof allows. Fitted powers of T: {powers}; the bound has 0.5, from far above. "
                "Uniform's regret is on the same norms; in the last case they were chosen against the bandit."
            ),
            figure(
                figures.bandit(result), "Regret against the best fixed p in P, and the bounds.", wide=True
            ),
            table(headers, [[row[key] for key in keys] for row in result["rows"]]),
        ]
    )


def _table_1(result: Result, moments: Result) -> str:
    rates = {
        "AdamBS": "√(d log d) / √K · log n / n · √T",
        "Adam": "√(d log d) / √K · √(n log n) / n · √T",
        "Adam-apt": "√(d log d) · log n / n · √T",
        "Adam-uni": "√(d log d) · √(n log n) / n · √T",
    }
    powers = moments["powers"]
    fitted = ("n_paper", "n", "K_paper", "K", "K_of_deviation")
    cells = [
        [name, rate, *(f"{powers[name][key] + 0.0:.2f}".replace("-0.00", "0.00") for key in fitted)]
        for name, rate in rates.items()
    ]
    headers = (
        "method",
        "paper's second term",
        "n: paper",
        "measured",
        "K: paper",
        "measured",
        "deviation only",
    )
    keys = (
        "n",
        "K",
        "alpha",
        "relative_regret",
        "relative_regret_sd",
        "power_of_T",
        "steps_to_target",
        "final_gap",
    )
    runs = [[row["method"], *(row[key] for key in keys)] for row in result["rows"]]
    run_headers = ("method", "n", "K", "α", "R(T)", "± sd", "R ~ T to the", "steps to target", "gap at T")
    terms = ("regret", "first", "first_with_v", "second", "third", "third_as_printed")
    bounds = [
        [row["method"], row["n"], row["K"], *(row["theorem_1"][key] for key in terms)]
        for row in result["rows"]
    ]
    bound_headers = (
        "method",
        "n",
        "K",
        "R(T)",
        "first term",
        "with v̂ itself",
        "second",
        "third",
        "third as printed",
    )
    return "".join(
        [
            "<h2>Theorem 1 and Table 1</h2>",
            paragraph(
                "Logistic regression, the convex relative of the one-neuron network, on features whose "
                "squares are the "
                "expected ones of the paper's data. First the second terms alone: the root of E‖Ĝ‖² at θ "
                "= 0, computed "
                "exactly, best p for AdamBS and Adam-apt, fitted to powers of n and K beside the paper's "
                "rates. "
                "The paper's K gain of AdamBS and Adam over prefixed batches is not there: it comes from "
                "an inequality "
                "that does not hold and a Jensen step that throws the gain of a batch away."
            ),
            table(headers, cells),
            paragraph(
                f"Then training: T = {result['T']}, d = {result['d']}, α_θ = α/√t with the best α of "
                f"{result['alphas']} for "
                f"each method, {result['seeds']} seed(s); R(T) and gaps are divided by f(0) - f*, the "
                "target is a "
                f"gap of {result['target']:g}. 'best p' knows the norms at θ = 0; AdamBS and Adam-apt "
                "learn with Lemma 1's step."
            ),
            figure(
                figures.training(result), "The loss gap of each method with its best step size.", wide=True
            ),
            table(run_headers, runs),
            paragraph(
                "Theorem 1 with each run's own constants (first seed). The first term, d√T, has no n and "
                "no p in it and "
                "is far larger than the second: in the bound it hides the difference between the "
                "methods, the more so the "
                "larger n is. In the runs it does not: with v̂ itself in place of d G∞ the first term "
                "depends on p too."
            ),
            table(bound_headers, bounds),
        ]
    )


def _errata(result: Result) -> str:
    rows = [
        (name, f"{value:.6g}" if isinstance(value, float) else str(value)) for name, value in _flat(result)
    ]
    return "".join(
        [
            "<h2>Errata, as numbers</h2>",
            paragraph("The arguments are in docs/theory.md; the functions in adambs.lab.theory.errata."),
            figure(
                figures.counter_example(result["reddi"]),
                "Adam does not converge on Reddi et al.'s problem; AMSGrad does.",
            ),
            table(("what", "value"), rows),
        ]
    )


def _flat(result: Result) -> list[tuple[str, Any]]:
    return [
        (f"{group}: {name}".replace("_", " "), value)
        for group, values in result.items()
        for name, value in values.items()
    ]
