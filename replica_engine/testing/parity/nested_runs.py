"""Refuses a step that calls `strategy.run` itself.

`check_parity` takes the function that one replica runs. If a step calls `run`, what goes wrong depends on its use of
the result: on one device nothing goes wrong if the step drops it, and on replicas TensorFlow reports mixed strategies.
So while a step runs, `run` of every strategy class is replaced by a function that raises. It raises only for calls from
the step: a context variable, which replica threads inherit and other threads do not have, names the run of the check. A
merge function may call `run`, since it is in cross-replica context.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.graphs import autograph
from replica_engine.errors import ParityArgumentError


@dataclasses.dataclass
class _Run:
    """One run of a check.

    Attributes:
        step: the name of the step.
        strategy: the strategy that runs it.
        has_begun: whether the check itself has called `run`.
        is_nested: whether the step has called `run`.
    """

    step: str
    strategy: tf.distribute.Strategy
    has_begun: bool = False
    is_nested: bool = False

    def refuses(self) -> bool:
        """Whether the step makes the present call of `run`."""
        if tf.distribute.in_cross_replica_context():
            return False
        # On one device neither the check nor the step is in the context of a strategy; the check's call comes first.
        on_one_device = self.strategy is distribute.default_strategy()
        is_step = tf.distribute.has_strategy() or (on_one_device and self.has_begun)
        self.has_begun = True
        return is_step


_now: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("parity_run", default=None)


@contextlib.contextmanager
def refused(step: str, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, the check calls `strategy.run` once, and the step must not call `run` of any strategy.

    Args:
        step: the name of the step.
        strategy: the strategy that runs it.

    Raises:
        ParityArgumentError: the step has called `run`.
    """
    run = _Run(step, strategy)
    token = _now.set(run)
    try:
        with _replaced.installed():
            yield
    except Exception as error:
        if run.is_nested and not isinstance(error, ParityArgumentError):
            raise ParityArgumentError.runs_itself(step) from error
        raise
    finally:
        _now.reset(token)
    if run.is_nested:  # the step caught the exception
        raise ParityArgumentError.runs_itself(step)


class _Replaced:
    """Replaces `run` of all strategy classes while a step runs; several threads may use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[type, Any]] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                classes = dict.fromkeys(base for each in _strategy_classes() for base in each.__mro__)
                self._originals = [(each, vars(each)["run"]) for each in classes if "run" in vars(each)]
                for each, original in self._originals:
                    each.run = _refusing(original)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    for each, original in self._originals:
                        each.run = original  # type: ignore[attr-defined]


_replaced = _Replaced()


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @autograph.artifact
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        now = _now.get()
        if now is not None and now.refuses():
            now.is_nested = True
            raise ParityArgumentError.runs_itself(now.step)
        return original(*args, **kwargs)

    return run


def _strategy_classes() -> list[type]:
    """`tf.distribute.Strategy`, its bases, and all their subclasses."""
    found: dict[type, None] = {}
    waiting = list(tf.distribute.Strategy.__mro__[:-1])  # all but object
    while waiting:
        each = waiting.pop()
        if each not in found:
            found[each] = None
            waiting += each.__subclasses__()
    return list(found)
