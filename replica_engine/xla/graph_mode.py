"""Compiled bodies do not work in graphs of tf.compat.v1. Every entry point raises the same error there.

A launch is an op around Python code that holds the strategy, and variables live on the devices. Both need eager mode or
a `tf.function`; a session of TensorFlow 1 has neither. Without the check, such a program would build some of its ops
and then fail in a place that tells nothing about the cause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from replica_engine._tf.graphs import autograph
from replica_engine.errors import GraphModeError

C = TypeVar("C", bound=type)


def check_mode() -> None:
    """Raises GraphModeError in a graph of tf.compat.v1."""
    if not tf.executing_eagerly() and not tf.inside_function():
        raise GraphModeError(
            "TPUStrategy and compiled bodies run in eager mode and in tf.functions, not in a graph of "
            "tf.compat.v1. Remove the `with tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution(). "
            "MirroredStrategy runs in such a graph."
        )


def refuses_graphs(*methods: str) -> Callable[[C], C]:
    """A class decorator that makes methods raise GraphModeError in a graph of tf.compat.v1.

    Args:
        methods: the names of the methods, which may be inherited.

    Example:
        >>> import tensorflow as tf
        >>> @refuses_graphs("run")
        ... class Runner:
        ...     def run(self):
        ...         return "run"
        >>> Runner().run()
        'run'
    """

    def decorate(cls: C) -> C:
        for name in methods:
            setattr(cls, name, _checked(vars(cls)[name] if name in vars(cls) else _inherited(cls, name)))
        return cls

    return decorate


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_mode()
        return method(*args, **kwargs)

    return autograph.artifact(checked)


def _inherited(cls: type, name: str) -> Callable[..., Any]:
    """The method of the class that follows `cls` in a subclass's method resolution order."""

    @functools.wraps(getattr(cls, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    return method
