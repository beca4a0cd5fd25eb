"""What a step needs on the devices that are there, and the errors for chips that are not.

What needs the compilers of such chips is in tests/aot.
"""

import importlib.util
import itertools
import os
import re
import sys
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import spread

import replica_engine
from replica_engine import xla
from replica_engine.errors import (
    BackendMissingError,
    DeviceError,
    InputsError,
    ProgramError,
    ReplicaMismatchError,
    ReplicaTimeoutError,
)
from replica_engine.pjrt import absent_chips, accelerators, executable
from replica_engine.pjrt.accelerators import check_devices, slice_named
from replica_engine.pjrt.plan import Collective, Cost, Memory, Plan, collectives, cycles
from replica_engine.pjrt.stablehlo.markers import expand_markers
from replica_engine.workers import child_process
from replica_engine.xla.calls import body_calls

SIDE = 256
SIZE = 4 * SIDE * SIDE


@pytest.fixture
def tpu():
    return replica_engine.TPUStrategy(num_cores=2)


@pytest.fixture
def weights(tpu):
    with tpu.scope():
        return tf.Variable(tf.ones([SIDE, SIDE]))


def step_of(weights):
    def step(x, rate=0.1):
        total = tf.distribute.get_replica_context().all_reduce("SUM", tf.matmul(x, weights))
        weights.assign_sub(total * rate)
        return tf.reduce_sum(total)

    return step


def test_a_plan_says_what_the_step_needs_and_changes_nothing(tpu, weights):
    plan = tpu.plan(step_of(weights), (tf.TensorSpec([SIDE, SIDE]),), {"rate": 0.5})
    memory, cost = plan.memory, plan.cost
    assert memory.arguments == 2 * SIZE + 4  # the weights, the batch, and the rate
    assert memory.aliased == SIZE
    assert SIZE < memory.results < SIZE + 100
    assert memory.peak == memory.arguments + memory.results + memory.temporary - memory.aliased
    assert plan.fits
    assert memory.peak < memory.chip
    assert 2 * SIDE**3 <= cost.flops < 2 * SIDE**3 + 10 * SIDE**2
    assert cost.bytes > 3 * SIZE
    assert cost.cycles is None
    assert cost.collectives == (Collective("all-reduce", SIZE),)
    assert (plan.name, plan.replicas, plan.devices) == ("step", 2, "CPU")
    assert "all-reduce" in plan.as_text()
    assert weights.numpy().tolist() == np.ones([SIDE, SIDE]).tolist()


def test_a_planned_step_is_compiled_once(tpu, weights):
    before, step = xla.counts(), step_of(weights)
    tpu.plan(step, (tf.TensorSpec([SIDE, SIDE]),))
    tpu.run(step, (tf.ones([SIDE, SIDE]),))
    tpu.plan(step, (tf.ones([SIDE, SIDE]),))
    made = xla.counts() - before
    assert (made.traces, made.compiles, made.launches) == (1, 1, 1)


def test_values_of_each_replica_and_numbers_that_must_stay_numbers(tpu):
    values = tpu.experimental_distribute_values_from_function(lambda context: tf.ones([4]))
    assert tpu.plan(lambda x, rate: tf.ones([int(rate)]) * tf.reduce_sum(x), (values, 3.0)).memory.arguments == 16


def test_the_table(tpu, weights):
    plan = tpu.plan(step_of(weights), (tf.TensorSpec([SIDE, SIDE]),))
    text = str(plan)
    assert text.startswith("step: 2 replicas on CPU, each device:\n  memory ")
    assert ": fits\n" in text
    assert "all-reduce              1 of 256 KiB in all" in text
    page = plan._repr_html_()
    assert page.startswith("<table")
    assert "<caption>step: 2 replicas" in page
    assert page.count("<tr>") == len(text.splitlines()) - 1


def test_names_in_the_page_are_escaped():
    plan = Plan("<lambda>", 2, "v5e:2x4", Memory(1, 1, None, 0, None), Cost(None, None, 66_070), None, 0.0)
    assert "&lt;lambda&gt;" in plan._repr_html_()
    assert "\n  estimated cycles        66,070" in str(plan)
    assert "not known whether it fits" in str(plan)
    assert plan.memory.peak is None


