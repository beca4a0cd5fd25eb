"""Misuse of strategies in the user's terms: TensorFlow's errors, N values used as one, and warnings.

- A program that uses the value of several replicas as if it were one tensor gets an error that says what to write
  (`install`).
- What TensorFlow's exceptions about strategies say in its own terms, `translate_error` says in the user's.
- Programs that run, and probably do not do what their author wants, get a warning (`check_inputs`, `check_lines`,
  `check_additions`, `check_optimizer`).

What must never happen: a program that works is refused; a warning comes for a program that is right.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.user_frames import here, raised_at, user_line, users_place
from replica_engine.engine import SyncPoint
from replica_engine.errors import InputsError, NoValueError, ReplicaValueError, ScopeError, run_errors, value_errors
from replica_engine.errors.base import add_note, at
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import graph_walk

# The value of several replicas, used as if it were one tensor.

_UNARY = {f"__{name}__": f"{name}(x)" for name in ("float", "int", "complex", "round", "abs")}
_UNARY |= {"__neg__": "-x", "__pos__": "+x", "__invert__": "~x", "__getitem__": "x[...]", "__iter__": "for each in x"}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_OPERATORS |= {"matmul": "@", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
_OF_NO_CLASS = (bool, int, float, complex, str, type(None), np.generic, np.ndarray, list, tuple, distribute.PerReplica)
"""Other operands for which nobody else implements the operator. A tensor does, and comes to the conversion below."""


def install() -> None:
    """Makes TensorFlow's `PerReplica` raise errors that say what to write; only once per process.

    The result of a run is TensorFlow's `PerReplica`. It has no arithmetic, no length and no attributes of a tensor, so
    `float(result)` and `result.numpy()` fail in the words of Python, which name no cure. A subclass with words of its
    own would not last: TensorFlow makes a plain `PerReplica` of each that leaves or enters a `tf.function`. So the
    methods that raise are added to TensorFlow's class, each only where the class has none. Whatever worked before works
    in the same way, with one exception: the truth of boolean values. It was always True, and
    `if strategy.run(is_done):` was a bug.
    """
    methods: dict[str, Callable[..., object]] = {name: _refusing(asked) for name, asked in _UNARY.items()}
    for name, sign in _OPERATORS.items():
        methods[f"__{name}__"] = _operator(f"x {sign} y")
        methods[f"__r{name}__"] = _refusing(f"y {sign} x")
    methods.update({name: _operator(f"x {sign} y") for name, sign in _COMPARISONS.items()})
    methods.update(__format__=_formatted, __bool__=_truth, __getattr__=_attribute)
    distribute.refuse_several(methods, _as_tensor)


def _refusing(asked: str) -> Callable[..., object]:
    def refuse(self: distribute.PerReplica, *_: object) -> object:
        raise _error(self, asked)

    return refuse


def _operator(asked: str) -> Callable[..., object]:
    def operate(self: distribute.PerReplica, other: object) -> object:
        if isinstance(other, _OF_NO_CLASS):
            raise _error(self, asked)
        return NotImplemented

    return operate


def _formatted(self: distribute.PerReplica, spec: str) -> str:
    if spec:
        raise _error(self, f"f'{{x:{spec}}}'")
    return str(self)


def _truth(self: distribute.PerReplica) -> bool:
    """Whether a result is there: True, as for any object. But the truth of a boolean is what the program asks for.

    TensorFlow's own collectives ask for the truth of `destinations`, and mean whether something is there.
    """
    asker = sys._getframe(1).f_globals.get("__name__", "")
    if asker.startswith(distribute.PACKAGE):
        return True
    if all(getattr(value, "dtype", type(value)) in (tf.bool, bool) for value in self.values):
        raise _error(self, "if x")
    return True


def _attribute(self: distribute.PerReplica, name: str) -> NoReturn:
    """The error of an attribute that only one tensor or array has; `hasattr` is False as before."""
    if not name.startswith("_") and (hasattr(eager.EagerTensor, name) or hasattr(np.ndarray, name)):
        raise NoValueError.several(name, is_in_replica())
    raise AttributeError(f"'PerReplica' object has no attribute {name!r}", name=name, obj=self)


def _as_tensor(
    value: distribute.PerReplica, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
) -> object:
    """TensorFlow's hook that makes a tensor of a value. TensorFlow's own, which comes next, serves in replicas.

    But it asks the whole value for its dtype, so `tensor + x` failed there where `tf.identity(x)` works.
    """
    if not is_in_replica():
        raise _error(value, "A function of TensorFlow")
    return NotImplemented if dtype is None else tf.convert_to_tensor(distribute.own_value(value), dtype)


def _error(value: distribute.PerReplica, asked: str) -> ReplicaValueError:
    return ReplicaValueError.several(asked, len(value.values), is_in_replica())


# TensorFlow's exceptions about strategies.

_MIXED = ("Mixing different tf.distribute.Strategy", "Need to be inside")
_NO_REDUCTION = " is not a valid ReduceOp"
_COLOCATED = "`colocate_vars_with` must only be passed a variable created in this"
_SYMBOLIC = "symbolic"
_OF_VARIABLE = "numpy() is only available when eager execution is enabled."
_NUMPY = os.path.dirname(np.__file__) + os.sep
_ASKING = (
    ("Cannot convert a symbolic tf.Tensor", "numpy"),
    ("float() argument must be", "float(x)"),
    ("int() argument must be", "int(x)"),
    ("as a Python `bool`", "if x"),
    ("Iterating over a symbolic", "for each in x"),
    ("interpreted as an integer", "float(x), int(x) or range(x)"),  # of all three since TensorFlow 2.22
    ("no attribute 'item'", "x.item()"),
    ("no attribute 'tolist'", "x.tolist()"),
    ("must be real number", "'%f' % x"),
    ("__format__", "f'{x:.2f}'"),
)
"""Words of errors about symbolic tensors, and the code that asks for a value."""
_NEXT = "next(iterator) should be called from outside of replica_fn"
_IN_REPLICA = "Method requires being in cross-replica context"


def translate_error(error: Exception) -> Exception:
    """The error of the library that says what a known error of TensorFlow means; otherwise the error itself.

    Nothing is checked in advance: a program that works is never refused, and pays nothing. When a run has failed with
    one of a few known errors, the frames of its traceback show the object of the user that the error is about.
    """
    try:
        str(error)
    except Exception:  # its class cannot say what it is; it arrives as it is, and not as what `__str__` raises
        return error
    better = _meaning(error)
    if better is None:
        _note_no_value(error)
        return error
    for note in getattr(error, "__notes__", ()):
        add_note(better, note)
    better.__suppress_context__ = True
    return better.with_traceback(error.__traceback__)


def check_outside_replicas(method: str) -> None:
    """Checks that a method of the strategy, `scope` or `reduce`, is not called in a replica.

    Raises:
        ScopeError: it is.
    """
    if is_in_replica():
        raise ScopeError.in_replica(method, here())


def make_plain_variable_error(variable: tf.Variable) -> ScopeError:
    """The error of a plain variable that is updated here, and of its optimizer, if that is of no strategy either."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        owner: Any = frame.f_locals.get("self")
        if _is_optimizer(owner) and _is_default(owner._distribution_strategy):
            return ScopeError.model_and_optimizer(_name(variable), owner.name, type(owner).__name__, here())
    return ScopeError.variable(_name(variable), here())


