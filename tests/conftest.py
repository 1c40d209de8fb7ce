import os

import hypothesis
import torch

# Shared machines stall: a slow example is not a failure. Derandomised: CI fails for a reason, not by luck.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("suite")

# Read when keras is imported, wherever that is.
os.environ.setdefault("KERAS_BACKEND", "torch")

# Two cores, small tensors: threads only add noise.
torch.set_num_threads(1)
