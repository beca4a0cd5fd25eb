"""Where the trace of a body looks on while TensorFlow works. Outside a trace, TensorFlow's functions do as always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import control_flow, ragged, row_updates
from replica_engine.diagnostics import hooks


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once."""
    hooks.install()
    control_flow.FREED_GRADIENT.around(_custom_gradient)
    control_flow.BINOMIAL.around(_binomial)
    control_flow.RAGGED.around(_make_ragged)
    control_flow.REPEAT.around(_repeat)
    control_flow.REPEAT_ROWS.around(_repeat)
    row_updates.MAKE_OP.around(row_updates.update_all)


def _custom_gradient(original: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function with a gradient of its own: TensorFlow would keep the gradient, and so the graph, for ever."""
    results = original(fn, args, kwargs)
    if control_flow.in_body():
        control_flow.keep_by_graph(results)
    return results


def _binomial(
    original: Callable[..., Any],
    self: tf.random.Generator,
    shape: Any,
    counts: Any,
    probs: Any,
    dtype: tf.DType = tf.int32,
    name: str | None = None,
) -> tf.Tensor:
    """`Generator.binomial`, whose op keeps its state on the devices and has a kernel on the host only.

    The generator draws a seed on the devices. The host draws from it.
    """
    if not control_flow.in_body():
        return original(self, shape, counts, probs, dtype, name)
    return tf.random.stateless_binomial(shape, self.make_seeds(1)[:, 0], counts, probs, dtype, name)


def _make_ragged(original: Callable[..., Any], self: tf.RaggedTensor, *args: Any, **kwargs: Any) -> None:
    """The constructor of a ragged tensor."""
    original(self, *args, **kwargs)
    ragged.note_values(self)


def _repeat(original: Callable[..., Any], data: Any, repeats: Any, axis: Any, name: str | None = None) -> Any:
    """`tf.repeat`, which repeats what belongs to a row of a ragged tensor for each of its values."""
    if control_flow.in_body() and axis == 0 and (rows := ragged.rows_of_values(repeats)) is not None:
        return tf.gather(data, rows, name=name)
    return original(data, repeats, axis, name)
