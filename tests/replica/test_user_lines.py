"""Whatever AutoGraph and Keras do on the way: an error keeps its type and contents, and says the user's own line."""

import inspect

import keras
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, errors, xla
from replica_engine.testing import logical_devices


@pytest.fixture
def mirrored():
    return MirroredStrategy(logical_devices(8)[:2])


@pytest.fixture
def compiled():
    return TPUStrategy(num_cores=2)


@pytest.fixture(params=["eager", "in a tf.function"])
def run(request):
    """`strategy.run`, and in a converted function."""
    if request.param == "eager":
        return lambda strategy, fn, *args: strategy.run(fn, args)

    def in_function(strategy, fn, *args):
        @tf.function
        def train(*args):
            if tf.reduce_sum(args[0]) > -1.0:
                args = tuple(arg + 0.0 for arg in args)
            return strategy.run(fn, args)

        return train(*args)

    return in_function


def lines_of(error):
    """The user's lines in the notes: function and source."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("in user code:")]
    assert len(notes) == 1
    lines = notes[0].split("\n")[2:]
    for place, source in zip(lines[::2], lines[1::2], strict=True):
        file, line, function = place.strip().split(", ")
        assert file == f'File "{__file__}"'
        with open(__file__) as text:
            assert text.read().split("\n")[int(line.removeprefix("line ")) - 1].strip() == source.strip()
        yield function.removeprefix("in "), source.strip()


def add_up(x):
    return xla.cross_replica_sum(x, groups=[[0, 1], [1]])


def test_of_a_collective_in_a_helper(compiled, run):
    def step(x):
        return 2.0 * add_up(x)

    with pytest.raises(errors.CollectiveError) as caught:
        run(compiled, step, tf.constant(1.0))
    assert list(lines_of(caught.value)) == [
        ("step", "return 2.0 * add_up(x)"),
        ("add_up", "return xla.cross_replica_sum(x, groups=[[0, 1], [1]])"),
    ]


def test_of_a_collective_in_a_branch_on_a_tensor(compiled, run):
    def step(x):
        if x > 0.0:
            x = add_up(x)
        return x

    with pytest.raises(errors.CollectiveError) as caught:
        run(compiled, step, tf.constant(1.0))
    assert list(lines_of(caught.value))[-1] == ("add_up", "return xla.cross_replica_sum(x, groups=[[0, 1], [1]])")


def test_of_a_body_without_a_strategy():
    with pytest.raises(errors.CollectiveError) as caught:
        xla.replicate(add_up, inputs=[[1.0], [2.0]])
    assert list(lines_of(caught.value)) == [("add_up", "return xla.cross_replica_sum(x, groups=[[0, 1], [1]])")]


def test_of_what_a_host_function_returns(compiled, run):
    def names(x):
        return {"first"}

    def step(x):
        return xla.outside_compilation(names, x)

    with pytest.raises(errors.HostResultError) as caught:
        run(compiled, step, tf.constant(1.0))
    assert list(lines_of(caught.value)) == [("step", "return xla.outside_compilation(names, x)")]


def test_of_a_variable_that_is_new_each_time(compiled, run):
    def make(x):
        return tf.Variable(1.0, name="weight")

    def step(x):
        return make(x) * x

    with pytest.raises(errors.VariableCreationError) as caught:
        run(compiled, step, tf.constant(1.0))
    line = inspect.getsourcelines(make)[1] + 1
    assert f"(weight at {__file__}:{line} in make)" in str(caught.value)


def test_of_a_variable_made_of_arguments(compiled):
    class Mean(tf.Module):
        value = None

        @tf.function
        def __call__(self, x):
            if self.value is None:
                self.value = tf.Variable(tf.reduce_mean(x), name="mean")
            return self.value

    with pytest.raises(errors.VariableCreationError) as caught:
        compiled.run(Mean(), args=(tf.constant([1.0]),))
    assert list(lines_of(caught.value))[-1][1] == 'self.value = tf.Variable(tf.reduce_mean(x), name="mean")'


def test_of_what_is_used_where_there_is_no_body():
    @tf.function
    def total(x):
        return add_up(x)

    with pytest.raises(errors.NotInBodyError, match=f"there is none at {__file__}:[0-9]+ in add_up"):
        total(tf.constant(1.0))


class Total(keras.layers.Layer):
    def call(self, x):
        return add_up(x)


def test_of_a_layer(compiled, run):
    """Keras makes another one of the error, with its own text around it."""
    total = Total()

    def step(x):
        return total(x)

    with pytest.raises(errors.CollectiveError, match="Exception encountered when calling Total") as caught:
        run(compiled, step, tf.ones([2]))
    assert list(lines_of(caught.value))[-1] == ("add_up", "return xla.cross_replica_sum(x, groups=[[0, 1], [1]])")


def test_a_layer_without_replicas_keeps_type_and_text():
    with pytest.raises(errors.NotInBodyError, match=r"xla\.cross_replica_sum\(\) works inside a function"):
        Total()(tf.ones([2]))


def test_an_error_of_the_run_keeps_what_it_knows(mirrored, run):
    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            x = context.all_reduce("SUM", x)
        return x

    with pytest.raises(errors.MergeCallMismatchError) as caught:
        run(mirrored, step, tf.constant(1.0))
    assert [row.replica for row in caught.value.rows] == [0, 1]
    assert f"{__file__}:" in str(caught.value)


def test_of_a_structure_in_a_merge_call(mirrored, run):
    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        return context.merge_call(lambda strategy, x: x, args=([x] if first else x,))

    with pytest.raises(errors.StructureMismatchError) as caught:
        run(mirrored, step, tf.constant(1.0))
    assert (caught.value.path, caught.value.replicas) == ("args[0]", (0, 1))


def test_two_boundaries_tell_it_once(compiled):
    def inner(x):
        return add_up(x)

    def merge(strategy, x):
        return xla.replicate(inner, inputs=[[1.0], [2.0]])

    def step(x):
        return tf.distribute.get_replica_context().merge_call(merge, args=(x,))

    mirrored = MirroredStrategy(logical_devices(8)[:2])
    with pytest.raises(errors.CollectiveError) as caught:
        tf.function(lambda x: mirrored.run(step, args=(x,)))(tf.constant(1.0))
    assert [function for function, _ in lines_of(caught.value)][-2:] == ["inner", "add_up"]
