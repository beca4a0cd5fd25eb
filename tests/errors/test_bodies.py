"""Bodies that cannot be compiled: what they use, create and return."""

import importlib

import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import TPUStrategy, xla
from replica_engine.errors import (
    CaptureError,
    InputsError,
    LostVariableError,
    LoweringError,
    ProgramError,
    VariableCreationError,
    broken_cache_file,
    many_traces,
    not_rewritten,
    remote_cache_dir,
    unusable_cache_dir,
)
from replica_engine.pjrt import cpu_rewrites
from replica_engine.xla.stages import program_cache, saved_programs

lower = importlib.import_module("replica_engine.xla.stages.lower")  # `xla.lower` is the function


@shows(CaptureError.not_a_variable)
def test_a_dataset_iterator():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(tf.data.Dataset.range(8).batch(4))

    def step(rate):
        return rate * tf.cast(next(batches), tf.float32)

    strategy.run(step, args=(tf.constant(0.1),))


@shows(LoweringError.beyond_array)
def test_a_write_beyond_a_fixed_array():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        powers = tf.TensorArray(tf.float32, size=3)
        for i in tf.range(4):
            powers = powers.write(i, x ** tf.cast(i, tf.float32))
        return powers.stack()

    strategy.run(step, args=(tf.constant(2.0),))


@shows(CaptureError.unknown_shape)
def test_a_variable_that_may_change_its_shape():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        history = tf.Variable(tf.zeros([1]), shape=[None])

    def step(x):
        return x + tf.reduce_sum(history)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(CaptureError.host_only)
def test_text_from_outside():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)
    labels = tf.constant(["cat", "dog"])

    def step(x):
        return x + tf.cast(tf.size(tf.where(labels == "cat")), tf.float32)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(VariableCreationError.each_time)
def test_a_new_variable_in_each_run():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        weight = tf.Variable(1.0, name="weight")
        return weight * x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(VariableCreationError.of_arguments)
def test_an_initial_value_of_the_arguments():
    strategy = TPUStrategy(num_cores=2)

    class Mean(tf.Module):
        value = None

        @tf.function
        def __call__(self, x):
            if self.value is None:
                self.value = tf.Variable(tf.reduce_mean(x), name="mean")
            return self.value

    strategy.run(Mean(), args=(tf.constant([1.0, 2.0]),))


@shows(VariableCreationError.of_run)
def test_an_initial_value_that_replicas_bring_together():
    strategy = TPUStrategy(num_cores=2)

    class Mean(tf.Module):
        value = None

        def __call__(self):
            if self.value is None:
                drawn = tf.random.normal([3])
                mean = tf.distribute.get_replica_context().all_reduce("MEAN", drawn)
                self.value = tf.Variable(mean, name="mean")
            return self.value.read_value()

    strategy.run(Mean())


@shows(LoweringError.unsupported_op)
def test_text_in_a_body():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)

    def label(x):
        text = tf.strings.as_string(x)
        return tf.strings.length(text)

    def step(x):
        return label(2.0 * x)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.not_constant)
def test_a_shape_that_depends_on_data():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        rows = tf.cast(tf.reduce_max(x), tf.int32)
        return tf.reshape(x, [rows, -1])

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.unbounded_loop)
def test_the_gradient_of_a_loop_without_a_bound():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            while tf.reduce_sum(y) < 100.0:
                y = y * y
        return tape.gradient(y, x)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.dynamic_argument)
def test_a_batch_of_any_size():
    def step(x):
        return tf.reduce_sum(x)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def show(x):
        print(xla.lower(step, inputs=[[x], [x]]).as_text())

    show(tf.ones([8, 3]))


@shows(LoweringError.dynamic_result)
def test_a_result_that_a_mask_leaves():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        large = tf.boolean_mask(x, x > 1.0)
        return {"all": x, "large": large}

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.host_only)
def test_text_as_an_argument():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)

    def step(batch):
        return batch["x"]

    strategy.run(step, args=({"x": tf.constant([1.0]), "name": tf.constant(["a"])},))


@shows(LoweringError.host_result)
def test_text_as_a_result():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)

    def step(x):
        return x, tf.strings.as_string(x)

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


@shows(LoweringError.not_on_host)
def test_a_branch_of_what_was_cut_out_that_the_host_needs():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        large = tf.boolean_mask(x, x > 1.0)
        shown = tf.cond(x[0] > 0.0, lambda: large * 2.0, lambda: large)
        tf.print("large ones:", shown)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.shaped_by_data)
def test_a_branch_that_cuts_out_what_the_host_needs():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        shown = tf.cond(x[0] > 0.0, lambda: tf.boolean_mask(x, x > 1.0), lambda: x)
        tf.print("large ones:", shown)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.python_gradient)
def test_gradients_of_a_python_function_that_is_called_twice():
    strategy = TPUStrategy(num_cores=2)

    @tf.function
    def squared(x):
        y = tf.py_function(lambda x: x**2, [x], tf.float32)
        return tf.ensure_shape(y, [])

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = squared(x) + squared(10.0 * x)
        return tape.gradient(loss, x)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(LoweringError.growing_loop)
