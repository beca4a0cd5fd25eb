"""Variables that a model and its replicas share.

A Keras variable holds a TensorFlow variable. Outside the replicated methods it holds a plain one, so that the original
model works as always. While a replicated method runs, it holds a distributed variable instead, whose first component is
that plain variable:

- on entering, the values of the plain variables go to all replicas, so that changes of the original take effect;
- a `tf.function` that was traced before has captured the plain variable. When it is called between two steps, the plain
  variable first gets the value that entering would find after leaving; what the function writes goes to all replicas;
- on leaving, the replicas' separate values are combined in the plain variables. Metrics are added up, and so are the
  gradients that an optimizer accumulates. Weights that a step assigns, such as the moving statistics of a batch
  normalization, are averaged over replicas. Seeds keep the value of replica 0. Trained weights and the optimizer's
  other variables are equal on all replicas anyway.

All this moves values, whatever they are: `tf.debugging.enable_check_numerics` checks ops of the user, and not these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from replica_engine.backend import find_backend
from replica_engine.process.interrupts import afterwards
from replica_engine.upstream import distribute, eager, thread_state
from replica_engine.upstream.graphs import function_graphs
from replica_engine.upstream.keras import keras_models, keras_variables
from replica_engine.values.replica_weights import make_replica_seed

_SHARED = "_replica_engine_shared"  # on a handle: the `_Shared` of its variable, and whether it is the plain one
_WORTH_A_GRAPH = 8  # calls that take about as long as one trace


class ReplicatedVariables:
    """The distributed variables of one model and one strategy.

    Args:
        model: the model whose variables they are.
        strategy: the strategy whose replicas they are for.
    """

    def __init__(self, model: keras.Model, strategy: tf.distribute.Strategy):
        self._model = model
        self._strategy = strategy
        self._shared: dict[int, _Shared] = {}
        self._spread, self._gather = (_with_all({}, do) for do in (_Shared.spread, _Shared.gather))

    @contextlib.contextmanager
    def metrics_left(self) -> Iterator[None]:
        """Inside the block, metric variables are plain ones: Keras is about to set them, and replica 0 gets that value.

        An assignment to the distributed variable would give each replica an equal part of the value. Of a metric that
        is not a sum, only the value of replica 0 counts.
        """
        counted = [shared for shared in self._shared.values() if shared.is_of_metric and shared.is_distributed()]
        with thread_state.unobserved():
            for shared in counted:
                shared.gather()
                shared.put_plain()

        @thread_state.unobserved()
        def put_back() -> None:
            for shared in counted:
                shared.put_distributed()
                shared.spread()

        with afterwards(put_back, "giving the metrics back to the replicas"):
            yield

    @thread_state.unobserved()
    def reconcile(self) -> None:
        """Makes replicas agree on the values that each has assigned for itself; does not change metrics."""
        for shared in self._shared.values():
            shared.reconcile()

    @thread_state.unobserved()
    def enter(self) -> None:
        """Puts the distributed variables into the model's Keras variables."""
        self._find()
        for shared in self._shared.values():
            shared.put_distributed()
        self._spread()

    @thread_state.unobserved()
    def leave(self) -> bool:
        """Puts the plain variables back into the model's Keras variables.

        Returns:
            Whether a step made variables, which steps of a later call would not share.
        """
        try:
            self.reconcile()
            self._gather()
        finally:
            # Whatever fails above, the original must never keep the variables of the replicas.
            _put_all_plain(self._shared.values())
        made = [_make_plain(variable) for variable in keras_models.list_variables(self._model)]
        return any(made)

    def give_up(self) -> bool:
        """Undoes an `enter` that failed: as `leave`, but the plain variables keep the values that they had before.

        Returns:
            True: what is known of the replicas may be of no use.
        """
        # If `enter` did not find all, a variable may have others by now than it had in the last call.
        _put_all_plain(shared for shared in self._shared.values() if shared.is_under())
        return True

    @thread_state.unobserved()
    def renew(self, in_step: bool = False) -> bool:
        """Shares the variables that the model has now and gives back those it had; called between `enter` and `leave`.

        Args:
            in_step: whether a step is being traced. Distributed variables that the step made stay as they are, because
                ops in its graph use them.

        Returns:
            Whether the set of variables has changed.
        """
        before = self._shared
        self._find(in_step)
        for key, shared in before.items():
            if key not in self._shared:
                shared.reconcile()
                shared.gather()
                shared.put_plain()
        for key, shared in self._shared.items():
            if before.get(key) is not shared:
                shared.put_distributed()
                shared.spread()
            elif shared.is_one_seed():
                shared.spread()
        return before is not self._shared

    def _find(self, in_step: bool = False) -> None:
        """Looks through the model for its variables, and keeps what is known of those that it had before."""
        known = {}
        assigned = {id(weight) for weight in self._model.non_trainable_weights}
        accumulators = {id(variable) for variable in keras_models.list_accumulators(self._model)}
        weights = keras_models.weights_kept_for(self._model)
        # If making one fails, those made before must be undone here: `self._shared` does not have them yet.
        with contextlib.ExitStack() as undo:
            for variable in keras_models.list_variables(self._model):
                shared = self._shared.get(id(variable))
                value = keras_models.underlying(variable)
                if shared is None or not shared.is_either(value):
                    if in_step and isinstance(value, distribute.DistributedVariable):
                        continue
                    _make_plain(variable)
                    is_state = id(variable) in assigned and not keras_models.is_seed(variable)
                    with keras_variables.making(variable, weights.get(id(variable))):
                        shared = _Shared(variable, self._strategy, is_state, id(variable) in accumulators)
                    undo.callback(shared.put_plain)
                known[id(variable)] = shared
            undo.pop_all()
        if known != self._shared:
            self._shared = known
            self._spread, self._gather = (_with_all(known, do) for do in (_Shared.spread, _Shared.gather))


