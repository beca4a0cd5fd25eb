"""Debug mode: mistakes that raise nothing by themselves, found while steps run. It looks on, and changes no number.

`watched_runs` has what a run is looked at for, `trails` what its replicas compute, `findings` what is said of it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine.debugging import findings, trails, watched_runs
from replica_engine.debugging.watched_runs import WatchedRun
from replica_engine.diagnostics import observer
from replica_engine.diagnostics.user_frames import here
from replica_engine.strategies.on_backend import OnBackend
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import autograph, function_graphs
from replica_engine.values import structure

__all__ = ["debug"]


class debug:
    """Finds mistakes that raise nothing: from now on, or inside a `with` block.

    Steps that are traced while it is on, or run in eager mode, are looked at, under every strategy of this library.
    They take about two times as long. Numbers stay as they are, but that traced steps may round in another order. A
    `tf.function` that was traced before is not looked at. The environment variable REPLICA_ENGINE_DEBUG=1 switches
    debug mode on where a program is started.

    Args:
        on: False switches it off.

    Raises:
        DebugError: later, out of a step: the copies of a trainable variable have become unequal; a NaN or infinity was
            made out of finite numbers and used; a mean over replicas was taken of shards of unequal size; a sum over
            replicas was summed again; or a tape is open around a run. What may be meant is a warning instead: a
            reduction whose result nobody uses, a batch that all replicas share, dropout that is equal on all of them.

    Example:
        >>> import replica_engine, tensorflow as tf
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> with replica_engine.debug():
        ...     try:
        ...         strategy.run(tf.math.log, args=(tf.constant(0.0),))
        ...     except replica_engine.errors.DebugError as error:
        ...         print(str(error).split(" at ")[0])
        The first NaN or infinity of `log` is made by Log
    """

    def __init__(self, on: bool = True):
        self._before = observer.current
        _set(_Observer() if on else None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _set(self._before)


class _Observer:
    """Looks on at all runs; see `observer.Observer`."""

    def begin(self, name: str, devices: Sequence[str]) -> WatchedRun:
        return WatchedRun(name, devices)

    def reduced(self, kind: str, value: Any, result: Any) -> None:
        watched_runs.note_reduction(kind, value, result)


_OWN = os.path.dirname(__file__)
_run, _reduce = OnBackend.run, OnBackend.reduce
_unequal: weakref.WeakKeyDictionary[Any, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()
"""By a result of replicas that had shards of unequal size: the name of the function, and the sizes."""


def _set(new: Any) -> None:
    observer.current = new
    findings.forget()
    # Nothing stands around `run` and `reduce` while debug mode is off.
    OnBackend.run = _run if new is None else _watched_run  # type: ignore[method-assign]
    OnBackend.reduce = _reduce if new is None else _watched_reduce  # type: ignore[method-assign]


@autograph.artifact
@functools.wraps(_run)
def _watched_run(self: Any, *given: Any, **keywords: Any) -> Any:
    call = dict(zip(("fn", "args"), given, strict=False)) | keywords
    name, args = getattr(call.get("fn"), "__name__", "a function"), call.get("args")
    if function_graphs.is_recording():
        raise findings.tape_around(name, here())
    with watched_runs.called_at(here() if trails.calling_frame(_OWN) is not None else None):
        results = _run(self, *given, **keywords)
    for value in args if isinstance(args, (list, tuple)) else ():
        for leaf in _leaves(value):
            rows = [part.shape[0] if part.shape[0] is not None else tf.shape(part)[0] for part in _batches(leaf)]
            if any(isinstance(each, tf.Tensor) for each in rows) or len(set(rows)) > 1:
                for result in _leaves(results):
                    if isinstance(result, distribute.PerReplica):
                        _unequal[result] = name, rows
    return results


def _leaves(value: Any) -> list[Any]:
    return structure.flatten(value, what="the values")[0]


def _batches(leaf: Any) -> list[tf.Tensor]:
    values = leaf.values if isinstance(leaf, distribute.PerReplica) else ()
    return [each for each in values if isinstance(each, tf.Tensor) and each.shape.rank]


@autograph.artifact
@functools.wraps(_reduce)
def _watched_reduce(self: Any, *args: Any, **keywords: Any) -> Any:
    given = dict(zip(("reduce_op", "value", "axis"), args, strict=False)) | keywords
    kind = given.get("reduce_op")
    if given.get("axis") is None and str(getattr(kind, "value", kind)).upper() == "MEAN":
        for leaf in _leaves(given.get("value")):
            if isinstance(leaf, distribute.PerReplica) and leaf in _unequal:
                _check_mean(*_unequal[leaf], here())
    return _reduce(self, *args, **keywords)


def _check_mean(name: str, rows: list[Any], where: str) -> None:
    def check(*rows: Any) -> None:
        if len(set(map(int, rows))) > 1:
            raise findings.unequal_mean(name, list(map(int, rows)), where)

    if any(tf.is_symbolic_tensor(each) for each in rows):
        function_graphs.python_op(check, rows, [])
    else:
        check(*rows)
