"""`xla.from_jax`: functions of JAX called with tensors, in every form of a run and outside of runs."""

import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import pallas as pl

from replica_engine import xla
from replica_engine.errors import InputsError, LoweringError

X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
W = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)


def softened(x, w):
    return {"rows": jnp.tanh(x @ w), "loss": (jnp.sum(jax.nn.softmax(x @ w) ** 2),)}


def loss(x, w):
    made = softened(x, w)
    return jnp.sum(made["rows"] ** 3) + made["loss"][0]


def loss_of_tensors(x, w):
    made = xla.from_jax(softened)(x, w)
    return tf.reduce_sum(made["rows"] ** 3) + made["loss"][0]


def close(values, expected):
    for value in values:
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=2e-6)


def test_values_and_gradients_are_those_of_jax(run, local):
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            value = loss_of_tensors(x, w)
        return value, *tape.gradient(value, [x, w])

    values = zip(*local(run(step, args=(tf.constant(X), tf.constant(W)))), strict=True)
    for found, expected in zip(values, [loss(X, W), *jax.grad(loss, (0, 1))(X, W)], strict=True):
        close(found, expected)


def test_gradients_of_gradients(run, local):
    def step(x, w):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                value = loss_of_tensors(x, w)
            squares = tf.reduce_sum(inner.gradient(value, x) ** 2)
        return outer.gradient(squares, x)

    expected = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, W) ** 2))(X)
    close(local(run(step, args=(tf.constant(X), tf.constant(W)))), expected)


