"""The command line: parsing and printing only. Each command imports what it needs: --help is quick."""

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ModuleNotFoundError as missing:
    sys.exit(f"The adambs command needs {missing.name}: pip install 'adambs[lab]'")

app = typer.Typer(
    help="Adam with bandit sampling: train on the examples that matter, without bias.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half as long, and nothing is cut in a narrow terminal
)
data_app = typer.Typer(help="The data sets: what is there, and how to get the rest.")
app.add_typer(data_app, name="data")
console = Console()

DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", help="Data folder; else $ADAMBS_DATA, else the user's cache folder."
    ),
]


class Scale(StrEnum):
    """How large an experiment is."""

    QUICK = "quick"
    PAPER = "paper"


class Noise(StrEnum):
    """Which labels are changed."""

    FLIPS = "flips"
    CONFUSIONS = "confusions"


def _print_version(wanted: bool) -> None:
    if wanted:
        from adambs import __version__

        console.print(f"adambs {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Adam with bandit sampling: train on the examples that matter, without bias."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the report.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 5,
) -> None:
    """Show where it pays, and where it does not. Three panels on data that needs no files, in two minutes."""
    from adambs.lab.experiments.demo import run_demo

    run_demo(console, out, seeds, command=_command())


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(metavar="NAME", help="One of `adambs experiments`.")],
    scale: Annotated[Scale, typer.Option(help="Minutes, or the paper's size.")] = Scale.QUICK,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Of `adambs methods`, with commas between; adam:lr=0.002 changes a setting. Or sweep: every "
            "rule with three settings each."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    first_seed: Annotated[int, typer.Option(help="To confirm with others than 0, 1, 2.", min=0)] = 0,
    epochs: Annotated[float | None, typer.Option(help="Instead of the experiment's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Instead of the experiment's.")] = None,
    lr: Annotated[float | None, typer.Option(help="Instead of the experiment's, for all methods.")] = None,
    long_tail: Annotated[
        float | None, typer.Option(help="Make the largest class this many times the smallest.")
    ] = None,
    slices: Annotated[int | None, typer.Option(help="How often to look at the losses.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of torch; 2 if not given.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu if not given.")] = None,
    data: DataFolder = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of the run; runs/NAME-SCALE if not given.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write TensorBoard scalars too.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Keep what is seen of each example, for inspect.")
    ] = False,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Find each method's best learning rate and batch size, then compare the best."
        ),
    ] = False,
    tune_seconds: Annotated[float, typer.Option(help="Training time of each run with --tune.")] = 60.0,
    tune_lrs: Annotated[
        str | None, typer.Option(help="To try, with commas; 1, 2 and 4 times the experiment's if not given.")
    ] = None,
    tune_batch_sizes: Annotated[
        str | None, typer.Option(help="To try, with commas; half, once and twice the experiment's.")
    ] = None,
) -> None:
    """Run an experiment of the paper and write its report. Stop it at any time; the same command goes on."""
    from adambs.lab.errors import STOPPED
    from adambs.lab.experiments import reproduce as lab
    from adambs.lab.experiments import tune as tuning
    from adambs.lab.runs import records

    chosen = tuple(name.strip() for name in methods.split(",")) if methods else None
    plan = lab.make_plan(
        experiment,
        scale.value,
        lab.Overrides(chosen, epochs, batch_size, lr, long_tail, slices, threads, device),
    )
    if tune and (lr is not None or batch_size is not None or epochs is not None or history):
        raise ValueError(
            "--tune finds lr and batch-size and counts seconds: leave out --lr, --batch-size, "
            "--epochs and --history"
        )
    name = "tune" if tune else "sweep" if methods == "sweep" else scale.value
    folder = out or Path("runs") / f"{experiment}-{name}"
    loaded = lab.prepare(plan, data)
    if plan.differs:
        console.print(f"Unlike the paper: {plan.differs}.")
    command, seed_range = _command(), range(first_seed, first_seed + seeds)
    try:
        if tune:
            grid = tuning.make_grid(plan.experiment, tune_seconds, tune_lrs, tune_batch_sizes)
            lab.tune_with_progress(
                console, plan, grid, loaded, seed_range, folder, command=command, tensorboard=tensorboard
            )
        else:
            lab.run_with_progress(
                console,
                plan,
                loaded,
                seed_range,
                folder,
                command=command,
                tensorboard=tensorboard,
                history=history,
            )
    except KeyboardInterrupt:
        console.print("Stopped. What is done is kept; the same command goes on from here.")
        if records.begun(folder):
            _write_report([folder], folder)
        raise typer.Exit(STOPPED) from None
    _write_report([folder], folder)


