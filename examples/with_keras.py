"""Keras 3 on torch on scikit-learn's handwritten digits. Some seconds.

What a plain script does not have is marked: four lines more, and one that is different.

pip install 'adambs[keras]' scikit-learn
python examples/with_keras.py
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from sklearn.datasets import load_digits

import adambs  # added
from adambs.integrations.keras import BanditData, BanditModel  # added

torch.set_num_threads(1)
keras.utils.set_random_seed(0)
x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16

model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model = BanditModel(model.inputs, model.outputs)  # added
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
data = BanditData((x[:1500], y[:1500]), adambs.BanditSampler(1500, batch_size=64, seed=0))  # added
model.fit(data, epochs=15, validation_data=(x[1500:], y[1500:]), verbose=0)  # changed
found = model.evaluate(x[1500:], y[1500:], verbose=0, return_dict=True)
seen = data.bandit.diagnostics()
print(f"test error {1 - found['accuracy']:.3f}, variance reduction {seen.variance_reduction:.2f}")