def test_loops_and_branches(run, local):
    layer = xla.from_jax(lambda x, w: jnp.tanh(x @ w))

    def step(x, w, count):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            _, y = tf.while_loop(
                lambda i, _: i < count,
                lambda i, y: (i + 1, layer(y, w)),
                (tf.constant(0), x),
                maximum_iterations=5,
            )
            y = tf.cond(tf.reduce_sum(x) > 0, lambda: layer(y, w), lambda: y)
        return tape.gradient(y, [x, w])

    def expected(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    found = local(run(step, args=(tf.constant(X), tf.constant(W), tf.constant(3))))
    for index, gradient in enumerate(jax.grad(expected, (0, 1))(X, W)):
        close([each[index] for each in found], gradient)


def test_forward_differences(strategy, local):
    """Forward mode, which TensorFlow makes of the gradients."""
    called = xla.from_jax(lambda x: jnp.sin(x) ** 2)
    x = tf.constant([0.5, 1.0])
    with tf.autodiff.ForwardAccumulator(x, tf.constant([1.0, 2.0])) as accumulator:
        value = called(x)
    np.testing.assert_allclose(accumulator.jvp(value), [np.sin(1.0), 2 * np.sin(2.0)], rtol=1e-6)


def test_a_gradient_of_ones_own(run, local):
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, x), lambda x, g: (jnp.where(x > 1, 7.0, g),))
    called = xla.from_jax(clipped)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(called(x))
        return tape.gradient(value, x)

    assert local(run(step, args=(tf.constant([0.5, 2.0]),))) == [[1.0, 7.0]] * len(local(tf.constant(0)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"])
def test_dtypes(strategy, local, dtype):
    """Also the gradients of complex numbers, which JAX has as the conjugates of TensorFlow's."""
    x = tf.cast(X[:2, :2], dtype) * tf.cast(1 + 0.5j if "complex" in dtype else 1, dtype)
    called = xla.from_jax(lambda a, b: jnp.sin(a) @ b * 2)

    def step(fn, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = fn(x, x)
            total = tf.reduce_sum(tf.abs(value) if value.dtype.is_complex else value)
        return value, tape.gradient(total, x)

    expected = step(lambda a, b: tf.sin(a) @ b * 2, x)
    found = strategy.run(functools.partial(step, called), args=(x,))
    limit = 1e-14 if dtype in ("float64", "complex128") else 2e-6 if "32" in dtype or "64" in dtype else 0.02
    for each, wanted in zip(found, expected, strict=True):
        for value in strategy.experimental_local_results(each):
            assert value.dtype == x.dtype
            np.testing.assert_allclose(*(tf.cast(one, "complex128") for one in (value, wanted)), rtol=limit, atol=limit)


def test_integers_and_truth_values_have_no_gradient(run, local):
    chosen = xla.from_jax(lambda i, m, x: (jnp.where(m, x[i], 0.0), i + 1, ~m))

    def step(i, m, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            values, *others = chosen(i, m, x)
        return others, tape.gradient(values, [x, values])[0]

    args = tf.constant([2, 0], tf.int64), tf.constant([True, False]), tf.constant([1.0, 2.0, 3.0])
    for others, gradient in local(run(step, args=args)):
        assert others == [[3, 1], [False, True]]
        assert gradient == [0.0, 0.0, 1.0]


def test_structures_numbers_and_keywords(strategy, local):
    """Numbers of Python and keywords are constants of the function, so Python code may ask for them."""

    def fn(pair, scale, *, power=1, skip=None):
        return {"a": pair["x"] * scale if scale > 1 else pair["x"], "b": [pair["y"][0] ** power, skip]}

    called = xla.from_jax(fn)
    result = strategy.run(lambda x: called({"x": x, "y": (x + 1,)}, 3, power=2), args=(tf.constant([1.0, 2.0]),))
    assert local(result) == [{"a": [3.0, 6.0], "b": [[4.0, 9.0], None]}] * strategy.num_replicas_in_sync


def test_constants_that_are_equal_and_not_the_same(strategy):
    """0.0 and -0.0, and numbers of other types, also in keywords."""
    sign = xla.from_jax(lambda x, s: jnp.copysign(x, s))
    assert [float(sign(tf.constant(1.0), s)) for s in (0.0, -0.0, 0.0)] == [1.0, -1.0, 1.0]
    product = xla.from_jax(lambda x, *, k: x * k[0])
    made = [product(tf.constant(3), k=(k,)) for k in (2, 2.0, True)]
    assert [each.dtype for each in made] == [tf.int32, tf.float32, tf.int32]
    assert list(map(int, made)) == [6, 6, 3]


def test_lists_and_dicts_of_modules_and_layers(strategy):
    """They are wrappers of TensorFlow and Keras, which JAX does not know."""

    class Module(tf.Module):
        def __init__(self):
            self.weights = [tf.Variable([1.0, 2.0]), {"b": (tf.Variable([3.0, 4.0]),)}]

    class Layer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.held = [tf.Variable([1.0, 2.0]), {"b": (tf.Variable([3.0, 4.0]),)}]

    called = xla.from_jax(lambda tree: tree[0] + tree[1]["b"][0])
    assert called(Module().weights).numpy().tolist() == [4.0, 6.0]
    assert called(Layer().held).numpy().tolist() == [4.0, 6.0]


def test_as_an_argument_of_a_function(strategy, local):
    called = xla.from_jax(lambda x: jnp.sin(x) + jax.lax.cond(True, lambda: 1.0, lambda: 2.0))
    through = tf.function(lambda fn, x: fn(x))
    np.testing.assert_allclose(through(called, tf.constant(0.5)), np.sin(0.5) + 1, rtol=1e-6)


def test_a_function_that_is_made_in_a_step(run, local):
    """AutoGraph leaves the library and JAX alone there too."""

    def step(x):
        return xla.from_jax(lambda x: jax.lax.scan(lambda c, y: (c + y, c), x, jnp.arange(3.0))[0])(x)

    assert set(local(run(step, args=(tf.constant(1.0),)))) == {4.0}


def test_values_and_gradients_are_of_one_trace(run, local):
    """What a function draws while it is traced is the same in its gradient."""
    rng = np.random.default_rng(0)
    called = xla.from_jax(lambda x: x * rng.integers(1, 1000, 3).astype(np.float32))

    def step(x):
        value = called(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            recorded = called(x)
        return value, recorded, tape.gradient(recorded, x)

    for value, recorded, gradient in local(run(step, args=(tf.ones(3),))):
        assert value == recorded == gradient


def test_a_function_is_traced_once_for_equal_shapes(strategy):
    calls = []

    def fn(x, scale):
        calls.append(x.shape)
        return x * scale

    called = xla.from_jax(fn)
    for _ in range(2):
        strategy.run(lambda x: called(x, 2.0), args=(tf.ones([2]),))
        strategy.run(lambda x: called(x, 2.0), args=(tf.ones([3]),))
        called(tf.ones([3]), 2.0)
    assert calls == [(2,), (3,)]


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0


def doubled(x):
    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_kernels_of_other_chips(run, local):
    one = xla.from_jax(doubled)
    with pytest.raises(LoweringError, match=r"`doubled`, a function of from_jax called at .*cannot be lowered for CPU"):
        run(lambda x: one(x), args=(tf.constant([1.0]),))
    other = xla.from_jax(doubled, otherwise=lambda x: x * 2.0)
    assert {each[0] for each in local(run(lambda x: other(x), args=(tf.constant([1.0]),)))} == {2.0}


def test_a_kernel_without_a_gradient_has_that_of_the_function_in_its_place(run, local):
    """Whether sizes are known or not."""
    called = xla.from_jax(doubled, otherwise=lambda x: x * 2.0)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(called(x) ** 2)
        return tape.gradient(value, x)

    x = tf.constant([1.0, 3.0])
    assert {tuple(each) for each in local(run(step, args=(x,)))} == {(8.0, 24.0)}
    assert tf.function(step, input_signature=[tf.TensorSpec([None])])(x).numpy().tolist() == [8.0, 24.0]


def test_a_kernel_with_a_gradient_and_a_function_in_its_place(strategy, local):
    """What the gradient needs differs between the two, and only one of them runs."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] ** 2

    @jax.custom_vjp
    def squares(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    squares.defvjp(lambda x: (squares(x), (x, x, x)), lambda saved, g: (2 * saved[0] * g,))
    called = xla.from_jax(squares, otherwise=lambda x: x * x)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(called(x) ** 2)
        return tape.gradient(value, x)

    assert {tuple(each) for each in local(strategy.run(step, args=(tf.constant([1.0, 2.0]),)))} == {(4.0, 32.0)}


def test_fit_with_a_layer_of_jax(strategy):
    """The batches do not divide evenly, and outside compiled bodies Keras does not say their size."""
    gelu = xla.from_jax(lambda x: jax.nn.gelu(x))

    class Layer(keras.layers.Layer):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def call(self, x):
            return self.fn(x)

    def trained(fn, scope):
        with scope:
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(5), Layer(fn), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
        model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=2, verbose=0)
        return [each.numpy() for each in model.weights]

    expected = trained(keras.ops.gelu, tf.distribute.get_strategy().scope())
    for found, wanted in zip(trained(gelu, strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def outside(fn, *args):
    return xla.from_jax(fn)(*args)


BAD = {
    "string": (lambda: outside(jnp.sin, tf.constant("a")), InputsError, "tensor of string, which JAX does not have"),
    "text": (lambda: outside(lambda x, how: x, tf.ones(2), "mean"), InputsError, r"args\[1\] is str 'mean', and by"),
    "function": (lambda: outside(lambda x, f: f(x), tf.ones(2), jnp.sin), InputsError, "functions as keywords"),
    "ragged": (lambda: outside(jnp.sin, tf.ragged.constant([[1.0], [2.0, 3.0]])), InputsError, r"is ragged.*to_tensor"),
    "sparse": (lambda: outside(jnp.sin, tf.sparse.from_dense([1.0, 0.0])), InputsError, r"is sparse.*to_dense"),
    "a size that is not known": (
        lambda: of_any_size(lambda x: x if x.shape[0] > 3 else -x),
        Exception,
        r"inconclusive(.|\n)*args\[0\] has the shape \(None, 2\) here(.|\n)*drop_remainder",
    ),
    "a kernel of a size that is not known": (
        lambda: of_any_size(doubled),
        ValueError,
        r"args\[0\] has the shape \(None, 2\) here(.|\n)*otherwise=",
    ),
    "keyword": (
        lambda: xla.from_jax(lambda x, y: x)(tf.ones(2), y=tf.ones(2)),
        InputsError,
        "Keywords are constants",
    ),
    "no array": (lambda: outside(lambda x: "a", tf.ones(2)), TypeError, "not a valid JAX type"),
    "prints": (
        lambda: outside(lambda x: jax.debug.print("{}", x) or x, tf.ones(2)),
        InputsError,
        "does more than to compute",
    ),
    "calls the host": (
        lambda: outside(
            lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x), tf.ones(2)
        ),
        InputsError,
        r"does more than to compute \(pure_callback\)",
    ),
    "calls the host in a body": (
        lambda: xla.replicate(
            xla.from_jax(lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)),
            [[tf.ones(2)]] * 2,
        ),
        InputsError,
        r"does more than to compute \(pure_callback\)",
    ),
    "four bits": (
        lambda: outside(lambda x: x.astype(jnp.int32), tf.constant(np.ones(2, ml_dtypes.int4))),
        InputsError,
        "values of 4 bits",
    ),
    "the user's error beside another function": (
        lambda: tf.function(
            xla.from_jax(lambda x: x * undefined, otherwise=lambda x: x),  # noqa: F821
            input_signature=[tf.TensorSpec([None])],
        )(tf.ones(2)),
        NameError,
        "undefined",
    ),
    "unknown rank": (
        lambda: tf.function(xla.from_jax(jnp.sin), input_signature=[tf.TensorSpec(None)])(tf.ones(2)),
        InputsError,
        "no known number of dimensions",
    ),
    "other structure": (
        lambda: xla.from_jax(lambda x: x, otherwise=lambda x: (x,))(tf.ones(2)),
        InputsError,
        r"returns \(float32\[2\],\), and `<lambda>` returns float32\[2\]",
    ),
    "other dtype": (
        lambda: xla.from_jax(lambda x: x, otherwise=lambda x: x > 0)(tf.ones(2)),
        InputsError,
        r"returns bool\[2\], and",
    ),
    "no gradient": (
        lambda: gradient_of(lambda x: jax.lax.while_loop(lambda y: y[0] < 3, lambda y: y * 2, x), tf.ones(2)),
        ValueError,
        "Reverse-mode differentiation",
    ),
}


def of_any_size(fn):
    return tf.function(xla.from_jax(fn), input_signature=[tf.TensorSpec([None, 2])])(tf.ones([4, 2]))


def gradient_of(fn, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = outside(fn, x)
    return tape.gradient(value, x)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    fn, kind, words = BAD[name]
    with pytest.raises(kind, match=words) as caught:
        fn()
    said = [str(caught.value), *caught.value.__notes__]
    assert sum(each.count("a function of from_jax called at") for each in said) == 1


def test_keras_and_tensorflow_keep_the_name_and_the_line_of_what_jax_raises():
    def wide(x):
        return x @ jnp.ones((7, 7))

    class Layer(keras.layers.Layer):
        def call(self, x):
            return xla.from_jax(wide)(x)

    for call in (Layer(), tf.function(lambda x: xla.from_jax(wide)(x))):
        with pytest.raises(TypeError) as caught:
            call(tf.ones([2, 3]))
        words = r"dot_general.*\s+In `wide`, a function of from_jax called at .*\.py:\d+"
        assert re.search(words, str(caught.value))  # not in the notes, where `match` looks too


def test_the_users_exception_keeps_its_message():
    def fails(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        xla.from_jax(fails)(tf.ones(2))
    assert str(caught.value) == "mine"
    assert any("In `fails`, a function of from_jax called at" in note for note in caught.value.__notes__)


def test_keras_does_not_take_its_own_function_for_that_of_jax(tmp_path):
    """It saves and copies functions by name, and its `leaky_relu` has another slope."""
    path, x = str(tmp_path / "model.keras"), np.array([[-1.0, 2.0]], "float32")

    def saved(leaky):
        model = keras.Sequential([keras.Input([2]), keras.layers.Activation(leaky)])
        model.save(path)
        return model

    leaky = xla.from_jax(jax.nn.leaky_relu)
    model = saved(leaky)
    for copy in (lambda: keras.models.load_model(path), lambda: keras.models.clone_model(model)):
        with pytest.raises(TypeError, match="Could not locate function 'from_jax_leaky_relu'"):
            copy()
    loaded = keras.models.load_model(path, custom_objects={"from_jax_leaky_relu": leaky})
    registered = saved(keras.saving.register_keras_serializable("tests")(xla.from_jax(jax.nn.leaky_relu)))
    for each in (loaded, keras.models.load_model(path), keras.models.clone_model(registered)):
        np.testing.assert_allclose(each.predict(x, verbose=0), [[-0.01, 2.0]], rtol=1e-6)


def test_unknown_shapes(strategy):
    """Outside bodies the sizes of equal dimensions may be unknown; a body is compiled for known ones."""
    called = xla.from_jax(lambda x, y: (x + y).sum(1))
    spec = tf.TensorSpec([None, 2])
    traced = tf.function(called, input_signature=[spec, spec])
    assert traced(tf.ones([3, 2]), tf.ones([3, 2])).numpy().tolist() == [4.0] * 3
    assert traced(tf.ones([1, 2]), tf.ones([1, 2])).numpy().tolist() == [4.0]
    with pytest.raises(tf.errors.InvalidArgumentError):
        traced(tf.ones([3, 2]), tf.ones([2, 2]))


def test_a_function_goes_with_the_graphs_that_use_it(strategy):
    def use():
        def fn(x):
            return jnp.sin(x) * 3

        called = xla.from_jax(fn)
        strategy.run(tf.function(lambda x: called(x)), args=(tf.ones(2),))
        return weakref.ref(fn)

    known = use()
    gc.collect()
    strategy.run(lambda: tf.constant(0))  # programs whose functions have died are dropped in a later call
    gc.collect()
    assert known() is None


def test_a_saved_model_runs_and_trains(tmp_path):
    """Of a model that is loaded, TensorFlow runs the function and its gradient."""
    called = xla.from_jax(lambda x: jnp.sin(x) ** 2)

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 2])])
        def __call__(self, x):
            return called(x)

    tf.saved_model.save(Model(), str(tmp_path))
    loaded, x = tf.saved_model.load(str(tmp_path)), tf.constant([[0.5, 1.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = loaded(x)
    np.testing.assert_allclose(value, np.sin(x) ** 2, rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(value, x), np.sin(2 * x), rtol=1e-6)