@app.command()
def report(
    # Hidden in the list of arguments, where typer would call it a list[Path]; the usage line shows it.
    runs: Annotated[list[Path], typer.Argument(metavar="FOLDER", hidden=True)],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For the report; the first run's if not given.")
    ] = None,
) -> None:
    """Write the report of one run or of several. FOLDER is that of a run."""
    _write_report(runs, out or runs[0])


@app.command()
def summary(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of folders of runs.")],
) -> None:
    """Write RESULTS.md and its figures for all runs below a folder."""
    from adambs.lab.report.summary import write_summary

    console.print(f"Written: [bold]{write_summary(folder)}[/bold]")


@app.command()
def methods() -> None:
    """List the methods, a line and a citation each."""
    from adambs.lab.methods import METHODS
    from adambs.lab.report.terminal import Entries

    console.print(Entries((each.name, [each.summary, f"({each.citation})"]) for each in METHODS.values()))


@app.command()
def experiments() -> None:
    """List the experiments, and where their values come from."""
    from adambs.lab.experiments import EXPERIMENTS
    from adambs.lab.report.terminal import Entries

    rows = []
    for e in EXPERIMENTS.values():
        numbers = f"batch {e.batch_size}, lr {e.lr:g}, {e.epochs:g} epochs; {', '.join(e.methods)}"
        lines = {"paper": e.paper, "ours": e.ours, "--scale quick": e.quick_differs}
        told = [f"{what}: {text}" for what, text in lines.items() if text]
        rows.append((e.name, [f"{e.title} ({e.figure})", numbers, *told]))
    console.print(Entries(rows))


@data_app.callback(invoke_without_command=True)
def list_data(context: typer.Context, data: DataFolder = None) -> None:
    """List what is in the data folder."""
    if context.invoked_subcommand:
        return
    from adambs.lab import datasets
    from adambs.lab.report.terminal import Entries

    console.print(f"Data folder: [bold]{escape(str(datasets.data_folder(data)))}[/bold]", highlight=False)
    rows = []
    for row in datasets.available(data):
        where = f"in {row.where}" if row.where else ""
        rows.append((row.name, [f"{row.state}: {row.detail}", where, row.source]))
    console.print(Entries(rows))
    console.print("Get one with: adambs data fetch NAME")


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the data set.")], data: DataFolder = None
) -> None:
    """Download a data set from its publisher, checked by its hash."""
    from adambs.lab import datasets

    with datasets.download_bar(console) as bar:
        files = datasets.fetch(name, data, progress=bar)
    for file in files:
        console.print(f"there: [bold]{file}[/bold]")
    if not files:
        console.print(f"{name} needs no files.")


