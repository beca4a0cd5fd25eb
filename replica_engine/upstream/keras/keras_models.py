"""Parts of Keras models that have no public name: the variables under Keras variables, losses, metrics, optimizers.

Checked on Keras 3.15.1. This module imports Keras, so only code that already has a Keras model should import it.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

# REGISTERED_OBJS_TO_NAMES: the names under which Keras serializes its own classes.
from keras.src.api_export import REGISTERED_OBJS_TO_NAMES as _public_names

# compute_output_spec: calls a function in a graph that is thrown away, so that it makes variables and changes none.
from keras.src.backend import compute_output_spec as _compute_output_spec

# loss: the module that has the mask of a loss.
from keras.src.losses import loss as _loss

# Functional: the class of models that are built from inputs and outputs.
from keras.src.models.functional import Functional as _Functional

# GLOBAL_CUSTOM_NAMES: and those of classes that users have registered.
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES as _custom_names

from replica_engine.upstream import thread_state, versions
from replica_engine.upstream.keras import keras_training

versions.check_keras()

MASKED = "apply_mask"

_OF_BATCHES = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle)
_CORRELATIONS = (keras.metrics.PearsonCorrelation, keras.metrics.ConcordanceCorrelation)
STRATEGY = "_distribution_strategy"
"""The attribute of an optimizer with the strategy under which it was made and through which it updates variables."""

_FUNCTIONS = ("train", "test", "predict")
Functions = tuple[list[object], dict[str, Callable[..., object] | None]]
"""What `compile` made, and the functions that Keras traced for it, by the names of the attributes."""


def underlying(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable under a Keras variable."""
    return variable._value


