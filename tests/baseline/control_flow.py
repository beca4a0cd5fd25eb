"""Nested branches, loops, functions and tapes with merge calls in them: the random programs of tests/helpers."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from helpers import random_programs
from helpers.random_programs import OnReplica

from tests.baseline.start import COMPILED, THREADS, Numbers, Start, local, make_shared_strategy


class Nested(NamedTuple):
    """A program of nested statements.

    Attributes:
        strategy: the name of the strategy.
        replicas: the number of replicas.
        statements: the program.
    """

    strategy: str
    replicas: int
    statements: tuple


def drawn(draw: random.Random, index: int) -> Nested:
    """A program with a block in it, on both strategies in turn."""
    while True:
        statements = random_programs.make(draw.randrange(1_000_000), depth=2)
        if any(kind in random_programs.BLOCKS for kind, *_ in statements):
            return Nested((THREADS, COMPILED)[index % 2], draw.choice((2, 2, 3, 4)), statements)


def run(nested: Nested, start: Start) -> Numbers:
    """The values of each replica after each of three runs, and the variables."""
    strategy = make_shared_strategy(nested.strategy, nested.replicas)
    with strategy.scope():
        variable = tf.Variable(start.normal(3) / 2)
        total = tf.Variable(np.float64(0.0), trainable=False, aggregation=tf.VariableAggregation.SUM)

    def body(x: tf.Tensor, y: tf.Tensor) -> tuple:
        return random_programs.run(nested.statements, OnReplica(variable, total), x, y)

    step = tf.function(lambda x, y: strategy.run(body, args=(x, y)))
    x, y = (
        strategy.experimental_distribute_values_from_function(
            lambda context, rows=rows: tf.constant(rows[context.replica_id_in_sync_group])
        )
        for rows in start.normal(2, nested.replicas, 3)
    )
    numbers: Numbers = {}
    for number in range(3):
        x, y = step(x, y)
        numbers |= local(strategy, f"step {number}, x", x) | local(strategy, f"step {number}, y", y)
        numbers |= local(strategy, f"step {number}, variable", variable) | {f"step {number}, total": total.numpy()}
    return numbers
