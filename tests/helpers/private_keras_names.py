"""Private attributes of Keras that the library uses, for `test_rules.py`. Checked on Keras 3.15.1."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as _loss
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter as _OfGenerator

from helpers.private_names import Private
from replica_engine.keras.backup import saved_state
from replica_engine.upstream.keras import keras_models as keras_model
from replica_engine.upstream.keras import keras_training as keras_trainer

_optimizer = keras.optimizers.SGD()
_accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
_accumulating.build([keras.Variable(0.0)])
_model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
_model.compile(_optimizer, "mse", metrics=["mae"])
_normalization = keras.layers.BatchNormalization()
_normalization.build((None, 1))
_epochs = keras.src.backend.tensorflow.trainer.TFEpochIterator(
    tf.distribute.get_strategy(), np.zeros([1, 1]), np.zeros([1, 1])
)

PRIVATE = (
    Private(_optimizer.iterations, "_value", "the TensorFlow variable under a Keras variable"),
    Private(_optimizer, "_distribution_strategy", "the strategy through which an optimizer updates variables"),
    Private(_optimizer, "_trainable_variables", "the variables that an optimizer was built for"),
    Private(_optimizer, "_trainable_variables_indices", "finding weights that an optimizer has no state for"),
    Private(_optimizer, "_var_key", "finding weights that an optimizer has no state for"),
    Private(_optimizer, "_iterations", "the number of steps, of which k make one update"),
    Private(_optimizer, "_clip_gradients", "a part of the update that ends a group of accumulated gradients"),
    Private(_optimizer, "_apply_weight_decay", "a part of that update"),
    Private(_optimizer, "_backend_update_step", "a part of that update"),
    Private(_optimizer, "_update_model_variables_moving_average", "the moving averages after that update"),
    Private(_optimizer, "_overwrite_model_variables_with_average_value", "the moving averages after that update"),
    Private(_accumulating, "_accumulated_gradients", "the gradients that were added up so far"),
    Private(keras.optimizers.LossScaleOptimizer, "_common_apply", "its update in cross-replica context"),
    Private(_model, "_distribute_strategy", "whether a model was built under a strategy"),
    Private(_model, "_flatten_layers", "all layers of a model, nested ones included"),
    Private(_model, "_layers", "the input layer of a Sequential, which `layers` leaves out"),
    Private(_model._layers[0], "_auto_config", "whether Keras made that layer from the first data"),
    Private(_normalization, "_reduction_axes", "the axes of the statistics of a normalization"),
    Private(_model, "_compute_loss", "making the variables of losses as a step does"),
    Private(_model, "_call_has_training_arg", "calling a model as Keras' steps do"),
    Private(_model, "_compile_loss", "the loss of each output"),
    Private(_model._compile_loss, "call", "which losses are called by that of `compile`"),
    Private(_model, "_compile_metrics", "whether the metrics have been built"),
    Private(_model, "_loss_tracker", "whether compile() was called again"),
    Private(_loss.backend, "backend", "whether losses are scaled for a strategy"),
    Private(_OfGenerator(iter([(0,)])), keras_trainer.KEPT, "the first batch of a generator, which still gives it"),
    Private(_model, "_initial_epoch", "the epoch that a restored training begins with"),
    Private(_model, "_get_metrics_result_or_logs", "the logs of an epoch whose last step was before a restart"),
    *(
        Private(_epochs, name, "the place of a training in its data")
        for name in ("_distributed_dataset", "_get_iterator", "_current_iterator", "_steps_seen", "_num_batches")
    ),
    *(Private(keras.callbacks.TensorBoard(), name, "where it is in its logs") for name in saved_state.OF_BOARD),
    *(
        Private(keras.callbacks.ModelCheckpoint("a.keras"), name, "when it saves next")
        for name in saved_state.OF_CHECKPOINT
        if name.startswith("_")
    ),
    Private(_loss, keras_model.MASKED, "the divisor of a masked loss"),
)
"""Every private attribute of Keras that the library uses."""