def underlying_or_itself(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """The TensorFlow variable under a Keras variable; any other variable itself."""
    return underlying(variable) if isinstance(variable, keras.Variable) else variable


def put_underneath(variable: keras.Variable, value: tf.Variable) -> None:
    """Puts another TensorFlow variable under a Keras variable."""
    variable._value = value


def contain(component: tf.Variable, container: tf.Variable | None) -> None:
    """Marks a plain variable as a component of a distributed one, as TensorFlow does; None removes the mark."""
    # Keras finds the distributed variable by the one or the other.
    for holder in (component, component._handle):
        if container is None:
            vars(holder).pop("_distributed_container", None)
        else:
            holder._distributed_container = weakref.ref(container)


def compiled_loss(model: keras.Model) -> keras.losses.Loss | None:
    """What `compile` made of all losses of a model; None if there is none. It calls its attribute `call`."""
    return getattr(model, "_compile_loss", None)


def losses_in(compiled: keras.losses.Loss | None) -> list[keras.losses.Loss]:
    """The loss of each output in what `compile` made of them, which calls them; none before it is built."""
    return [each.loss for each in getattr(compiled, "_flat_losses", None) or ()]


def is_seed(variable: keras.Variable) -> bool:
    """Whether the variable is the state of a seed generator."""
    return variable.name == "seed_generator_state"


def is_counted(variable: keras.Variable) -> bool:
    """Whether each replica counts in a value of its own of a metric's variable, and the values are added up."""
    return variable.aggregation == "sum" and variable.synchronization == "on_read"


def list_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """All optimizers among the attributes of a model and its layers, also in lists and dictionaries."""
    found = [getattr(model, "optimizer", None)]
    for layer in list_layers(model):
        found += leaves(vars(layer).values(), 3)
    unique = {id(each): each for each in found if isinstance(each, keras.optimizers.Optimizer)}
    return list(unique.values())


def leaves(values: Iterable[object], depth: int) -> Iterator[object]:
    """The values themselves, and those inside lists, tuples and dictionaries among them, which may be nested."""
    for value in values:
        if isinstance(value, (list, tuple, dict)) and depth:
            yield from leaves(value.values() if isinstance(value, dict) else value, depth - 1)
        else:
            yield value


def list_layers(model: keras.Model, include_self: bool = True) -> list[keras.layers.Layer]:
    """All layers of a model, also nested ones; the model itself comes first."""
    return list(model._flatten_layers(include_self=include_self))


def unbuilt_layers(model: keras.Model) -> list[str]:
    """The names of the layers that have no variables yet; the model's own name comes first.

    What Keras has called is complete: a part of it that says that it is not built, such as a table of words, needs no
    build. A layer that the user's own class calls may get its variables later.
    """
    layers = list_layers(model)
    called = [each for each in layers if each.built and _calls_all(each)]
    complete = {id(part) for each in called for part in list_layers(each)}
    return [layer.name for layer in layers if not layer.built and id(layer) not in complete]


def _calls_all(layer: keras.Layer) -> bool:
    keras_own = isinstance(layer, (keras.Sequential, _Functional)) or type(layer).__module__.startswith("keras.")
    return keras_own and type(layer) is not keras.Model


def input_sizes(model: keras.Model) -> list[tuple[str, int]]:
    """The inputs of a model for which somebody gave a batch size: the name and that size.

    A Sequential without `keras.Input` gets an input of Keras' own from the first data that it sees. That input has the
    size of those data, which nobody gave, and the model takes any other.
    """
    if isinstance(model, keras.Sequential) and any(getattr(layer, "stateful", False) for layer in list_layers(model)):
        return _sizes(model)  # the size of the first data is that of its states
    first = model.layers[0] if isinstance(model, keras.Sequential) and model.layers else None
    if isinstance(first, keras.Model):  # Keras' own input takes the shape that this model has
        return input_sizes(first)
    return [] if first is not None and _is_input_of_data(model) else _sizes(model)


def _sizes(model: keras.Model) -> list[tuple[str, int]]:
    tensors = keras.tree.flatten(getattr(model, "inputs", None) or [])
    shapes = [(tensor.name, tensor.shape) for tensor in tensors if isinstance(tensor, keras.KerasTensor)]
    return [(name, shape[0]) for name, shape in shapes if shape and shape[0] is not None]


def _is_input_of_data(model: keras.Sequential) -> bool:
    """Whether Keras may have made the input of a Sequential itself: it names the dtype, and gives no name.

    A saved or copied model does not tell who made it. Plain Keras takes any size there, and so do the replicas.
    """
    of_model = [layer for layer in model._layers if isinstance(layer, keras.layers.InputLayer)]
    given = getattr(of_model[0], "_auto_config", None) if of_model else None
    is_named = not of_model or re.fullmatch(r"input_layer(_\d+)?", of_model[0].name) is None
    return given is not None and not is_named and given.config.get("dtype") is not None and not given.config["shape"]


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def weights_kept_for(model: keras.Model) -> dict[int, keras.Variable]:
    """For each variable that an optimizer of a model keeps for one weight, by its id, that weight.

    An optimizer keeps them in lists in the order of its weights.
    """
    found = {}
    for optimizer in [each for outer in list_optimizers(model) for each in with_inner_optimizers(outer)]:
        weights = trained_by(optimizer) if optimizer.built else []
        for kept in vars(optimizer).values():
            if isinstance(kept, (list, tuple)) and len(kept) == len(weights):
                for variable, weight in zip(kept, weights, strict=True):
                    if isinstance(variable, keras.Variable) and variable is not weight:
                        found[id(variable)] = weight
    return found


def with_inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and all optimizers that it wraps."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer, *(deeper for each in inner if each is not None for deeper in with_inner_optimizers(each))]


def apply_across(
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[..., object],
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    variables: Sequence[keras.Variable] | None,
) -> None:
    """Calls the optimizer's own `apply` in cross-replica context, where LossScaleOptimizer's would raise."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer._common_apply(grads, variables)
    else:
        apply(grads, variables)


def is_overwritten(variable: keras.Variable | tf.Variable) -> bool:
    """Whether an optimizer puts a variable's gradient in place of its value, as for the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def touches_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer processes gradients before it passes each one to the variable's update."""
    return (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or optimizer.gradient_accumulation_steps is not None  # of an optimizer that was made outside of the scope
        or keras_training.clips(optimizer)
        or getattr(optimizer, "loss_scale_factor", None) is not None
    )


def list_accumulators(model: keras.Model) -> list[keras.Variable]:
    """The variables in which the optimizers of a model accumulate gradients."""
    optimizers = [each for optimizer in list_optimizers(model) for each in with_inner_optimizers(optimizer)]
    return [variable for optimizer in optimizers for variable in keras_training.accumulators(optimizer)]


def list_variables(model: keras.Model) -> list[keras.Variable]:
    """All variables of a model: weights, seeds, metric variables, and the variables of its optimizers."""
    groups = [model.variables, model.metrics_variables, *(each.variables for each in list_optimizers(model))]
    # By identity: a variable compares element by element.
    every = {id(variable): variable for group in groups for variable in group}
    return [variable for variable in every.values() if underlying(variable) is not None]


def output_losses(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that keep the loss of each output if there are several outputs."""
    compiled = compiled_loss(model)
    return [] if compiled is None else list(compiled.metrics)


def list_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, including those inside the one that `compile` makes of several."""
    nested = [inner for metric in model.metrics for inner in (metric, *getattr(metric, "metrics", metric._metrics))]
    return list({id(metric): metric for metric in nested}.values())


def is_built(model: keras.Model) -> bool:
    """Whether all variables that a training step needs exist."""
    parts = [getattr(model, "_compile_metrics", None), getattr(model, "_compile_loss", None)]
    if keras_training.has_keras_step(model, "train_step"):  # other steps build the optimizers that they use
        parts.append(model.optimizer)
    return all(part is None or part.built for part in parts)


def build(model: keras.Model, batch: object) -> None:
    """Makes the variables of a model's loss, metrics and optimizer, from a batch or its specs.

    The loss and the metrics get what they get in a step: outputs with values if the model runs eagerly, otherwise those
    of a graph, of the kind that the model gives (ragged or dense). Keras' own way to build knows dense symbols only.
    Nothing that exists changes its value.
    """
    parts = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    if any(part is not None and not part.built for part in parts):
        leaves = tf.nest.flatten(batch, expand_composites=True)
        if model.run_eagerly and not any(isinstance(leaf, tf.TypeSpec) for leaf in leaves):
            # A regularizer asks the scope for the value of its weight.
            with (
                keras.StatelessScope([(variable, variable.value) for variable in model.variables]),
                _unchanged(own_variables(model)),
            ):
                _build_from(model, batch)
        else:
            _compute_output_spec(lambda: _build_from(model, _placeholders(batch)))
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def own_variables(model: keras.Model) -> list[tf.Variable]:
    """The variables of TensorFlow among the attributes of a model and its layers, which Keras does not know."""
    return [
        each
        for layer in list_layers(model)
        for each in leaves(vars(layer).values(), 4)
        if isinstance(each, tf.Variable)
    ]


@contextlib.contextmanager
def _unchanged(variables: Iterable[tf.Variable]) -> Iterator[None]:
    with thread_state.unobserved():
        # Callbacks of `tf.debugging` must not see these copies: they are no ops of the user's.
        before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _build_from(model: keras.Model, batch: object) -> None:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = model(x, training=False) if model._call_has_training_arg else model(x)
    metrics, losses = model._compile_metrics, model._compile_loss
    if metrics is not None and not metrics.built:
        model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
    if losses is not None and not losses.built:
        model._compute_loss(x, y, outputs, sample_weight=sample_weight, training=False)


def _placeholders(batch: object) -> object:
    """Stands for a batch in a graph; a sparse tensor keeps the length of its rows, which its components lose."""

    def placeholder(leaf: object) -> object:
        if isinstance(leaf, (tf.SparseTensor, tf.SparseTensorSpec)):
            return tf.compat.v1.sparse_placeholder(leaf.dtype, leaf.shape)
        components = tf.nest.flatten(leaf, expand_composites=True)
        tensors = [each if each is None else tf.compat.v1.placeholder(each.dtype, each.shape) for each in components]
        return tf.nest.pack_sequence_as(leaf, tensors, expand_composites=True)

    return tf.nest.map_structure(placeholder, batch)


def read_traced_state(model: keras.Model) -> list[object]:
    """A value that changes whenever the model's steps may trace to other graphs: what `compile` and layers set."""
    parts = [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")]
    layers = [(layer, layer.trainable) for layer in list_layers(model)]
    return [*parts, bool(model.run_eagerly), layers]


def gives_rows(model: keras.Model) -> bool:
    """Whether a model is known to predict outputs that all have one row per sample.

    It was built from inputs and outputs, or its `predict_step` has the attribute `gives_rows`.
    """
    if getattr(model.predict_step, "gives_rows", False):
        return True
    kinds = [kind for kind in (keras.Sequential, _Functional) if isinstance(model, kind)]
    if not any(type(model).call is kind.call for kind in kinds):
        return False  # it computes its outputs in another way
    if not keras_training.has_keras_step(model, "predict_step"):
        return False
    outputs = [each.shape for each in keras.tree.flatten(model.outputs)]
    return all(len(shape) > 0 and shape[0] is None for shape in outputs)


def counts(model: keras.Model) -> list[tuple[keras.optimizers.Optimizer, int]]:
    """The number of variables of each optimizer that is an attribute of the model itself; fast enough for each step."""
    found = [value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)]
    return [(optimizer, len(optimizer.variables)) for optimizer in found]


def unknown_to(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> list[keras.Variable]:
    """The variables among `variables` for which a built optimizer has no state."""
    inner = with_inner_optimizers(optimizer)[-1]
    if not inner.built:
        return []
    return [variable for variable in variables if inner._var_key(variable) not in inner._trainable_variables_indices]


def exchange_functions(model: keras.Model, others: Functions | None) -> Functions:
    """Replaces the functions that Keras traced for a model; returns the functions that were replaced.

    Args:
        model: the model.
        others: an earlier return value of this function. If it is None, or if `compile` was called since, the model
            gets no functions.
    """
    names = [f"{name}_function" for name in _FUNCTIONS]
    compiled = [vars(model).get(name) for name in ("optimizer", "_loss_tracker")]
    found = compiled, {name: vars(model).get(name) for name in names}
    if others is not None and all(one is other for one, other in zip(others[0], compiled, strict=True)):
        vars(model).update(others[1])
    else:
        vars(model).update(dict.fromkeys(names))
    return found


def serialized_as(kind: type, other: type) -> type:
    """Makes Keras write the name of another class for objects of a class, and load them as objects of that one."""
    _custom_names[kind] = keras.saving.get_registered_name(other)
    if other in _public_names:
        _public_names[kind] = _public_names[other]
    return kind


def masked(sample_weight: object, mask: object, dtype: tf.DType, reduction: str) -> tf.Tensor:
    """The sample weights combined with the mask, as Keras' losses use them."""
    return getattr(_loss, MASKED)(sample_weight, mask, dtype=dtype, reduction=reduction)


def mixes_samples(model: keras.Model) -> bool:
    """Whether a loss or metric of the model depends on the batch as a whole and is not a mean over samples."""
    return any(map(_is_of_batches, losses_in(compiled_loss(model)))) or any(
        isinstance(metric, _CORRELATIONS) and 0 in _axes(metric) for metric in list_metrics(model)
    )


def _is_of_batches(loss: object) -> bool:
    if isinstance(loss, _OF_BATCHES):
        return getattr(loss, "axis", None) is None
    return getattr(loss, "fn", None) in (keras.losses.dice, keras.losses.tversky, keras.losses.circle)


def _axes(metric: keras.metrics.Metric) -> tuple:
    axis = metric.get_config().get("axis")
    return tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
