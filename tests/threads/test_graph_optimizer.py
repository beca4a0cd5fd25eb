"""How much TensorFlow's graph optimizer does to functions with replicas: `MirroredStrategy(graph_optimizer=)`."""

import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation, context

from replica_engine import MirroredStrategy
from replica_engine.upstream.graphs import function_calls

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture
def ops_left(tmp_path):
    """Calls a `tf.function`, and returns the types of the ops that the graph optimizer left."""

    def call(function, *args):
        tf.summary.trace_on(graph=True)
        function(*args)
        with tf.summary.create_file_writer(str(tmp_path)).as_default():
            tf.summary.trace_export("call", step=0)
        events = [event for path in tmp_path.iterdir() for event in tf.compat.v1.train.summary_iterator(str(path))]
        text = next(value.tensor.string_val[0] for event in events for value in event.summary.value)
        run = tf.compat.v1.RunMetadata.FromString(text)
        for path in tmp_path.iterdir():
            path.unlink()
        return [node.op for graphs in run.function_graphs for node in graphs.post_optimization_graph.node]

    return call


def doubled_negation(x):
    return tf.negative(tf.negative(x)) + 1.0


def on_replicas(strategy):
    return tf.function(lambda x: strategy.run(doubled_negation, args=(x,)))


def number_of_negations(ops):
    return ops.count("Neg")


@pytest.mark.parametrize(("level", "left"), [(None, 0), ("full", 0), ("light", 0), ("off", 4)])
def test_it_works_on_functions_of_users(ops_left, level, left):
    strategy = MirroredStrategy(DEVICES, graph_optimizer=level)
    assert number_of_negations(ops_left(on_replicas(strategy), tf.ones([3]))) == left


def test_it_works_on_a_function_given_to_run(ops_left):
    strategy = MirroredStrategy(DEVICES, graph_optimizer="off")
    step = tf.function(doubled_negation)
    assert number_of_negations(ops_left(lambda x: strategy.run(step, args=(x,)), tf.ones([3]))) == 4


def test_functions_in_which_no_replica_runs_stay_as_they_were(ops_left):
    strategy = MirroredStrategy(DEVICES, graph_optimizer="off")
    assert number_of_negations(ops_left(on_replicas(strategy), tf.ones([3]))) == 4
    assert number_of_negations(ops_left(tf.function(doubled_negation), tf.ones([3]))) == 0


def test_of_two_strategies_in_one_function_the_one_with_more_passes_counts(ops_left):
    strategies = [MirroredStrategy(DEVICES, graph_optimizer=level) for level in ("full", "off")]
    both = tf.function(lambda x: [strategy.run(doubled_negation, args=(x,)) for strategy in strategies])
    assert number_of_negations(ops_left(both, tf.ones([3]))) == 0


def test_what_the_user_has_set_for_the_process_stays(ops_left):
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False, "remapping": False})
    try:
        strategy = MirroredStrategy(DEVICES)
        assert number_of_negations(ops_left(on_replicas(strategy), tf.ones([3]))) == 4
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True, "remapping": True})
    assert {
        **before,
        "arithmetic_optimization": True,
        "remapping": True,
    } == tf.config.optimizer.get_experimental_options()


def test_gradients_through_a_function_are_those_of_one_device():
    strategy = MirroredStrategy(DEVICES)
    x = tf.Variable([3.0])
    with tf.GradientTape() as tape:
        results = on_replicas(strategy)(x * x)
        total = tf.add_n(strategy.experimental_local_results(results))
    assert tape.gradient(total, x).numpy().tolist() == [12.0]


def made(own):
    """The context of a function whose calls cannot be ended."""
    return function_calls._Context(own, function_calls.LIGHT, lambda manager: lambda execute: execute())


class TestContext:
    """The context of one function, around TensorFlow's."""

    @pytest.fixture
    def own(self):
        own = context.context()
        before = own.function_call_options
        with cancellation.CancellationManagerContext(cancellation.CancellationManager()):
            yield own
        own.function_call_options = before

    def test_options_that_are_set_during_the_call_stay(self, own, monkeypatch):
        others = context.FunctionCallOptions()
        monkeypatch.setattr(own, "call_function", lambda *call: setattr(own, "function_call_options", others))
        made(own).call_function(b"f", [], 0)
        assert own.function_call_options is others

    def test_otherwise_the_call_leaves_the_options_as_they_were(self, own, monkeypatch):
        before = own.function_call_options
        monkeypatch.setattr(own, "call_function", lambda *call: own.function_call_options)
        used = made(own).call_function(b"f", [], 0)
        assert used is not before
        assert own.function_call_options is before

    def test_it_shows_itself_as_the_context(self, own):
        assert repr(made(own)) == repr(own)
