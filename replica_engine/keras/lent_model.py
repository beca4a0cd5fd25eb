"""The replicated model: the original model, lent to replicas while one of its methods runs.

The replicated model is a second object that uses the attribute dictionary of the original. So each change of one (new
weights, a frozen layer, `compile`) is a change of both, and nothing needs to be kept in step. Its class derives from
the class of the original, so `isinstance`, custom methods and `train_step` keep working. Keras serializes it under the
name of the original's class, and called, its class makes a model of that class. So what is saved, copied or cloned is
a plain model.

Both share their variables, and only one of them owns them at a time. A method of the replicated model *enters*: the
variables become variables of the replicas, optimizers and metrics get their hooks, and the functions that Keras traced
for the original are put aside. When the last thread leaves, all this is undone. So after a method of the replicated
model has returned, users of the original see no change. A callback that uses the original during such a method works on
the replicas' variables.

A callback may change what the model has: build its optimizer, set another one, compile it, add weights. Keras creates
variables for these outside any scope, so they are plain variables. They must be shared before the next step runs;
otherwise that step would update them once per replica. `changed` shares them. It is called at three times: when Keras
tells this library at once (an optimizer's `build`, `compile`), at the beginning of each step, and at the beginning of
each epoch and evaluation, when there is time to visit all layers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine.backend import Backend
from replica_engine.engine import current_replica
from replica_engine.errors import BatchError, ReplicateError
from replica_engine.keras import batches, lent_variables, replica_optimizer, shard_hooks, shard_step, train_function
from replica_engine.process import interrupts
from replica_engine.strategies import keras_scopes
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import function_graphs
from replica_engine.upstream.keras import keras_models
from replica_engine.watch import timeline

_RUN = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_SLOT = "_replica_engine_replicas"
_lock = threading.RLock()
_inside: weakref.WeakKeyDictionary[keras.Model, LentModel] = weakref.WeakKeyDictionary()  # the one inside, by original
_thread = threading.local()


def replicated(model: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """Makes a second object of the same model, which runs on the replicas of `strategy`."""
    model_class: Any = type(model)
    twin: keras.Model = object.__new__(_make_lent_class(model_class))
    # Not `twin.__dict__ = ...`: Keras' `__setattr__` would put a tracked copy there, and the two would share nothing.
    object.__setattr__(twin, "__dict__", model.__dict__)
    object.__setattr__(twin, _SLOT, LentModel(model, twin, strategy))
    return twin


def is_replicated(model: keras.Model) -> bool:
    """Whether `replicated` made the model."""
    return hasattr(type(model), _SLOT)


def find_original(model: keras.Model) -> keras.Model:
    """The original of a model that `replicated` made; any other model itself."""
    original: keras.Model = getattr(model, _SLOT).original if is_replicated(model) else model
    return original


def build_for(model: keras.Model, batch: object) -> None:
    """Makes all variables of a model, its metrics and optimizer, from a batch or its specs."""
    if is_replicated(model):
        getattr(model, _SLOT).ready(batch)
    elif not keras_models.is_built(model):
        keras_models.build(model, batch)


@functools.cache
def _make_lent_class(kind: Any) -> type[keras.Model]:
    # A slot, since the dictionary of attributes is the original's: what is in it belongs to both.
    members: dict[str, object] = {"__slots__": (_SLOT,), "__module__": kind.__module__, "__doc__": kind.__doc__}
    members.update({name: _running(kind, name) for name in _RUN})
    members.update({f"make_{name}_function": _make_nothing for name in ("train", "test", "predict")})
    members.update({f"{name}_function": _function(name) for name in ("train", "test", "predict")})
    members["reset_metrics"] = _resetting(kind)
    members["__reduce__"] = lambda self: getattr(self, _SLOT).original.__reduce__()  # which names the class
    members["strategy"] = _Strategy()
    members["_repr_html_"] = _described
    members["__repr__"] = lambda self: f"{kind.__repr__(self)} on {getattr(self, _SLOT).strategy!r}"
    # `from_config` and `clone_model` call the class.
    members["__new__"] = lambda cls, *args, **kwargs: kind(*args, **kwargs)
    return keras_models.serialized_as(type(kind.__name__, (kind,), members), kind)


def _described(self: keras.Model) -> str:
    """The replicated model in a notebook."""
    strategy = getattr(self, _SLOT).strategy
    weights = sum(math.prod(weight.shape) for weight in self.trainable_weights)
    rows = [
        ("model", f"{self.name} ({type(find_original(self)).__name__})"),
        ("replicas", strategy.num_replicas_in_sync),
        ("strategy", type(strategy).__name__),
        ("trainable weights", f"{weights:,}"),
        ("compiled", "yes" if self.compiled else "no: call compile() before fit()"),
    ]
    return timeline.table("replicated model", ("", ""), rows)


class _Strategy:
    """The strategy that a replicated model runs on, unless the model has an attribute of that name."""

    def __get__(self, model: keras.Model | None, kind: type | None = None) -> object:
        return self if model is None else getattr(model, _SLOT).strategy


def _running(kind: type[keras.Model], name: str) -> Callable[..., object]:
    method = getattr(kind, name)

    @functools.wraps(method)
    def wrapper(self: keras.Model, *args: object, **kwargs: object) -> object:
        lent: LentModel = getattr(self, _SLOT)
        data = args[0] if args else kwargs.get("x")
        if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
            raise BatchError(
                f"{name} of a replicated model got a {type(data).__name__}, and divides each batch among the "
                "replicas itself. Pass the dataset as it is, before experimental_distribute_dataset: "
                "replicated.fit(dataset)."
            )
        try:
            with lent.entered():
                return method(self, *args, **kwargs)
        finally:
            lent.let_go()

    return wrapper


def _resetting(kind: type[keras.Model]) -> Callable[..., None]:
    @functools.wraps(kind.reset_metrics)
    def reset_metrics(self: keras.Model) -> None:
        with getattr(self, _SLOT).metrics_left():
            kind.reset_metrics(self)

    return reset_metrics


def _make_nothing(self: keras.Model, force: bool = False) -> None:
    """Replaces a method of Keras; a `LentModel` has its own functions."""


def _function(name: str) -> property:
    def get(self: keras.Model) -> Callable[..., object]:
        function = getattr(self, _SLOT).functions[name]
        return function.predict if name == "predict" else function

    def put(self: keras.Model, value: object) -> None:
        self.__dict__[f"{name}_function"] = value  # goes to the original's attribute, which compile() clears

    return property(get, put)


def extend_functions() -> None:
    """Makes functions that were traced before see the weights of a replicated model at the moment of their call."""
    function_graphs.CALL_FLAT.around(_called)


def _at_work() -> contextlib.AbstractContextManager[object]:
    """Inside, functions that this thread calls are those of steps and of this library."""
    return interrupts.set_for_block(_thread, "is_at_work", True)


def _called(original: Callable[..., object], function: object, *args: object, **kwargs: object) -> object:
    """A call of a traced function. Outside the methods of replicated models, and in their steps, there is no more."""
    if (
        not _inside
        or getattr(_thread, "is_at_work", False)
        or not tf.executing_eagerly()
        or current_replica() is not None
    ):
        return original(function, *args, **kwargs)
    # Without the lock above: this goes around each call of a function in the process, and must cost it nothing.
    me = threading.get_ident()
    with _lock:
        is_between_steps = any(lent._thread == me for lent in _inside.values())
    with lent_variables.used_by(function, is_between_steps, _at_work):
        return original(function, *args, **kwargs)


class LentModel:
    """The strategy and the steps of a replicated model.

    Args:
        original: the original model.
        model: the replicated model.
        strategy: the strategy to run on.
    """

    def __init__(self, original: keras.Model, model: keras.Model, strategy: tf.distribute.Strategy):
        self.original = original
        self.strategy = strategy
        self._model = model
        self._variables = lent_variables.ReplicatedVariables(original, strategy)
        self._hooks = shard_hooks.Hooks(original, strategy, self)
        self._functions: keras_models.Functions | None = None
        self._is_resumed = False
        self._depth = 0
        self._thread = 0
        self._outer: LentModel | None = None
        self._entered: list[tuple[LentModel | None, int, int]] = []  # the same three of the blocks around the last one
        self._known: object = None
        self._counted: object = None
        backend: Backend = strategy.extended.backend
        self.functions = {
            name: train_function.StepFunction(
                model, backend, shard_step.ShardedStep(model, f"{name}_step"), batches.WholeBatches(backend), self.ready
            )
            for name in ("train", "test", "predict")
        }

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside the block, the model's variables belong to the replicas; no strategy's scope is entered.

        In a strategy's scope, Keras would distribute data a second time, and a callback would create distributed
        variables.

        Several threads may be inside. If another replicated model of the same original enters, for example in a
        callback, this one leaves until the other has left.

        Raises:
            ReplicateError: the other replicated model is inside on another thread, which cannot be made to leave.
            DistributionError: Keras has a distribution that the strategy does not have.
        """
        keras_scopes.check_distribution(self.strategy)
        outside = distribute.outside_scopes() if tf.distribute.has_strategy() else contextlib.nullcontext()
        with outside:
            # The lock is not held while the method runs: other threads may be inside at the same time.
            with _lock:
                self._enter()
            with interrupts.afterwards(self._exit, "giving the model back"):
                yield

    def _enter(self) -> None:
        current = _inside.get(self.original)
        me = threading.get_ident()
        if current is self:
            self._depth += 1
            self.reconcile()
            return
        if current is not None:
            if current._thread != me:
                raise ReplicateError(
                    f"The model {self.original.name!r} is running on other replicas in another thread. Two "
                    "replicated models of one original model must take turns. Wait for the other one, or use one "
                    "replicated model in both threads."
                )
            current._suspend()
        self._entered.append((self._outer, self._thread, self._depth))
        self._outer, self._thread, self._depth = current, me, 1
        try:
            self._resume()
        except BaseException:  # not an ExitStack: a Ctrl-C between two lines of that would undo nothing
            self._outer, self._thread, self._depth = self._entered.pop()
            if current is not None:
                current._resume()
            raise
        _inside[self.original] = self

    def _exit(self) -> None:
        with _lock:
            self._depth -= 1
            if self._depth:
                return
            outer = self._outer
            # Before the variables are given back: the functions that do so must not count as calls of the user's.
            self._outer, self._thread, self._depth = self._entered.pop()
            try:
                self._suspend()
            finally:
                if outer is None:
                    del _inside[self.original]
                else:
                    _inside[self.original] = outer
                    outer._resume()

    def _resume(self) -> None:
        """Gives the model to the replicas; if that fails, or is interrupted, the original has everything again."""
        # The functions that Keras traced for the original use the plain variables. Inside, others take their place.
        self._functions = keras_models.exchange_functions(self.original, self._functions)
        self._is_resumed = True
        try:
            self._variables.enter()
            self._hooks.put()
        except BaseException:  # as above; a second Ctrl-C must not leave the model to nobody
            interrupts.held_off_once().around(lambda: self._suspend(self._variables.give_up))
            raise

    def _suspend(self, leave: Callable[[], bool] | None = None) -> None:
        """Gives the model back to the original; does nothing if a `_resume` failed, which has done so."""
        if not self._is_resumed:
            return
        self._is_resumed = False
        self._hooks.take_away()
        try:
            if (leave or self._variables.leave)():
                self._known = None
        finally:
            self._functions = keras_models.exchange_functions(self.original, self._functions)

    def let_go(self) -> None:
        """Called at the end of a method that runs steps.

        Makes the original's history refer to the original, so that it does not keep the replicated model alive.
        """
        history = vars(self.original).get("history")
        if history is not None and history.model is self._model:
            history.set_model(self.original)

    def changed(self) -> None:
        """Called when the model's variables, optimizers or metrics may differ; replicas then share new variables."""
        with _lock:
            if _inside.get(self.original) is self:
                with tf.init_scope(), distribute.outside_scopes():
                    if self._renew():
                        self._known = None  # traced steps use the old variables

    def _renew(self, in_step: bool = False) -> bool:
        has_others = self._variables.renew(in_step)
        self._hooks.put()
        self._counted = keras_models.counts(self._model)
        return has_others

    def reconcile(self) -> None:
        """Makes replicas agree on moving statistics; does nothing on any thread but the one that runs the steps."""
        with _lock:
            if _inside.get(self.original) is self and self._thread == threading.get_ident():
                self._variables.reconcile()

    def build(self, optimizer: keras.optimizers.Optimizer, build: Callable[[], None]) -> None:
        """Builds an optimizer in a callback, or in the first step that applies it, while that step is traced."""
        # The variables outlive the graph that is traced here.
        # Outside scopes they are plain until `_renew` shares them.
        with _lock, tf.init_scope(), distribute.outside_scopes():
            with replica_optimizer.through_strategy(optimizer, tf.distribute.get_strategy()):
                build()
            self._renew(in_step=True)

    def metrics_left(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, metric variables are plain ones; see `ReplicatedVariables.metrics_left`."""
        self.changed()
        return self._variables.metrics_left()

    def ready(self, batch: object) -> contextlib.AbstractContextManager[object]:
        """Called before a step: shares all variables of the model, its metrics and optimizer.

        Makes them, from a batch or its specs; from None, none. If the model has changed, its functions forget all.

        Returns:
            A context manager for the step.
        """
        if batch is not None and not keras_models.is_built(self._model):
            with _lock:
                self._suspend()
                with interrupts.afterwards(self._resume, "giving the model to the replicas"):
                    keras_models.build(self._model, batch)
        state, counted = keras_models.read_traced_state(self._model), keras_models.counts(self._model)
        if self._known != state or self._counted != counted:
            self.changed()
            train_function.check_trainable(self._model)
            for function in self.functions.values():
                function.forget()
            self._known = state
        return _at_work()