def test_a_loop_that_lets_a_value_grow():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(shape_invariants=[(x, tf.TensorShape([None]))])
            x = tf.concat([x, x], axis=0)
        return x

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.growing_loop, "by_a_gather")
def test_a_loop_that_gathers():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(shape_invariants=[(x, tf.TensorShape([None]))])
            x = tf.distribute.get_replica_context().all_gather(x, axis=0)
        return x

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(LoweringError.other)
def test_whatever_else_xla_refuses():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        array = tf.TensorArray(tf.float32, size=0)
        return x + array.read(0)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(CaptureError.host_only_variable)
def test_a_variable_of_text():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)
    words = tf.Variable(["a", "b"], name="words")

    def step(x):
        return x + tf.cast(tf.size(words), tf.float32)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(CaptureError.of_all_replicas)
def test_a_concrete_function_of_all_replicas():
    strategy = TPUStrategy(num_cores=2)
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    with strategy.scope():
        seen = tf.Variable(0.0, name="seen", synchronization=on_read, aggregation=total)

    @tf.function
    def so_far(x):
        return x + seen

    concrete = so_far.get_concrete_function(tf.TensorSpec([]))
    strategy.run(concrete, args=(tf.constant(1.0),))


@pytest.fixture
def _few_traces(monkeypatch):
    monkeypatch.setattr(program_cache, "MANY_TRACES", 3)


@pytest.mark.usefixtures("_few_traces")
@shows(many_traces)
def test_a_number_that_is_another_each_time():
    """The warning comes at the third trace here, and not at the eighth."""
    strategy = TPUStrategy(num_cores=2)

    def step(x, count):
        return x * count

    for count in (1, 2, 3):
        strategy.run(step, args=(tf.constant(1.0), count))


@pytest.fixture
def _small_machine(monkeypatch):
    monkeypatch.setattr(lower, "memory_limit", lambda devices: 8 << 30)


@pytest.mark.usefixtures("_small_machine")
@shows(ProgramError.too_large)
def test_a_program_that_needs_more_memory_than_there_is():
    """On a machine that has 8 GiB of memory."""
    strategy = TPUStrategy(num_cores=2)

    def step():
        noise = tf.random.normal([1 << 22, 1 << 20])
        return tf.reduce_sum(noise @ tf.transpose(noise))

    strategy.run(step)


@pytest.fixture
def _unknown_memory(monkeypatch):
    monkeypatch.setattr(lower, "memory_limit", lambda devices: None)


@pytest.mark.usefixtures("_unknown_memory")
@shows(ProgramError.failed)
def test_a_program_that_fails():
    """On devices that have too little memory, and do not say how much they have."""
    strategy = TPUStrategy(num_cores=2)

    def step():
        noise = tf.random.normal([1 << 22, 1 << 22])
        return tf.reduce_sum(noise @ noise)

    strategy.run(step)


@pytest.mark.usefixtures("_unknown_memory")
@shows(LostVariableError.read)
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


@shows(LoweringError.growing_array)
def test_an_array_that_grows_without_soft_placement():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)

    def step(x):
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        index = 0
        while tf.reduce_sum(x) < 100.0:
            array = array.write(index, x)
            index += 1
            x *= 2.0
        return array.stack()

    strategy.run(step, args=(tf.constant(1.0),))


@shows(LoweringError.size_of_growing_array)
def test_an_array_that_is_appended_to():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        for value in x:
            array = array.write(array.size(), 2.0 * value)
        return array.stack()

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@pytest.fixture
def _own_cache():
    yield
    saved_programs._chosen.clear()


@pytest.mark.usefixtures("_own_cache")
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


@pytest.mark.usefixtures("_own_cache")
@shows(unusable_cache_dir)
def test_a_cache_folder_that_cannot_be_written():
    xla.set_cache_dir("/dev/null/programs")
    xla.lower(lambda x: 2 * x, [[1.0], [2.0]]).compile()
    xla.lower(lambda x: 3 * x, [[1.0], [2.0]]).compile()


@pytest.mark.usefixtures("_own_cache")
@shows(remote_cache_dir)
def test_a_cache_folder_in_the_network():
    xla.set_cache_dir("gs://bucket/programs")
    xla.lower(lambda x: 2 * x, [[1.0], [2.0]]).compile()
    xla.lower(lambda x: 3 * x, [[1.0], [2.0]]).compile()


@pytest.mark.usefixtures("_own_cache")
@shows(InputsError.no_cache_dir)
def test_a_cache_folder_that_is_a_number():
    xla.set_cache_dir(1)


@pytest.fixture
def _failing_rule(monkeypatch):
    def fails(operation):
        raise IndexError("list index out of range")

    monkeypatch.setattr(cpu_rewrites, "_failed", set())
    monkeypatch.setitem(cpu_rewrites._RULES, "stablehlo.convolution", fails)


@pytest.mark.usefixtures("_failing_rule")
@shows(not_rewritten)
def test_a_rewrite_for_cpu_that_fails():
    images, kernel = tf.ones([2, 2, 2, 3]), tf.ones([3, 3, 3, 4])
    blur = lambda image: tf.nn.conv2d(image, kernel, 1, "SAME")  # noqa: E731
    xla.replicate(blur, [[images], [images]])
    xla.replicate(lambda image: 2 * blur(image), [[images], [images]])
