"""Host calls as TPUs make them: by sending to the host and receiving from it.

No TPU is here, so each send and receive is made a custom call of the CPU again, just before the program is compiled:
what is sent on the channels of a call goes to the function that jaxlib would call, and what it returns is received.
"""

import itertools
import re
from inspect import signature
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax._src.callback import _aval_to_xla_shape, _emit_tpu_python_callback

from replica_engine import xla
from replica_engine.pjrt import executable
from replica_engine.pjrt.jaxlib import BY_TRANSFERS, VERSION, Shape, ir, make_cpu_client, program_context
from replica_engine.pjrt.stablehlo import markers
from replica_engine.pjrt.stablehlo.markers import expand_markers

CONVERT = markers.convert


class Client:
    """Takes callbacks as jaxlib's client does, and has the function that is to be called."""

    def __init__(self):
        self.real = make_cpu_client()

    def make_python_callback_from_host_send_and_recv(self, call, operands, results, sends, receives, serialize):
        assert all(isinstance(each, Shape) and 0 not in each.dimensions() for each in [*operands, *results])
        assert (len(operands), len(results)) == (len(sends), len(receives))
        assert self.real.make_python_callback_from_host_send_and_recv(
            call, operands, results, sends, receives, serialize
        ), "jaxlib takes these arguments"

        def checked(*arrays):
            assert [(each.shape, each.dtype) for each in arrays] == [
                (tuple(each.dimensions()), each.numpy_dtype()) for each in operands
            ]
            returned = call(*arrays)
            assert len(returned) == len(results)
            return tuple(returned)

        return checked


def on_channels(module):
    """The operations of a module that send or receive, by channel."""
    found = {}

    def collect(operation):
        if operation.name in ("stablehlo.send", "stablehlo.recv"):
            channel = int(re.search(r"handle = (\d+)", str(operation.attributes["channel_handle"]))[1])
            assert channel not in found, "a channel stands in the program twice"
            found[channel] = operation
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    return found


def make_custom_calls(module, transfers):
    operations = on_channels(module)
    for number, each in enumerate(transfers):
        sends = [operations[channel] for channel in each.sends]
        receives = [operations[channel] for channel in each.receives]
        attributes = {
            "call_target_name": '"xla_ffi_python_cpu_callback"',
            "backend_config": f"{{index = {number} : ui64}}",
            "api_version": "4 : i32",
            "has_side_effect": "true",
        }
        with ir.InsertionPoint(receives[0]), ir.Location.unknown():
            call = ir.Operation.create(
                "stablehlo.custom_call",
                results=[receive.results[0].type for receive in receives],
                operands=[send.operands[0] for send in sends],
                attributes={key: ir.Attribute.parse(text) for key, text in attributes.items()},
            )
        for receive, result in zip(receives, call.results, strict=True):
            receive.results[0].replace_all_uses_with(result)
        for operation in [*reversed(receives), *reversed(sends)]:
            operation.erase()


@pytest.fixture(autouse=True)
def as_on_tpus(monkeypatch):
    callback, convert, client = markers.callback, markers.convert, Client()

    def and_back(module):
        transfers = convert(module)
        with module.context:
            make_custom_calls(module, transfers)
        return transfers

    monkeypatch.setattr(executable.jaxlib, "HOST_CALL_TARGETS", {"cpu": BY_TRANSFERS})
    monkeypatch.setattr(markers, "convert", and_back)
    monkeypatch.setattr(markers, "callback", lambda _, *arguments: callback(client, *arguments))


def replicated(fn, *inputs):
    return [np.asarray(each).tolist() for each in xla.replicate(fn, inputs=[list(inputs)] * 2)]


def test_a_call_gets_what_a_replica_sends_and_returns_what_it_receives():
    seen = []

    @xla.returns((tf.TensorSpec([], tf.float64), tf.TensorSpec([2, 3], tf.bfloat16)))
    def work(x, y, flag):
        seen.append((x.numpy().tolist(), y.numpy().tolist(), bool(flag)))
        return tf.cast(tf.reduce_sum(x), tf.float64), tf.fill([2, 3], tf.cast(y, tf.bfloat16))

    def body(x):
        y = tf.cast(xla.replica_id(), tf.int32) + 1
        total, filled = xla.outside_compilation(work, x, y, x[0] > 0)
        return tf.cast(total, tf.float32) + tf.reduce_sum(tf.cast(filled, tf.float32))

    assert replicated(body, tf.constant([1.0, 2.0])) == [9.0, 15.0]
    assert sorted(seen) == [([1.0, 2.0], 1, True), ([1.0, 2.0], 2, True)]


def test_what_is_empty_is_not_sent():
    """TPUs cannot receive empty arrays."""

    @xla.returns((tf.TensorSpec([0, 2], tf.complex64), tf.TensorSpec([], tf.int32)))
    def work(x):
        assert x.shape == [0, 3]
        return tf.zeros([0, 2], tf.complex64), tf.constant(7)

    def body(x):
        empty, seven = xla.outside_compilation(work, x)
        return tf.cast(tf.shape(empty)[0], tf.int32) + seven

    assert replicated(body, tf.zeros([0, 3])) == [7, 7]


def test_calls_keep_their_order_in_loops_and_branches():
    seen = {0: [], 1: []}

    def note(replica, number):
        seen[int(replica)].append(int(number))

    def body():
        replica = xla.replica_id()
        for number in tf.range(3):
            xla.outside_compilation(note, replica, 10 * number)
            if number > 0:
                xla.outside_compilation(note, replica, 10 * number + 1)
        xla.outside_compilation(note, replica, 99)

    xla.replicate(body, num_replicas=2)
    assert seen == {0: [0, 10, 11, 20, 21, 99], 1: [0, 10, 11, 20, 21, 99]}


