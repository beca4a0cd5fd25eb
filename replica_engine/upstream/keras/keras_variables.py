"""Keras' variables while they are made, their layouts, and the state that Keras keeps for each thread.

This module does not import Keras: in a process without Keras there is no state to inherit or to clear. Checked on
Keras 3.10 to 3.16; the state of a thread on Keras 3.15.1.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from replica_engine.process import interrupts
from replica_engine.upstream import distribute, eager, hook, versions
from replica_engine.upstream.keras import keras_training

if TYPE_CHECKING:
    import keras


# Variables while they are made, and the parts of `keras.distribution` that have no public name.
#
# A strategy that divides variables must know which Keras variable a TensorFlow variable is made for: layouts go by its
# path.

_OPS = "keras.src.backend.tensorflow.ops" if versions.keras_renamed() else "keras.src.backend.tensorflow"
_INITIALIZERS = "keras.src.initializers"
_DISTRIBUTION = "keras.src.distribution.distribution_lib"
_divided = functools.partial(hook.Hook, since="the first `TPUStrategy(distribution=...)`")
INITIALIZE = _divided(
    f"{_OPS}.core.Variable",
    "_initialize",
    why="the path of a variable says how it is divided; a large value is made in parts by an initializer of Keras",
    until="only notes which variable Keras makes, and by which initializer",
)
ADD_VARIABLE = _divided(
    f"{keras_training._BASE_OPTIMIZER}.{keras_training.OPTIMIZER}",
    keras_training.ADD_VARIABLE,
    why="what an optimizer keeps for a weight is divided like the weight",
    until="only notes the weight",
    order=1,
)
DIVIDE = _divided(
    f"{_OPS}.numpy",
    "divide",
    why="a table's gradient in an optimizer such as Adagrad keeps its number of rows where devices divide the step",
    until="passes on to Keras outside the steps of such a strategy",
)
DISTRIBUTE = _divided(
    "keras.src.backend.tensorflow.distribution_lib",
    "distribute_tensor",  # the backend has none
    why="layouts of the outputs of layers, and `keras.distribution.distribute_tensor`",
    until="only added; does nothing outside the steps of such a strategy",
)
MODULE = "keras.src.backend.common.global_state"
"""The module with the state that Keras keeps separately for each thread."""
_ATTRIBUTE = "distribution"

OUTPUT = "/output"
"""The end of a key of a LayoutMap that is for the outputs of a layer."""

_in_parts: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_in_parts", default=False)


FindLayout = Callable[[str], object]
"""The layout for the path of a layer and "/output", or None."""
Constrain = Callable[[str, tf.Tensor, object], tf.Tensor]
"""Divides a tensor, given the path, as a layout says."""


class Making(NamedTuple):
    """What is being made.

    Attributes:
        variable: the Keras variable; None for a TensorFlow variable of its own.
        reference: the weight for which an optimizer makes it, or None.
        initializer: Keras' own initializer that makes its value, or None.
    """

    variable: keras.Variable | None = None
    reference: keras.Variable | None = None
    initializer: keras.initializers.Initializer | None = None


_NOTHING = Making()
_making: contextvars.ContextVar[Making] = contextvars.ContextVar("replica_engine_making", default=_NOTHING)


def watch_variables() -> None:
    """Makes `being_made` know what Keras makes; does nothing a second time."""
    INITIALIZE.around(_initialized)
    ADD_VARIABLE.around(_added)
    DIVIDE.around(_divide)
    DISTRIBUTE.put(lambda _: _distribute)


def being_made() -> Making:
    """What this thread is making."""
    return _making.get()


def making(
    variable: keras.Variable | None,
    reference: keras.Variable | None = None,
    initializer: keras.initializers.Initializer | None = None,
) -> contextlib.AbstractContextManager[Making]:
    """Inside, TensorFlow variables are made for a Keras variable."""
    return interrupts.variable_for_block(_making, Making(variable, reference, initializer))


def _initialized(own: Callable[..., object], variable: keras.Variable, value: object) -> object:
    with making(variable, _making.get().reference, _initializer_in(value)):
        return own(variable, value)


def _initializer_in(value: object) -> keras.initializers.Initializer | None:
    """Keras' own initializer that a function calls, which Keras has made of it: `lambda: initializer(shape, dtype)`."""
    if not isinstance(value, types.FunctionType):
        return None
    initializer = inspect.getclosurevars(value).nonlocals.get("initializer")
    return initializer if type(initializer).__module__.startswith(_INITIALIZERS) else None


def _added(
    own: Callable[..., object], optimizer: object, reference_variable: keras.Variable, *args: object, **kwargs: object
) -> object:
    with making(None, reference_variable):
        return own(optimizer, reference_variable, *args, **kwargs)


def in_parts() -> contextlib.AbstractContextManager[bool]:
    """Inside, a step is traced whose values XLA divides over several devices."""
    return interrupts.variable_for_block(_in_parts, True)


