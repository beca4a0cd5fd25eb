"""The inputs of device loops: what iterators may yield, how far they are read ahead, and how they end."""

import gc
import itertools
import signal
import threading
import types
import weakref

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import InputsError, ReplicaEngineError
from replica_engine.testing import no_leaked_threads

SUM = tf.VariableAggregation.SUM
THREAD = "replica_engine: inputs"
SOON = 20  # seconds until a thread that should have gone on by then is stuck


@pytest.fixture(autouse=True)
def _feeding_threads_go():
    with no_leaked_threads(grace=2.0, prefix=THREAD):
        yield


class Noting:
    """A step that remembers its inputs, scalars on each replica, and how often it ran.

    Args:
        replicas: with the strategy.
        most: how many steps at most.
    """

    def __init__(self, replicas, most=20):
        self.replicas = replicas
        self.strategy = replicas.strategy
        self.seen = replicas.variable(tf.zeros([most]), SUM, on_read=True)
        self.count = replicas.variable(0, tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def step(self, context, x):
        self.seen.assign(tf.tensor_scatter_nd_update(self.seen, [[self.count]], [tf.cast(x, tf.float32)]))
        self.count.assign_add(1)
        context.set_last_step_output("x", x)

    def run(self, iterator, iterations, **options):
        return self.strategy.run_steps(self.step, iterator, iterations, **options)

    @property
    def inputs(self):
        """What the steps got so far: of replica 0 if it is the same on all, or else for each replica."""
        count = int(self.count.numpy())
        each = [one[:count] for one in self.replicas.components(self.seen)]
        return each[0] if all(one == each[0] for one in each) else each


@pytest.fixture
def noting(two):
    return Noting(two)


def numbers(count, start=0):
    """That many batches, 0.0, 1.0, ..., each the same on all replicas."""
    return [np.float32(start + number) for number in range(count)]


def floats(count):
    """The same as a data set."""
    return tf.data.Dataset.range(count).map(lambda i: tf.cast(i, tf.float32))


class Counted:
    """An iterator over numbers that counts how many were taken."""

    def __init__(self, count):
        self.taken = 0
        self._count = count

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self._count:
            raise StopIteration
        self.taken += 1
        return np.float32(self.taken - 1)


class GetNext:
    """An iterator as of TensorFlow 1."""

    def __init__(self, dataset):
        self._iterator = iter(dataset)

    def get_next(self):
        return self._iterator.get_next()


# What iterators yield.


def test_of_a_distributed_data_set_each_replica_gets_its_share(two, noting):
    dataset = floats(12).batch(2, drop_remainder=True)
    batches = iter(two.strategy.experimental_distribute_dataset(dataset))
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    two.strategy.run_steps(step, batches, 4)
    two.strategy.run_steps(step, batches, 2)
    assert noting.inputs == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]]


def test_of_a_data_set_that_is_made_for_each_replica_each_gets_its_own(two, noting):
    batches = iter(two.strategy.distribute_datasets_from_function(lambda context: floats(8)))
    noting.run(batches, 3)
    assert noting.inputs == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


