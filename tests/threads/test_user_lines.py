"""Whatever AutoGraph and Keras do on the way: an error keeps its type and contents, and says the user's own line."""

import inspect
import json
import os
import pathlib

import keras
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import MirroredStrategy, TPUStrategy, errors, logical_devices, xla
from replica_engine.compat import contrib
from replica_engine.diagnostics.user_frames import is_internal, user_line
from replica_engine.strategies import MirroredExtended


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


ADD_UP = ("add_up", "return xla.cross_replica_sum(x, groups=[[0, 1], [1]])")


def test_of_a_collective_in_a_helper(compiled, run):
    def step(x):
        return 2.0 * add_up(x)

    with pytest.raises(errors.CollectiveError) as caught:
        run(compiled, step, tf.constant(1.0))
    assert list(lines_of(caught.value)) == [("step", "return 2.0 * add_up(x)"), ADD_UP]


def test_of_a_collective_in_a_branch_on_a_tensor(compiled, run):
    def step(x):
        if x > 0.0:
            x = add_up(x)
        return x

    with pytest.raises(errors.CollectiveError) as caught:
        run(compiled, step, tf.constant(1.0))
    assert list(lines_of(caught.value))[-1] == ADD_UP


def test_where_there_is_no_strategy():
    with pytest.raises(errors.CollectiveError) as caught:
        xla.replicate(add_up, inputs=[[1.0], [2.0]])
    assert list(lines_of(caught.value)) == [ADD_UP]
    with pytest.raises(errors.NotInBodyError, match=f"was called outside one at {__file__}:[0-9]+ in add_up"):
        tf.function(lambda x: add_up(x))(tf.constant(1.0))
    with pytest.raises(errors.NotInBodyError, match=r"xla\.cross_replica_sum\(\) works inside a function"):
        Total()(tf.ones([2]))


def test_of_what_a_host_function_returns(compiled, run):
    def step(x):
        return xla.outside_compilation(lambda x: {"first"}, x) * 2.0

    with pytest.raises(errors.HostResultError) as caught:
        run(compiled, step, tf.constant(1.0))
    assert list(lines_of(caught.value)) == [("step", 'return xla.outside_compilation(lambda x: {"first"}, x) * 2.0')]


def test_of_a_variable_that_is_new_each_time(compiled, run):
    def make(x):
        return tf.Variable(1.0, name="weight")

    with pytest.raises(errors.VariableCreationError) as caught:
        run(compiled, lambda x: make(x) * x, tf.constant(1.0))
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
    assert list(lines_of(caught.value))[-1] == ADD_UP


def test_two_boundaries_tell_it_once(mirrored):
    def inner(x):
        return add_up(x)

    def step(x):
        return tf.distribute.get_replica_context().merge_call(
            lambda strategy, x: xla.replicate(inner, inputs=[[1.0], [2.0]]), args=(x,)
        )

    with pytest.raises(errors.CollectiveError) as caught:
        tf.function(lambda x: mirrored.run(step, args=(x,)))(tf.constant(1.0))
    assert [function for function, _ in lines_of(caught.value)][-2:] == ["inner", "add_up"]


def line_with(text):
    """The number of the last line of this file that ends with some text."""
    with open(__file__) as file:
        return max(number for number, line in enumerate(file, start=1) if line.rstrip().endswith(text))


def places(strategy):
    """Where the sync points of a strategy were."""
    found = {point.where for point in strategy.sync_points()}
    assert found
    return found


@pytest.mark.parametrize("kind", ["mirrored", "compiled"])
def test_of_the_sync_points_of_a_replicated_fit(request, kind):
    strategy = request.getfixturevalue(kind)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    replicated = replica_engine.keras.replicate_model(model, strategy=strategy)
    replicated.fit(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)  # here
    assert places(strategy) == {f"{__file__}:{line_with('# here')} in {inspect.currentframe().f_code.co_name}"}
    if kind == "mirrored":
        assert {point.name for point in strategy.sync_points()} == {"fit"}


def test_of_the_sync_points_of_a_device_loop(compiled):
    def step(context, x):
        total = tf.distribute.get_replica_context().all_reduce("SUM", x)  # meets
        context.set_last_step_output("total", total, "MEAN")  # meets again

    compiled.run_steps(step, iter([1.0, 2.0]), 2)
    assert places(compiled) == {f"{__file__}:{line_with(text)} in step" for text in ("# meets", "# meets again")}


def test_of_the_sync_points_of_towers():
    strategy = contrib.TPUStrategy(num_cores=2)

    def merge(distribution, x):
        return distribution.reduce(tf.VariableAggregation.SUM, x, None)  # in the merge function

    def tower(x):
        own = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, x.dtype)
        return contrib.get_tower_context().merge_call(merge, x + own)

    strategy.call_for_each_tower(tower, tf.constant(1.0))
    assert places(strategy) == {f"{__file__}:{line_with('# in the merge function')} in merge"}


