"""The command line: parsing and printing only."""

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    sys.exit(f"The adambs command needs {missing.name}: pip install 'adambs[lab]'")

app = typer.Typer(
    help="Adam with bandit sampling: train on the examples that matter, without bias.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()


@app.callback()
def _root() -> None:
    """Keep subcommands even while there is only one."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 5,
    epochs: Annotated[int, typer.Option(help="Epochs of each run.", min=1)] = 20,
) -> None:
    """Adam against AdamBS on scikit-learn's digits, from the same start, in a minute or two."""
    from adambs.lab.demo import run_demo

    run_demo(console, out, seeds, epochs)


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("bench.json"),
    quick: Annotated[bool, typer.Option(help="Smaller n and fewer repetitions.")] = False,
) -> None:
    """What the sampler and the scores cost, beside their peers, as ratios in one run."""
    from adambs.lab.bench import run_bench

    run_bench(console, out, quick=quick)


def main() -> None:
    """Entry point of the ``adambs`` command."""
    app()