ITERATORS = {
    "a data set's": lambda: iter(floats(10)),
    "one with get_next": lambda: GetNext(floats(10)),
    "a generator": lambda: (number for number in numbers(10)),
    "a map": lambda: map(np.float32, range(10)),
    "a list's of NumPy scalars": lambda: iter(numbers(10)),
    "a list's of arrays": lambda: iter(np.split(np.arange(10.0).astype("float32"), 10)),
    "a list's of tensors": lambda: iter([tf.constant(number) for number in numbers(10)]),
    "a list's of Python numbers": lambda: iter([float(number) for number in range(10)]),
    "the program's own": lambda: Counted(10),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_of_any_other_iterator_all_replicas_get_all_and_a_loop_goes_on_where_the_last_one_ended(two, noting, make):
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    iterator = make()
    assert two.strategy.run_steps(step, iterator, 1).steps == 1
    assert two.strategy.run_steps(step, iterator, 3).steps == 3
    assert noting.inputs == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(tf.errors.OutOfRangeError, match="6 of 8 steps") as raised:
        two.strategy.run_steps(step, iterator, 8)
    assert raised.value.context.steps == 6
    assert two.each(raised.value.context.last_step_outputs["x"]) == [9.0, 9.0]
    assert noting.inputs == [float(number) for number in range(10)]


def test_a_data_set_or_a_list_begins_anew_in_each_loop(noting):
    for batches in (floats(4), numbers(4)):
        noting.run(batches, 2)
        noting.run(batches, 2)
    assert noting.inputs == [0.0, 1.0] * 4


@pytest.mark.parametrize(("prefetch", "iterations"), [(1, 3), (5, 3), (2, 1), (100, 10)])
def test_no_more_batches_are_taken_than_there_are_iterations(noting, prefetch, iterations):
    batches = Counted(10)
    noting.run(batches, iterations, prefetch=prefetch)
    assert batches.taken == iterations


def test_values_by_replica_are_each_replicas_own(two, noting):
    noting.run([two.spread(lambda i, n=n: 10.0 * n + tf.cast(i, tf.float32)) for n in range(3)], 3)
    assert noting.inputs == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]


@pytest.mark.parametrize(
    "values",
    [
        tf.constant([1.5, -2.0], tf.bfloat16),
        tf.constant([1.5, -2.0], tf.float16),
        tf.constant([1.5, np.pi], tf.float64),
        tf.constant([True, False]),
        tf.constant([1 + 2j, 3], tf.complex64),
        tf.constant([[1, 2], [3, 1 << 40]], tf.int64),
        tf.constant([0, 255], tf.uint8),
        tf.zeros([0, 3]),
        np.arange(6.0)[::2],
        np.float32([[1, 2], [3, 4]]).T,
        np.array([1.5, 2.5], ">f4"),
        np.array([1, 256], ">i4"),
    ],
    ids=lambda value: f"{value.dtype} {value.shape}",
)
def test_inputs_arrive_to_the_bit(two, values):
    def step(context, x):
        context.set_last_step_output("x", x)

    output = two.strategy.run_steps(step, [values, values], 2).last_step_outputs["x"]
    for one in output.values:
        assert one.dtype == tf.convert_to_tensor(values).dtype
        np.testing.assert_array_equal(one.numpy(), np.asarray(values))


def test_batches_may_be_tuples_dictionaries_and_nested(two):
    def step(context, x, pair, rest):
        context.set_last_step_output("all", [x, pair[0] * 10.0, pair[1] * 100.0, rest["a"]["b"][0] * 1000.0])
        assert rest["name"] == "static"
        assert rest["nothing"] is None

    batches = []
    for n in range(3):
        own = two.spread(lambda i, n=n: 1.0 * n + tf.cast(i, tf.float32))
        rest = {"a": {"b": [own]}, "name": "static", "nothing": None}
        batches.append((np.float32(n), (tf.constant(n + 1.0), own), rest))
    outputs = two.strategy.run_steps(step, batches, 3).last_step_outputs["all"]
    assert [two.each(each) for each in outputs] == [[2.0, 2.0], [30.0, 30.0], [200.0, 300.0], [2000.0, 3000.0]]


def test_sparse_and_ragged_batches_of_one_shape(two):
    def step(context, sparse, ragged):
        context.set_last_step_output("sums", (sparse.values * 10.0, tf.reduce_sum(ragged.flat_values)))

    batches = [
        (tf.SparseTensor([[0, n]], [n + 1.0], [2, 3]), tf.ragged.constant([[1.0 * n], [2.0, 3.0]])) for n in range(3)
    ]
    sums = two.strategy.run_steps(step, batches, 3).last_step_outputs["sums"]
    assert [two.each(each)[1] for each in sums] == [[30.0], 7.0]


class Array(np.ndarray):
    """A program's own kind of array."""