def test_of_the_sync_points_of_a_strategy_of_ones_own():
    class Extended(MirroredExtended):
        def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)

    class Own(MirroredStrategy):
        extended_class = Extended

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x)  # in a step

    strategy = Own(logical_devices(8)[:2])
    strategy.run(step, args=(tf.constant(1.0),))
    assert places(strategy) == {f"{__file__}:{line_with('# in a step')} in step"}


def test_of_the_ops_of_a_summary(tmp_path):
    """tf.summary is tensorboard's."""
    seen = []

    @tf.function
    def summarize(x):
        before = len(tf.compat.v1.get_default_graph().get_operations())
        tf.summary.histogram("x", x, step=0)  # a summary
        seen.extend(map(user_line, tf.compat.v1.get_default_graph().get_operations()[before:]))

    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        summarize(tf.ones([3]))
    assert set(seen) == {f"{__file__}:{line_with('# a summary')} in summarize"}


@pytest.mark.parametrize("cut", ["the first slash", "the folders that all files share"])
def test_of_a_trace_whose_paths_lack_their_beginning(cut):
    """XLA prints such traces. The function of a lambda has no name in them."""
    files = [__file__, replica_engine.xla.__file__, tf.__file__]
    shared = "/" if cut == "the first slash" else os.path.commonpath(files)
    mine, ours, tensorflows = (os.path.relpath(file, shared) for file in files)
    frames = [(mine, "1", "main"), (ours, "2", "run"), (mine, "12", ""), (tensorflows, "34", "ones")]
    assert user_line(frames) == f"{__file__}:12 in a lambda"
    assert user_line([("<ipython-input-1>", "1", "step"), *frames[1:2]]) == "<ipython-input-1>:1 in step"


def test_the_whole_package_is_not_the_users():
    package = pathlib.Path(replica_engine.__file__).parent
    assert all(is_internal(str(path)) for path in package.rglob("*.py"))


def test_a_package_of_the_users_is_the_users(programs, tmp_path):
    """Also with the name of one whose frames are skipped."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "__init__.py").write_text(
        "import tensorflow as tf\n\n"
        "def step():\n"
        "    return tf.distribute.get_replica_context().all_reduce('SUM', tf.constant(1.0))\n"
    )
    done = programs.run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import replica_engine, tree\n"
        "strategy = replica_engine.MirroredStrategy(['CPU:0'])\n"
        "strategy.run(tree.step)\n"
        "print(strategy.sync_points()[0].where)"
    )
    assert done.stdout.strip() == f"{tmp_path}/tree/__init__.py:4 in step", done.stderr


def test_little_of_the_library_is_in_the_traceback_of_a_traced_step(mirrored):
    """One of it, and one of TensorFlow's, for all tf.functions on the way."""
    failure = ValueError("mine")

    def step(x):
        raise failure

    inner = tf.function(lambda x: mirrored.run(step, args=(x,)))
    with pytest.raises(ValueError, match="mine") as caught:
        tf.function(lambda x: inner(x))(tf.constant(1.0))
    assert caught.value is failure
    frames = [os.path.basename(frame.path) for frame in caught.traceback]
    assert frames == ["test_user_lines.py", "traceback_utils.py", "supervised_call.py"]


def test_a_traceback_keeps_the_frames_of_python_itself():
    step = tf.function(lambda x: x * json.loads("{"), autograph=False)
    with pytest.raises(ValueError, match="Expecting property name") as caught:
        step(tf.constant(1.0))
    assert "decoder.py" in [os.path.basename(frame.path) for frame in caught.traceback]


def test_ctrl_c_in_a_step_shows_the_users_frames(mirrored):
    def step():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        mirrored.run(step)
    frames = [os.path.basename(frame.path) for frame in caught.traceback]
    assert frames == ["test_user_lines.py", "on_backend.py", "test_user_lines.py"]


@pytest.mark.parametrize("kind", ["def", "lambda"])
def test_a_step_that_is_defined_inside_a_tf_function_is_named_where_it_is_written(kind):
    strategy = MirroredStrategy(logical_devices(8)[:2])
    made = []

    def results():
        """Another structure at each call."""
        made.append(None)
        return [1.0] * len(made)

    @tf.function
    def train():
        def step():
            return results()

        if kind == "def":
            return strategy.run(step)
        return strategy.run(lambda: results())

    lines, first = inspect.getsourcelines(train.python_function)
    start = "def step" if kind == "def" else "return strategy.run(lambda"
    written = next(number for number, line in enumerate(lines, first) if line.strip().startswith(start))
    with pytest.raises(errors.StructureMismatchError) as caught:
        train()
    name = "step" if kind == "def" else "<lambda>"
    said = f"`{name}` ({__file__}:{written})"
    assert said in str(caught.value)
    assert "__autograph_generated" not in str(caught.value)