def test_gradients():
    cube = lambda x: x**3  # noqa: E731

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = xla.outside_compilation(cube, x)
        return tape.gradient(y, x)

    assert replicated(body, tf.constant(2.0)) == [12.0, 12.0]


def test_a_call_that_fails_leaves_variables_as_they_were(two):
    with two.scope():
        total = tf.Variable(1.0)

    def fail(x):
        if float(x) > 1:
            raise OSError("the disk is full")

    def step(x):
        total.assign_add(x)
        xla.outside_compilation(fail, x)

    two.run(step, args=(1.0,))
    with pytest.raises(OSError, match="the disk is full"):
        two.run(step, args=(2.0,))
    assert total.numpy() == 2.0


ONE_CALL = """
module @replica_body {
  func.func @main(%arg0: tensor<i64>, %arg1: tensor<2x3xf32>) -> tensor<i64> {
    %0:2 = stablehlo.custom_call @replica_engine.host_call(%arg0, %arg1) {backend_config = "{\\22index\\22: 0}",
      has_side_effect = true} : (tensor<i64>, tensor<2x3xf32>) -> (tensor<i64>, tensor<4xi1>)
    return %0#0 : tensor<i64>
  }
}
"""


def comparable(module):
    # Earlier versions of jax give a channel the name of the function, which nothing reads.
    return str(module) if VERSION >= (0, 10) else re.sub(r'(_xla_host_transfer_\w+) = "[^"]*"', r"\1", str(module))


def test_the_transfers_are_those_of_jaxs_own_callbacks_on_tpus():
    ours = expand_markers(ONE_CALL, "tpu")
    CONVERT(ours)
    channels = itertools.count(min(on_channels(ours)))
    context = SimpleNamespace(
        module_context=SimpleNamespace(
            new_channel=lambda: next(channels), add_host_callback=lambda _: None, aval_to_ir_types_cache={}
        )
    )
    with program_context(), ir.Location.unknown():
        jaxs = ir.Module.parse(ONE_CALL)
        (main,) = jaxs.body.operations
        call, end = main.regions[0].blocks[0].operations
        taken = [jax.core.ShapedArray([], np.int64), jax.core.ShapedArray([2, 3], np.float32)]
        given = [jax.core.ShapedArray([], np.int64), jax.core.ShapedArray([4], np.bool_)]
        with ir.InsertionPoint(call), jax.enable_x64(True):
            results, _ = _emit_tpu_python_callback(
                *(make_cpu_client(), context, lambda *arrays: arrays, None),
                *(list(call.operands), taken, [_aval_to_xla_shape(each) for each in taken]),
                *(given, [_aval_to_xla_shape(each) for each in given]),
                **{
                    name: False
                    for name in ("returns_token",)
                    if name in signature(_emit_tpu_python_callback).parameters
                },
            )
        end.operands[0] = results[0]
        call.operation.erase()
        assert comparable(ours) == comparable(jaxs)


def test_on_gpus_the_call_has_the_form_that_runs_on_cpus_and_another_name():
    of_cpu, of_gpu = (str(expand_markers(ONE_CALL, platform)) for platform in ("cpu", "gpu"))
    assert of_gpu == of_cpu.replace("@xla_ffi_python_cpu_callback", "@xla_ffi_python_gpu_callback") != of_cpu


FUNCTION_CALLED_TWICE = """
module @replica_body {{
  func.func @main(%x: tensor<i64>) -> tensor<i64> {{
    %a = call @function_1(%x) : (tensor<i64>) -> tensor<i64>
    %b = call @function_1(%a) : (tensor<i64>) -> tensor<i64>
    %c = call @function_0(%b) : (tensor<i64>) -> tensor<i64>
    return %c : tensor<i64>
  }}
  func.func private @function_0(%x: tensor<i64>) -> tensor<i64> {{
    %a = stablehlo.custom_call @replica_engine.host_call(%x) {parameters} : (tensor<i64>) -> tensor<i64>
    return %a : tensor<i64>
  }}
  func.func private @function_1(%x: tensor<i64>) -> tensor<i64> {{
    %a = call @function_0(%x) : (tensor<i64>) -> tensor<i64>
    return %a : tensor<i64>
  }}
}}
"""


def test_in_a_divided_program_the_transfers_are_on_the_device_that_calls():
    """Without it, XLA does not compile a program that is divided over devices."""
    sharded = "has_side_effect = true, sdy.sharding = #sdy.sharding_per_value<[<@one_device, []>, <@one_device, []>]>"
    mesh = "sdy.mesh @one_device = <[], device_ids=[0]>\n  func.func @main"
    text = ONE_CALL.replace("has_side_effect = true", sharded).replace("func.func @main", mesh)
    module = expand_markers(text, "tpu")
    CONVERT(module)
    for each in on_channels(module).values():
        assert str(each.attributes["sdy.sharding"]).count("<@one_device, []>") == len(each.results)
    assert module.operation.verify()


def test_a_function_that_is_called_twice_has_channels_for_each_call():
    text = FUNCTION_CALLED_TWICE.format(parameters='{backend_config = "{\\22index\\22: 4}", has_side_effect = true}')
    module = expand_markers(text, "tpu")
    transfers = CONVERT(module)
    assert module.operation.verify()
    assert len(on_channels(module)) == 6
    assert [each.index for each in transfers] == [4, 4, 4]