def _meaning(error: Exception) -> Exception | None:
    # Only of these two exact classes: an exception of the user may have a text that raises.
    if type(error) is AttributeError:
        text = str(error)
        if not ("SymbolicTensor" in text and text.endswith("no attribute 'numpy'")):
            return None
        return NoValueError(
            "numpy() was called on a tensor x of a function that is traced: of a tf.function, or of a function that "
            "TPUStrategy runs. While it is traced, x has no value yet. Compute with TensorFlow's ops, or return x and "
            "read it after the run. To see it while the function runs: tf.print(x), or "
            "tf.py_function(fn, [x], x.dtype)."
        )
    if type(error) not in (RuntimeError, ValueError):
        return None
    text = str(error)
    if type(error) is ValueError and text.endswith(_NO_REDUCTION):
        return ReplicaValueError.bad_reduction(text.removesuffix(_NO_REDUCTION).strip("'"))
    if text.startswith(_MIXED if type(error) is RuntimeError else _COLOCATED):
        return _foreign(error)
    if type(error) is RuntimeError and text.startswith(_IN_REPLICA) and is_in_replica():
        return ScopeError.in_replica("run", here())
    if type(error) is ValueError and text.startswith(_NEXT):
        return InputsError(
            f"A replica asks for the next batch of a distributed dataset{at(raised_at(error))}. A batch has a part for "
            "each replica, so take it outside, and pass it: strategy.run(step, args=(next(iterator),)). "
            f"{run_errors.KERAS_RUNS}"
        )
    return None


