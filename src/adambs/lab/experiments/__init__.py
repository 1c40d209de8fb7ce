"""What is compared: ``catalogue`` lists the experiments, ``reproduce`` runs one from its name to its report.

``demo``, ``sweep`` (every rule with several settings) and ``text_sources`` (a stream of reviews) stand alone.
"""

from adambs.lab.experiments.catalogue import EXPERIMENTS, PAPER_METHODS, SGD_METHODS, Experiment, find

__all__ = ["EXPERIMENTS", "PAPER_METHODS", "SGD_METHODS", "Experiment", "find"]