@pytest.mark.parametrize("kind", [np.ndarray, Array])
def test_one_array_may_be_filled_anew_for_each_batch(noting, kind):
    """As loaders do that save memory; what is fetched ahead is a copy."""
    array = np.zeros(4096, np.float32).view(kind)

    def batches():
        for number in range(20):
            array[...] = number
            yield (array,)

    step = lambda context, x: noting.step(context, tf.reduce_max(x))  # noqa: E731
    noting.strategy.run_steps(step, batches(), 20, prefetch=8)
    assert noting.inputs == [float(number) for number in range(20)]


PAIR = (np.float32(1.0), np.float32(2.0))


def pass_out(context, *values):
    context.set_last_step_output("all", values)


@pytest.mark.parametrize(
    ("batch", "step", "expected"),
    [
        (PAIR, lambda context, x, y: pass_out(context, x, y), [1.0, 2.0]),
        (PAIR, lambda context, *inputs: pass_out(context, *inputs), [1.0, 2.0]),
        (PAIR, lambda context, pair: pass_out(context, *pair), [1.0, 2.0]),
        (PAIR, lambda context, x, y, scale=3.0: pass_out(context, x, y * scale), [1.0, 6.0]),
        ((PAIR,), lambda context, pair: pass_out(context, *pair), [1.0, 2.0]),
        (list(PAIR), lambda context, inputs: pass_out(context, *inputs), [1.0, 2.0]),
        ({"x": PAIR[0], "y": PAIR[1]}, lambda context, inputs: pass_out(context, inputs["x"], inputs["y"]), [1.0, 2.0]),
    ],
    ids=["two", "any", "one", "default", "nested", "list", "dict"],
)
def test_a_tuple_is_several_arguments_or_one_as_the_step_takes_it(two, batch, step, expected):
    found = two.strategy.run_steps(step, [batch], 1).last_step_outputs["all"]
    assert [two.each(each) for each in found] == [[value, value] for value in expected]


def test_in_extended_a_batch_is_one_argument_unless_the_step_takes_more(two):
    kinds = []
    run = two.strategy.extended.experimental_run_steps_on_iterator
    run(lambda context, inputs: kinds.append(type(inputs)), [PAIR], 1)
    run(lambda context, inputs, scale=3.0: kinds.append((type(inputs), scale)), [PAIR], 1)
    run(lambda context, x, y: kinds.append(2), [PAIR], 1)
    run(lambda context, *inputs: kinds.append(len(inputs)), [PAIR], 1)
    assert kinds == [tuple, (tuple, 3.0), 2, 1]


def test_more_replicas_than_cores_that_never_meet(replicas):
    """Each may be as far from the others as batches are fetched ahead."""
    eight = Noting(replicas(8), most=200)
    assert eight.run(numbers(200), 200, prefetch=1).steps == 200
    assert eight.inputs == [float(number) for number in range(200)]


# Fetching ahead.


class Held:
    """A step that waits on the host, in step `at`, until it is let go."""

    def __init__(self, at):
        self.at = at
        self.arrived = threading.Event()
        self.go = threading.Event()

    @xla.returns(None)
    def host(self, x):
        if float(x) == self.at:
            self.arrived.set()
            assert self.go.wait(SOON)

    def step(self, context, x):
        xla.outside_compilation(self.host, x)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_batches_are_fetched_ahead_while_a_step_runs_and_no_more_than_asked_for(two, prefetch):
    fetched = threading.Semaphore(0)

    def batches():
        for number in itertools.count():
            fetched.release()
            yield np.float32(number)

    held = Held(at=3)
    run = threading.Thread(
        target=two.strategy.run_steps, args=(held.step, batches(), 100), kwargs={"prefetch": prefetch}
    )
    run.start()
    assert held.arrived.wait(SOON)
    for _ in range(4 + prefetch):  # of steps 0 to 3, and ahead
        assert fetched.acquire(timeout=SOON)
    more = fetched.acquire(timeout=0.2)
    held.go.set()
    run.join(SOON)
    assert not run.is_alive()
    assert not more