def _note_no_value(error: Exception) -> None:
    """Adds to an error about a value that cannot be read yet: what asked for it, where, and what to write."""
    if not isinstance(error, (AttributeError, NotImplementedError, TypeError)):
        return
    text = str(error)
    of_variable = text.endswith(_OF_VARIABLE)
    if not of_variable and _SYMBOLIC not in text.lower():
        return
    asked = "v.numpy()" if of_variable else next((asked for words, asked in _ASKING if words in text), "")
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename.startswith(_NUMPY):
            if asked in ("numpy", "v.numpy()"):  # the function that the user called
                asked = f"np.{code.co_name}(x)"
        elif asked == "v.numpy()" and code.co_name == "__array__":  # a function of NumPy that is written in C
            asked = "numpy"
        else:
            place = users_place(frame, number) or place
    if asked:
        value_errors.note_no_value(error, asked, place, of_variable)


def _foreign(error: Exception) -> ScopeError | None:
    """Finds the optimizer or variable that does not belong to the strategy in use."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    for owner in owners:  # the outermost first: an optimizer, rather than the variables that it updates
        if _is_optimizer(owner):
            return _make_optimizer_error(owner, _updated(frames))
    for owner in owners:
        if isinstance(owner, distribute.DistributedVariable):
            return ScopeError.other_strategy("variable", _name(owner))
    return None


def _is_optimizer(owner: object) -> bool:
    kind = getattr(getattr(sys.modules.get("keras"), "optimizers", None), "Optimizer", None)
    return kind is not None and isinstance(owner, kind)


def _make_optimizer_error(optimizer: Any, variable: tf.Variable) -> ScopeError:
    """The error of an optimizer that makes its state for a variable, or for one that is not known: None."""
    name, kind = optimizer.name, type(optimizer).__name__
    is_plain = isinstance(variable, tf.Variable) and not isinstance(variable, distribute.DistributedVariable)
    if _is_default(optimizer._distribution_strategy):
        if is_plain:
            return ScopeError.model_and_optimizer(_name(variable), name, kind, here())
        return ScopeError(
            f"The optimizer {name!r} was made outside `strategy.scope()`, so it cannot keep its state on the "
            "replicas. Make it under the scope:\n"
            "    with strategy.scope():\n"
            f"        optimizer = keras.optimizers.{kind}(...)"
        )
    if is_plain:
        return ScopeError.variable(_name(variable), here())
    return ScopeError.other_strategy("optimizer", name)


def _updated(frames: Sequence[FrameType]) -> tf.Variable | None:
    """The variable for which an optimizer makes its state: an argument of the library's function around Keras' own."""
    for frame in frames:
        if "reference_variable" in frame.f_locals:
            variable = frame.f_locals["reference_variable"]
            return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    return None


def _is_default(strategy: object) -> bool:
    return strategy is distribute.default_strategy()


def _name(variable: tf.Variable) -> str:
    return str(variable.name).removesuffix(":0")


def is_in_replica() -> bool:
    """Whether the calling code runs in a replica of a strategy, other than TensorFlow's default one."""
    context = tf.distribute.get_replica_context()
    return context is not None and not _is_default(context.strategy)


# Warnings. None is logged twice for a cause.
#
# A warning must never come for a program that is right. So each of these looks at what happens, and not at how a
# program is written: every replica goes through all of a dataset; two replicas add to one variable.

_logger = logging.getLogger("replica_engine")
_OF_REPLICA = re.compile(r"(?:^|/)(replica_\d+)/")
_told: weakref.WeakKeyDictionary[object, dict[Hashable, object]] = weakref.WeakKeyDictionary()


def warn_once(owner: object, key: Hashable, text: str) -> None:
    """Logs a warning, unless it was logged for this strategy or model, and key."""
    mine = object()
    if _told.setdefault(owner, {}).setdefault(key, mine) is mine:  # of several threads, one; without a lock
        _logger.warning(text)


class Named:
    """The objects of one kind that warnings have named: each object once, and not more than `MOST` objects.

    A model that was made outside the scope may have hundreds of variables, and the first few say what is wrong. The
    objects are known by reference, since two may have one name, and weakly, since a program may make many.
    """

    MOST = 5

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._known: dict[int, weakref.ref[object]] = {}

    def warn(self, each: object, text: Callable[[], str]) -> None:
        """Logs a warning about an object, unless one was logged; the last one says that it is the last."""
        key = id(each)
        with self._lock:  # replicas that run at the same time find the same object
            if key in self._known or self._count >= self.MOST:
                return
            self._known[key] = weakref.ref(each, lambda _: self._known.pop(key, None))
            self._count += 1
            is_last = self._count == self.MOST
        _logger.warning(text() + (f"\nThis is the last of {self.MOST} such warnings; more are not logged." * is_last))


_named: weakref.WeakKeyDictionary[tf.distribute.Strategy, dict[str, Named]] = weakref.WeakKeyDictionary()


def _find_named(strategy: tf.distribute.Strategy, kind: str) -> Named:
    return _named.setdefault(strategy, {}).setdefault(kind, Named())


