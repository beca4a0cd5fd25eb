"""Variables that a model and its replicas share.

A Keras variable holds a TensorFlow variable. Outside of the replicated methods that is a plain one, so that the
original model works as it always did. While a replicated method runs, each Keras variable holds a distributed one in
its place, whose first component is that plain variable. `entered` puts them there and takes them away:

- on entering, what the plain variables hold goes to all replicas, so that what was done to the original counts;
- on leaving, what replicas hold each of their own comes together in the plain variables. Metrics are added up. Weights
  that a step assigns, such as the moving statistics of a batch normalization, are averaged over replicas. Of a seed,
  that of replica 0 is kept. Trained weights and the optimizer's variables are equal on all replicas to begin with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine._compat import distribute, keras_model
from replica_engine.xla.host_variable import HostVariable

_SUM = tf.VariableAggregation.SUM


class SharedVariables:
    """The distributed variables of one model and strategy.

    Args:
        model: whose variables they are.
        strategy: whose replicas they are for.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self._model = model
        self._strategy = strategy
        self._shared: dict[int, _Shared] = {}
        self._lock = threading.RLock()
        self._depth = 0
        self._optimizers: list[Any] = []
        self._assigned: set[int] = set()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the model's variables are those of all replicas."""
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._enter()
                else:
                    self.reconcile()
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._leave()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Inside, within `entered`, the variables are plain ones again: new ones can be made."""
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def reconcile(self) -> None:
        """Has replicas agree on what each has of its own, other than metrics."""
        for shared in self._shared.values():
            shared.reconcile()

    def _enter(self) -> None:
        known = {}
        self._assigned = {id(weight) for weight in self._model.non_trainable_weights}
        for variable in keras_model.variables_of(self._model):
            shared = self._shared.get(id(variable))
            if shared is None or shared.plain is not keras_model.underlying(variable):
                shared = _Shared(variable, self._strategy, self._is_state(variable))
            known[id(variable)] = shared
        self._shared = known
        for shared in known.values():
            shared.enter()
        self._optimizers = [
            (optimizer, keras_model.strategy_of_optimizer(optimizer))
            for optimizer in keras_model.optimizers_of(self._model)
        ]
        for optimizer, _ in self._optimizers:
            keras_model.set_strategy_of_optimizer(optimizer, self._strategy)

    def _leave(self) -> None:
        for optimizer, strategy in self._optimizers:
            keras_model.set_strategy_of_optimizer(optimizer, strategy)
        for shared in self._shared.values():
            shared.leave()
        self._adopt_new()

    def _adopt_new(self) -> None:
        """Makes plain variables of those that a step made, by building a layer, say."""
        for variable in keras_model.variables_of(self._model):
            made = keras_model.underlying(variable)
            if isinstance(made, distribute.DistributedVariable) and id(variable) not in self._shared:
                plain = tf.Variable(
                    made.read_value(),
                    trainable=made.trainable,
                    name=made.name.split(":")[0],
                    synchronization=made.synchronization,
                    aggregation=made.aggregation,
                )
                keras_model.put_underneath(variable, plain)

    def _is_state(self, variable: keras.Variable) -> bool:
        """Whether it is a weight that steps assign, each replica for itself."""
        return id(variable) in self._assigned and not keras_model.is_seed(variable)


class _Shared:
    """One Keras variable, with the plain TensorFlow variable and the distributed one that it holds in turn."""

    def __init__(self, variable: keras.Variable, strategy: tf.distribute.Strategy, is_state: bool):
        self.variable = variable
        self.plain = keras_model.underlying(variable)
        self._is_state = is_state
        self._distributed = _around(self.plain, strategy)
        components = list({id(value): value for value in self._distributed._values}.values())
        self._others = [value for value in components if value is not self.plain]
        self._is_component = len(self._others) < len(components)
        self._on_read = isinstance(self._distributed, distribute.SyncOnReadVariable)
        # Of a variable whose values are on devices of XLA, what keeps them.
        self._resident = HostVariable.resident(self.plain) if self._is_component else None

    def enter(self) -> None:
        """Puts the distributed variable in place."""
        if self._is_component:
            keras_model.contain(self.plain, self._distributed)
        if self._resident is not None:
            HostVariable.adopt(self.plain, *self._resident)
        value = self.plain.read_value()
        for index, other in enumerate(self._others, start=1 if self._is_component else 0):
            is_zero = index and self._on_read and self._distributed.aggregation == _SUM
            other.assign(tf.zeros_like(value) if is_zero else value)
        keras_model.put_underneath(self.variable, self._distributed)

    def leave(self) -> None:
        """Puts the plain variable back, with what the replicas have in it."""
        self.reconcile()
        if self._on_read or not self._is_component:
            value = self._distributed.read_value()
            keras_model.contain(self.plain, None)
            self.plain.assign(value)
        keras_model.contain(self.plain, None)
        if self._resident is not None:
            HostVariable.release(self.plain)
        keras_model.put_underneath(self.variable, self.plain)

    def reconcile(self) -> None:
        """Averages over replicas what each has assigned for itself; of integers, that of replica 0 counts."""
        if not self._is_state or self._on_read:
            return
        values = [value.numpy() for value in self._distributed.values]
        if any(value.tobytes() != values[0].tobytes() for value in values[1:]):
            if self.plain.dtype.is_floating:
                mean = tf.add_n([tf.cast(value, "float64") for value in values]) / len(values)
                self._distributed.assign(tf.cast(mean, self.plain.dtype))
            else:
                self._distributed.assign(values[0])


def _around(plain: Any, strategy: tf.distribute.Strategy) -> Any:
    """A distributed variable, with the plain variable as its first component if that is on the first device."""
    unused = [plain] if plain.device == strategy.extended.worker_devices[0] else []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        return unused.pop() if unused else next_creator(**kwargs)

    with tf.variable_creator_scope(creator), strategy.scope():
        return tf.Variable(
            plain.read_value(),
            trainable=plain.trainable,
            name=plain.name.split(":")[0],
            dtype=plain.dtype,
            synchronization=plain.synchronization,
            aggregation=plain.aggregation,
        )
