"""The step of a device loop, traced once and called in a loop of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf.graphs import autograph
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import LoweringError
from replica_engine.values.structure import flatten
from replica_engine.xla import soft_placement
from replica_engine.xla.body import in_body
from replica_engine.xla.host_calls.call import HostCalls, current_calls
from replica_engine.xla.signature import argument_names
from replica_engine.xla.signature.arguments import Arguments
from replica_engine.xla.signature.function_spec import FunctionSpec


class Step(NamedTuple):
    """A traced step.

    Attributes:
        run: takes the inputs of a step; returns its outputs.
        zeros: the outputs before the first step.
        calls: the host calls of the body.
        calls_host: whether the step calls the host.
        value: what the step returned, from its outputs.
    """

    run: Callable[..., Sequence[tf.Tensor]]
    zeros: list[tf.Tensor]
    calls: HostCalls
    calls_host: bool
    value: Callable[[Sequence[tf.Tensor]], Any]


class LoopBody:
    """The body of a program with a loop of steps: a function for `trace`.

    Attributes:
        was_traced: whether it was traced; False if an equal program was found in the cache.
    """

    def __init__(
        self, source: FunctionSpec, step: Callable[..., Any], like: Arguments, specs: Sequence[tf.TensorSpec], most: int
    ):
        self.__name__ = source.name
        self.made_of = source.fn  # has the line
        self._fn = source.fn
        self._step: Any = step
        self._rebuild: Any = like.rebuild
        self._places = [slot.name for slot in like.slots]
        self._specs = specs
        self._most = most
        self.was_traced = False

    def forget(self) -> None:
        """Called when tracing is over: lets go of the first batch, which tracing needed."""
        self._rebuild = self._step = None

    def _traced_step(self) -> Step:
        self.was_traced = True
        packed: list[Any] = []

        def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
            args, kwargs = self._rebuild(tensors)
            named = argument_names.named(self._fn, tensors, self._places, skip=1)
            with named, autograph.as_outside():  # AutoGraph converts the step, but not this function
                value = self._step(self._fn, args, kwargs)
            packed.append(flatten(value))
            return [tf.identity(each) for each in packed[-1][0] if tf.is_tensor(each)]

        def value(outputs: Sequence[tf.Tensor]) -> Any:
            found = iter(outputs)
            leaves, spec = packed[-1]
            return spec.rebuild([next(found) if tf.is_tensor(each) else each for each in leaves])

        # Traced separately first, since a loop must know in advance what its body returns.
        step = tf.function(flat, autograph=False).get_concrete_function(*self._specs)
        for index, output in enumerate(step.outputs):
            if not output.shape.is_fully_defined():
                raise LoweringError.dynamic_result(self.__name__, index, user_line(output))
        zeros = [tf.zeros(each.shape, each.dtype) for each in step.outputs]
        calls, body = current_calls(), in_body()
        calls_host = bool(calls.calls) or (
            body is not None and body.moves_ops and soft_placement.needs_host(step.graph)
        )
        return Step(step, zeros, calls, calls_host, value)
