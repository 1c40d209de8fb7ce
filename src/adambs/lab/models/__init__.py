"""The networks of the paper's experiments (``paper``), and small ones for text (``transformers``)."""

from adambs.lab.models.paper import build as build