class _Shared:
    """One Keras variable, with the plain TensorFlow variable and the distributed variable that it holds in turn.

    Attributes:
        plain: the plain variable; it is a component of the distributed one if it is on the first device.
        on_read: whether each replica has a separate value, and reading the variable combines these values.
        is_of_metric: whether it is such a variable, and not an accumulator of an optimizer.
        host_side: links the plain variable to its value on the devices; None if the plain variable holds its value.
    """

    def __init__(
        self, variable: keras.Variable, strategy: tf.distribute.Strategy, is_state: bool, is_accumulator: bool
    ):
        self.plain = keras_models.underlying(variable)
        self._variable = variable
        self._is_state = is_state
        self._is_seed = keras_models.is_seed(variable)
        kind = (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM)
        if not is_accumulator and not keras_models.is_counted(variable):
            kind = (self.plain.synchronization, self.plain.aggregation)
        self._distributed = _around(self.plain, strategy, *kind)
        self._components = list({id(value): value for value in self._distributed._values}.values())
        self._is_component = self._components[0] is self.plain
        if not self._is_component:
            # An optimizer knows a weight by this identity, and the first component now stands for the plain variable.
            eager.take_identity(self._components[0], self.plain)
        self._ids = [distribute.replica_id_in_sync_group(strategy, index) for index in range(len(self._components))]
        self.on_read = isinstance(self._distributed, distribute.SyncOnReadVariable)
        self.is_of_metric = self.on_read and not is_accumulator
        backend = find_backend(strategy)
        self.host_side = backend.find_host_side(self.plain) if self._is_component and backend is not None else None

        self._this = weakref.ref(self)
        for component in self._components:
            if component is not self.plain:
                # On the handle, since that is what a traced function has captured (`used_by`).
                setattr(eager.raw_handle(component), _SHARED, (self._this, False))

    def is_either(self, value: object) -> bool:
        """Whether `value` is one of these two variables."""
        return value is self.plain or value is self._distributed

    def is_distributed(self) -> bool:
        """Whether the Keras variable holds the distributed variable now."""
        return keras_models.underlying(self._variable) is self._distributed

    def is_under(self) -> bool:
        """Whether the Keras variable holds one of these two variables now."""
        return self.is_either(keras_models.underlying(self._variable))

    def is_one_seed(self) -> bool:
        """Whether this is a seed with one value on all replicas: a callback has set it, perhaps from a checkpoint."""
        if not self._is_seed or len(self._components) == 1:
            return False
        return len({component.numpy().tobytes() for component in self._components}) == 1

    def put_distributed(self) -> None:
        """Puts the distributed variable into the Keras variable."""
        if self._is_component:
            keras_models.contain(self.plain, self._distributed)
        if self.host_side is not None:
            self.host_side.attach()
        setattr(eager.raw_handle(self.plain), _SHARED, (self._this, True))
        keras_models.put_underneath(self._variable, self._distributed)

    def put_plain(self) -> None:
        """Puts the plain variable back."""
        vars(eager.raw_handle(self.plain)).pop(_SHARED, None)
        keras_models.contain(self.plain, None)
        if self.host_side is not None:
            self.host_side.release()
        keras_models.put_underneath(self._variable, self.plain)

    def spread(self) -> None:
        """Gives the plain variable's value to all replicas; a sum goes to replica 0, and the others get 0."""
        if self._is_seed:
            seed = self.plain.read_value()
            for replica, component in zip(self._ids, self._components, strict=True):
                if replica or component is not self.plain:
                    component.assign(_seed(seed, replica))
            return
        if self._is_component and len(self._components) == 1:
            return
        value = self.plain.read_value()
        is_sum = self.on_read and self._distributed.aggregation == tf.VariableAggregation.SUM
        for replica, other in enumerate(self._components):
            if other is not self.plain:
                other.assign(tf.zeros_like(value) if is_sum and replica else value)

    def before_use(self, writes: bool, is_between_steps: bool) -> None:
        """Brings the plain variable up to date, before a function uses it that knows nothing of the replicas.

        Args:
            writes: whether the function may write to it.
            is_between_steps: whether no step runs; else what replicas have for themselves is left alone.
        """
        if is_between_steps:
            self.reconcile()
            if self.on_read and len(self._components) > 1:
                self.gather()
                self.spread()
        if not self._is_component:
            self.gather()
        elif self.host_side is not None:
            self.host_side.used(writes)

    def after_write(self, is_between_steps: bool) -> None:
        """Gives what such a function may have written to all replicas."""
        if is_between_steps or not self.on_read:
            self.spread()

    def gather(self) -> None:
        """Combines the values of the replicas in the plain variable."""
        if self.on_read and len(self._components) > 1:
            values = [component.read_value() for component in self._components]
            aggregated = _AGGREGATED.get(self._distributed.aggregation)
            self.plain.assign(values[0] if aggregated is None else aggregated(values))
        elif self._is_seed and self._ids[0]:  # the first replica of another worker than the chief
            self.plain.assign(_seed(self._components[0].read_value(), -self._ids[0]))
        elif not self._is_component:
            self.plain.assign(self._components[0].read_value())

    def reconcile(self) -> None:
        """Averages over replicas the values that each has assigned for itself; integers take the value of replica 0."""
        if not self._is_state or self.on_read:
            return
        values = [value.numpy() for value in self._distributed.values]
        # By bytes, since a NaN differs from itself: replicas that agree on one need no assignment.
        if any(value.tobytes() != values[0].tobytes() for value in values[1:]):
            agreed = values[0]
            if self.plain.dtype.is_floating:
                agreed = tf.cast(_mean([tf.cast(value, "float64") for value in values]), self.plain.dtype)
            self._distributed.assign(agreed)


