"""Values that cross replicas: in a step, in a merge call, and outside of the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine import xla
from tests.baseline.start import COMPILED, THREADS, Numbers, Start, local, make_shared_strategy

FLOATS = ("float64", "float32", "float16", "bfloat16")
DTYPES = (*FLOATS, "int32", "int64", "complex64")


def _context() -> Any:
    return tf.distribute.get_replica_context()


def _of_structure(x: Any) -> Any:
    total = _context().all_reduce("SUM", {"a": [x, 2 * x], "b": (x[0],)})
    return total["a"][1] + total["b"][0]


def _gradient(op: str) -> Callable[[Any], Any]:
    def of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = _context().all_reduce(op, x * x) * x
        return tape.gradient(y, x)

    return of


def _of_rows(x: Any) -> Any:
    index = tf.cast(_context().replica_id_in_sync_group, tf.int64)
    slices = tf.IndexedSlices(x, tf.stack([index, tf.zeros_like(index)]), (4, 3))
    return tf.convert_to_tensor(_context().all_reduce("SUM", slices))


def _merged(op: str) -> Callable[[Any], Any]:
    return lambda x: _context().merge_call(lambda strategy, value: strategy.reduce(op, value, axis=None), args=(x,))


def _in_loop(x: Any) -> Any:
    return tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, x + _context().all_reduce("MEAN", x) / 2), (tf.constant(0), x)
    )[1]


def _gathered_gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = _context().all_gather(x, axis=0)
        total = tf.reduce_sum(y * y * tf.reshape(tf.range(tf.size(y), dtype=x.dtype), tf.shape(y)))
    return tape.gradient(total, x)


INSIDE: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "sum": (lambda x: _context().all_reduce("SUM", x), DTYPES),
    "mean": (lambda x: _context().all_reduce("MEAN", x), FLOATS),
    "min": (lambda x: _context().all_reduce("MIN", x), ("float64", "float32", "int32")),
    "max": (lambda x: _context().all_reduce("MAX", x), ("float64", "float32", "int64")),
    "gather": (lambda x: _context().all_gather(x, axis=0), DTYPES),
    "gather columns": (lambda x: _context().all_gather(x, axis=1), ("float64", "int32")),
    "structure": (_of_structure, ("float64", "int32")),
    "gradient of the sum": (_gradient("SUM"), ("float64", "float32")),
    "gradient of the mean": (_gradient("MEAN"), ("float64", "float32")),
    "gradient of gathering": (_gathered_gradient, ("float64",)),
    "rows": (_of_rows, ("float64", "float32")),
    "merged sum": (_merged("SUM"), ("float64", "int32")),
    "merged mean": (_merged("MEAN"), ("float64", "float16")),
    "in a loop": (_in_loop, ("float64",)),
}
"""Operations of a replica on a value of two rows and three columns, and the dtypes that they take."""

COMPILED_ONLY: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "permuted": (
        lambda x: xla.collective_permute(x, [(i, (i + 1) % xla.num_replicas()) for i in range(xla.num_replicas())]),
        ("float64", "int32"),
    ),
    "sums of groups": (lambda x: xla.all_reduce(x, "SUM", groups=[[*range(1, xla.num_replicas())], [0]]), ("float64",)),
    "sum over replicas": (lambda x: xla.cross_replica_sum(x), ("float64", "bfloat16")),
}

OUTSIDE: dict[str, Callable[[Any, Any], Any]] = {
    "reduced": lambda strategy, value: strategy.reduce("SUM", value, axis=None),
    "mean of replicas": lambda strategy, value: strategy.reduce("MEAN", value, axis=None),
    "sum of rows": lambda strategy, value: strategy.reduce("SUM", value, axis=0),
    "mean of rows": lambda strategy, value: strategy.reduce("MEAN", value, axis=0),
    "gathered": lambda strategy, value: strategy.gather(value, axis=0),
    "reduced to a device": lambda strategy, value: strategy.extended.reduce_to("SUM", value, "CPU:0"),
}
"""Operations on a value of replicas from outside."""

VARIABLES = {
    "on read, sum": (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM),
    "on read, mean": (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.MEAN),
    "on read, first": (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.ONLY_FIRST_REPLICA),
    "on write, sum": (tf.VariableSynchronization.ON_WRITE, tf.VariableAggregation.SUM),
    "on write, mean": (tf.VariableSynchronization.ON_WRITE, tf.VariableAggregation.MEAN),
    "on write, first": (tf.VariableSynchronization.ON_WRITE, tf.VariableAggregation.ONLY_FIRST_REPLICA),
}
"""Variables that replicas add to."""


class Exchange(NamedTuple):
    """What crosses replicas, in three steps.

    Attributes:
        strategy: the name of the strategy.
        replicas: the number of replicas.
        graph: whether the step is a tf.function.
        inside: operations of a replica, each with a dtype.
        outside: operations on the results.
        variables: variables that replicas add to.
    """

    strategy: str
    replicas: int
    graph: bool
    inside: tuple[tuple[str, str], ...]
    outside: tuple[str, ...]
    variables: tuple[str, ...]


def drawn(draw: random.Random, index: int) -> Exchange:
    """Some operations of each kind."""
    strategy = (THREADS, COMPILED)[index % 2]
    table = INSIDE if strategy == THREADS else INSIDE | COMPILED_ONLY
    names = draw.sample(sorted(table), 4)
    return Exchange(
        strategy,
        draw.choice((2, 3, 4)),
        draw.random() < 0.6,
        tuple((name, draw.choice(table[name][1])) for name in names),
        tuple(draw.sample(sorted(OUTSIDE), 2)),
        tuple(draw.sample(sorted(VARIABLES), 2)),
    )


def run(exchange: Exchange, start: Start) -> Numbers:
    """The results of each step on each replica, and what came of them."""
    strategy = make_shared_strategy(exchange.strategy, exchange.replicas)
    with strategy.scope():
        variables = {
            name: tf.Variable(
                np.zeros(3), trainable=False, synchronization=VARIABLES[name][0], aggregation=VARIABLES[name][1]
            )
            for name in exchange.variables
        }

    def body(x: Any) -> dict[str, Any]:
        for variable in variables.values():
            variable.assign_add(tf.reduce_sum(x, axis=0))
        results = {"own": x}
        for name, dtype in exchange.inside:
            results[f"{name} of {dtype}"] = (INSIDE | COMPILED_ONLY)[name][0](tf.cast(3 * x, dtype))
        return results

    step = lambda x: strategy.run(body, args=(x,))  # noqa: E731
    step = tf.function(step) if exchange.graph else step
    numbers: Numbers = {}
    for number in range(3):
        rows = start.normal(exchange.replicas, 2, 3)
        values = strategy.experimental_distribute_values_from_function(
            lambda context, rows=rows: tf.constant(rows[context.replica_id_in_sync_group])
        )
        results = step(values)
        for name, result in results.items():
            numbers |= local(strategy, f"step {number}, {name}", result)
        for name in exchange.outside:
            made = OUTSIDE[name](strategy, results["own"])
            numbers[f"step {number}, {name}"] = np.asarray(strategy.experimental_local_results(made)[0])
    for name, variable in variables.items():
        numbers |= {name: variable.numpy()} | local(strategy, name, variable)
    return numbers