def test_memory_is_bounded_by_what_is_fetched_ahead(two):
    """Of 30 batches those fetched ahead are alive, one that is being fetched and those in use; and none at the end."""
    alive = []
    most = []

    def batches():
        for number in range(30):
            batch = tf.fill([1000], 1.0 * number)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            most.append(sum(each() is not None for each in alive))

    total = two.variable(0.0, SUM)
    two.strategy.run_steps(lambda context, x: total.assign_add(tf.reduce_mean(x)), batches(), 30, prefetch=2)
    assert total.numpy() == 2 * sum(range(30))
    assert max(most) <= 2 + 3
    gc.collect()
    assert not [each() for each in alive if each() is not None]


def feeding():
    """Whether there is a thread that feeds."""
    return any(thread.name.startswith(THREAD) for thread in threading.enumerate())


def fail(error):
    raise error


def then_fail(batches, error):
    yield from batches
    raise error


def test_the_thread_is_gone_when_the_run_is(two, noting):
    """However it ended; and there is one meanwhile."""
    seen = []

    def batches(count):
        for number in range(count):
            seen.append(feeding())
            yield np.float32(number)

    noting.run(batches(5), 3)
    assert not feeding()
    assert seen == [False, True, True]  # the first batch is what the program is made for

    with pytest.raises(tf.errors.OutOfRangeError):
        noting.run(batches(2), 3)
    assert not feeding()

    with pytest.raises(OSError, match="no more"):
        noting.run(then_fail(batches(2), OSError("no more")), 5)
    assert not feeding()

    host = lambda: fail(OSError("on the host"))  # noqa: E731
    with pytest.raises(OSError, match="on the host"):
        two.strategy.run_steps(lambda context, x: xla.outside_compilation(xla.returns(None)(host)), batches(9), 9)
    assert not feeding()

    with pytest.raises(OSError, match="traced"):
        two.strategy.run_steps(lambda context, x: fail(OSError("traced")), batches(9), 9)
    assert not feeding()


# Ends.


def test_as_many_batches_as_iterations_and_then_none(noting):
    batches = iter(floats(4))
    assert noting.run(batches, 4).steps == 4
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError, match="0 of 4 steps") as raised:
            noting.run(batches, 4, initial_loop_values={"x": 7.0})
        assert raised.value.context.steps == 0
        assert raised.value.context.last_step_outputs == {"x": 7.0}
    assert noting.inputs == [0.0, 1.0, 2.0, 3.0]


EMPTY = {
    "list": lambda strategy: [],
    "generator": lambda strategy: iter(()),
    "data set": lambda strategy: floats(0),
    "iterator": lambda strategy: iter(floats(0)),
    "get_next": lambda strategy: GetNext(floats(0)),
    "distributed": lambda strategy: iter(strategy.experimental_distribute_dataset(floats(0).batch(2))),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_no_batch_at_all(two, launched, make):
    before = xla.counts()
    with pytest.raises(tf.errors.OutOfRangeError, match="0 of 3 steps") as raised:
        two.strategy.run_steps(lambda context, x: None, make(two.strategy), 3)
    assert raised.value.context.steps == 0
    assert raised.value.context.last_step_outputs == {}
    assert xla.counts() == before


class Cancelled(BaseException):
    """As of asyncio: no Exception."""


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError("bug"), Cancelled("enough")], ids=repr)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_an_iterator_raises_is_raised_when_the_steps_before_are_done(noting, after, error):
    error = type(error)(*error.args)
    with pytest.raises(type(error)) as raised:
        noting.run(then_fail(numbers(after), error), 10)
    assert raised.value is error
    assert noting.inputs == [float(number) for number in range(after)]
    assert error.context.steps == after
    if after:
        assert noting.replicas.each(error.context.last_step_outputs["x"]) == [after - 1.0] * 2
    assert any(f"{after} of 10 steps" in note for note in error.__notes__)
    noting.run(numbers(2, start=50), 2)
    assert noting.inputs[after:] == [50.0, 51.0]


