"""One run: methods take turns (``runner``) in one training loop (``training``); ``records`` keep it.

``locking`` keeps a second run out of the folder, ``randomness`` gives each method its own random stream.
"""
