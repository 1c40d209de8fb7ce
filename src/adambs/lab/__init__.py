"""Experiments, benchmarks and records: what imports the core and is not imported by it.

Each folder is a room: ``experiments`` (what is compared), ``methods`` (ways to choose examples), ``models``,
``datasets``, ``runs`` (the training loop and its records), ``report`` (numbers, figures, pages), ``insight``
(probe, inspect, mislabelled), ``theory`` (the paper's, running), ``bench`` (what things cost).
"""