def _with_all(shared: dict[int, _Shared], do: Callable[[_Shared], None]) -> Callable[[], None]:
    """Returns a function that does `do` with all variables.

    The function works op by op at first. When it has been called often enough for a trace to pay, it calls a graph. So
    a model that changes, or that is used for one call, is not traced.
    """
    calls = 0
    graph: Callable[[], None] | None = None

    def each() -> None:
        for one in shared.values():
            do(one)

    def with_all() -> None:
        nonlocal calls, graph
        calls += 1
        # Variables of XLA track their own reads and writes: a graph gains nothing.
        if calls == _WORTH_A_GRAPH and not any(one.host_side for one in shared.values()):
            # Not a tf.function: TensorFlow would warn that this code is traced often, because each model needs one
            # trace.
            graph = tf.function(each, autograph=False).get_concrete_function()
        (graph or each)()

    return with_all


@contextlib.contextmanager
def used_by(
    function: object, is_between_steps: bool, at_work: Callable[[], contextlib.AbstractContextManager[object]]
) -> Iterator[None]:
    """Around a call of a traced function: the plain variables that it has captured are as those of one device.

    A function that has captured a variable of a replica was traced while the model had them, and knows what to do.

    Args:
        function: the function, as `function_graphs.marked` takes it.
        is_between_steps: whether no step of the model runs.
        at_work: a context for what is done with variables here.
    """
    found: dict[int, tuple[_Shared, bool]] = {}
    knows = set()
    for (reference, is_plain), may_write in function_graphs.captured_with(function, _SHARED):
        if (shared := reference()) is not None:
            if is_plain:
                found[id(shared)] = shared, may_write()
            else:
                knows.add(id(shared))
    used = [each for key, each in found.items() if key not in knows]
    with at_work(), thread_state.unobserved():
        for shared, writes in used:
            shared.before_use(writes, is_between_steps)

    def give_to_replicas() -> None:
        with at_work(), thread_state.unobserved():
            for shared, writes in used:
                if writes:
                    shared.after_write(is_between_steps)

    with afterwards(give_to_replicas, "giving the values to the replicas"):
        yield


