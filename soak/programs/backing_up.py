"""Trains with `BackupAndRestore` until it is killed: `python -m soak.programs.backing_up`, for `soak/backups.py`.

A fork prints "goes" with the number of steps it found, when its first step is done, and "came" with a hash of all that
the training came to.
"""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import tensorflow as tf

from soak.programs.common import make_strategy, say, serve

import replica_engine  # isort: skip
import keras

EPOCHS, BATCHES = 20, 12


def train(folder: str, kind: str) -> None:
    """Resumes and trains on until it is killed, or to its end."""
    if kind == "compiled":
        replica_engine.xla.set_cache_dir(os.path.join(os.path.dirname(folder), "programs"))
    strategy = make_strategy(kind)

    class Says(keras.callbacks.Callback):
        said = False

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if not self.said:
                self.said = True
                say(f"goes {int(self.model.optimizer.iterations.numpy()) - 1}")

        def get_state(self) -> None:
            """It has none to come back."""

        def set_state(self, state: None) -> None:
            """See above."""

    keras.utils.set_random_seed(1)
    data = np.random.default_rng(0).normal(size=(BATCHES * 8, 6)).astype("float32")
    norm, dropout = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    parts = [keras.layers.Dense(6, "relu"), norm, dropout, keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    stopping = keras.callbacks.EarlyStopping("mae", patience=EPOCHS, restore_best_weights=True)
    backup = replica_engine.keras.BackupAndRestore(folder, save_freq=3)
    given: dict[str, object] = {"x": data[:, :4], "y": data[:, 4:], "batch_size": 8}
    if kind == "compiled":
        dataset = tf.data.Dataset.from_tensor_slices((data[:, :4], data[:, 4:])).shuffle(len(data)).batch(8)
        options = tf.data.Options()
        options.autotune.enabled = False  # iterators that tune themselves take long to delete
        given = {"x": dataset.with_options(options)}
    replicated = replica_engine.keras.replicate_model(model, strategy=strategy)
    history = replicated.fit(**given, epochs=EPOCHS, verbose=0, callbacks=[Says(), stopping, backup])
    came = hashlib.sha256(json.dumps(history.history).encode())
    for variable in [*model.variables, *model.optimizer.variables]:
        came.update(variable.numpy().tobytes())
    say(f"came {came.hexdigest()[:16]}")


if __name__ == "__main__":
    serve(train)
