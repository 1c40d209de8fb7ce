"""Bandit sampling in trainers of other libraries: each module an extra, each importable without the others.

`adambs.integrations.lightning`, `.transformers` (and TRL), `.accelerate`, `.keras`. Nothing is imported here.
"""
