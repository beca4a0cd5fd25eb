"""What a compiled program has of a function of JAX, and when two programs are one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pallas_tpu

from replica_engine import xla


def lowered(fn, x=(1.0, 2.0)):
    return xla.lower(xla.from_jax(fn), [[tf.constant(x)]] * 2)


def test_equal_functions_are_one_program():
    """Also in other processes: nothing in the text depends on where a function lies."""
    texts = [lowered(lambda x: jnp.sin(x) * 2).as_text() for _ in range(2)]
    assert texts[0] == texts[1]


def test_functions_with_other_constants_are_other_programs():
    programs = [lowered(functools.partial(jnp.add, np.full(2, number, np.float32))) for number in (1.0, 2.0)]
    assert programs[0].as_text() != programs[1].as_text()
    results = [program.compile()([[tf.zeros(2)]] * 2)[0] for program in programs]
    assert [result.numpy().tolist() for result in results] == [[1, 1], [2, 2]]


def test_a_program_is_found_in_the_cache(tmp_path):
    xla.set_cache_dir(tmp_path)
    try:
        before = xla.counts()
        for _ in range(2):
            lowered(lambda x: jnp.cos(x) * 3).compile()
        made = xla.counts() - before
    finally:
        xla.set_cache_dir(None)
    assert (made.compiles, made.cache_hits) == (1, 1)


def test_a_function_that_is_called_often_is_in_the_program_once():
    called = xla.from_jax(lambda x: jnp.tanh(x) + 1)

    def body(x):
        for _ in range(3):
            x = called(x)
        return x

    compiled = xla.lower(body, [[tf.constant(0.5)]] * 2).compile()
    wanted = 0.5
    for _ in range(3):
        wanted = np.tanh(wanted) + 1
    np.testing.assert_allclose([float(each) for each in compiled([[0.5], [0.5]])], [wanted] * 2, rtol=1e-6)


def test_a_gradient_computes_nothing_twice():
    """The exponentials of the forward pass are kept for the backward pass, in eager code too."""
    from_jax = xla.from_jax(lambda x: jnp.exp(jnp.sin(x)))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = from_jax(x)
        return tape.gradient(y, x)

    text = xla.lower(step, [[tf.ones([8])]] * 2).compile().plan().as_text()
    assert text.count(" exponential(") == 1


def test_kernels_for_other_chips_are_told_apart_by_their_constants():
    """Beside CPUs both become the same function, so only the constants tell that they are two."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def made(number):
        table = np.full([8, 128], number, np.float32)

        def fn(x):
            spec = pallas.BlockSpec(memory_space=pallas_tpu.VMEM)
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return pallas.pallas_call(kernel, in_specs=[spec], out_specs=spec, out_shape=shape)(x) + table

        return xla.from_jax(fn, otherwise=lambda x: x * 2)

    texts = [xla.lower(made(number), [[tf.ones([8, 128])]] * 2).as_text() for number in (5.0, 5.0, 9.0)]
    assert texts[0] == texts[1] != texts[2]
