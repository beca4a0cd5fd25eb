"""Workers that launch in another order, or for other batches: an error on both, before there is a number."""

import json

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import HEAD, IN_ANOTHER_ORDER, failing

ORDER = """
strategy = KIND()


def sums(x):
    return context().all_reduce("SUM", x)


def means(x):
    return context().all_reduce("MEAN", x)


if os.environ["TRACED"] == "1":
    sums, means = tf.function(sums), tf.function(means)
both = [sums, means]
"""


@pytest.mark.parametrize(
    ("traced", "later"), [(0, 0), (1, 1), pytest.param(1, 0, marks=pytest.mark.full("each is above"))]
)
def test_another_order_is_found(programs, traced, later):
    """At the first launch before there is a number; later, soon after it."""
    with job(join=LONGER) as made:
        environment = {"LOCAL": "1", "TRACED": str(traced), "LATER": str(later)}
        started = made.start_all(programs, HEAD + ORDER + IN_ANOTHER_ORDER, **environment)
        for process in started:
            error = failing(process)
            assert "ProgramDisagreementError: After" in error
            assert "`all_reduce SUM, float32[4]` at program.py:" in error
            assert "`all_reduce MEAN, float32[4]` at program.py:" in error
            assert "in means, from program.py:" in error


SWAPPED = """
from replica_engine.threads import merge_checks as launches

launches._MOST_LAUNCHES = 2  # so that numbers of collectives come again
strategy = KIND()


def values(number, rows):
    return strategy.experimental_distribute_values_from_function(lambda context: tf.fill([rows], number))


def all_reduced(number):
    return context().all_reduce("SUM", tf.constant(number))


def all_reduced_too(number):
    return context().all_reduce("SUM", tf.constant(number))


def helper(number):
    return context().all_reduce("SUM", tf.constant(number))


def one():
    return helper(1.0)


def ten():
    return helper(10.0)


def reduced(number):
    return strategy.reduce("SUM", values(number, 1), axis=None)


def in_a_loop(number):
    total = tf.constant(0.0)
    for _ in tf.range(3):
        total += context().all_reduce("SUM", tf.constant(number))
    return total


def in_another_loop(number):
    total = tf.constant(0.0)
    for _ in tf.range(3):
        total += context().all_reduce("SUM", tf.constant(number))
    return total


first, second = {
    "eager": (
        lambda: strategy.reduce("SUM", values(1.0, 1), axis=None),
        lambda: strategy.reduce("SUM", values(10.0, 1), axis=None),
    ),
    "sizes": (
        lambda: strategy.reduce("SUM", values(1.0, 1), axis=None),
        lambda: strategy.reduce("SUM", values(10.0, 4), axis=None),
    ),
    "kinds": (
        lambda: strategy.reduce("MEAN", values(1.0, 4), axis=None),
        lambda: strategy.gather(values(10.0, 4), axis=0),
    ),
    "functions": (
        tf.function(lambda: strategy.run(all_reduced, args=(1.0,))),
        tf.function(lambda: strategy.run(all_reduced_too, args=(10.0,))),
    ),
    "helper": (
        lambda: strategy.run(one),
        lambda: strategy.run(ten),
    ),
    "traced helper": (
        tf.function(lambda: strategy.run(one)),
        tf.function(lambda: strategy.run(ten)),
    ),
    "reduce in a helper": (
        lambda: reduced(1.0),
        lambda: reduced(10.0),
    ),
    "traced reduce in a helper": (
        tf.function(lambda: reduced(1.0)),
        tf.function(lambda: reduced(10.0)),
    ),
    "loops": (
        tf.function(lambda: strategy.run(tf.function(in_a_loop), args=(1.0,))),
        tf.function(lambda: strategy.run(tf.function(in_another_loop), args=(10.0,))),
    ),
}[os.environ["WHAT"]]


def show():
    print(json.dumps([float(tf.reduce_sum(each())) for each in (first, second)]), flush=True)


for number in range(5):
    if me:
        show()
    else:
        show()  # from another line
for each in (second, first) if me else (first, second):
    print("a number after the swap", float(tf.reduce_sum(each())), flush=True)
"""