def _put_all_plain(shared: Iterable[_Shared]) -> None:
    with contextlib.ExitStack() as stack:  # the others too if one fails
        for one in shared:
            stack.callback(one.put_plain)


def _make_plain(variable: keras.Variable) -> bool:
    """Replaces a distributed variable by a plain one; returns whether the variable was distributed."""
    made = keras_models.underlying(variable)
    if not isinstance(made, distribute.DistributedVariable):
        return False
    keras_models.put_underneath(variable, eager.plain_like(made))
    return True


def _seed(value: tf.Tensor, replica: int) -> tf.Tensor:
    """The state of a seed generator on one replica, by its id among the replicas of all workers."""
    own = make_replica_seed(replica, tf.cast(value[:1], tf.int64))
    return tf.concat([tf.cast(own, value.dtype), value[1:]], 0)


def _mean(values: list[tf.Tensor]) -> tf.Tensor:
    return distribute.total(values, len(values))


_AGGREGATED = {tf.VariableAggregation.SUM: distribute.total, tf.VariableAggregation.MEAN: _mean}


def _around(
    plain: tf.Variable,
    strategy: tf.distribute.Strategy,
    synchronization: tf.VariableSynchronization,
    aggregation: tf.VariableAggregation,
) -> distribute.DistributedVariable:
    """Makes a distributed variable whose first component is `plain`, if `plain` is on the first device."""
    unused = [plain] if plain.device == strategy.extended.worker_devices[0] else []

    def creator(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        return unused.pop() if unused else next_creator(**kwargs)

    with tf.variable_creator_scope(creator), strategy.scope():
        return tf.Variable(
            plain.read_value(),
            trainable=plain.trainable,
            name=plain.name.split(":")[0],
            dtype=plain.dtype,
            synchronization=synchronization,
            aggregation=aggregation,
        )


@contextlib.contextmanager
def kept_if(raised: type[BaseException], model: keras.Model) -> Iterator[None]:
    """Gives all variables of a model their values again if the block raises an exception of this class."""
    parts = [part for each in keras_models.list_variables(model) for part in _components(keras_models.underlying(each))]
    with thread_state.unobserved():
        # Each component, since replicas may have values of their own.
        values = [tf.identity(part.read_value()) for part in parts]
    try:
        yield
    except raised:
        for part, value in zip(parts, values, strict=True):
            part.assign(value)
        raise


def _components(variable: tf.Variable) -> Sequence[tf.Variable]:
    return variable.values if isinstance(variable, distribute.DistributedValues) else (variable,)
