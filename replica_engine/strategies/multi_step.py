"""The context of a device loop: what its steps pass out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import autograph
from replica_engine.errors import CollectiveError, InputsError, ReplicaValueError
from replica_engine.values.regroup import regroup
from replica_engine.values.tensors import as_tensor


class MultiStepContext:
    """What `fn` of a device loop is given first, and what the loop returns.

    Attributes:
        last_step_outputs: by name, what the last step passed out: one value if it was reduced, or else a
            `tf.distribute.DistributedValues` of each replica's.
        non_tensor_outputs: by name, what was passed out while the step was traced; from replica context a tuple over
            replicas.
        steps: how many steps ran.
        run_op: None: the steps have run. For programs that pass it to a session.
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}
        self.steps = 0
        self.run_op = None
        self._reduced: dict[str, bool] = {}

    @autograph.artifact
    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Passes a value out of the last step.

        Args:
            name: to find it by in `last_step_outputs`.
            output: a tensor, or a structure of tensors.
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`, to reduce it over replicas; None passes out
                each replica's.

        Raises:
            InputsError: `name` is no name.
            CollectiveError: `reduce_op` is no reduction.
        """
        _check_name(name)
        if reduce_op is None:
            self._pass_out(name, output, None)
            return
        how = tf.distribute.ReduceOp.__members__.get(str(getattr(reduce_op, "name", reduce_op)).upper())
        if how is None:
            raise CollectiveError.unknown_reduction(reduce_op, list(tf.distribute.ReduceOp.__members__))
        self._pass_out(name, output, lambda strategy, leaf: strategy.extended.reduce_to(how, leaf, "CPU:0"))

    @autograph.artifact
    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Passes out a value that is known while the step is traced: a name, a number, any object."""
        _check_name(name)
        if tf.distribute.in_cross_replica_context():
            self.non_tensor_outputs[name] = output
        else:
            size = tf.distribute.get_strategy().num_replicas_in_sync
            self.non_tensor_outputs[name] = (output,) * size

    def _pass_out(self, name: str, output: Any, reduce: Callable[[Any, tf.Tensor], Any] | None) -> None:
        """Passes a value out, reduced by `reduce(strategy, tensor)` in cross-replica context."""
        try:
            tensors = tf.nest.map_structure(lambda leaf: as_tensor(leaf, f"The output {name!r}"), output)
        except RecursionError:
            raise ReplicaValueError.endless(f"the output {name!r}") from None
        self._reduced[name] = reduce is not None
        if reduce is not None:

            def merge_fn(strategy: tf.distribute.Strategy, value: Any) -> Any:
                return tf.nest.map_structure(lambda leaf: reduce(strategy, leaf), value)

            tensors = _in_cross_replica_context(merge_fn, tensors)
        self.last_step_outputs[name] = tensors

    @staticmethod
    def of_replicas(name: str, values: list[Any]) -> Any:
        """What `last_step_outputs` has of an output that is not reduced."""
        return regroup(values, what=f"The output {name!r}")

    def traced(self) -> tuple[dict[str, Any], Any]:
        """What a step passed out: tensors, and the rest for `filled`."""
        return self.last_step_outputs, _Rest(dict(self._reduced), dict(self.non_tensor_outputs))

    @classmethod
    def filled(cls, steps: int, results: list[Any]) -> MultiStepContext:
        """Of each replica's values of what `traced` returned."""
        context = cls()
        context.steps = steps
        rest: _Rest = results[0][1]
        context.non_tensor_outputs = dict(rest.non_tensor_outputs)
        context._reduced = rest.reduced
        for name, is_reduced in rest.reduced.items():
            values = [outputs[name] for outputs, _ in results]
            context.last_step_outputs[name] = values[0] if is_reduced else cls.of_replicas(name, values)
        return context


def _check_name(name: Any) -> None:
    try:
        hash(name)
    except Exception:  # tensors of TensorFlow have errors of their own
        raise InputsError.bad_output_name(name) from None


class _Rest:
    """What goes past the program; no structure, so that nothing looks for tensors in it."""

    def __init__(self, reduced: dict[str, bool], non_tensor_outputs: dict[str, Any]):
        self.reduced = reduced
        self.non_tensor_outputs = non_tensor_outputs


def _in_cross_replica_context(fn: Any, value: Any) -> Any:
    """`fn(strategy, value)` in cross-replica context, wherever this is called."""
    if tf.distribute.in_cross_replica_context():
        return fn(tf.distribute.get_strategy(), value)
    return tf.distribute.get_replica_context().merge_call(fn, args=(value,))
