"""Programs under `MirroredStrategy(trace_once=...)`: each computes what it computes without, or says why not.

The table: a program gives the same, bit for bit and random numbers included (those in no list); or each replica is
traced, so that it gives the same (`FALLS_BACK`); or it is an error that names the line (`ERRORS`). What Python code
leaves behind, and replica 1 would see, `"checked"` alone can find (`DIFFERS`).
"""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import once_programs

from replica_engine import MirroredStrategy
from replica_engine.errors import TraceOnceError

DEVICES = ["CPU:0", "CPU:1"]
FALLS_BACK = {
    "all_gather_other_shapes": "the arguments: tensors of shapes that differ by replica",
    "args_other_shapes": "the arguments: tensors of shapes that differ by replica",
    "args_python_per_replica": "the arguments: Python values that differ by replica",
    "numpy_function": "tf.numpy_function",
    "id_in_nested_function": "the replica id in a nested tf.function",
    "private_python_id": "the replica id as a Python number",
    "py_function": "tf.py_function",
    "py_function_gradient": "tf.py_function",
    "python_id": "tf.get_static_value of a value that may differ by replica",
}
ERRORS = {
    "closure_of_merge_fn": "it left the replica in a Python object or in a closure",
    "merge_returns_per_replica_python": "Python values that differ by replica",
    "tensor_kept_outside": "it left the replica in a Python object or in a closure",
}
DIFFERS = {
    "python_counter": "value of Const",
}
PROGRAMS = [
    name
    for name, each in vars(once_programs).items()
    if inspect.isfunction(each) and list(inspect.signature(each).parameters) == ["s"]
]


def outcome(name, trace_once):
    """What a program returns, or the exception that it raises."""
    keras.utils.set_random_seed(1)
    try:
        return flat(getattr(once_programs, name)(MirroredStrategy(DEVICES, trace_once=trace_once)))
    except TraceOnceError:
        raise
    except Exception as error:
        text = str(error).replace("replica_1/", "")  # the ops in a branch that is copied keep replica 0's names
        return f"{type(error).__name__}: {text[:60]}"


@functools.cache
def plain(name):
    return outcome(name, False)


def flat(value):
    found = []
    for leaf in tf.nest.flatten(value):
        parts = leaf.values if isinstance(leaf, tf.distribute.DistributedValues) else [leaf]
        found += [part if isinstance(part, (str, bytes)) else np.asarray(part).tolist() for part in parts]
    return repr(found)


@pytest.mark.parametrize("trace_once", [True, "checked"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name, trace_once, caplog):
    problem = ERRORS.get(name) or (trace_once == "checked" and DIFFERS.get(name))
    if problem:
        with pytest.raises(TraceOnceError, match=problem) as raised:
            outcome(name, trace_once)
        assert "once_programs.py:" in str(raised.value)
        return
    found = outcome(name, trace_once)
    reason = FALLS_BACK.get(name)
    traced_each = [message for message in caplog.messages if "is traced by itself" in message]
    assert bool(traced_each) == (reason is not None), traced_each
    assert reason is None or reason in traced_each[0]
    if name not in DIFFERS:
        assert found == plain(name)