def check_inputs(
    strategy: tf.distribute.Strategy, args: Sequence[object], kwargs: Any, size: int, compiles: bool
) -> None:
    """Looks at the arguments of a run.

    Args:
        strategy: the strategy.
        args: the positional arguments of the function that replicas run.
        kwargs: its keyword arguments; None for none.
        size: the number of replicas.
        compiles: whether the strategy compiles; a compiled body refuses datasets itself.

    Raises:
        InputsError: an argument is a distributed dataset or an iterator over one.
    """
    values = [*args, *kwargs.values()] if isinstance(kwargs, Mapping) else list(args)
    for index, value in enumerate(values):
        is_distributed = None if compiles else _is_distributed(type(value))  # type: ignore[arg-type]
        if is_distributed is not None:
            name = f"args[{index}]" if index < len(args) else list(kwargs)[index - len(args)]
            if is_distributed:
                raise InputsError.distributed(name, type(value).__name__.lstrip("_"))
            if size > 1:
                warn_once(strategy, ("dataset", name), run_errors.warn_dataset_for_each(name, size, here()))


@functools.cache
def _is_distributed(kind: Hashable) -> bool | None:
    """For the type of a dataset, whether it is a distributed one; None for all other types."""
    assert isinstance(kind, type)
    if issubclass(kind, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        return True
    return False if issubclass(kind, tf.data.Dataset) else None


def check_lines(strategy: tf.distribute.Strategy, points: Sequence[SyncPoint]) -> None:
    """Warns if replicas meet from different lines: what they bring may not belong together.

    Args:
        strategy: the strategy.
        points: the sync point of each replica.
    """
    first = points[0]
    for replica, point in enumerate(points):
        if point.lineno != first.lineno or point.filename != first.filename:
            text = run_errors.warn_different_lines(first.name, (0, first.where), (replica, point.where))
            warn_once(strategy, ("lines", first.filename, first.function), text)
            return


def check_additions(strategy: tf.distribute.Strategy, graph: tf.Graph, first: int) -> None:
    """Warns of plain variables to which more than one replica adds, as a traced run shows it.

    The names of ops tell the replica: those of all replicas but the first are in scopes of their own. A merge function,
    which adds once for all replicas, is in the scopes of the first.

    Args:
        strategy: the strategy.
        graph: the graph into which the run was traced.
        first: how many ops the graph had before.
    """
    adding: dict[int, dict[str, tf.Operation]] = {}
    captures: dict[tf.Graph, dict[int, tf.Tensor]] = {}
    for op, replica in _additions(graph.get_operations()[first:], "", set()):
        adding.setdefault(id(graph_walk.outermost(op.inputs[0], captures)), {}).setdefault(replica, op)
    for variable in eager.used_in(graph) if adding else ():
        ops = [*adding.get(id(eager.raw_handle(variable)), {}).values()]
        name = variable.name.removesuffix(":0")
        if len(ops) > 1 and "seed" not in name:  # a generator of random numbers may be shared
            text = functools.partial(run_errors.warn_shared_variable, name, user_line(ops[1]))
            _find_named(strategy, "written").warn(variable, text)


def _additions(
    operations: Iterable[tf.Operation], around: str, seen: set[tuple[int, str]]
) -> Iterator[tuple[tf.Operation, str]]:
    """The ops that add to variables, also in branches, loops and calls, and the replica of each.

    A function that is called often is looked at once a replica; `seen` keeps which.
    """
    for op in operations:
        if graph_walk.is_stateful(op):  # others write nothing
            found = _OF_REPLICA.search(op.name)
            replica = found[1] if found else around
            if op.type in graph_walk.ADDING:
                yield op, replica
            for graph in graph_walk.list_inner_graphs(op):
                if (id(graph), replica) not in seen:
                    seen.add((id(graph), replica))
                    yield from _additions(graph.get_operations(), replica, seen)


def check_optimizer(optimizer: Any, variables: Sequence[object]) -> None:
    """Warns, in a replica on a thread, if an optimizer of no strategy updates variables of the replicas.

    Args:
        optimizer: a Keras optimizer that was made outside all scopes, and so has one state for all replicas.
        variables: the Keras variables that it updates.
    """
    strategy = tf.distribute.get_strategy()
    size = strategy.num_replicas_in_sync
    if size == 1 or strategy.extended.backend.compiles:
        return
    if any(isinstance(getattr(each, "value", each), distribute.DistributedVariable) for each in variables):
        name, kind = optimizer.name, type(optimizer).__name__
        named = _find_named(strategy, "optimizer")
        named.warn(optimizer, lambda: run_errors.warn_foreign_optimizer(name, kind, size, here()))
