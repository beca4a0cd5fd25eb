"""Bodies that cannot be compiled: what they use, create and return."""

import importlib

import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import TPUStrategy, xla
from replica_engine.errors import (
    CaptureError,
    LostVariableError,
    LoweringError,
    ProgramError,
    VariableCreationError,
)
from replica_engine.errors.program_errors import broken_cache_file, untrusted_cache_dir, unusable_cache_dir
from replica_engine.pjrt import rewrites
from replica_engine.xla.calls import program_table

lower = importlib.import_module("replica_engine.xla.stages.lowered")  # `xla.lower` is the function


@shows(CaptureError, "not_a_variable")
def test_a_dataset_iterator():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(tf.data.Dataset.range(8).batch(4))

    def step(rate):
        return rate * tf.cast(next(batches), tf.float32)

    strategy.run(step, args=(tf.constant(0.1),))


@shows(VariableCreationError)
def test_a_new_variable_in_each_run():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        weight = tf.Variable(1.0, name="weight")
        return weight * x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(LoweringError)
def test_text_in_a_body():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)

    def label(x):
        text = tf.strings.as_string(x)
        return tf.strings.length(text)

    def step(x):
        return label(2.0 * x)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.stays_on_host)
def test_a_variable_that_gets_what_stays_on_the_host():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        lengths = tf.Variable([0, 0, 0])

    def step(text):
        words = tf.strings.split(text)
        lengths.assign(tf.strings.length(words))

    strategy.run(step, args=(tf.constant("as many as there are"),))


@shows(LoweringError, "growing_loop")
def test_a_loop_that_lets_a_value_grow():
    strategy = TPUStrategy(num_cores=2)

    any_length = tf.TensorShape([None])

    def step(x):
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(shape_invariants=[(x, any_length)])
            x = tf.concat([x, x], axis=0)
        return x

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@pytest.fixture
def _few_traces(monkeypatch):
    monkeypatch.setattr(program_table, "MANY_TRACES", 3)


@pytest.mark.usefixtures("_few_traces")
@shows("many_traces")
def test_a_number_that_is_another_each_time():
    """The warning comes at the third trace here, and not at the eighth."""
    strategy = TPUStrategy(num_cores=2)

    def step(x, count):
        return x * count

    for count in (1, 2, 3):
        strategy.run(step, args=(tf.constant(1.0), count))


@pytest.fixture
def _unknown_memory(monkeypatch):
    monkeypatch.setattr(lower, "memory_limit", lambda devices: None)


@pytest.mark.usefixtures("_unknown_memory")
@shows(ProgramError)
def test_a_program_that_fails():
    """On devices that have too little memory, and do not say how much they have."""
    strategy = TPUStrategy(num_cores=2)

    def step():
        noise = tf.random.normal([1 << 22, 1 << 22])
        return tf.reduce_sum(noise @ noise)

    strategy.run(step)


@pytest.mark.usefixtures("_unknown_memory")
@shows(LostVariableError)
def test_a_variable_of_a_program_that_fails():
    """On devices that have too little memory, and do not say how much they have."""
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        weight = tf.Variable(1.0, name="weight")

    def step():
        noise = tf.random.normal([1 << 22, 1 << 22])
        weight.assign_add(tf.reduce_sum(noise @ noise))

    try:
        strategy.run(step)
    except RuntimeError as error:
        print(type(error).__name__)
    print(weight.numpy())


@shows(broken_cache_file)
def test_a_file_of_the_cache_folder_that_is_cut_short(tmp_path):
    def double(x):
        return 2 * x

    xla.set_cache_dir(tmp_path)
    xla.lower(double, [[1.0], [2.0]]).compile()
    for file in tmp_path.glob("*-cache"):
        file.write_bytes(file.read_bytes()[:1000])

    xla.lower(double, [[1.0], [2.0]]).compile()
    xla.lower(double, [[1.0], [2.0]]).compile()


@shows(unusable_cache_dir)
def test_a_cache_folder_that_cannot_be_written():
    xla.set_cache_dir("/dev/null/programs")
    xla.lower(lambda x: 2 * x, [[1.0], [2.0]]).compile()
    xla.lower(lambda x: 3 * x, [[1.0], [2.0]]).compile()


@shows(untrusted_cache_dir)
def test_a_cache_folder_of_a_team(tmp_path):
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(0o775)  # as with umask 002
    xla.set_cache_dir(folder)
    xla.lower(lambda x: 2 * x, [[1.0], [2.0]]).compile()
    xla.lower(lambda x: 3 * x, [[1.0], [2.0]]).compile()


@shows("remote_cache_dir")
def test_a_cache_folder_in_the_network():
    xla.set_cache_dir("gs://bucket/programs")
    xla.lower(lambda x: 2 * x, [[1.0], [2.0]]).compile()
    xla.lower(lambda x: 3 * x, [[1.0], [2.0]]).compile()


@pytest.fixture
def _failing_rule(monkeypatch):
    def fails(operation):
        raise IndexError("list index out of range")

    monkeypatch.setattr(rewrites, "_failed", set())
    monkeypatch.setitem(rewrites._RULES["cpu"], "stablehlo.convolution", fails)


@pytest.mark.usefixtures("_failing_rule")
@shows("not_rewritten")
def test_a_rewrite_for_cpu_that_fails():
    images, kernel = tf.ones([2, 2, 2, 3]), tf.ones([3, 3, 3, 4])
    blur = lambda image: tf.nn.conv2d(image, kernel, 1, "SAME")  # noqa: E731
    xla.replicate(blur, [[images], [images]])
    xla.replicate(lambda image: 2 * blur(image), [[images], [images]])
