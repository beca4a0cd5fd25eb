"""The context of a device loop: it collects what the steps pass out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from replica_engine.diagnostics.user_frames import here
from replica_engine.errors import CollectiveError, InputsError, run_errors
from replica_engine.errors.base import at, brief, shown
from replica_engine.upstream.graphs import autograph
from replica_engine.values.regroup import regroup
from replica_engine.values.structure import as_tensor, flatten


class MultiStepContext:
    """The first argument of each step of a device loop, and the result of the loop.

    Attributes:
        last_step_outputs: what the last step passed out, by name: one value if the output was reduced, otherwise a
            `tf.distribute.DistributedValues` with one value per replica.
        non_tensor_outputs: what was passed out while the step was traced, by name; a tuple over replicas for an
            output from replica context.
        steps: how many steps ran.
        run_op: None, because the steps have already run. It exists for programs that pass it to a session.
        later: on devices that may still run the last steps, what `last_step_outputs` is made of when somebody looks.
    """

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}
        self.steps = 0
        self.run_op = None
        self.later: Any = None
        self._make: Callable[[], list[Any]] | None = None
        self._reduced: dict[str, bool] = {}
        self._graph = None if tf.executing_eagerly() else weakref.ref(tf.compat.v1.get_default_graph())  # the step's

    @autograph.artifact
    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Passes a value out of the last step.

        Args:
            name: the key of the value in `last_step_outputs`.
            output: a tensor, or a structure of tensors.
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`, to reduce the value over replicas; None passes
                out the value of each replica.

        Raises:
            InputsError: `name` is not hashable, or the call is in a branch or loop on a tensor.
            CollectiveError: `reduce_op` is not a reduction.
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
        """Passes out a value that is known while the step is traced: a name, a number or any other object."""
        _check_name(name)
        if tf.distribute.in_cross_replica_context():
            self.non_tensor_outputs[name] = output
        else:
            size = tf.distribute.get_strategy().num_replicas_in_sync
            self.non_tensor_outputs[name] = (output,) * size

    def _pass_out(self, name: str, output: Any, reduce: Callable[[Any, tf.Tensor], Any] | None) -> None:
        """Passes a value out. If `reduce` is given, reduces each tensor by `reduce(strategy, tensor)` first."""
        leaves, spec = flatten(output, what=f"the output {name!r}")
        tensors = spec.rebuild([as_tensor(leaf, f"The output {name!r}") for leaf in leaves])
        self._reduced[name] = reduce is not None
        self._check_known(name, tensors)
        if reduce is not None:

            def merge_fn(strategy: tf.distribute.Strategy, value: Any) -> Any:
                return tf.nest.map_structure(lambda leaf: reduce(strategy, leaf), value)

            if tf.distribute.in_cross_replica_context():
                tensors = merge_fn(tf.distribute.get_strategy(), tensors)
            else:
                tensors = tf.distribute.get_replica_context().merge_call(merge_fn, args=(tensors,))
            self._check_known(name, tensors)  # the reduction is an op of the branch, even if the tensor is not
        self.last_step_outputs[name] = tensors

    def _check_known(self, name: str, tensors: Any) -> None:
        if any(map(self._is_inside, tf.nest.flatten(tensors))):
            raise InputsError(
                f"The output {shown(name)} is set{at(here())} in a branch or loop on a tensor (`if`, `for`, "
                "`while`, tf.cond), or in a nested tf.function, and what is computed there is not known outside. "
                "Set it in the step itself: give the variable a value before the branch, change it there, and pass "
                "it out after it:\n"
                "    loss = 0.0\n"
                "    if x > 3.0:\n"
                "        loss = x\n"
                f'    context.set_last_step_output({shown(name)}, loss, "MEAN")'
            )

    def _is_inside(self, leaf: Any) -> bool:
        """Whether a tensor is of a graph inside that of the step, such as a branch, so that it is not known outside."""
        outer: Any = None if self._graph is None else self._graph()
        graph = getattr(leaf, "graph", None)  # not of a value that is known already
        if outer is None or graph is None:
            return False
        while outer is not None and outer is not graph:
            outer = getattr(outer, "outer_graph", None)
        return outer is None

    @staticmethod
    def of_replicas(name: str, values: list[Any]) -> Any:
        """The entry of `last_step_outputs` for an output that is not reduced: the values of all replicas, regrouped."""
        return regroup(values, what=f"The output {name!r}")

    if not TYPE_CHECKING:  # a type checker would take each name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that is not found: says what to write for one that another object has."""
            make = vars(self).get("_make") if name == "last_step_outputs" else None
            if make is None:
                return run_errors.elsewhere(self, "loop", name)
            self.last_step_outputs = self._filled(make())
            self._make = self.later = None
            return self.last_step_outputs

    def traced(self) -> tuple[dict[str, Any], Any]:
        """What a step passed out: the tensors, and an object with everything else, which `filled` takes.

        The object is no structure, so that nothing looks for tensors in it.
        """
        rest = SimpleNamespace(reduced=dict(self._reduced), non_tensor_outputs=dict(self.non_tensor_outputs))
        return self.last_step_outputs, rest

    @classmethod
    def filled(cls, steps: int, results: Callable[[], list[Any]], later: Any = None) -> MultiStepContext:
        """Makes the context that the loop returns.

        Args:
            steps: how many steps ran.
            results: gives for each replica the values of what `traced` returned.
            later: the same regrouped, if `results` would wait for it; None otherwise.
        """
        context = cls()
        context.steps = steps
        if later is None:
            made = results()
            rest = made[0][1]
            context.last_step_outputs = cls._filled(made)
        else:
            context.later, rest = later
            context._make = results
            del context.last_step_outputs  # until somebody looks at it
        context.non_tensor_outputs = dict(rest.non_tensor_outputs)
        return context

    @classmethod
    def _filled(cls, results: list[Any]) -> dict[str, Any]:
        """The content of `last_step_outputs`."""
        values = {name: [outputs[name] for outputs, _ in results] for name in results[0][1].reduced}
        return {
            name: each[0] if results[0][1].reduced[name] else cls.of_replicas(name, each)
            for name, each in values.items()
        }


def _check_name(name: Any) -> None:
    try:
        hash(name)
    except (TypeError, ValueError):
        raise InputsError(
            f"The name of a step's output must be a string; got {brief(name)}, which is not hashable."
        ) from None
