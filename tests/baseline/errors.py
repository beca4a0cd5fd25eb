"""Mistakes: what each one raises, and that the next step works."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine import xla
from replica_engine.keras import BackupAndRestore, replicate_model
from tests.baseline.record import IN_FULL
from tests.baseline.start import COMPILED, THREADS, Numbers, Start, local, make_shared_strategy

Mistake = Callable[[Any, Any], Any]
"""Called with the strategy and a value of each replica, of two rows and three columns."""


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _one_replica_alone(strategy: Any, value: Any) -> Any:
    def body(x: Any) -> Any:
        is_first = tf.equal(_context().replica_id_in_sync_group, 0)
        return tf.cond(is_first, lambda: _context().all_reduce("SUM", x), lambda: x)

    return strategy.run(body, args=(value,))


def _new_variable_each_time(strategy: Any, value: Any) -> Any:
    return strategy.run(lambda x: tf.Variable(x) * 2.0, args=(value,))


def _iterator_in_the_step(strategy: Any, value: Any) -> Any:
    batches = iter(tf.data.Dataset.range(8))
    return strategy.run(lambda x: x * tf.cast(next(batches), x.dtype), args=(value,))


def _other_op(strategy: Any, value: Any) -> Any:
    return strategy.run(lambda x: _context().all_reduce("MEDIAN", x), args=(value,))


def _outside_a_replica(strategy: Any, value: Any) -> Any:
    with strategy.scope():
        return _context().all_reduce("SUM", tf.constant(1.0))


def _fit_of_too_few(strategy: Any, value: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="last")], name="net")
        model.compile("sgd", "mse")
    return model.fit(np.ones((7, 3)), np.ones((7, 1)), batch_size=7, verbose=0)


def _uncompiled(strategy: Any, value: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="last")], name="net")
    return replicate_model(model, strategy=strategy).fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def _unbuilt(strategy: Any, value: Any) -> Any:
    keras.backend.clear_session()  # the message has the names, which count what the process has made
    return replicate_model(keras.Sequential([keras.layers.Dense(1)]), strategy=strategy)


def _other_gradients(strategy: Any, value: Any) -> Any:
    with strategy.scope():
        weight = keras.Variable(np.ones((2, 3)), name="weight")
        optimizer = keras.optimizers.SGD()
        optimizer.build([weight])
    return strategy.run(lambda x: optimizer.apply([x[0]], [weight]), args=(value,))


def _raises(strategy: Any, value: Any) -> Any:
    def body(x: Any) -> Any:
        raise LookupError(f"no {x.shape} here")

    return strategy.run(body, args=(value,))


def _assertion(strategy: Any, value: Any) -> Any:
    return strategy.run(lambda x: tf.debugging.assert_less(x, np.float64(-100.0)), args=(value,))


def _host_function_raises(strategy: Any, value: Any) -> Any:
    def fail(x: Any) -> None:
        raise LookupError("no such row")

    return strategy.run(lambda x: xla.outside_compilation(fail, x), args=(value,))


def _unknown_shape(strategy: Any, value: Any) -> Any:
    return strategy.run(lambda x: _context().all_gather(tf.boolean_mask(x, x > 0), axis=0), args=(value,))


def _other_shapes(strategy: Any, value: Any) -> Any:
    uneven = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([2 + context.replica_id_in_sync_group])
    )
    return strategy.run(lambda x: _context().all_reduce("SUM", x), args=(uneven,))


MISTAKES: dict[str, Mistake] = {
    "arguments that do not fit": lambda strategy, value: strategy.run(lambda x: x, args=(value, value)),
    "an argument that is no tuple": lambda strategy, value: strategy.run(lambda x: x, args=value),
    "a misspelt keyword of run": lambda strategy, value: strategy.run(lambda: 1.0, arg=()),
    "a misspelt keyword of reduce": lambda strategy, value: strategy.reduce("SUM", value, axes=0),
    "a misspelt keyword of a strategy": lambda strategy, value: replica_engine.MirroredStrategy(device=["CPU:0"]),
    "a device that is not there": lambda strategy, value: replica_engine.MirroredStrategy(["CPU:0", "CPU:98"]),
    "no device": lambda strategy, value: replica_engine.MirroredStrategy([]),
    "another distribution": lambda strategy, value: replica_engine.TPUStrategy(num_cores=2, distribution="fdsp"),
    "fewer devices than a replica": lambda strategy, value: replica_engine.TPUStrategy(
        num_cores=2, cores_per_replica=4
    ),
    "a reduction that is none": _other_op,
    "a reduction along no axis": lambda strategy, value: strategy.reduce("SUM", value, axis=3),
    "a sum of one tensor": lambda strategy, value: strategy.reduce("SUM", tf.ones([2]), axis=None),
    "a sum of a number": lambda strategy, value: strategy.reduce("SUM", 3.0, axis=None),
    "a sum of texts": lambda strategy, value: strategy.reduce("SUM", strategy.run(lambda: tf.constant("a")), axis=None),
    "a sum in replicas of a shared tensor": lambda strategy, value: strategy.run(
        lambda: _context().all_reduce("SUM", SHARED)
    ),
    "a value of replicas as a number": lambda strategy, value: float(strategy.run(lambda x: x[0, 0], args=(value,))),
    "a value of replicas plus one": lambda strategy, value: value + 1,
    "reduce in a replica": lambda strategy, value: strategy.run(
        lambda x: strategy.reduce("SUM", x, axis=None), args=(value,)
    ),
    "no replica context": _outside_a_replica,
    "one replica alone": _one_replica_alone,
    "a new variable each time": _new_variable_each_time,
    "an iterator in the step": _iterator_in_the_step,
    "gradients that do not fit": _other_gradients,
    "an exception of the user's own": _raises,
    "an assertion": _assertion,
    "a host function that raises": _host_function_raises,
    "a gathering of what a mask leaves": _unknown_shape,
    "values of other shapes": _other_shapes,
    "a batch that does not divide": _fit_of_too_few,
    "a model that is not compiled": _uncompiled,
    "a model that is not built": _unbuilt,
    "a dataset that is an array": lambda strategy, value: strategy.experimental_distribute_dataset(np.ones((4, 2))),
    "a dataset of single numbers": lambda strategy, value: next(
        iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(8)))
    ),
    "rows of unlike numbers": lambda strategy, value: replica_engine.split_batch(
        strategy, (np.ones((4, 2)), np.ones((3, 2)))
    ),
    "a batch larger than it may be": lambda strategy, value: replica_engine.split_batch(
        strategy, np.ones((9, 2)), batch_size=4
    ),
    "parts that are no number": lambda strategy, value: replica_engine.accumulate(lambda x: x, (tf.ones([4]),), 0),
    "a merge call that is no function": lambda strategy, value: strategy.run(lambda: _context().merge_call(3)),
    "a backup without a folder": lambda strategy, value: BackupAndRestore(backup="folder"),
}
SHARED = tf.constant([1.0, 2.0])
PROGRAMS = 12


class Mistaken(NamedTuple):
    """Some mistakes, with a step after each.

    Attributes:
        strategy: the name of the strategy.
        replicas: the number of replicas.
        mistakes: names in `MISTAKES`.
    """

    strategy: str
    replicas: int
    mistakes: tuple[str, ...]


def drawn(draw: random.Random, index: int) -> Mistaken:
    """Each mistake once under each strategy, in any order."""
    names = sorted(MISTAKES)
    random.Random(index % 2).shuffle(names)
    return Mistaken((THREADS, COMPILED)[index % 2], draw.choice((2, 2, 3)), tuple(names[index // 2 :: PROGRAMS // 2]))


def run(mistaken: Mistaken, start: Start) -> Numbers:
    """What each mistake raises, and the values of the step after it."""
    strategy = make_shared_strategy(mistaken.strategy, mistaken.replicas)
    with strategy.scope():
        weight = tf.Variable(start.normal(3))

    def good(x: Any) -> Any:
        weight.assign_add(0.1 * _context().all_reduce("MEAN", tf.reduce_mean(x * weight, axis=0)))
        return x @ tf.reshape(weight, [3, 1])

    numbers: Numbers = {}
    for name in mistaken.mistakes:
        rows = start.normal(mistaken.replicas, 2, 3)
        value = strategy.experimental_distribute_values_from_function(
            lambda context, rows=rows: tf.constant(rows[context.replica_id_in_sync_group])
        )
        try:
            MISTAKES[name](strategy, value)
        except Exception as error:
            numbers |= {name: np.array(said(error)), name + IN_FULL: np.array(said_in_full(error))}
        else:
            numbers[name] = np.array("nothing")
        numbers |= local(strategy, f"after {name}", strategy.run(good, args=(value,)))
    return numbers | {"weight": weight.numpy()}


def said(error: BaseException) -> str:
    """The class of an exception, and the first line of its text that is its own, or 300 characters of that.

    In a tf.function, TensorFlow puts the lines of a traceback before it. Lines and addresses are left out, digits that
    rounding may change, and the values of a tensor: they are those of the replica that failed first.
    """
    return f"{type(error).__name__}: {next(_own_lines(error), '')[:300]}"


def said_in_full(error: BaseException) -> str:
    """The same with all lines from that one on, and the notes without the number of the replica that failed first.

    The note that says where to read more is left out: it names the class again.
    """
    # Whether another replica comes to its own failure before it hears of the first depends on the machine.
    notes = (each for each in getattr(error, "__notes__", ()) if not each.startswith(("more: ", "also failed: ")))
    notes = (_without_places(f"note: {each}") for each in notes)
    notes = (re.sub(r"replica \d+ of (\d+), \w+:\d+", r"a replica of \1", each) for each in notes)
    return "\n".join([type(error).__name__, *_own_lines(error), *notes])


def _own_lines(error: BaseException) -> Iterator[str]:
    own = (line.strip() for line in str(error).splitlines())
    lines = [line for line in own if line and not line.startswith(("in user code", "File ", "Traceback", "Graph exec"))]
    begin = next((number for number, line in enumerate(lines) if "rror: " in line), 0)
    return map(_without_places, lines[begin:])


def _without_places(text: str) -> str:
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    text = re.sub(r"\[\[[^]]*\]\.\.\.\]", "[...]", text)
    text = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
    return re.sub(r"[^\s\"'(]*\.py:\d+", "a line", text)
