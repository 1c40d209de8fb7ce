"""Experiments, benchmarks and records: what imports the core and is not imported by it."""