@app.command()
def theory(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For the page.")] = Path("theory"),
    seed: Annotated[int, typer.Option(help="Of everything random.", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, in half a minute.")] = False,
) -> None:
    """Measure the paper's bounds, lemmas and Table 1. Takes a few minutes."""
    from adambs.lab.theory import run_theory

    run_theory(console, out, quick=quick, seed=seed)


@app.command()
def probe(
    file: Annotated[
        Path | None, typer.Argument(help="A Python file that defines what the probe takes.")
    ] = None,
    template: Annotated[bool, typer.Option("--template", help="Print such a file to begin with.")] = False,
    experiment: Annotated[str | None, typer.Option(help="One of `adambs experiments`, instead.")] = None,
    seconds: Annotated[float, typer.Option(help="Time limit.")] = 60.0,
    scale: Annotated[Scale, typer.Option(help="Of the experiment.")] = Scale.QUICK,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="HTML page to write as well.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON file to write as well.")] = None,
    data: DataFolder = None,
) -> None:
    """Estimate what there is to win on my data. Trains a copy of a model for a minute."""
    from adambs.lab.insight import probes

    if template:
        typer.echo(probes.template(), nl=False)
        return
    if (file is None) == (experiment is None):
        raise ValueError("probe takes a FILE or --experiment NAME, one of them (or --template)")
    for wanted in (out, json):
        if wanted is not None and not wanted.parent.is_dir():
            raise ValueError(f"{wanted} cannot be written: there is no folder {wanted.parent}")
    question = probes.from_file(file) if file else probes.from_experiment(str(experiment), scale.value, data)
    answer = probes.run_with_progress(console, question, seconds)
    typer.echo(str(answer))
    for written in probes.write(answer, out, json):
        console.print(f"Written: [bold]{written}[/bold]")


@app.command()
def inspect(
    what: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run with a history, or a saved history.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML page; inspect.html beside it if not given.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option(help="Of the lab, whose pictures or texts to show with a saved history.")
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Classes of your own data, a line for each example.")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Texts of your own data, a line for each example.")
    ] = None,
    k: Annotated[int, typer.Option(help="How many suspects to show.", min=1)] = 60,
    data: DataFolder = None,
) -> None:
    """Show what a training has seen of each example. A page: what is hard, rare or mislabelled."""
    from adambs.lab.insight import inspection

    page = inspection.inspect(what, out, experiment=experiment, labels=labels, texts=texts, k=k, folder=data)
    console.print(f"Written: [bold]{page.resolve()}[/bold]")


@app.command()
def mislabelled(
    experiment: Annotated[
        str, typer.Argument(metavar="NAME", help="One of `adambs experiments`, such as cnn-fashion.")
    ],
    noise: Annotated[Noise, typer.Option(help="Labels at random, or a weak model's mistakes.")] = Noise.FLIPS,
    share: Annotated[float, typer.Option(help="Of the labels, how many are changed.")] = 0.05,
    long_tail: Annotated[float, typer.Option(help="Largest class over smallest.")] = 1.0,
    n: Annotated[int | None, typer.Option(help="Training examples; all if not given.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Instead of the experiment's.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.", min=0)] = 0,
    cleanlab: Annotated[
        bool, typer.Option("--cleanlab", help="Also cleanlab's confident learning, 5 folds.")
    ] = False,
    data: DataFolder = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the records.")] = Path("runs/mislabelled"),
) -> None:
    """Measure how well rankings find changed labels. One record; what is there is kept."""
    from adambs.lab.insight import mislabelled as lab

    case = lab.Case(experiment, noise.value, share, long_tail, n, epochs, seed)
    console.print(lab.table(lab.run(case, out, with_cleanlab=cleanlab, folder=data, command=_command())))
    console.print(f"All records: [bold]{lab.write_tables(out).resolve()}[/bold]")


@app.command()
def bench(
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON file to write.")] = Path("bench.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller n and fewer repetitions.")] = False,
) -> None:
    """Measure what the sampler and the scores cost. Beside their peers, as ratios in one run."""
    from adambs.lab.bench import run_bench

    run_bench(console, out, quick=quick)


def _write_report(folders: list[Path], out: Path) -> None:
    from adambs.lab.report.page import write_report
    from adambs.lab.report.tables import terminal_table
    from adambs.lab.runs import records

    runs = [records.read(folder) for folder in folders]
    page = write_report(runs, out)
    console.print(terminal_table(runs))
    console.print(f"The report: [bold]{page.resolve()}[/bold]")


def _command() -> str:
    """The command line, to repeat it."""
    return shlex.join(["adambs", *sys.argv[1:]])


def main() -> None:
    """Entry point: what is wrong with the input is one line, not a traceback."""
    from adambs.lab.errors import user_errors

    try:
        app()
    except user_errors() as error:
        Console(stderr=True).print(f"[bold red]adambs:[/bold red] {escape(str(error))}", highlight=False)
        sys.exit(1)
