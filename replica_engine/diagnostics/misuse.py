"""Says in the user's terms what TensorFlow's exceptions about strategies say in its own.

Nothing is checked in advance: a program that works is never refused, and pays nothing. When a run has failed with one
of a few known errors, the frames of its traceback show the object of the user that the error is about.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.diagnostics.op_lines import here, raised_at, users_place
from replica_engine.errors import InputsError, NoValueError, ReplicaValueError, ScopeError
from replica_engine.errors.base import add_note, at
from replica_engine.errors.scopes import KERAS_RUNS
from replica_engine.errors.values import note_no_value

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


def explained(error: Exception) -> Exception:
    """The error of the library that says what a known error of TensorFlow means; otherwise the error itself."""
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


def of_plain_variable(variable: tf.Variable) -> ScopeError:
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
            f"{KERAS_RUNS}"
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
        note_no_value(error, asked, place, of_variable)


def _foreign(error: Exception) -> ScopeError | None:
    """Finds the optimizer or variable that does not belong to the strategy in use."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    for owner in owners:  # the outermost first: an optimizer, rather than the variables that it updates
        if _is_optimizer(owner):
            return _of_optimizer(owner, _updated(frames))
    for owner in owners:
        if isinstance(owner, distribute.DistributedVariable):
            return ScopeError.other_strategy("variable", _name(owner))
    return None


def _is_optimizer(owner: object) -> bool:
    kind = getattr(getattr(sys.modules.get("keras"), "optimizers", None), "Optimizer", None)
    return kind is not None and isinstance(owner, kind)


def _of_optimizer(optimizer: Any, variable: tf.Variable) -> ScopeError:
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
