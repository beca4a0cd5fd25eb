"""A training that saves and resumes. The text of this file is also a part of programs that run as workers."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(48, 13)).astype("f")
Y = np.random.default_rng(1).integers(0, 3, 48)


class Training:
    """A model with its optimizer, and a count with a part on each replica."""

    def __init__(self, strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            up = keras.layers.Dense(65, activation="relu", name="up")  # 13 x 65 does not divide evenly by 2 or 4
            self.model = keras.Sequential([keras.Input([13]), up, keras.layers.Dense(3, name="out")], name="net")
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(keras.optimizers.Adam(0.003, name="adam"), loss)
            self.model.optimizer.build(self.model.trainable_variables)
            self.seen = tf.Variable(
                0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
            )
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer, seen=self.seen)

    def values(self):
        variables = [*self.model.variables, *self.model.optimizer.variables, self.seen]
        return [np.asarray(variable.numpy()).tolist() for variable in variables]

    def fit(self):
        """Trains for an epoch of two steps, and returns the loss of each."""
        losses = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
        self.model.fit(X, Y, batch_size=24, shuffle=False, verbose=0, callbacks=[note])
        return losses

    def save(self, path, asynchronous):
        """Saves, and returns the values that were saved and the losses of what follows."""
        options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=asynchronous)
        self.seen.assign(12.0)
        self.fit()
        values = self.values()
        self.checkpoint.write(path, options)
        losses = self.fit()
        self.checkpoint.sync()
        return values, losses

    def resume(self, path):
        """Reads, and returns the values that were read and the losses of what follows."""
        self.checkpoint.read(path).assert_consumed()
        return self.values(), self.fit()
