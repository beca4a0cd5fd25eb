"""Host work inside a compiled body: Python and TensorFlow that run on the host, once for each replica.

Each call is a cluster with a name: "0", "1", ... The gradient of a cluster runs on the host too, in its own cluster
with the name root.uid: root is the name of the cluster that the user wrote, and uid counts its gradients, including
gradients of gradients.

A cluster that is differentiated runs under a gradient tape. The tape is kept until the launch is over. The gradient's
cluster asks that tape. If a gradient is differentiated itself, the tape records in it too. So the tape knows the
derivatives of every order, and no function ever runs a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import tensorflow as tf

from replica_engine.diagnostics.user_frames import here
from replica_engine.errors import NestedHostCallError
from replica_engine.errors.base import at
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import autograph, function_graphs
from replica_engine.xla import arguments, body
from replica_engine.xla.host_calls import closures, host_call, host_results, session

P = ParamSpec("P")

_GRADIENT = "the gradient of "


@autograph.artifact
def outside_compilation(fn: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Runs `fn` on the host, from inside a compiled body: once on each replica, each time the body reaches the call.

    `fn` runs as eager TensorFlow, with concrete tensors: `x.numpy()`, strings, files, `tf.print`, `tf.summary`, any
    Python code. It may close over tensors of the body. It may be called in loops, branches and nested functions; a
    replica's calls keep the order of the program. Inside `fn`, `replica_id()` is the id of the replica that called.

    Declare what `fn` returns with `returns`, if the body uses it: then `fn` runs only when the program calls it. A
    function without a `return` needs no declaration. Any other function is traced, as a `tf.function` is: its Python
    code runs once with symbolic tensors, which have no values. If tracing fails, because `fn` needs values
    (`x.numpy()`, `float(x)`), or if it leaves a shape unknown, then the results are not known. The program calls `fn`
    all the same, but any use of its results in the body is an error.

    Gradients of every order go through `fn`, where it computes with TensorFlow.

    If `fn` raises, on any replica, in any iteration of a loop, the exception leaves the run with a note that says
    where. All variables are as before the run.

    Outside a compiled body this just calls `fn`.

    Args:
        fn: the function. It may read and write variables that no compiled body uses.
        *args: its arguments. `fn` gets concrete values instead of tensors and instead of variables of a strategy.
        **kwargs: its keyword arguments.

    Returns:
        What `fn` returned: tensors, and structures of them, of the same dtypes and shapes each time. If that is not
        known, an object that raises `HostResultError` wherever it is used.

    Raises:
        TypeError: `fn` cannot be called.
        NestedHostCallError: it was called in a function that it runs; a NotImplementedError.
        HostResultError: `fn` returns a tensor that no device can have, or an argument is the unknown result of another
            call.
        HostAccessError: `fn` uses a variable that is on the devices.
        Exception: `fn` raised it; the run raises it again.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import xla
        >>> def digits(x):
        ...     return tf.strings.length(tf.strings.as_string(x))
        >>> def body(x):
        ...     return xla.outside_compilation(digits, x) * 10
        >>> [int(each) for each in xla.replicate(body, inputs=[[7], [1234]])]
        [10, 40]
    """
    if not callable(fn):
        raise TypeError(f"outside_compilation takes a function and its arguments; got {fn!r}. Write f, x and not f(x).")
    if (side := body.host_call_site()) is not None:
        raise NestedHostCallError(
            f"outside_compilation{at(here())} was called in a function that outside_compilation{at(side.where)} "
            "already runs on the host. Host calls cannot be nested: call the inner function directly."
        )
    if body.in_body() is None or tf.executing_eagerly():
        return fn(*args, **kwargs)
    calls: host_call.HostCalls = body.gathered_host_calls()
    calls.can_fail = True
    calls.codes |= host_results.list_codes(fn)
    closure = closures.Closure(fn, args, kwargs, _value_on_devices)
    where = here()
    found = host_results.find_host_results(
        fn, closure, body.HostCallSite(tf.constant(0), calls.size, where), calls.handles
    )
    # The program calls it all the same: it may have been written for its effects.
    results = host_results.AnyResults() if isinstance(found, arguments.UnknownResults) else found
    calls.closures.append(closure)
    cluster = _FunctionCall(calls, where, host_results.readable_name(fn), closure, results)
    tensors = _differentiable(cluster, closure.tensors)
    return found if isinstance(found, arguments.UnknownResults) else found.rebuild(tensors)


