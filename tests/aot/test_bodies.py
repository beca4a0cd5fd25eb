"""Each kind of body compiles for chips that are not there."""

import itertools

import jax
import keras
import pytest
import tensorflow as tf
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pallas_tpu

import replica_engine
from aot.bodies import GROUPS, MODELS
from aot.table import note
from replica_engine import xla
from replica_engine.errors import DeviceError, LoweringError, ProgramError

CHIPS = ("v5e:2x4", "v4:2x2x2", "v5p:2x2x2", "v6e:2x4", "7x:2x2x1", "h100:8")
SUBSET = (
    *("product, bfloat16", "cholesky", "fft", "top_k", "gather_and_scatter", "conv2d", "stateful"),
    *("gradient_of_a_loop", "all_reduces", "all_gather", "ring"),
)
"""What is compiled for all chips; the others for the first alone. And all models."""

BODIES = [
    (chip, group, name)
    for chip, (group, bodies) in itertools.product(CHIPS, GROUPS.items())
    for name in bodies
    if chip == CHIPS[0] or name in SUBSET
]


def platform(chip):
    return "gpu" if chip.startswith("h") else "tpu"


def compiled(chip, group, name, compile_):
    """Compiles, and notes what came of it for the table."""
    try:
        plan = compile_()
    except (DeviceError, LoweringError, ProgramError) as error:
        note(chip, group, name, str(error))
        raise
    note(chip, group, name, "")
    assert plan.fits
    assert plan.cost.flops is None or plan.cost.flops >= 0
    assert plan.devices == chip
    return plan


@pytest.mark.parametrize(("chip", "group", "name"), BODIES)
def test_a_body(chip, group, name):
    fn, *specs = GROUPS[group][name]
    arguments = [tf.zeros(each.shape, each.dtype) for each in specs]
    plan = compiled(chip, group, name, lambda: xla.lower(fn, [arguments] * 8).compile(topology=chip))
    if group == "between replicas" and name != "by_replica":
        assert plan.cost.collectives


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_a_training_step_of_keras(chip, name):
    make, batch = MODELS[name]
    strategy = replica_engine.TPUStrategy(num_cores=8)
    with strategy.scope():
        model = make()
    plan = compiled(
        chip, "training steps of Keras", name, lambda: strategy.plan(model.train_step, (batch,), topology=chip)
    )
    assert plan.cost.collectives
    assert plan.memory.aliased > 0.9 * sum(4 * variable.numpy().size for variable in model.trainable_variables)
    if platform(chip) == "tpu":
        assert plan.cost.cycles > 0


def test_a_number_of_chips_that_ends_the_compiler_is_refused_before_that():
    with pytest.raises(DeviceError, match="6 of the 8 chips"):
        xla.lower(lambda x: xla.all_reduce(x, "SUM"), [[tf.ones([4])]] * 6).compile(topology="v5e:2x4")


def test_the_compiler_that_ends_its_process_does_not_end_this_one(monkeypatch):
    """Without the check before, libtpu aborts: its words are in the error."""
    monkeypatch.setattr("replica_engine.pjrt.accelerators.check_count", lambda *_: None)
    with pytest.raises(
        ProgramError, match=r"(?s)ended its process \(signal 6\).*This process goes on. It printed:\n\S"
    ):
        xla.lower(lambda x: xla.all_reduce(x, "SUM"), [[tf.ones([4])]] * 6).compile(topology="v5e:2x4")


def test_a_program_that_the_chip_has_no_room_for():
    def sorted_(x):
        return tf.reduce_sum(tf.sort(tf.tile(x[:, None, None], [1, 1024, 1024]), axis=0)[0])

    plan = xla.lower(sorted_, [[tf.ones([9000])]] * 4).compile(topology="v5e:2x2")
    assert plan.fits is False
    assert plan.memory.peak > 60 * 2**30
    assert plan.memory.arguments == 36_000


@pytest.mark.parametrize(
    "name", ["v2:2x2", "v3:2x2", "v5e:1x1", "v6e:1x1", "v5p:1x1x1", "v5e:4x4", "7x:2x2x2", "h100:1"]
)
def test_every_name_that_is_listed_exists(name):
    plan = xla.lower(lambda x: x + 1.0, [[tf.ones([4])]]).compile(topology=name)
    assert plan.fits


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip != "v4:2x2x2"])
def test_a_kernel_is_that_of_the_chip(chip):
    """The body is traced beside CPU devices; `otherwise` is for those and, here, for GPUs."""

    def double(x_ref, out_ref):
        out_ref[...] = pallas_tpu.roll(x_ref[...] * 2, 1, 0)

    @jax.custom_vjp
    def doubled(x):
        spec, shape = pallas.BlockSpec(memory_space=pallas_tpu.VMEM), jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(double, in_specs=[spec], out_specs=spec, out_shape=shape)(x)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, upstream: (doubled(upstream),))
    called = xla.from_jax(doubled, otherwise=lambda x: jax.numpy.roll(x * 2, 1, 0))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(called(x) ** 2)
        return xla.cross_replica_sum(tape.gradient(total, x))

    plan = xla.lower(step, [[tf.ones([256, 256])]] * 8).compile(topology=chip)
    assert plan.cost.kernels == (2 if platform(chip) == "tpu" else 0)
    assert ("kernels" in str(plan)) == (platform(chip) == "tpu")
    alone = xla.from_jax(doubled)
    if platform(chip) == "gpu":
        with pytest.raises(LoweringError, match=f"`doubled`.* cannot be lowered for {chip}"):
            xla.lower(alone, [[tf.ones([256, 256])]] * 8).compile(topology=chip)
    else:
        assert xla.lower(alone, [[tf.ones([256, 256])]] * 8).compile(topology=chip).cost.kernels == 1


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_of_keras_is_a_kernel_of_the_chip(chip):
    length = 4096
    strategy = replica_engine.TPUStrategy(num_cores=8)
    batch = tf.zeros([1, length, 128], tf.bfloat16), tf.ones([1, length], tf.bool)

    def plan(flash_attention=None, **options):
        with strategy.scope():
            layer = keras.layers.MultiHeadAttention(2, 64, dtype="bfloat16", flash_attention=flash_attention)
            layer.build(batch[0].shape, batch[0].shape)

        def step(x, seen):
            with tf.GradientTape() as tape:
                if options:
                    keras.src.backend.set_keras_mask(x, seen)
                results = layer(x, x, **{name: seen if value is ... else value for name, value in options.items()})
                loss = tf.reduce_sum(tf.cast(results, tf.float32) ** 2)
            return tape.gradient(loss, layer.trainable_variables)

        return strategy.plan(step, batch, topology=chip)

    with_kernel, masked, without = plan(), plan(value_mask=..., use_causal_mask=True), plan(flash_attention=False)
    assert with_kernel.cost.kernels == masked.cost.kernels == 3  # forward, and two for the gradients
    assert without.cost.kernels == 0
    assert with_kernel.memory.temporary < without.memory.temporary
    keras.config.disable_flash_attention()
    try:
        assert plan().cost.kernels == 0
    finally:
        keras.config.enable_flash_attention()
