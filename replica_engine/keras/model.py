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
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine._compat import keras_model
from replica_engine.errors import OptimizerError
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
_SLOT = "_replicas"


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
def _class_of(kind: type) -> type:
    members: dict[str, Any] = {"__slots__": (_SLOT,), "__module__": kind.__module__, "__doc__": kind.__doc__}
    members.update({name: _running(kind, name) for name in _RUN})
    members.update({name: _by_original(kind, name) for name in _WRITTEN_BY_THE_ORIGINAL})
    members.update({f"make_{name}_function": _make(name) for name in ("train", "test", "predict")})
    members.update({f"{name}_function": _function(name) for name in ("train", "test", "predict")})
    members["reset_metrics"] = _resetting(kind)
    members["__reduce__"] = lambda self: getattr(self, _SLOT).original.__reduce__()
    members["__deepcopy__"] = lambda self, memo: copy.deepcopy(getattr(self, _SLOT).original, memo)
    members["strategy"] = property(lambda self: getattr(self, _SLOT).strategy, doc="The strategy that it runs on.")
    return type(kind.__name__, (kind,), members)


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
        self._known: Any = None
        self._steps: Any = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the model's variables are those of the replicas."""
        with self._variables.entered(), self._hooks.entered():
            yield

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
        batches = []
        for _ in range(self._model.steps_per_execution):
            try:
                batches.append(rows.as_tensors(next(iterator)))
            except (StopIteration, tf.errors.OutOfRangeError):
                if not batches:
                    raise
                break
        batches = [batch for batch in batches if rows.count(batch)]
        if not batches:
            return self._model.get_metrics_result()
        return self._ready(batches[0]).step(name, batches)

    def _predict(self, batch: Any) -> Any:
        total = rows.count(batch)
        if total:
            return self._ready(None).predict(batch)
        outputs = self._ready(None).predict(rows.blank(batch))
        return rows.take(outputs, 0, 0)

    def _ready(self, batch: Any) -> OnThreads | OnXla:
        """What runs steps, with all variables that they need; anew where the model has changed."""
        if batch is not None and not keras_model.is_built(self._model):
            with self._variables.left(), self._hooks.left():
                keras_model.build(self._model, batch)
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
