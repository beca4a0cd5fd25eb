"""Where the trace of a body looks on while TensorFlow works. Outside a trace, TensorFlow's functions do as always."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import variables
from replica_engine._tf.graphs import control_flow, ragged, row_updates
from replica_engine.diagnostics import hooks


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once."""
    hooks.install()
    control_flow.FREED_GRADIENT.around(_custom_gradient)
    control_flow.RAGGED.around(_make_ragged)
    control_flow.REPEAT.around(_repeat)
    control_flow.REPEAT_ROWS.around(_repeat)
    row_updates.MAKE_OP.around(_make_op)


def _custom_gradient(original: Callable[..., object], fn: object, args: object, kwargs: object) -> object:
    """A function with a gradient of its own: TensorFlow would keep the gradient, and so the graph, for ever."""
    results = original(fn, args, kwargs)
    if control_flow.in_body():
        control_flow.keep_by_graph(results)
    return results


def _make_op(original: Callable[..., object], kind: str, name: str | None = None, **given: Any) -> object:
    """Makes an op. XLA has no kernel for some, and the host cannot compute them, because their state is on devices."""
    if kind == "StatefulRandomBinomial" and control_flow.in_body():
        drawn = _binomial(**given)
        return None, True, drawn.op, [drawn]
    return row_updates.update_all(original, kind, name, **given)


def _binomial(
    resource: tf.Tensor, algorithm: int, shape: tf.Tensor, counts: tf.Tensor, probs: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """`Generator.binomial`: the generator draws a seed on the devices, as in `make_seeds`; the host draws from it."""
    one = tf.constant(1, tf.uint64)
    state = tf.raw_ops.RngReadAndSkip(resource=resource, alg=tf.cast(algorithm, tf.int32), delta=one)
    size = 1 if algorithm == tf.random.Algorithm.THREEFRY.value else 2  # of the counter; a key and padding follow
    counter, key = (tf.bitcast(part, tf.uint64) for part in (state[:size], state[size : size + 1]))
    integers = functools.partial(tf.raw_ops.StatelessRandomUniformFullIntV2, shape=[1], alg=algorithm)
    if variables.container_of(resource) is not None:  # a generator of the scope, whose state replicas share
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint64)
        key = integers(key=key, counter=tf.stack([replica, 0]), dtype=tf.uint64)
    seed = tf.concat([integers(key=key, counter=counter, dtype=tf.int64), [0]], 0)
    return tf.random.stateless_binomial(shape, seed, counts, probs, tf.dtypes.as_dtype(dtype))


def _make_ragged(original: Callable[..., object], self: tf.RaggedTensor, *args: object, **kwargs: object) -> None:
    """The constructor of a ragged tensor."""
    original(self, *args, **kwargs)
    ragged.note_values(self)


def _repeat(
    original: Callable[..., tf.Tensor], data: object, repeats: object, axis: int | None, name: str | None = None
) -> tf.Tensor:
    """`tf.repeat`, which repeats what belongs to a row of a ragged tensor for each of its values."""
    if control_flow.in_body() and axis == 0 and (rows := ragged.rows_of_values(repeats)) is not None:
        return tf.gather(data, rows, name=name)
    return original(data, repeats, axis, name)