@pytest.mark.parametrize(
    ("what", "right"),
    [
        ("sizes", [2.0, 80.0]),
        ("kinds", [4.0, 80.0]),
        ("functions", [2.0, 20.0]),
        ("helper", [2.0, 20.0]),
        ("traced helper", [2.0, 20.0]),
        *(
            pytest.param(*case, marks=pytest.mark.full("as sizes, as functions, or as helper"))
            for case in (
                ("eager", [2.0, 20.0]),
                ("loops", [6.0, 60.0]),
                ("reduce in a helper", [2.0, 20.0]),
                ("traced reduce in a helper", [2.0, 20.0]),
            )
        ),
    ],
)
def test_swapped_launches_give_no_number(programs, what, right):
    """Collectives that differ never meet, also when both were launched before."""
    with job(join=LONGER) as made:
        started = made.start_all(programs, HEAD + SWAPPED, LOCAL="1", WHAT=what)
        for process in started:
            out, error = process.communicate(timeout=LONGER)
            assert [json.loads(line) for line in out.splitlines()] == [right] * 5
            assert process.returncode
            assert "ProgramDisagreementError: After" in error


MODELS = """
import os
import numpy as np
import tensorflow as tf
import keras
import replica_engine

me = int(os.environ["REPLICA_ENGINE_PROCESS_ID"])
strategy = getattr(replica_engine, os.environ["KIND"])()
with strategy.scope():
    models = [keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]) for _ in range(2)]
    for each in models:
        each.compile("sgd", "mse")
x = np.ones((8, 3), "float32")
targets = [x.sum(1, keepdims=True), -5 * x.sum(1, keepdims=True)]
order = [0, 1]
for step in range(4):
    if step == 2 and me:
        order.reverse()
    for each in order:
        models[each].train_on_batch(x, targets[each])
        print(step, each, flush=True)
"""


@pytest.mark.parametrize("kind", ["MultiWorkerMirroredStrategy", "TPUStrategy"])
def test_swapped_models_of_one_shape_give_no_number(programs, kind):
    """Their programs are equal, and their sums have equal lines: their variables differ."""
    with job(join=LONGER) as made:
        for process in made.start_all(programs, MODELS, KIND=kind):
            out, error = process.communicate(timeout=LONGER)
            assert out.split("\n") == ["0 0", "0 1", "1 0", "1 1", ""], error[-4000:]
            assert process.returncode
            assert "ProgramDisagreementError: After" in error
            assert "variable" in error


UNKNOWN = """
strategy = KIND()


@tf.function(input_signature=[tf.TensorSpec([None] * 3)])
def combined(values):
    if os.environ["SIZE"] == "0":
        return tf.size(strategy.run(lambda: context().all_gather(values, axis=0)))
    return tf.size(strategy.run(lambda: context().all_reduce("SUM", values)))


size = int(os.environ["SIZE"]) or 3
print(int(combined(tf.ones([2, 1, 1]))), flush=True)
print("a number", int(combined(tf.ones([1, size + size * me, 2 * size - size * me]))), flush=True)
"""


@pytest.mark.parametrize(
    ("size", "first"),
    [(3, 2), (0, 4), pytest.param(3000, 2, marks=pytest.mark.full("beyond what travels in one round"))],
    ids=["sum", "gather", "large"],
)
def test_sizes_that_only_the_values_tell_are_compared(programs, size, first):
    """The trace does not know them. In Gloo, sums of unequal sizes would end the process."""
    with job(join=LONGER) as made:
        text = HEAD + UNKNOWN
        started = made.start_all(programs, text, LOCAL="1", SIZE=str(size))
        rows = ("(3, 6)", "(6, 3)") if not size else (f"(1, {size}, {2 * size})", f"(1, {2 * size}, {size})")
        for process in started:
            out, error = process.communicate(timeout=LONGER)
            assert (process.returncode, out) == (1, f"{first}\n"), error[-4000:]
            assert "ProgramDisagreementError: After" in error
            assert all(row in error for row in rows)


BATCHES = """
strategy = KIND()
data = tf.data.Dataset.range(64).map(lambda i: tf.cast(i, tf.float32))
if os.environ["FUNCTION"] == "1":
    dataset = strategy.distribute_datasets_from_function(lambda context: data.batch(16 if me else 8))
else:
    dataset = strategy.experimental_distribute_dataset(data.batch(16 if me else 8))
for batch in dataset:
    strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
    print("a number", flush=True)
"""


@pytest.mark.parametrize("of_function", [0, pytest.param(1, marks=pytest.mark.full("the same batches"))])
def test_another_size_of_batches_is_found(programs, of_function):
    with job(join=LONGER) as made:
        started = made.start_all(programs, HEAD + BATCHES, LOCAL="1", FUNCTION=str(of_function))
        for process in started:
            out, err = process.communicate(LONGER)
            assert (process.returncode, out) == (1, ""), err[-4000:]
            assert "ProgramDisagreementError: After" in err
            assert "worker 0: launch of `a dataset in batches of 8 rows` at program.py:" in err
            assert "worker 1: launch of `a dataset in batches of 16 rows` at program.py:" in err