def test_a_step_that_needs_more_memory_than_there_is(tpu):
    step = lambda x: tf.reduce_sum(tf.sort(tf.tile(x[:, None, None], [1, 2048, 2048]), axis=0)[0])  # noqa: E731
    plan = tpu.plan(step, (tf.TensorSpec([20_000]),))
    assert plan.fits is False
    assert plan.memory.peak > plan.memory.chip
    assert "DOES NOT FIT" in str(plan)
    with pytest.raises(ProgramError, match="was not launched"):
        tpu.run(step, (tf.ones([20_000]),))


def test_a_step_of_keras(tpu):
    with tpu.scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
        model.compile("adam", "mse")
    plan = tpu.plan(model.train_step, ((tf.TensorSpec([6, 8]), tf.TensorSpec([6, 4])),))
    sizes = tpu.memory()
    assert plan.cost.collectives
    assert plan.memory.arguments >= 4 * 3 * (8 * 4 + 4)  # weights and two slots
    assert sizes.variables[0] == sizes.variables[1] >= 4 * 3 * (8 * 4 + 4)


def test_the_memory_of_a_strategy(tpu, weights):
    assert tpu.memory().variables == [SIZE, SIZE]
    assert tpu.memory().program is None
    step = step_of(weights)
    tpu.run(step, (tf.ones([SIDE, SIDE]),))
    memory = tpu.memory()
    assert memory.program == tpu.plan(step, (tf.ones([SIDE, SIDE]),)).memory
    assert str(memory).startswith("CPU:0: variables 256 KiB\nCPU:1: variables 256 KiB\nthe last program")
    with tpu.scope():
        sums = tf.Variable(
            tf.zeros([10]), synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    assert tpu.memory().variables == [SIZE + 40] * 2
    del sums, step, weights


NAMES = {
    "v5e:2x4": ("v5e:2x4", 8),
    " V5E:2x4": ("v5e:2x4", 8),
    "v5e:1x1": ("v5e:1x1", 1),
    "v4:2x2x1": ("v4:2x2x1", 4),
    "v5p:4x4x4": ("v5p:4x4x4", 64),
    "tpu7x:2x2x1": ("7x:2x2x1", 8),
    "v3:2x2": ("v3:2x2", 8),
    "h100:4": ("h100:4", 4),
}


def test_names():
    found = {name: slice_named(name) for name in NAMES}
    assert {name: (each.name, each.size) for name, each in found.items()} == NAMES
    with pytest.raises(DeviceError):
        slice_named("v5litepod:1x1")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5f:2x4", r"Did you mean v5e:2x4\?"),
        ("v5e", "v2, v3, v5e, v6e: with 1x1, 2x2, 2x4"),
        ("v5e", r"Did you mean v5e:1x1, v5e:2x2, v5e:2x4, .* or v5e:16x16\?"),
        ("v9:2", r"'v9:2'\. A topology is"),
        ("v5e:3x3", r"Did you mean v5e:2x4\?"),
        ("v5e:0x2", "as in v5e:2x4"),
        ("v5e:2x2x2", "as in v5p:2x2x2"),
        ("v4:2x4", "v4, v5p, 7x: with 1x1x1, 2x2x1"),
        ("h100:9", "h100: with 1 to 8 GPUs"),
        (8, "No such topology: 8"),
        ("", "No such topology"),
        *((name, r"Did you mean v5e:2x4\?") for name in ("v5e-8", "v5e:8")),  # numbers of chips
        ("v5p-8", r"Did you mean v5p:2x2x2\?"),
        ("h100-4", r"Did you mean h100:4\?"),
        ("h100:16", r"(?s)^(?!.*Did you mean)"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(tpu, name, says):
    with pytest.raises(DeviceError, match=says):
        tpu.plan(lambda: 1.0, topology=name)
    with pytest.raises(DeviceError, match=says):
        xla.lower(lambda: 1.0, num_replicas=2).compile(topology=name)


@pytest.mark.parametrize(
    ("name", "count", "says"),
    [
        ("v5e:2x4", 9, "9 replicas need 9 devices, but the slice v5e:2x4 has 8"),
        ("v5e:2x4", 6, "6 of the 8 chips of a slice v5e:2x4 cannot run one program.*Take all 8"),
        ("v6e:4x4", 4, "4 of the 16 chips"),
        ("v5e:4x8", 16, "16 of the 32 chips"),
    ],
)
def test_numbers_that_a_slice_cannot_serve(name, count, says):
    with pytest.raises(DeviceError, match=says):
        slice_named(name).check(count)


def test_numbers_that_a_slice_serves():
    for name, count in (("v5e:2x4", 7), ("v5e:4x8", 1), ("v6e:4x8", 16), ("v4:2x2x2", 6)):
        slice_named(name).check(count)


def test_they_are_refused_on_real_chips_too():
    coordinates = itertools.product([0], range(4), range(2))
    devices = [types.SimpleNamespace(device_kind="TPU v5 lite", coords=(x, y, z)) for z, y, x in coordinates]
    with pytest.raises(DeviceError, match="6 of the 8 chips of a slice v5e:2x4"):
        check_devices(devices, 6)
    check_devices(devices, 5)
    check_devices(devices, 8)


@pytest.fixture
def not_installed(monkeypatch):
    found = importlib.util.find_spec
    missing = ("libtpu", "jax_plugins")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in missing else found(name, *more)
    )
    monkeypatch.delenv(accelerators.LIBTPU, raising=False)


@pytest.mark.usefixtures("not_installed")
@pytest.mark.parametrize(("name", "package"), [("v5e:2x4", "libtpu"), ("h100:8", "jax-cuda12-pjrt")])
def test_without_the_compiler_the_error_names_the_extra(tpu, name, package):
    traces = xla.counts().traces
    with pytest.raises(BackendMissingError, match=rf'(?s){package}.*pip install "replica-engine\[aot\]"'):
        tpu.plan(lambda: 1.0, topology=name)
    assert xla.counts().traces == traces


def runs(monkeypatch, *command):
    """Has the child process that compiles run another program."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda *names: object())
    monkeypatch.setattr(absent_chips, "_COMMAND", command)


def compiled_by(monkeypatch, program, command=None, fn=lambda x: x + 1.0):
    """What comes of a compile whose child process runs another program."""
    lowered = xla.lower(fn, [[tf.constant(1.0)]] * 8)  # which looks for what is installed here
    runs(monkeypatch, *(command or ("-c", program)))
    return lowered.compile(topology="v5e:2x4")


def test_a_compiler_that_dies_is_an_error_with_its_words(monkeypatch):
    program = "import os, sys; print('F0000 Check failed: it is a torus', file=sys.stderr, flush=True); os.abort()"
    with pytest.raises(ProgramError, match=r"(?s)ended its process \(signal 6\).*This process goes on.*it is a torus"):
        compiled_by(monkeypatch, program)
    with pytest.raises(ProgramError, match=r"(?s)exit status 3.*\(nothing\)"):
        compiled_by(monkeypatch, "raise SystemExit(3)")


def answering(error):
    return f"import json, sys; open(sys.argv[1] + '/answer.json', 'w').write(json.dumps({{'error': {error!r}}}))"


def test_a_compiler_that_refuses(monkeypatch):
    with pytest.raises(ProgramError, match="cannot be compiled for v5e:2x4:\nUNIMPLEMENTED: f64"):
        compiled_by(monkeypatch, answering("UNIMPLEMENTED: f64"))
    with pytest.raises(DeviceError, match=r"(?s)8 of the devices of v5e:2x4.*device_count == 4"):
        compiled_by(monkeypatch, answering("RET_CHECK device_count == 4"))


def test_for_absent_chips_too_a_loop_keeps_no_variable_for_its_gradient(monkeypatch):
    """The kernel of an LSTM, which TensorFlow would copy once a step: a third of the cycles of a language model."""
    w = tf.Variable(tf.ones([3, 3]))

    def last(x):
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, h @ w), (0, x), maximum_iterations=4)[1]
        return tape.gradient(h, w)

    lowered = xla.lower(last, [[tf.TensorSpec([2, 3])]])
    program = """if True:
        import json, sys
        text = open(sys.argv[1] + "/program.mlir").read()
        open(sys.argv[1] + "/answer.json", "w").write(json.dumps({"error": f"rows: {text.count('update_slice')}"}))
    """
    runs(monkeypatch, "-c", program)
    found = []
    for enabled in ("0", "1"):
        monkeypatch.setenv("REPLICA_ENGINE_CPU_REWRITES", enabled)
        with pytest.raises(ProgramError) as raised:
            lowered.compile(topology="v5e:1x1")
        found.append(int(re.search(r"rows: (\d+)", str(raised.value))[1]))
    assert found[1] == found[0] - 1


def test_a_program_that_the_chip_has_no_room_for(monkeypatch):
    words = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.55G) "
    plan = compiled_by(monkeypatch, answering(words + "exceeds available HBM (15.75G)."))
    assert plan.fits is False
    assert plan.memory.arguments == plan.memory.results == 4
    assert plan.memory.peak == int(19.55 * 2**30)
    assert plan.memory.chip == 16 * 2**30
    plan = compiled_by(monkeypatch, answering("RESOURCE_EXHAUSTED: no more words"))
    assert (plan.fits, plan.memory.temporary, plan.memory.peak) == (False, None, None)
    with pytest.raises(ProgramError, match="Shared memory size limit"):  # of a core: the chip may have room
        compiled_by(monkeypatch, answering("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: 300000 of 232448"))


def test_variables_that_are_written_over_count_once_where_there_is_no_room(monkeypatch):
    w = tf.Variable(tf.ones([1024]))
    words = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the memory for HLO temporaries (19.55G) exceeds that"
    plan = compiled_by(monkeypatch, answering(words), fn=lambda x: w.assign_add(x * tf.ones([1024])))
    assert plan.memory.aliased == 4096
    assert plan.memory.peak == int(19.55 * 2**30)


def test_the_child_process_finds_the_library_and_has_no_flags_of_this_process(monkeypatch, tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_enable_fast_math=false"
    monkeypatch.setenv("XLA_FLAGS", flags)  # of known names: where this test is the first, XLA reads them here
    (tmp_path / "asks.py").write_text(
        "import json, os, sys, replica_engine\n"
        "said = str((os.environ.get('XLA_FLAGS'), os.environ['JAX_PLATFORMS'], replica_engine.__file__))\n"
        "open(sys.argv[1] + '/answer.json', 'w').write(json.dumps({'error': said}))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ProgramError) as caught:
        compiled_by(monkeypatch, None, command=child_process.arguments("asks"))
    assert str((None, "cpu", replica_engine.__file__)) in str(caught.value)


def test_plans_that_cannot_be_made(tpu):
    with pytest.raises(InputsError, match="give every dimension a size"):
        tpu.plan(lambda x: x, (tf.TensorSpec([None, 3]),))
    with pytest.raises(InputsError, match="call it in eager mode"):
        tf.function(lambda: tpu.plan(lambda: 1.0))()
    values = spread(tpu, lambda i: tf.ones([2 + i]))
    with pytest.raises(ReplicaMismatchError, match="other shapes on some replicas"):
        tpu.plan(lambda x: x, (values,))
    devices = xla.PjrtClusterResolver("cpu").devices
    with pytest.raises(DeviceError, match="not both"):
        xla.lower(lambda: 1.0, num_replicas=2).compile(devices, topology="v5e:2x4")


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        ("%a = f32[8,4]{1,0:T(8,128)} all-reduce(%b), replica_groups={}", "all-reduce", 128),
        ("%a = (f32[8]{0}, bf16[4]{0}) all-reduce-start(%b, %c)", "all-reduce", 40),
        ("%a = (f32[8]{0}, f32[64]{0}) all-gather-start(%b), dimensions={0}", "all-gather", 256),
        ("%a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%b)", "collective-permute", 32),
        ("%a = pred[8]{0} all-gather(%b)", "all-gather", 8),
        ("%a = s4[8]{0} all-to-all(%b)", "all-to-all", 4),
        ("%a = f32[] reduce-scatter(%b)", "reduce-scatter", 4),
    ],
)
def test_collectives_in_the_text_of_a_program(line, kind, size):
    assert collectives(line) == (Collective(kind, size),)
    assert collectives(line.replace("%a = ", "%a = f32[] add(%x) //").replace(kind, "fusion")) == ()


def test_cycles_in_the_text_of_a_program():
    assert cycles('{"estimated_cycles":"12"} {"estimated_cycles":"30"}') == 42
    assert cycles("no cycles") is None


def test_packages_that_only_compile_are_no_accelerators(monkeypatch, tmp_path):
    """With libtpu or jax-cuda12-pjrt alone, jax is not asked for devices: it would print its failures."""
    for name in list(os.environ):
        if name in (accelerators.LIBTPU, *accelerators._OF_TPUS):
            monkeypatch.delenv(name)
    for folder in ("libtpu", "jax_plugins/xla_cuda12"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    assert not accelerators.may_be_there()
    monkeypatch.setenv(accelerators.LIBTPU, str(tmp_path / "libtpu" / "libtpu.so"))  # as jax does
    assert not accelerators.may_be_there()
    monkeypatch.setenv(accelerators.LIBTPU, "/lib/libtpu.so")
    assert accelerators.may_be_there()
    monkeypatch.delenv(accelerators.LIBTPU)
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert accelerators.may_be_there()


def test_a_spec_that_is_larger_than_this_machine(tpu):
    plan = tpu.plan(tf.reduce_sum, args=(tf.TensorSpec([200_000, 100_000]),))
    assert plan.memory.arguments == 80_000_000_000
    assert plan.fits is False


def test_specs_of_datasets_and_of_bodies(tpu):
    rows = tf.data.Dataset.from_tensor_slices((tf.ones([40, 3]), tf.zeros([40], tf.int32)))
    data = rows.batch(10, drop_remainder=True)
    batches = tpu.experimental_distribute_dataset(data)
    of_batch = tpu.plan(lambda batch: tf.reduce_sum(batch[0]), (batches.element_spec,)).memory
    assert of_batch == tpu.plan(lambda batch: tf.reduce_sum(batch[0]), (next(iter(batches)),)).memory
    assert of_batch.arguments == 5 * 4 * 3 + 5 * 4
    inputs = [[tf.TensorSpec([5, 3]), {"rate": tf.TensorSpec([], tf.float64)}]] * 2
    lowered = xla.lower(lambda x, settings: x * tf.cast(settings["rate"], x.dtype), inputs)
    assert lowered.compile().plan().memory.arguments == 5 * 4 * 3 + 8
    with pytest.raises(InputsError, match=r"lower was called with TensorSpec.*drop_remainder=True"):
        xla.lower(lambda x: x, [[tf.TensorSpec([None, 3])]])
    with pytest.raises(InputsError, match="pass a RaggedTensor like those"):
        tpu.plan(lambda x: x, (tf.RaggedTensorSpec([2, None]),))


def test_a_compile_in_this_process_that_takes_longer_than_the_limit(monkeypatch):
    strategy, go_on = replica_engine.TPUStrategy(num_cores=2, timeout=2.0), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(executable, "expand_markers", lambda *_, **__: go_on.wait(300) and slow(*_, **__))
        slow = expand_markers
        with pytest.raises(ReplicaTimeoutError, match=r"`step` was not compiled for CPU in 2 s \(timeout=\)"):
            strategy.plan(step, (tf.TensorSpec([5]),))
        (thread,) = (each for each in threading.enumerate() if each.name == "replica_engine: compile of step")
        go_on.set()
        thread.join(300)
    before = xla.counts()
    assert strategy.plan(step, (tf.TensorSpec([5]),)).memory.arguments == 20
    assert (xla.counts() - before).compiles == 0, "the compile went on"


def step(x):
    return x + 1.0


def test_a_compiler_of_absent_chips_that_takes_longer_than_the_limit(monkeypatch, caplog):
    strategy = replica_engine.TPUStrategy(num_cores=8, timeout=3.0, warn_after=0.1)  # looks for what is installed here
    monkeypatch.setattr(body_calls, "check_absent", lambda name, _: (slice_named(name), {}))
    runs(monkeypatch, "-c", "import time; time.sleep(600)")
    with pytest.raises(ReplicaTimeoutError, match=r"`step` was not compiled for v5e:2x4 in 3 s \(timeout=\)"):
        strategy.plan(step, (tf.TensorSpec([5]),), topology="v5e:2x4")
    said = caplog.text
    assert "`step` for 8 replicas has been compiled for v5e:2x4 for" in said
    assert "CPU" not in said


def test_memory_of_a_program_with_branches_for_shares_of_different_sizes(tpu):
    of_each = lambda context: tf.ones([context.replica_id_in_sync_group + 1])  # noqa: E731
    tpu.run(tf.reduce_sum, args=(tf.ones([4]),))
    assert tpu.memory().program.arguments == 16
    tpu.run(tf.reduce_sum, args=(tpu.experimental_distribute_values_from_function(of_each),))
    assert tpu.memory().program.arguments == 4 * tpu.num_replicas_in_sync + 4  # of the largest, and a branch's number


def test_a_topology_in_the_wrong_place(tpu):
    with pytest.raises(InputsError, match=r"plan\(fn, args, topology='v5e:2x4'\)"):
        tpu.plan(tf.reduce_sum, (tf.ones([2]),), "v5e:2x4")
    with pytest.raises(DeviceError, match="write topology='v5e:2x4'"):
        xla.lower(tf.reduce_sum, [[tf.ones([2])]], 1).compile("v5e:2x4")


def test_mirrored_strategy_says_who_plans():
    strategy = replica_engine.MirroredStrategy(["CPU:0"])
    assert not hasattr(strategy, "plan")
    with pytest.raises(AttributeError, match="TPUStrategy"):
        strategy.plan  # noqa: B018
