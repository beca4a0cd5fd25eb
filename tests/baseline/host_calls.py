"""Steps of which a part runs on the host: Python functions, strings, tables, and what XLA has no kernel for."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine import xla
from tests.baseline.start import COMPILED, THREADS, Numbers, Start, local, make_shared_strategy

SPEC = tf.TensorSpec([2, 3], tf.float64)


@xla.returns(SPEC)
def _sorted(x: Any) -> np.ndarray:
    return np.sort(x.numpy(), axis=1) * 2


def _of_tensorflow(x: Any) -> Any:
    return x**3 + tf.sin(x)


def _with_gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = xla.outside_compilation(_of_tensorflow, x)
    return tape.gradient(y, x) + y


def _by_py_function(x: Any) -> Any:
    return tf.ensure_shape(tf.py_function(lambda x: tf.cumsum(x, axis=1), [x], tf.float64), x.shape)


def _by_numpy_function(x: Any) -> Any:
    return tf.ensure_shape(tf.numpy_function(lambda x: np.round(x, 2), [x], tf.float64), x.shape)


def _words(x: Any) -> Any:
    text = tf.strings.join([tf.strings.as_string(x, precision=2), "1"])
    return tf.strings.to_number(text, tf.float64) + tf.cast(tf.strings.length(text), tf.float64)


def _looked_up(x: Any) -> Any:
    keys = tf.strings.as_string(tf.cast(tf.math.floor(x), tf.int64))
    return _table().lookup(keys)


@functools.cache
def _table() -> tf.lookup.StaticHashTable:
    entries = tf.lookup.KeyValueTensorInitializer(["-1", "0", "1"], np.array([0.25, 0.5, 2.0]))
    return tf.lookup.StaticHashTable(entries, default_value=np.float64(-1.0))


def _root(x: Any) -> Any:
    return tf.linalg.sqrtm(tf.matmul(x, x, transpose_b=True) + tf.eye(2, dtype=x.dtype))


def _in_a_branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: xla.outside_compilation(_sorted, x), lambda: -x)


def _in_a_loop(x: Any) -> Any:
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, xla.outside_compilation(_sorted, x) / 3), (tf.constant(0), x)
    )[1]


def _checked(x: Any) -> Any:
    tf.debugging.assert_less(tf.abs(x), np.float64(100.0))
    return tf.debugging.check_numerics(x * 2, "twice")


CALLS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "declared": (lambda x: xla.outside_compilation(_sorted, x), ("compiled", "eager")),
    "gradient": (_with_gradient, ("compiled", "eager", "graph")),
    "py_function": (_by_py_function, ("compiled", "eager", "graph")),
    "numpy_function": (_by_numpy_function, ("compiled", "eager", "graph")),
    "words": (_words, ("compiled", "eager", "graph")),
    "table": (_looked_up, ("compiled", "eager", "graph")),
    "root": (_root, ("compiled", "eager", "graph")),
    "branch": (_in_a_branch, ("compiled", "eager")),
    "loop": (_in_a_loop, ("compiled", "eager")),
    "checks": (_checked, ("compiled", "eager", "graph")),
}
"""Calls of the host with two rows and three columns, and where they work."""


class Calling(NamedTuple):
    """A step that calls the host.

    Attributes:
        strategy: the name of the strategy.
        replicas: the number of replicas.
        graph: whether the step is a tf.function.
        calls: names in `CALLS`, in their order.
        steps: how many steps are one launch; 0 for `run`.
    """

    strategy: str
    replicas: int
    graph: bool
    calls: tuple[str, ...]
    steps: int


def drawn(draw: random.Random, index: int) -> Calling:
    """Some calls; two of three programs are compiled."""
    strategy = (COMPILED, COMPILED, THREADS)[index % 3]
    graph = draw.random() < 0.5
    kind = "compiled" if strategy == COMPILED else "graph" if graph else "eager"
    calls = draw.sample([name for name, (_, kinds) in CALLS.items() if kind in kinds], 3)
    return Calling(
        strategy, draw.choice((2, 3)), graph, tuple(calls), draw.choice((0, 3)) if strategy == COMPILED else 0
    )


def run(calling: Calling, start: Start) -> Numbers:
    """The results of each step, a weight that the replicas' mean moves, and what the host noted."""
    strategy = make_shared_strategy(calling.strategy, calling.replicas)
    noted: list[float] = []
    _table()  # before a step is traced
    with strategy.scope():
        weight = tf.Variable(start.normal(3))

    def note(x: Any) -> None:
        noted.append(float(tf.reduce_sum(x)))

    def body(x: Any) -> tuple[Any, dict[str, Any]]:
        value = tf.cast(x, tf.float64) * weight
        results = {}
        for name in calling.calls:
            results[name] = CALLS[name][0](value)
        if calling.strategy == COMPILED:
            xla.outside_compilation(note, value)
        loss = tf.add_n([tf.reduce_sum(tf.tanh(each)) for each in results.values()])
        weight.assign_add(0.1 * tf.distribute.get_replica_context().all_reduce("MEAN", tf.reduce_mean(value, 0) * loss))
        return loss, results

    rows = start.normal(3, calling.replicas * 2, 3)
    numbers: Numbers = {}
    if calling.steps:
        numbers = _in_one_launch(strategy, body, rows, calling.steps)
    else:
        step = lambda x: strategy.run(body, args=(x,))  # noqa: E731
        step = tf.function(step) if calling.graph else step
        for number, batch in enumerate(rows):
            values = strategy.experimental_distribute_values_from_function(
                lambda context, batch=batch: tf.constant(
                    np.split(batch, calling.replicas)[context.replica_id_in_sync_group]
                )
            )
            loss, results = step(values)
            numbers |= local(strategy, f"step {number}, loss", loss)
            for name, result in results.items():
                numbers |= local(strategy, f"step {number}, {name}", result)
    return numbers | {"weight": weight.numpy(), "noted": np.array(sorted(noted))}


def _in_one_launch(strategy: Any, body: Callable, rows: np.ndarray, steps: int) -> Numbers:
    dataset = tf.data.Dataset.from_tensor_slices(np.concatenate(rows)).batch(rows.shape[1], drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(dataset))

    def step(context: Any, x: Any) -> None:
        loss, results = body(x)
        context.set_last_step_output("loss", loss, "SUM")
        for name, result in results.items():
            context.set_last_step_output(name, result)

    outputs = strategy.run_steps(step, batches, iterations=steps).last_step_outputs
    numbers = {"last loss": np.asarray(outputs.pop("loss"))}
    for name, result in outputs.items():
        numbers |= local(strategy, f"last {name}", result)
    return numbers