def test_an_error_of_a_data_set_has_tensorflows_type(two, noting):
    def check(i):
        with tf.control_dependencies([tf.debugging.assert_less(i, 6.0, message="too large")]):
            return tf.identity(i)

    bad = floats(12).map(check)
    shared = two.strategy.experimental_distribute_dataset(bad.batch(2, drop_remainder=True))
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    for batches, steps in ((bad, 6), (shared, 3)):
        noting.count.assign(0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large") as raised:
            two.strategy.run_steps(step, iter(batches), 12)
        assert raised.value.context.steps == noting.count.numpy() == steps


def test_an_error_that_takes_no_attributes_is_raised_all_the_same(noting):
    class Frozen(Exception):
        __slots__ = ()

        def __setattr__(self, name, value):
            raise AttributeError("frozen")

    with pytest.raises(Frozen, match="ice"):
        noting.run(then_fail(numbers(2), Frozen("ice")), 3)
    assert noting.inputs == [0.0, 1.0]


# Batches that do not fit.


def rows(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("batches", "messages"),
    [
        ([rows(4, 2), rows(4, 2), rows(3, 2)], ["(3, 2)", "(4, 2)", "args[0]", "drop_remainder=True"]),
        ([{"x": rows(4), "y": rows(4)}] * 2 + [{"x": rows(4), "y": rows(2)}], ["['y']", "drop_remainder=True"]),
        ([rows(4), rows(4), rows(4, 1)], ["(4, 1)", "drop_remainder=True"]),
        ([rows(4), rows(4), rows(4).astype(np.float64)], ["dtype"]),
        ([rows(4), rows(4), [rows(4)]], ["structure"]),
        ([{"x": rows(4)}, {"x": rows(4)}, {"y": rows(4)}], ["structure"]),
        ([(rows(4), rows(4))] * 2 + [rows(2, 4)], ["structure"]),
        ([(rows(4), rows(4))] * 2 + [np.float32(1.0)], ["structure"]),
        ([(rows(4), rows(4))] * 2 + [None], ["structure"]),
        ([rows(4), rows(4), None], ["structure"]),
        ([rows(4), rows(4), (rows(4), rows(4))], ["structure"]),
    ],
    ids=[
        "shape",
        "in a dict",
        "rank",
        "dtype",
        "list",
        "keys",
        "rows for a pair",
        "scalar for a pair",
        "none for a pair",
        "none",
        "pair for one",
    ],
)
def test_a_batch_unlike_the_first_ends_the_run_after_the_steps_before(two, batches, messages):
    ran = two.variable(0, tf.VariableAggregation.ONLY_FIRST_REPLICA)
    with pytest.raises(InputsError) as raised:
        two.strategy.run_steps(lambda context, *inputs: ran.assign_add(1), batches, 3)
    for message in (*messages, "atch 2"):
        assert message in str(raised.value)
    assert raised.value.context.steps == ran.numpy() == 2


def test_the_order_of_a_dictionarys_keys_is_of_no_matter(two):
    batches = [{"a": np.float32(1.0), "b": np.int32(2)}, {"b": np.int32(4), "a": np.float32(3.0)}]

    def step(context, inputs):
        context.set_last_step_output("both", (inputs["a"], inputs["b"]))

    both = two.strategy.run_steps(step, batches, 2).last_step_outputs["both"]
    assert [two.each(each)[0] for each in both] == [3.0, 4]


def test_a_data_set_with_a_partial_last_batch(two, noting):
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    for count in (11, 9):  # of the last batch one replica has less, or nothing
        batches = iter(two.strategy.experimental_distribute_dataset(floats(count).batch(4)))
        with pytest.raises(InputsError, match="drop_remainder=True") as raised:
            two.strategy.run_steps(step, batches, 5)
        assert raised.value.context.steps == 2
    assert noting.inputs == [[1.0, 9.0] * 2, [5.0, 13.0] * 2]


def test_a_first_batch_that_replicas_cannot_share_evenly(two, launched):
    batches = iter(two.strategy.experimental_distribute_dataset(floats(3).batch(4)))
    with pytest.raises(InputsError, match=r"args\[0\] .*\(2,\), \(1,\).*drop_remainder=True"):
        two.strategy.run_steps(lambda context, x: None, batches, 5)
    assert launched() == 0


def test_a_loop_of_batches_of_another_shape_is_another_program(two, launched):
    before = xla.counts()
    total = two.variable(0.0, SUM)
    for length in (4, 3, 4):
        two.strategy.run_steps(lambda context, x: total.assign_add(tf.reduce_sum(x)), [np.ones(length, "f4")] * 2, 2)
    assert total.numpy() == 2 * 2 * 11
    assert (xla.counts() - before).compiles == 2
    assert launched() == 3


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        (tf.constant("a"), "args[0]"),
        ({"x": tf.zeros([]), "text": tf.constant(["a"])}, "args[0]['text']"),
        (np.array("a"), "args[0]"),
    ],
    ids=["tensor", "in a dict", "NumPy"],
)
def test_strings_are_refused_with_their_name(two, launched, batch, name):
    with pytest.raises(ReplicaEngineError, match="string") as raised:
        two.strategy.run_steps(lambda context, x: None, [batch] * 3, 3)
    assert name in str(raised.value)
    assert launched() == 0


