"""Calls that are nearly right: misspelt keywords, arguments that do not fit, one device; an exception with no text."""

import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy
from replica_engine.keras import BackupAndRestore, replicate_model


@pytest.mark.parametrize(("name", "near"), [("arg", "args"), ("kwarg", "kwargs"), ("option", "options")])
def test_a_misspelt_keyword_of_run(strategy, name, near):
    said = rf"strategy\.run got an unexpected keyword argument '{name}'\. Did you mean {near}=\?"
    with pytest.raises(TypeError, match=said):
        strategy.run(lambda: None, **{name: ()})


@pytest.mark.parametrize(
    ("name", "near"), [("device", "devices"), ("warn_afer", "warn_after"), ("time_out", "timeout")]
)
def test_a_misspelt_keyword_of_a_constructor(name, near):
    with pytest.raises(TypeError, match=rf"MirroredStrategy got .*'{name}'\. Did you mean {near}=\?"):
        MirroredStrategy(**{name: None})


def test_a_keyword_like_none_that_there_is():
    with pytest.raises(TypeError, match=r"It takes fn=, args=, kwargs=, options=\."):
        MirroredStrategy(["CPU:0"]).run(lambda: None, xyz=1)


@pytest.mark.parametrize(
    "device", ["CPU:0", "/cpu:1", "/device:CPU:0", tf.config.LogicalDevice("/device:CPU:1", "CPU")]
)
def test_one_device_without_a_list(device):
    assert MirroredStrategy(device).num_replicas_in_sync == 1


def without_text(base):
    class Mine(base):
        def __str__(self):
            raise KeyError("no text")

    def fail(x):
        if x.shape.rank == 0:
            raise Mine("mine")

    return Mine, fail


@pytest.mark.parametrize("base", [ValueError, TypeError, AttributeError, RuntimeError, KeyError])
def test_an_exception_whose_text_fails_arrives(strategy, base):
    mine, fail = without_text(base)
    with pytest.raises(mine) as failure:
        strategy.run(lambda x: fail(x), args=(tf.constant(1.0),))
    assert failure.value.args == ("mine",)


@pytest.mark.parametrize("base", [ValueError, TypeError, OSError])
def test_an_exception_whose_text_fails_arrives_from_a_device_loop(base):
    mine, fail = without_text(base)
    with pytest.raises(mine):
        TPUStrategy(num_cores=2).run_steps(lambda _, x: fail(x), iter(tf.data.Dataset.range(3)), 2)


@pytest.mark.parametrize("base", [ValueError, OSError])
def test_an_exception_whose_text_raises_itself_arrives_from_a_trace(strategy, base):
    class Mine(base):
        def __str__(self):
            raise self

    def step(x):
        raise Mine

    with pytest.raises(Mine):
        tf.function(lambda: strategy.run(step, args=(tf.constant(1.0),)))()


@pytest.mark.parametrize("base", [ValueError, TypeError, OSError])
def test_an_exception_whose_text_raises_another_such_one_arrives(strategy, base):
    inner, _ = without_text(base)

    class Outer(base):
        def __str__(self):
            raise inner

    def step(x):
        if x.shape.rank == 0:
            raise Outer

    with pytest.raises(Outer):
        strategy.run(step, args=(tf.constant(1.0),))


@pytest.mark.parametrize(
    ("called", "name", "near"),
    [
        ("reduce", "ax", "axis"),
        ("reduce", "values", "value"),
        ("reduce", "reduce_opp", "reduce_op"),
        ("gather", "axes", "axis"),
        ("gather", "val", "value"),
    ],
)
def test_a_misspelt_keyword_of_a_method(strategy, called, name, near):
    with pytest.raises(TypeError, match=rf"strategy\.{called} got .*'{name}'\. Did you mean {near}=\?"):
        getattr(strategy, called)(**{name: 1})


@pytest.mark.parametrize(
    ("call", "name", "near"),
    [
        (TPUStrategy, "num_core", "num_cores"),
        (TPUStrategy, "distributon", "distribution"),
        (TPUStrategy, "softplacement", "soft_placement"),
        (MultiWorkerMirroredStrategy, "communication_option", "communication_options"),
        (MultiWorkerMirroredStrategy, "resolver", "cluster_resolver"),
        (replicate_model, "replica", "replicas"),
        (replicate_model, "strat", "strategy"),
        (BackupAndRestore, "directry", "directory"),
        (BackupAndRestore, "dir", "directory"),
        (BackupAndRestore, "save_frequency", "save_freq"),
    ],
)
def test_a_misspelt_keyword_of_what_users_call(call, name, near):
    with pytest.raises(TypeError, match=rf"{call.__name__} got .*'{name}'\. Did you mean {near}=\?"):
        call(**{name: None})


@pytest.mark.parametrize(("name", "near"), [("iteration", "iterations"), ("prefech", "prefetch"), ("iter", "iterator")])
def test_a_misspelt_keyword_of_run_steps(name, near):
    with pytest.raises(TypeError, match=rf"strategy\.run_steps got .*'{name}'\. Did you mean {near}=\?"):
        TPUStrategy(num_cores=1).run_steps(**{name: None})


@pytest.mark.parametrize(("name", "near"), [("arg", "args"), ("topologi", "topology"), ("kw_args", "kwargs")])
def test_a_misspelt_keyword_of_plan(name, near):
    with pytest.raises(TypeError, match=rf"strategy\.plan got .*'{name}'\. Did you mean {near}=\?"):
        TPUStrategy(num_cores=1).plan(**{name: None})


ONE = tf.constant([1.0, 2.0])


def of_two(x, y):
    return x + y


def of_one(batch):
    return batch


class Steps:
    def bound(self, x, y, z=0.0):
        return x + y + z


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "said"),
    [
        (
            of_two,
            ((ONE, ONE),),
            None,
            "held 1 value, a tuple of 2. Write args=batch for args=(batch,), or args=(x, y).",
        ),
        (of_two, ([ONE, ONE],), None, "held 1 value, a list of 2. Write args=batch for args=(batch,), or args=(x, y)."),
        (of_two, ({"x": ONE, "y": ONE},), None, "a dict of 2. Write kwargs=batch for args=(batch,)."),
        (of_two, (ONE,), None, "`of_two(x, y)`: args held 1 value. Write args=(x, y), with a value for each."),
        (of_two, (), None, "args held no value. Write args=(x, y)"),
        (of_two, (ONE,), {"z": ONE}, "args held 1 value, and kwargs z. Write args=(x, y)"),
        (of_one, (ONE, ONE), None, "`of_one(batch)`: args held 2 values. Write args=(batch,) for args=batch"),
        (Steps().bound, ((ONE, ONE),), None, "`bound(x, y, z)`: args held 1 value, a tuple of 2. Write args=batch"),
        (tf.function(of_two), ((ONE, ONE),), None, "`of_two(x, y)`: args held 1 value, a tuple of 2. Write args=batch"),
    ],
)
def test_arguments_that_the_function_does_not_take(strategy, fn, args, kwargs, said, in_function):
    def run():
        return strategy.run(fn, args=args, kwargs=kwargs)

    with pytest.raises(TypeError) as failure:
        (tf.function(run) if in_function else run)()
    text = "\n".join([str(failure.value), *getattr(failure.value, "__notes__", ())])
    assert text.count("strategy.run could not call") == 1, text
    assert said in text, text


def test_a_call_inside_the_function_is_not_that_of_run(strategy):
    with pytest.raises(TypeError) as failure:
        strategy.run(lambda batch: of_two(batch), args=(ONE,))
    assert "strategy.run could not call" not in "".join(getattr(failure.value, "__notes__", ()))
