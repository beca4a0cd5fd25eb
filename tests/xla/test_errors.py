"""Errors: of the right class, before anything runs, with the user's own line, and what to write instead."""

import inspect
import pickle

import pytest
import tensorflow as tf
from helpers.host_work import COLLECTIVES, Failing

from replica_engine import errors, xla
from replica_engine.errors import (
    CaptureError,
    CollectiveError,
    DeviceError,
    InputsError,
    LoweringError,
    NotInBodyError,
    ReplicaMismatchError,
    StructureMismatchError,
    VariableCreationError,
)

X = [[tf.constant([1.0, 2.0])], [tf.constant([3.0, 0.0])]]
UNEQUAL = [[0], [1, 2]]


def line_of(fn, text):
    """ "file:line" of the first line of `fn` that has `text`."""
    lines, first = inspect.getsourcelines(fn)
    return f"{__file__}:{next(first + i for i, line in enumerate(lines) if text in line)}"


@pytest.fixture(params=["eager", "inside tf.function"])
def replicate(request):
    """`xla.replicate` in both forms; the same errors come of both."""
    if request.param == "eager":
        return xla.replicate
    return lambda *args, **kwargs: tf.function(lambda: xla.replicate(*args, **kwargs))()


@pytest.fixture
def refused(replicate):
    """`refused(body, error, *messages)`: the body cannot run, says so, and has written nothing."""

    def refused(body, error, *messages, inputs=X):
        variable = tf.Variable(1.0)

        def writes_first(*args):
            variable.assign(99.0)
            return body(*args)

        before = xla.counts()
        with pytest.raises(error) as raised:
            replicate(writes_first, inputs)
        assert type(raised.value) is error
        for message in messages:
            assert message in str(raised.value)
        assert float(variable) == 1.0
        assert (xla.counts() - before).launches == 0
        again = replicate(lambda x: x * 2.0, X)
        assert again[0].numpy().tolist() == [2.0, 4.0]

    return refused


@pytest.fixture
def no_soft_placement():
    """Ops that XLA cannot compile stay where they are."""
    tf.config.set_soft_device_placement(False)
    yield
    tf.config.set_soft_device_placement(True)


