"""The paper's theory, running: bounds, data, lemmas, Table 1, errata, and a page of what was seen."""

from adambs.lab.theory.run import run_theory

__all__ = ["run_theory"]
