"""Takes a `tf.function` apart and puts it together again. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# XLA_COMPILE: the attribute that stands for jit_compile=True.
from tensorflow.python.eager.polymorphic_function.attributes import XLA_COMPILE as _XLA_COMPILE

from replica_engine._tf.hook import FIRST, Hook
from replica_engine.process import scoped

TRACE = Hook(
    "tensorflow.python.eager.polymorphic_function.tracing_compilation",
    "_create_concrete_function",  # its options of a trace have the function's attributes
    why="knows whether a function with jit_compile=True is being traced",
    since=FIRST,
)


def is_tf_function(fn: Any) -> bool:
    """Whether `fn` is a `tf.function`."""
    # Not tf.types.experimental.PolymorphicFunction, which has neither python_function nor the options.
    return isinstance(fn, tf.__internal__.function.Function)


def clone(fn: Any, python_function: Callable) -> Any:
    """A `tf.function` around another Python function, with the options of `fn`."""
    return fn._clone(python_function=python_function)


def clone_for_any(fn: Any, python_function: Callable) -> Any:
    """Like `clone`, but without the input signature: for arguments that it describes together, one for each replica."""
    if fn.input_signature is None:
        return clone(fn, python_function)
    return tf.__internal__.function.Function(
        python_function,
        name=fn._name,
        autograph=fn._autograph,
        jit_compile=fn._jit_compile,
        reduce_retracing=True,  # A signature has unknown sizes, so that other sizes are not traced again.
        experimental_attributes=fn._attributes,
        experimental_autograph_options=fn._experimental_autograph_options,
    )


def graphs_of(fn: Any) -> list[tuple[str, Any]]:
    """The name and the graph of each trace of a tf.function."""
    return [(tf.compat.as_text(each.name), each.graph) for each in fn._list_all_concrete_functions()]


def set_message(error: Any, text: str) -> None:
    """Replaces the text of an error of TensorFlow's runtime, whose other properties stay."""
    error._message = text


def is_compiled(fn: Any) -> bool:
    """Whether `fn` was made with `jit_compile=True`."""
    return bool(fn._jit_compile)


def options(fn: Any) -> tuple[bool, bool, Any]:
    """The options of a `tf.function`: `autograph`, `reduce_retracing`, and its input signature."""
    return bool(fn._autograph), bool(fn._reduce_retracing), fn.input_signature


def trace_noted(original: Callable[..., Any], function_type: Any, context: Any, graph: Any, options: Any) -> Any:
    """Notes the options of a `tf.function` while it is traced; goes around `TRACE`."""
    options_of_traces = vars(_tracing).setdefault("options", [])
    options_of_traces.append(options)
    try:
        return original(function_type, context, graph, options)
    finally:
        options_of_traces.pop()


def is_being_compiled() -> bool:
    """Whether this call is made while a `tf.function` with `jit_compile=True` is traced on this thread."""
    return any((options.attributes or {}).get(_XLA_COMPILE) for options in getattr(_tracing, "options", ()))


def leave_uncompiled() -> None:
    """Removes `jit_compile=True` from the tf.functions that are being traced around this call.

    An op that compiles its own program and launches it from the host calls this. TensorFlow reads the attribute after
    tracing the function.
    """
    for options in getattr(_tracing, "options", ()):
        if options.attributes and options.attributes.get(_XLA_COMPILE):
            options.attributes[_XLA_COMPILE] = False


_tracing = threading.local()  # its `options` are those of the functions that the thread is tracing, the innermost last
_inlining = threading.local()


def inlined() -> contextlib.AbstractContextManager[bool]:
    """Inside, on this thread, a call of a `tf.function` runs its Python function, and leaves no trace of its own.

    Tensors of a graph that is thrown away must not get into traces, which outlive it.
    """
    return scoped.attribute(_inlining, "on", True)


def is_inlining() -> bool:
    """Whether the calling thread is in a block of `inlined`."""
    return bool(getattr(_inlining, "on", False))
