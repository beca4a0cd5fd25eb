"""Small models of Keras, as most tests of models use them."""

import keras
import tensorflow as tf


class OneLayer(keras.Model):
    """A dense layer; subclasses write steps of their own."""

    def __init__(self, units=2, **options):
        super().__init__(**options)
        self.layer = keras.layers.Dense(units)

    def call(self, x):
        return self.layer(x)


def built(model, x, *options, **more):
    """The model after a call on `x`, compiled with the other arguments."""
    model(x)
    model.compile(*options, **more)
    return model


def compiled(layers, *options, **more):
    """A sequential model, compiled with the other arguments."""
    model = keras.Sequential(layers)
    model.compile(*options, **more)
    return model


def dense(inputs, outputs, *options, name=None, **more):
    """A sequential model of a dense layer, compiled with the other arguments if there are any."""
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs)], name=name)
    if options or more:
        model.compile(*options, **more)
    return model


def crossentropy(**options):
    """The loss of classes that are numbers, of outputs without a softmax."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def classifier(optimizer=None, **options):
    """A dense layer that tells three classes apart by four numbers, with its accuracy."""
    options = {"loss": crossentropy(), "metrics": ["accuracy"], **options}
    return dense(4, 3, optimizer or keras.optimizers.SGD(0.1), **options)


class Counted(keras.metrics.Metric):
    """The number of samples; when it is reset, it goes on counting if it `keeps` them."""

    def __init__(self, keeps=False):
        super().__init__(name="counted")
        self.keeps = keeps
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, outputs, sample_weight=None):
        self.count.assign_add(tf.cast(tf.shape(y)[0], "float32"))

    def result(self):
        return self.count

    def reset_state(self):
        if not self.keeps:
            super().reset_state()


class Stops(keras.callbacks.Callback):
    """Ends a training with InterruptedError after so many batches, as a lost machine does."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise InterruptedError
