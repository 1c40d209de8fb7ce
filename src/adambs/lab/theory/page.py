"""theory.html: words, tables and figures from the numbers of one run. One file, no scripts, nothing
fetched.
"""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from adambs import pages
from adambs.lab.theory import figures

Result = dict[str, Any]


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


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """An HTML table that scrolls sideways on a phone."""
    head = Markup("").join(Markup("<th>{}</th>").format(header) for header in headers)
    lines = (Markup("").join(Markup("<td>{}</td>").format(number(cell)) for cell in row) for row in rows)
    body = Markup("").join(Markup("<tr>{}</tr>").format(line) for line in lines)
    whole = Markup(
        '<div class="scroll" tabindex="0"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    return whole.format(head, body)


def paragraph(text: str) -> Markup:
    """Escaped words."""
    return Markup("<p>{}</p>").format(text)


def figure(uri: str, caption: str, *, wide: bool = False) -> Markup:
    """A picture that scrolls sideways on a phone, and its caption, which does not."""
    image = Markup('<img{} src="{}" alt="{}">').format(Markup(" class=wide") if wide else "", uri, caption)
    return Markup('<figure><div class="picture">{}</div><figcaption>{}</figcaption></figure>').format(
        image, caption
    )


def render(result: Result) -> str:
    """The whole page."""
    machine = ", ".join(f"{key}: {value}" for key, value in result["machine"].items())
    quick = " (quick run: smaller and rougher)" if result["quick"] else ""
    sections = [
        _findings(result),
        _lemmas(result["lemmas"]),
        _bandit(result["lemma_1"]),
        _table_1(result["table_1"], result["moments"]),
        _errata(result["errata"]),
    ]
    return pages.render(
        "theory.html",
        package=__package__,
        command=f"adambs theory --seed {result['seed']}{quick}",
        content=Markup("".join(sections)),  # each piece of it has been escaped
        machine=machine,
    )


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
    items = Markup("").join(Markup("<li>{}</li>").format(text) for text in findings(result))
    return Markup("<h2>What is seen</h2><ul>{}</ul>").format(items)


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
