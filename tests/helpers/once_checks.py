"""Compares a program with `trace_once` with the same program without. See tests/replica/once."""

import functools
import pathlib
import re

import keras
import pytest
import tensorflow as tf

from helpers.once_programs import context
from replica_engine import MirroredStrategy
from replica_engine.errors import TraceOnceError


def merged(x):
    """Makes a sync point, after which there is no way back."""
    return context().all_reduce("SUM", x)


def together(strategy, value):
    """The sum of what is there: one value, or one for each replica."""
    return tf.add_n([tf.convert_to_tensor(each) for each in strategy.experimental_local_results(value)])


def check(program, devices, trace_once, how, caplog):
    """Checks that a program gives what it gives without the option, or why not.

    Args:
        program: takes the strategy; returns tensors, distributed values and strings.
        devices: the names of the devices.
        trace_once: True or "checked".
        how: "" if replica 0 is traced for all; else the words of the log that say why each replica is traced;
            `TraceOnceError` if that is raised, with a line of the program's file.
        caplog: the fixture.
    """
    if how is TraceOnceError:
        file = re.escape(pathlib.Path(program.__code__.co_filename).name)
        with pytest.raises(TraceOnceError, match=rf"{file}:\d+"):
            outcome(program, devices, trace_once)
        return
    found = outcome(program, devices, trace_once)
    lines = [message for message in caplog.messages if "is traced by itself" in message]
    assert found == plain(program, devices)
    assert bool(lines) == bool(how), lines
    assert not how or how in lines[0]


@functools.cache
def plain(program, devices):
    return outcome(program, devices, False)


def outcome(program, devices, trace_once):
    keras.utils.set_random_seed(3)
    found = program(MirroredStrategy(list(devices), trace_once=trace_once))
    leaves = [
        part
        for leaf in tf.nest.flatten(found)
        for part in (leaf.values if isinstance(leaf, tf.distribute.DistributedValues) else [leaf])
    ]
    return [leaf if isinstance(leaf, str) else leaf.numpy().tolist() for leaf in leaves]
