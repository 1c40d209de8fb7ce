"""The commands ``adambs probe``, ``inspect`` and ``mislabelled``, and how well what they say has held."""