class TestWhatXlaCannotCompile:
    @pytest.mark.parametrize(
        ("op", "name"),
        [
            (lambda x: tf.strings.length(tf.strings.as_string(x)), "AsString"),
            (lambda x: tf.py_function(lambda y: y, [x], tf.float32), "EagerPyFunc"),
            (lambda x: tf.strings.length(tf.io.read_file("nothing")), "ReadFile"),
        ],
        ids=["as_string", "py_function", "read_file"],
    )
    def test_an_op(self, refused, no_soft_placement, op, name):
        refused(lambda x: op(x), LoweringError, name, __file__, "xla.outside_compilation", "MirroredStrategy")

    def test_an_op_at_its_line(self, refused, no_soft_placement):
        def body(x):
            y = x * 2.0
            text = tf.strings.as_string(y)  # here
            return tf.strings.length(text)

        refused(body, LoweringError, line_of(body, "# here"))

    def test_an_op_in_a_function_at_its_line(self, refused, no_soft_placement):
        @tf.function
        def inner(x):
            return tf.strings.length(tf.strings.as_string(x))  # here

        def body(x):
            return tf.cond(x[0] > 0.0, lambda: inner(x), lambda: tf.zeros([2], tf.int32))

        refused(body, LoweringError, "AsString", line_of(inner.python_function, "# here"))

    @pytest.mark.parametrize(
        "cut",
        [lambda x: tf.where(x > 1.0), lambda x: tf.boolean_mask(x, x > 1.0), lambda x: tf.unique(x)[0]],
        ids=["where", "boolean_mask", "unique"],
    )
    def test_a_result_whose_shape_depends_on_data(self, refused, cut):
        def body(x):
            rest = cut(x)
            return x, rest

        refused(body, LoweringError, "Result 1", __file__, "Return a mask")

    def test_a_result_whose_shape_depends_on_data_at_its_line(self, refused):
        def body(x):
            rest = tf.boolean_mask(x, x > 1.0)  # here
            return {"rest": rest}

        refused(body, LoweringError, "Result 0", line_of(body, "# here"))

    def test_a_shape_that_depends_on_data(self, refused):
        def body(x):
            size = tf.cast(tf.reduce_sum(x), tf.int32)
            return tf.reshape(x, [size, -1])  # here

        refused(body, LoweringError, "Reshape", line_of(body, "# here"), "Python number")

    @pytest.mark.parametrize(
        "make",
        [
            lambda n: tf.ones([n]),
            lambda n: tf.zeros([n, 2]),
            lambda n: tf.fill([n], 2.0),
            lambda n: tf.eye(n),
            lambda n: tf.random.normal([n]),
            lambda n: tf.cond(n > 0, lambda: tf.ones([n]), lambda: tf.zeros([1])),
            lambda n: tf.while_loop(lambda n: n < 3, lambda n: (n + tf.size(tf.ones([n])),), [n]),
        ],
        ids=["ones", "zeros", "fill", "eye", "normal", "a branch", "a loop"],
    )
    def test_a_shape_that_depends_on_data_in_a_function_of_tensorflows(self, refused, make):
        def body(x):
            return make(tf.cast(tf.reduce_sum(x), tf.int32))

        refused(body, LoweringError, f"{__file__}:{make.__code__.co_firstlineno} in a lambda")

    def test_ops_of_one_name_in_two_functions(self, refused):
        """The name of an op is not enough to find its line."""

        def body(x):
            size = tf.cast(tf.reduce_sum(x), tf.int32)
            small = lambda: tf.size(tf.ones([2]))  # noqa: E731
            large = lambda: tf.size(tf.ones([size]))  # noqa: E731 - here
            return tf.cond(x[0] > 0.0, small, large)

        refused(body, LoweringError, line_of(body, "- here"))

    def test_the_gradient_of_a_loop_without_a_bound(self, refused):
        def body(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                while tf.reduce_sum(y) < 100.0:
                    y = y * 2.0
            return tape.gradient(y, x)

        refused(body, LoweringError, "maximum_iterations")

    def test_a_string_as_a_result(self, refused, no_soft_placement):
        refused(lambda x: (x, tf.constant("text")), LoweringError, "string", __file__)

    def test_strings_as_arguments(self, refused, no_soft_placement):
        inputs = [[tf.constant("a")], [tf.constant("b")]]
        refused(lambda text: tf.strings.length(text), LoweringError, "args[0]", "string", "numbers", inputs=inputs)


class TestWhatCannotBeCaptured:
    def test_a_lookup_table(self, refused, no_soft_placement):
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4]), -1)

        def body(x):
            return table.lookup(tf.cast(x, tf.int32))  # here

        refused(body, CaptureError, "LookupInterface", "xla.outside_compilation", line_of(body, "# here"))

    def test_a_dataset_iterator(self, refused):
        iterator = iter(tf.data.Dataset.range(5))

        def body(x):
            return x + tf.cast(next(iterator), tf.float32)  # here

        refused(body, CaptureError, "Iterator", "xla.outside_compilation", line_of(body, "# here"))
        assert int(next(iterator)) == 0

    def test_a_string(self, refused, no_soft_placement):
        text = tf.constant("text")

        def body(x):
            return x + tf.cast(tf.strings.length(text), tf.float32)  # here

        refused(body, CaptureError, "string", "numbers", line_of(body, "# here"))


class TestVariables:
    def test_new_ones_in_each_trace(self, refused):
        refused(lambda x: tf.Variable(1.0, name="fresh") + x, VariableCreationError, "fresh", "Create them once")

    def test_of_strings(self, refused, no_soft_placement):
        text = tf.Variable("text")
        refused(lambda x: tf.strings.length(text), CaptureError, __file__)

    def test_different_ones_on_different_replicas_cannot_be_written(self, refused):
        inputs = [[tf.Variable(1.0)], [tf.Variable(2.0)]]
        refused(lambda v: v.assign_add(1.0), ReplicaMismatchError, "args[0]", inputs=inputs)