class _FunctionCall(host_call.HostCall):
    """A call of the user's function."""

    differentiated = False

    def __init__(
        self,
        calls: host_call.HostCalls,
        where: str,
        called: str,
        closure: closures.Closure,
        results: host_results.HostResults,
    ):
        super().__init__(calls, calls.new_name(), where, results.tensors)
        self._called = called
        self._closure = closure
        self._wanted = results

    def emit(self, inputs: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds the call to the graph; everything that the results depend on goes to the host."""
        return self.calls.emit(self, inputs)

    def describe(self) -> str:
        """The call as text, with the name of the user's function."""
        return f"outside_compilation({self._called}){at(self.where)}"

    def compute(self, kept: session.Kept, position: int, token: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Calls the function."""
        if not self.differentiated:
            return self._call(tensors)
        # Persistent: it is asked once for each gradient, and also records in one that is differentiated itself.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([tensor for tensor in tensors if _has_gradient(tensor)])
            outputs = self._call(tensors)
        kept[token] = tape, tensors, outputs  # what the gradient needs
        return outputs

    def _call(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        fn, args, kwargs = self._closure.build(tensors)
        return self._wanted.select_tensors(fn(*args, **kwargs))

    def result_name(self, result: int) -> str:
        """The path of a result in the structure that the function returned."""
        return self._wanted.names[result]


class _ClusterGradient(host_call.HostCall):
    """The gradient of a cluster, or of a gradient. It runs no function of the user, so it needs no order.

    Args:
        of: the call to differentiate.
        inputs: the tensors that the results of `of` depend on.
        token: the number that `of` returned as the position of the next call. Gradients pass it on.
    """

    differentiated = False

    def __init__(self, of: _FunctionCall | _ClusterGradient, inputs: Sequence[tf.Tensor], token: tf.Tensor):
        # In time: the body is traced to its end before any call of it runs and needs to know whether to keep a tape.
        of.differentiated = True
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs if _has_gradient(each)]
        super().__init__(of.calls, of.calls.new_gradient_name(of.name), of.where, specs)
        self._described = of.describe().removeprefix(_GRADIENT)
        self._token = token
        self._sent = len(inputs)

    def emit(self, inputs: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds the call to the graph. Only the gradients of the outputs go to the host, not the inputs of `of`."""
        return self.calls.emit_anywhere(self, self._token, inputs[self._sent :])

    def next_position(self, run: session.Session, position: int, replica: int) -> int:
        """A token: the call has no position, since it has no place in the order, but each call has its own number."""
        return run.new_token(replica)

    def describe(self) -> str:
        """The call as text, for messages: a gradient of a gradient has the name of the user's call too."""
        return _GRADIENT + self._described

    def compute(self, kept: session.Kept, position: int, token: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Asks the tape of the cluster."""
        tape, inputs, outputs = kept[position]
        sources = [tensor for tensor in inputs if _has_gradient(tensor)]
        targets = [tensor for tensor in outputs if _has_gradient(tensor)]
        zero = tf.UnconnectedGradients.ZERO
        if not self.differentiated:
            return _dense(tape.gradient(targets, sources, tensors, zero))
        with tape:
            tape.watch(tensors)
            results = _dense(tape.gradient(targets, sources, tensors, zero))
        kept[token] = tape, [*inputs, *tensors], results
        return results


def _differentiable(call: _FunctionCall | _ClusterGradient, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results of a call, with gradients with respect to everything they depend on."""
    if not any(map(_has_gradient, inputs)) or not any(map(_has_gradient, call.results)):
        return call.emit(inputs)[1]

    # Identities, since a gradient in a branch cannot find again the outer tensors that were passed in.
    inputs = list(map(tf.identity, inputs))
    token, results = call.emit(inputs)

    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
        pairs = zip(upstream, call.results, strict=True)
        given = [tf.convert_to_tensor(each) for each, spec in pairs if _has_gradient(spec)]
        found = iter(_differentiable(_ClusterGradient(call, inputs, token), [*inputs, *given]))
        return [next(found) if _has_gradient(each) else None for each in inputs]

    return function_graphs.differentiable(results, inputs, gradient)


def _value_on_devices(variable: object) -> tf.Tensor | None:
    """The value of a variable that is on the devices: a strategy's, or one that the body has used already."""
    if isinstance(variable, distribute.DistributedVariable):
        return variable.read_value()
    if isinstance(variable, tf.Variable) and eager.is_captured(variable.handle):
        return variable.read_value()
    return None


def _has_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _dense(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    # The program takes tensors only, no IndexedSlices.
    return [tf.convert_to_tensor(each) for each in gradients]