def _divide(own: Callable[..., tf.Tensor], x1: object, x2: object) -> tf.Tensor | tf.IndexedSlices:
    """`keras.ops.divide`, with which optimizers such as Adagrad divide the rows of a table's gradient.

    Keras adds the rows whose divisor is zero or NaN, and their number depends on data: XLA cannot divide such values
    over devices. The rows of the gradient alone remain. In an optimizer the others have no such divisor unless their
    weights became NaN before.
    """
    is_dense = not isinstance(x2, (tf.IndexedSlices, tf.SparseTensor)) and len(getattr(x2, "shape", ())) > 0
    if not (_in_parts.get() and isinstance(x1, tf.IndexedSlices) and is_dense):
        return own(x1, x2)
    return tf.IndexedSlices(own(x1.values, tf.gather(x2, x1.indices)), x1.indices, x1.dense_shape)


class _Outputs(hook.StandIn):
    """Takes the place of Keras' distribution: `Layer.__call__` asks it for the layout of its outputs.

    Args:
        own: the distribution itself.
        find_layout: returns the layout for the path of a layer and "/output", or None.
        constrain: divides a tensor, given the path, as a layout says.
    """

    def __init__(self, own: object, find_layout: FindLayout, constrain: Constrain):
        super().__init__(own)
        self.constrain = constrain
        self.path = ""
        self._find_layout = find_layout

    def get_tensor_layout(self, path: str) -> object:
        """Called by Keras."""
        self.path = path
        return self._find_layout(path)


@contextlib.contextmanager
def outputs_divided(given: object, find_layout: FindLayout, constrain: Constrain) -> Iterator[None]:
    """Inside, the outputs of Keras' layers are divided, see `_Outputs`, and what `distribute_tensor` gets."""
    state: Any = sys.modules[MODULE]
    before = state.get_global_attribute(_ATTRIBUTE)
    state.set_global_attribute(_ATTRIBUTE, _Outputs(given, find_layout, constrain))
    try:
        yield
    finally:
        state.set_global_attribute(_ATTRIBUTE, before)


def _distribute(value: object, layout: object) -> object:
    """`keras.distribution.distribute_tensor`, which does nothing outside of `outputs_divided`."""
    current: Any = sys.modules[MODULE].get_global_attribute(_ATTRIBUTE)
    if not isinstance(current, _Outputs):
        return value
    # Keras has asked for the layout of a path right before. A call of the user's has none.
    path, current.path = current.path or "distribute_tensor", ""
    return tf.nest.map_structure(lambda each: current.constrain(path, each, layout), value)


def find_first_handle(variable: keras.Variable | tf.Variable) -> tf.Tensor:
    """The handle of the first component of a Keras or TensorFlow variable."""
    value = getattr(variable, "_value", variable)
    return eager.raw_handle(value._values[0] if isinstance(value, distribute.DistributedVariable) else value)


def is_distribution(value: object) -> bool:
    """Whether a value is a `keras.distribution.Distribution`."""
    kind = getattr(sys.modules.get(_DISTRIBUTION), "Distribution", None)
    return kind is not None and isinstance(value, kind)


def current_distribution() -> Any:
    """What `keras.distribution.set_distribution` has set in this thread; None if it has set nothing."""
    state: Any = sys.modules.get(MODULE)
    found = None if state is None else state.get_global_attribute(_ATTRIBUTE)
    return found._own if isinstance(found, _Outputs) else found


def find_layout_map(distribution: Any) -> Any:
    """The LayoutMap of a `keras.distribution.ModelParallel`; None for another distribution."""
    return getattr(distribution, "_layout_map", None)


# The state that Keras keeps separately for each thread.

STATE = "GLOBAL_STATE_TRACKER"  # a threading.local with settings, name counters, scopes, a seed generator
SEEDS = "keras.src.random.seed_generator"
GLOBAL_SEED, GENERATOR = "global_random_seed", "global_seed_generator"  # keys in that state
SETTINGS = ("dtype_policy",)  # keys that a user sets once and means for all threads


def settings() -> dict[str, Any]:
    """This thread's settings of Keras."""
    state = _state()
    return {name: state[name] for name in SETTINGS if name in state}


def global_seeds(make: bool = False) -> Any:
    """The seed generator that Keras' random functions draw from on this thread without one of their own.

    None if Keras has not made one yet and `make` does not ask for it.
    """
    if make and _state().get(GENERATOR) is None:
        sys.modules[SEEDS].global_seed_generator()
    return _state().get(GENERATOR)


class entered:
    """Gives this thread the settings of another thread; on leaving, clears all state of Keras on this thread.

    That state includes the default seed generator. It holds variables of a strategy, which would keep the strategy
    alive as long as the thread, and the strategy keeps the thread alive: neither would ever end.
    """

    __slots__ = ("_settings",)

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings

    def __enter__(self) -> None:
        if self._settings:
            _state().update(self._settings)

    def __exit__(self, *_: object) -> None:
        _state().clear()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the block, Keras' random numbers on this thread start from a seed; on leaving, the old state returns.

    Args:
        seed: the seed, as for `keras.utils.set_random_seed`.
    """
    # Name counters are dictionaries inside the state, and variables that wait for their values a list: both are
    # changed in place, so both are copied. A variable that gets its value inside the block waits no more after it.
    state = _state()
    before = {name: copy.copy(each) if isinstance(each, (dict, list)) else each for name, each in state.items()}
    state[GLOBAL_SEED] = seed
    state.pop(GENERATOR, None)  # Keras makes a new one from the seed
    try:
        yield
    finally:
        state.clear()
        state.update(before)


def _state() -> dict[str, Any]:
    local = getattr(sys.modules.get(MODULE), STATE, None)
    return {} if local is None else local.__dict__
