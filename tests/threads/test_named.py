"""Warnings about objects: each object once, a bounded number, and no object is kept alive for it."""

import gc
import logging
import weakref

import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy
from replica_engine.diagnostics.misuse import Named


@pytest.fixture
def texts(caplog):
    with caplog.at_level(logging.WARNING, "replica_engine"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "replica_engine"]


def test_an_object_is_named_once_and_its_equal_too(texts):
    named, one, other = Named(), tf.Variable(0.0, name="v"), tf.Variable(0.0, name="v")
    for each in (one, other, one, other):
        named.warn(each, lambda: "written")
    assert texts() == ["written", "written"]


def test_after_the_last_one_nothing_is_logged_or_worded(texts):
    named = Named()
    objects = [tf.Variable(0.0) for _ in range(Named.MOST + 3)]
    for number, each in enumerate(objects[: Named.MOST]):
        named.warn(each, lambda number=number: f"object {number}")
    for each in objects:
        named.warn(each, lambda: pytest.fail("no text is made of a warning that is not logged"))
    assert [text.splitlines()[0] for text in texts()] == [f"object {number}" for number in range(Named.MOST)]
    assert texts()[-1].endswith("more are not logged.")
    assert "last" not in "".join(texts()[:-1])


def test_a_variable_of_which_a_strategy_has_warned_is_freed(texts):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def warned_of():
        count = tf.Variable(0)

        def step():
            count.assign_add(1)

        tf.function(lambda: strategy.run(step))()
        return weakref.ref(count)

    freed = warned_of()
    assert len(texts()) == 1
    strategy.run(lambda: None)  # waits for the threads, which let go of the step a moment after it
    gc.collect()
    assert freed() is None
