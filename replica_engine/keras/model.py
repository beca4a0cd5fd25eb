"""The replicated model: the original one, with other methods to train, evaluate and predict.

It is a second object with the attributes of the first: one dictionary for both. So whatever is done to either (weights
set, a layer frozen, `compile`) is done to both, and there is nothing to keep in step. Its class derives from the
model's own, so that `isinstance`, custom methods and `train_step` stay. What writes the model down is left to the
original, whose class plain Keras knows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine._compat import keras_model
from replica_engine.errors import OptimizerError, ReplicateError
from replica_engine.keras.hooks import Hooks
from replica_engine.keras.on_threads import OnThreads
from replica_engine.keras.on_xla import OnXla
from replica_engine.keras.variables import SharedVariables
from replica_engine.replica import rows

_RUN = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_WRITTEN_BY_THE_ORIGINAL = (
    "export",
    "get_build_config",
    "get_compile_config",
    "get_config",
    "load_weights",
    "save",
    "save_weights",
    "summary",
    "to_json",
)
_SLOT = "_replica_engine_replicas"


def replicated(model: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """A second object of the same model, that runs on the replicas of a strategy."""
    model_class: Any = type(model)
    kind = _class_of(model_class)
    twin: Any = object.__new__(kind)
    object.__setattr__(twin, "__dict__", model.__dict__)
    object.__setattr__(twin, _SLOT, Replicas(model, twin, strategy))
    return twin


def is_replicated(model: keras.Model) -> bool:
    """Whether it is one that `replicated` made."""
    return hasattr(type(model), _SLOT)


@functools.cache
def _class_of(kind: Any) -> type:
    members: dict[str, Any] = {"__slots__": (_SLOT,), "__module__": kind.__module__, "__doc__": kind.__doc__}
    members.update({name: _running(kind, name) for name in _RUN})
    members.update({name: _by_original(kind, name) for name in _WRITTEN_BY_THE_ORIGINAL})
    members.update({f"make_{name}_function": _make(name) for name in ("train", "test", "predict")})
    members.update({f"{name}_function": _function(name) for name in ("train", "test", "predict")})
    members["reset_metrics"] = _resetting(kind)
    members["__reduce__"] = lambda self: getattr(self, _SLOT).original.__reduce__()
    members["__deepcopy__"] = lambda self, memo: copy.deepcopy(getattr(self, _SLOT).original, memo)
    members["strategy"] = _Strategy()
    members["from_config"] = classmethod(lambda cls, *args, **kwargs: kind.from_config(*args, **kwargs))
    # To those who ask an object for its class, such as Keras when it writes a model down, it is the original's.
    members["__class__"] = property(lambda self: kind)
    return type(kind.__name__, (kind,), members)


class _Strategy:
    """The strategy that a replicated model runs on, unless the model has an attribute of that name."""

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        return self if model is None else getattr(model, _SLOT).strategy


def _running(kind: type, name: str) -> Callable[..., Any]:
    method = getattr(kind, name)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        replicas = getattr(self, _SLOT)
        try:
            with replicas.entered():
                return method(self, *args, **kwargs)
        finally:
            replicas.let_go()

    return run


def _resetting(kind: Any) -> Callable[..., None]:
    @functools.wraps(kind.reset_metrics)
    def reset_metrics(self: Any) -> None:
        with getattr(self, _SLOT).metrics_left():
            kind.reset_metrics(self)

    return reset_metrics


def _by_original(kind: type, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(kind, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, _SLOT).original, name)(*args, **kwargs)

    return call


def _make(name: str) -> Callable[..., None]:
    def make(self: Any, force: bool = False) -> None:
        """As of Keras; what is made is looked after here."""

    return make


def _function(name: str) -> property:
    def get(self: Any) -> Callable[..., Any]:
        return getattr(getattr(self, _SLOT), name)

    def put(self: Any, value: Any) -> None:
        self.__dict__[f"{name}_function"] = value  # that of the original: compile() takes it away

    return property(get, put)


_lock = threading.RLock()
_inside: weakref.WeakKeyDictionary[Any, Replicas] = weakref.WeakKeyDictionary()  # by original, who is inside


class Replicas:
    """What a replicated model has that the original has not.

    Args:
        original: the original model.
        model: the replicated one.
        strategy: what it runs on.
    """

    def __init__(self, original: keras.Model, model: keras.Model, strategy: tf.distribute.Strategy):
        self.original = original
        self.strategy = strategy
        self._model = model
        self._variables = SharedVariables(original, strategy)
        self._hooks = Hooks(original)
        self._functions: Any = None
        self._depth = 0
        self._thread = 0
        self._outer: Replicas | None = None
        self._known: Any = None
        self._steps: Any = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the model's variables are those of the replicas.

        Several threads may be inside. Another replicated model of the same original, in a callback say, takes its turn:
        this one leaves meanwhile.

        Raises:
            ReplicateError: that other one is on another thread, which cannot be made to leave.
        """
        with _lock:
            self._enter()
        try:
            yield
        finally:
            with _lock:
                self._exit()

    def _enter(self) -> None:
        current = _inside.get(self.original)
        me = threading.get_ident()
        if current is self:
            self._depth += 1
            if self._thread == me:
                self._variables.reconcile()
            return
        if current is not None:
            if current._thread != me:
                raise ReplicateError.busy(self.original.name)
            current._suspend()
        self._outer, self._thread, self._depth = current, me, 1
        try:
            self._resume()
        except BaseException:
            if current is not None:
                current._resume()
            raise
        _inside[self.original] = self

    def _exit(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        outer, self._outer = self._outer, None
        try:
            self._suspend()
        finally:
            if outer is None:
                del _inside[self.original]
            else:
                _inside[self.original] = outer
                outer._resume()

    def _resume(self) -> None:
        # What Keras traced for the original has the plain variables in it. Inside it is another function.
        self._functions = keras_model.exchange_functions(self.original, self._functions)
        self._variables.enter()
        self._hooks.put()

    def _suspend(self) -> None:
        self._hooks.take_away()
        try:
            self._variables.leave()
        finally:
            self._functions = keras_model.exchange_functions(self.original, self._functions)

    def let_go(self) -> None:
        """Has what the original keeps refer to it, so that the replicated model can go when nobody else has it."""
        history = vars(self.original).get("history")
        if history is not None and history.model is self._model:
            history.set_model(self.original)

    def metrics_left(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what replicas count in are plain variables, about to be set anew."""
        return self._variables.metrics_left()

    def train(self, iterator: Any) -> dict[str, Any]:
        """Runs training steps on the next batches; Keras' `train_function`."""
        return self._run("train_step", iterator)

    def test(self, iterator: Any) -> dict[str, Any]:
        """Runs test steps on the next batches; Keras' `test_function`."""
        return self._run("test_step", iterator)

    def predict(self, batches: list[Any]) -> Any:
        """The outputs of some batches, as one; Keras' `predict_function`."""
        outputs = [self._predict(rows.as_tensors(batch)) for batch in batches]
        return outputs[0] if len(outputs) == 1 else rows.join(outputs)

    def _run(self, name: str, iterator: Any) -> dict[str, Any]:
        batches: list[Any] = []
        failed: Exception | None = None
        for _ in range(self._model.steps_per_execution):
            try:
                batches.append(rows.as_tensors(next(iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                if not batches:
                    raise
                break
            except Exception as error:  # the steps before it count, as they do one by one
                failed = error
                break
        batches = [batch for batch in batches if rows.count(batch)]
        logs = self._ready(batches[0]).step(name, batches) if batches else self._model.get_metrics_result()
        if failed is not None:
            raise failed
        return logs

    def _predict(self, batch: Any) -> Any:
        total = rows.count(batch)
        if total:
            return self._ready(None).predict(batch)
        outputs = self._ready(None).predict(rows.blank(batch))
        return rows.take(outputs, 0, 0)

    def _ready(self, batch: Any) -> OnThreads | OnXla:
        """What runs steps, with all variables that they need; anew where the model has changed."""
        if batch is not None and not keras_model.is_built(self._model):
            with _lock:
                self._suspend()
                try:
                    keras_model.build(self._model, batch)
                finally:
                    self._resume()
        state = keras_model.state_of(self._model)
        if self._known != state:
            self._check_trainable()
            kind = OnXla if hasattr(self.strategy.extended, "device_group") else OnThreads
            self._steps = kind(self._model, self.strategy)
            self._known = state
        return self._steps

    def _check_trainable(self) -> None:
        optimizer = getattr(self._model, "optimizer", None)
        unknown = [] if optimizer is None else keras_model.unknown_to(optimizer, self._model.trainable_variables)
        if unknown:
            raise OptimizerError.unknown_weights(sorted({variable.path.split("/")[-2] for variable in unknown}))