# Calls that make no sense.


@pytest.mark.parametrize("name", ["iterations", "prefetch"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_numbers_of_steps_and_batches_are_positive_ints(two, launched, name, value):
    batches = Counted(5)
    with pytest.raises(InputsError, match=rf"`{name}` must be a positive int; got {value!r}"):
        two.strategy.run_steps(lambda context, x: None, batches, **{"iterations": 2, name: value})
    assert launched() == batches.taken == 0


def test_extended_checks_the_number_of_steps_too(two):
    with pytest.raises(InputsError, match=r"`iterations` must be a positive int; got 0"):
        two.strategy.extended.experimental_run_steps_on_iterator(lambda context, x: None, numbers(2), 0)


def test_a_loop_is_no_part_of_a_function(two):
    batches = Counted(5)

    def steps():
        two.strategy.run_steps(lambda context, x: None, batches, 2)

    for call in (tf.function(steps), lambda: two.strategy.run(steps)):
        with pytest.raises(InputsError, match=r"outside the tf\.function"):
            call()
    assert batches.taken == 0


def test_what_is_no_iterator_is_refused(two):
    with pytest.raises(TypeError, match="iter"):
        two.strategy.run_steps(lambda context, x: None, 5, 2)


def test_a_step_that_takes_another_number_of_inputs(two):
    with pytest.raises(TypeError, match=r"positional argument"):
        two.strategy.run_steps(lambda context, a, b, c: None, [PAIR] * 2, 2)


@pytest.fixture
def no_hang():
    """Ctrl-C for what would hang; `no_hang.fired` says whether it came to that."""
    state = types.SimpleNamespace(fired=False)

    def fire():
        state.fired = True
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(6.0, fire)
    timer.start()
    yield state
    timer.cancel()
    timer.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("uses", ["reads", "runs"])
def test_an_iterator_that_uses_the_devices_does_not_hang(two, no_hang, uses):
    """They are busy with the steps, which wait for it. It works, or is told so."""
    total = two.variable(0.0, SUM)

    def batches():
        for number in range(4):
            if uses == "reads":
                total.numpy()
            else:
                two.strategy.run(lambda: total.assign_add(total * 0.0))
            yield np.float32(number)

    try:
        two.strategy.run_steps(lambda context, x: total.assign_add(x), batches(), 4)
    except ReplicaEngineError:
        assert total.numpy() in (0.0, 2 * 0.0, 2 * 1.0)
    except KeyboardInterrupt:
        pass
    assert not no_hang.fired