class TestReplicasThatDiffer:
    @pytest.mark.parametrize(
        ("parts", "error", "messages"),
        [
            ((tf.zeros([2]), tf.zeros([3])), ReplicaMismatchError, ["(2,)", "(3,)", "replica 1", "drop_remainder"]),
            ((tf.zeros([2]), tf.zeros([2, 1])), ReplicaMismatchError, ["(2,)", "(2, 1)"]),
            ((tf.zeros([2]), tf.zeros([2], tf.int32)), ReplicaMismatchError, ["float32", "int32", "Cast"]),
            (({"a": 1.0}, {"b": 1.0}), StructureMismatchError, ["inputs[0]", "'a'", "'b'"]),
            (([1.0], [1.0, 2.0]), StructureMismatchError, ["inputs[0]", "length 1", "length 2"]),
            (([1.0], (1.0,)), StructureMismatchError, ["inputs[0]", "list", "tuple"]),
            (("a", "b"), ReplicaMismatchError, ["'a'", "must be a tensor"]),
            ((None, tf.zeros([2])), ReplicaMismatchError, ["None", "must be a tensor"]),
        ],
        ids=["shapes", "ranks", "dtypes", "keys", "lengths", "kinds", "strings", "none"],
    )
    def test_in_what_they_get(self, refused, parts, error, messages):
        refused(lambda x: tf.nest.flatten(x), error, *messages, inputs=[[part] for part in parts])

    def test_in_the_middle_of_many(self, refused):
        inputs = [[1.0, {"x": [tf.zeros([3 if i == 2 else 2])]}] for i in range(4)]
        refused(lambda a, b: a, ReplicaMismatchError, "args[1]['x'][0]", "replica 2", inputs=inputs)

    def test_in_the_number_of_arguments(self, refused):
        refused(lambda *x: x, StructureMismatchError, "length 1", "length 2", inputs=[[1.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "[[x0, y0], [x1, y1]]"),
        ((), "[[x0, y0], [x1, y1]]"),
        (5, "[[x0, y0], [x1, y1]]"),
        ({"x": 1}, "[[x0, y0], [x1, y1]]"),
        (tf.zeros([2, 1]), "[[x0, y0], [x1, y1]]"),
        ([1.0, 2.0], "[[x0], [x1]]"),
        ([tf.zeros([1]), tf.zeros([1])], "[[x0], [x1]]"),
        (["a", "b"], "[[x0], [x1]]"),
    ],
)
def test_inputs_are_a_list_over_replicas_of_lists(refused, inputs, message):
    refused(lambda *x: x, InputsError, message, inputs=inputs)


def test_the_number_of_replicas_is_that_of_the_inputs(replicate):
    with pytest.raises(InputsError, match=r"2 replicas.*num_replicas is 3"):
        replicate(lambda x: x, X, num_replicas=3)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2"])
def test_a_number_of_replicas_is_a_positive_int(replicate, count):
    with pytest.raises(DeviceError, match="positive int"):
        replicate(lambda: 1, num_replicas=count)


def test_too_many_replicas_for_any_machine(replicate):
    with pytest.raises(DeviceError, match=r"1025 replicas .* at most 1024 are made"):
        replicate(lambda: 1, num_replicas=1025)


class TestPlatforms:
    def test_unknown_ones(self):
        with pytest.raises(DeviceError, match=r"'xpu'.*tpu, gpu, cpu"):
            xla.PjrtClusterResolver("xpu")

    @pytest.mark.parametrize(("platform", "extra"), [("tpu", "[tpu]"), ("gpu", "[cuda]")])
    def test_absent_ones(self, platform, extra):
        present = xla.PjrtClusterResolver().platform
        if present == platform:  # on a machine that has it
            assert xla.PjrtClusterResolver(platform).platform == platform
            return
        with pytest.raises(DeviceError) as raised:
            xla.PjrtClusterResolver(platform)
        assert f"no {platform.upper()} device" in str(raised.value)
        assert present in str(raised.value)
        assert extra in str(raised.value)

    def test_names_in_capitals(self):
        assert xla.PjrtClusterResolver("CPU").platform == "cpu"


