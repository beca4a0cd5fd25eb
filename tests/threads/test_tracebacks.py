"""Whose frames a traceback shows."""

import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index

from replica_engine import MirroredStrategy, logical_devices
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.errors import ReplicaEngineError


@pytest.fixture
def strategy():
    return MirroredStrategy(logical_devices(8)[:2])


def fails_below():
    raise KeyError("mine")


def files_of(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_the_users_frames_follow_the_line_that_called_run(strategy):
    def step():
        fails_below()

    with pytest.raises(KeyError) as caught:
        strategy.run(step)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["step", "fails_below"]
    assert names == ["test_the_users_frames_follow_the_line_that_called_run", "run", "step", "fails_below"]
    assert sum("tensorflow" in file for file in files_of(caught.value)) == 0


def test_a_note_takes_the_place_of_generated_code(strategy):
    def step():
        fails_below()

    with pytest.raises(KeyError) as caught:
        strategy.run(tf.function(step))
    assert not any("autograph" in file for file in files_of(caught.value))
    (note,) = (note for note in caught.value.__notes__ if note.startswith("in user code:"))
    assert f'{__file__}", line {step.__code__.co_firstlineno + 1}, in step' in note
    assert "in fails_below" in note


def test_an_error_of_the_librarys_shows_no_generated_code_either(strategy):
    def step():
        context = tf.distribute.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            context.all_reduce("SUM", 1.0)

    def not_a_batch():
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(8))

    for fn in (lambda: strategy.run(step), not_a_batch):
        with pytest.raises(ReplicaEngineError) as caught:
            tf.function(fn)()
        assert not any("autograph" in file for file in files_of(caught.value))
        (note,) = (note for note in caught.value.__notes__ if note.startswith("in user code:"))
        assert f'File "{__file__}", line ' in note


def test_a_call_with_too_few_arguments_names_the_users_function(strategy):
    def step(x):
        return x

    with pytest.raises(TypeError, match=r"^[\w.<>]*step\(\) missing 1 required positional argument: 'x'") as caught:
        strategy.run(step)
    assert "tf__" not in str(caught.value)
    assert not any("user code" in note for note in getattr(caught.value, "__notes__", ()))


def test_an_error_of_the_librarys_ends_at_the_call(strategy):
    def step():
        if index() == 0:
            context().all_reduce("SUM", 1.0)

    with pytest.raises(RuntimeError) as caught:
        strategy.run(step)
    assert len(files_of(caught.value)) == 2


def test_keras_shows_no_frames_of_this_library(strategy):
    class Model(keras.Sequential):
        def train_step(self, data):
            fails_below()

    with strategy.scope():
        model = Model([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    rows = np.ones((4, 2))
    with pytest.raises(KeyError) as caught:
        model.fit(rows, rows, batch_size=4, verbose=0)
    assert files_of(caught.value)[-1] == __file__
    assert not any(file.startswith(FOLDERS) for file in files_of(caught.value))


def test_all_frames_are_there_if_asked_for(strategy):
    tf.debugging.disable_traceback_filtering()
    try:
        with pytest.raises(KeyError) as caught:
            strategy.run(fails_below)
    finally:
        tf.debugging.enable_traceback_filtering()
    assert any("engine/run.py" in file for file in files_of(caught.value))
    assert any("threads/replica_run.py" in file for file in files_of(caught.value))


def test_an_op_that_fails_names_the_users_line_and_no_other(strategy):
    """The function is defined inside a converted one, so its code is in the generated file of that."""

    @tf.function
    def step(x):
        def inverse(x):
            return tf.linalg.inv(x)  # fails when it runs

        return strategy.run(inverse, args=(x,))

    with pytest.raises(tf.errors.InvalidArgumentError, match="not invertible") as caught:
        step(tf.zeros([2, 2]))
    lines = [line.strip() for line in str(caught.value).splitlines() if line.lstrip().startswith('File "')]
    begin = step.python_function.__code__.co_firstlineno
    assert set(lines) == {f'File "{__file__}", line {begin + 3}, in inverse'}