class TestCollectives:
    @pytest.mark.parametrize("name", ["replica_id", "num_replicas", *COLLECTIVES])
    @pytest.mark.parametrize("traced", [False, True])
    def test_outside_a_body(self, name, traced):
        args = ([1.0], *COLLECTIVES[name]) if name in COLLECTIVES else ()
        call = lambda: getattr(xla, name)(*args)  # noqa: E731
        with pytest.raises(NotInBodyError, match=rf"xla\.{name}\(\).*xla.replicate"):
            (tf.function(call) if traced else call)()

    @pytest.mark.parametrize("groups", [[], [[0]], [[0, 1], [1]], [[0, 2]], [[-1, 0]], [[0, 1, 2]], [0, 1]], ids=str)
    def test_groups_that_do_not_divide_the_replicas(self, refused, groups):
        refused(lambda x: xla.cross_replica_sum(x, groups), CollectiveError, "groups")

    @pytest.mark.parametrize(
        "move", [lambda x: xla.all_gather(x, 0, UNEQUAL), lambda x: xla.all_to_all(x, 0, 0, UNEQUAL)]
    )
    def test_unequal_groups_where_shapes_depend_on_them(self, refused, move):
        refused(move, CollectiveError, "equal sizes", "[[0], [1, 2]]", inputs=[[tf.zeros([6])]] * 3)

    @pytest.mark.parametrize(
        ("operation", "messages"),
        [
            (lambda x: xla.all_gather(x, 1), ["all_gather: axis 1", "(2,)"]),
            (lambda x: xla.all_gather(x, -2), ["all_gather: axis -2"]),
            (lambda x: xla.all_gather(x[0], 1), ["axis 1"]),
            (lambda x: xla.all_to_all(x, 0, 5), ["all_to_all: axis 5"]),
            (lambda x: xla.all_to_all(x[0], 0, 0), ["all_to_all: axis 0", "()"]),
            (lambda x: xla.all_to_all(tf.zeros([3]), 0, 0), ["length 3", "2 equal parts"]),
            (lambda x: xla.all_gather(tf.where(x > 1.0)), ["all_gather at ", "needs a shape", "(None, 1)"]),
            (lambda x: xla.all_reduce(x, "PRODUCT"), ["PRODUCT", "MAX, MEAN, MIN, SUM"]),
            (lambda x: xla.cross_replica_sum(x > 1.0), ["bool", "tf.cast"]),
            (lambda x: xla.all_reduce(tf.complex(x, x), "MAX"), ["complex64", "MAX"]),
        ],
    )
    def test_what_does_not_fit_the_values(self, refused, operation, messages):
        refused(operation, CollectiveError, *messages)

    @pytest.mark.parametrize("name", COLLECTIVES)
    @pytest.mark.parametrize(
        ("make", "dtype"),
        [
            (tf.strings.as_string, "string"),
            (lambda x: tf.strings.split(tf.strings.as_string(x)).values, "string"),
            (lambda x: tf.raw_ops.OptionalFromValue(components=[x]), "variant"),
            (lambda x: tf.quantization.quantize(x, 0.0, 5.0, tf.qint8).output, "qint8"),
        ],
        ids=["string", "string of unknown shape", "variant", "quantized"],
    )
    def test_values_that_no_device_has(self, refused, name, make, dtype):
        def body(x):
            return getattr(xla, name)(make(x), *COLLECTIVES[name])  # here

        refused(body, CollectiveError, line_of(body, "# here"), f"dtype {dtype}", "after the run")

    @pytest.mark.parametrize(
        "pairs",
        [[(0, 1), (0, 0)], [(0, 1), (1, 1)], [(0, 2)], [(-1, 0)], [0, 1], [(0, 1, 1)]],
        ids=["sends twice", "receives twice", "beyond", "negative", "no pairs", "triples"],
    )
    def test_pairs_that_are_no_permutation(self, refused, pairs):
        refused(lambda x: xla.ppermute(x, pairs), CollectiveError, "pairs")


def test_a_users_exception_keeps_its_type_and_contents(refused, replicate):
    def body(x):
        raise Failing(7)

    refused(body, Failing, "code 7")
    with pytest.raises(Failing) as raised:
        replicate(body, X)
    assert (raised.value.code, raised.value.reason) == (7, "of the user's own")


@pytest.mark.parametrize(
    "error",
    [
        errors.BackendMissingError("a message"),
        NotInBodyError("a message"),
        InputsError("a message"),
        ReplicaMismatchError.shapes("args[0]", 1, "(2,)", "(3,)"),
        CollectiveError.bad_groups([[0]], 2),
        CaptureError("a message"),
        VariableCreationError("a message"),
        LoweringError.unsupported_op("fn", "AsString", "file:1 in fn"),
        DeviceError.too_many(5000, 1024),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert isinstance(copy, errors.ReplicaEngineError)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.BackendMissingError, ImportError),
        (NotInBodyError, RuntimeError),
        (InputsError, ValueError),
        (InputsError, TypeError),
        (ReplicaMismatchError, ValueError),
        (CollectiveError, ValueError),
        (CaptureError, ValueError),
        (VariableCreationError, ValueError),
        (LoweringError, ValueError),
        (DeviceError, ValueError),
    ],
)
def test_errors_are_of_the_builtin_kind_too(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, errors.ReplicaEngineError)
