"""Where a replica enters an operator: this module wraps TensorFlow's functions that make one.

Outside a replica on a thread, each wrapper calls TensorFlow's function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.diagnostics.user_frames import identity, user_location
from replica_engine.engine import current_replica
from replica_engine.errors import MergeCallGraphError
from replica_engine.process import interrupts
from replica_engine.threads import inherited_state, replica_context
from replica_engine.threads.control_flow import joint_operator, joint_ops
from replica_engine.traced_steps import supervised_call
from replica_engine.upstream.graphs import function_calls, function_graphs, operators


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once."""
    operators.COND.around(_cond)
    operators.SWITCH_CASE.around(_switch_case)
    operators.WHILE_LOOP.around(_while_loop)
    operators.TRIAL.around(_trial)
    operators.WHILE_STATEMENT.around(_while_stmt)
    operators.convert_with_hooks()
    supervised_call.install_nested(_call)
    operators.INITIALIZE.around(_initialize)
    operators.VECTORIZE.around(_vectorize)
    operators.CUSTOM_GRADIENT.around(_custom_gradient)
    operators.GRADIENTS.around(joint_ops.by_replicas)
    operators.GRADIENT_TYPES.around(_gradient_types)
    operators.PUSH_TAPE.around(_push_tape)
    operators.TAPE_GRADIENT.around(_tape_gradient)
    operators.wrap_gradients(_gradient_of_op)


def _context() -> replica_context.ReplicaContext | None:
    """The context of the replica that this thread runs, in replica context."""
    replica = current_replica()
    if replica is None:
        return None
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, replica_context.ReplicaContext) and context.runs(replica) else None


def _cond(original: Callable[..., Any], pred: Any, true_fn: Any, false_fn: Any, name: str = "cond") -> Any:
    def make(selector: Any, branches: Sequence[Callable[[], Any]]) -> Any:
        return original(selector, *branches, name)

    return _branched("tf.cond", make, pred, [true_fn, false_fn])


def _switch_case(original: Callable[..., Any], branch_index: Any, branch_fns: Any, *args: Any, **options: Any) -> Any:
    def make(selector: Any, branches: Sequence[Callable[[], Any]]) -> Any:
        return original(selector, branches, *args, **options)

    return _branched("tf.switch_case", make, branch_index, branch_fns)


def _branched(kind: str, make: Callable[..., Any], selector: Any, functions: Any) -> Any:
    context = _context()
    if context is None:
        return make(selector, functions)

    def plain() -> Any:
        return make(selector, [_ending(each, context.attempts.ends_branch) for each in functions])

    def joint() -> Any:
        payload = joint_ops.Branches(_as_value(selector), list(functions), make)
        return context.enter_operator(kind, joint_ops.build_branches, payload)

    return context.attempts.enter(user_location(context.replica), plain, joint)


def _while_loop(original: Callable[..., Any], cond: Any, body: Any, loop_vars: Any, **options: Any) -> Any:
    context = _context()
    if context is None:
        return original(cond, body, loop_vars, **options)
    ends = context.attempts.ends_branch

    def plain() -> Any:
        return original(_ending(cond, ends), _ending(body, ends), loop_vars, **options)

    def joint() -> Any:
        # A tape needs tensors that no other operator takes, to tell the gradients of two of them apart.
        taped = operators.has_tape()
        own = tf.nest.map_structure(
            lambda each: tf.identity(each) if taped and isinstance(each, tf.Tensor) else _as_value(each), loop_vars
        )
        most = _as_value(options.get("maximum_iterations"))
        payload = joint_ops.Loop(cond, body, own, options | {"maximum_iterations": most}, original)
        outs = context.enter_operator("tf.while_loop", joint_ops.build_loop, payload)
        flat = tf.nest.flatten(outs, expand_composites=True)
        return flat[0] if len(flat) == 1 and not options.get("return_same_structure", True) else outs

    return context.attempts.enter(user_location(context.replica), plain, joint)


def _trial(original: Callable[..., Any], body: Callable[[], Any], *rest: Any) -> Any:
    """AutoGraph's trial of the body of a loop, with variables that are undefined before the loop."""
    context = _context()
    if context is None:
        return original(body, *rest)

    def plain() -> Any:
        return original(_ending(body, context.attempts.ends_branch), *rest)

    def joint() -> Any:
        return original(lambda: context.enter_operator("tf.while_loop", joint_ops.build_trial, body), *rest)

    return context.attempts.enter(user_location(context.replica), plain, joint)


def _while_stmt(original: Callable[..., Any], test: Callable[[], Any], *rest: Any) -> Any:
    """AutoGraph's `while`, which first calls the condition in a graph that is thrown away, to see what it returns."""
    context = _context()
    if context is None or context.attempts.active:
        return original(test, *rest)
    untried = True

    def joint() -> Any:
        made: list[Any] = []
        context.enter_operator("tf.while_loop", joint_ops.build_trial, lambda: made.append(test()))
        return made[0]

    def condition() -> Any:
        nonlocal untried
        if not untried:
            return test()
        untried = False
        place = user_location(context.replica)
        return context.attempts.enter(place, _ending(test, context.attempts.ends_branch), joint)

    return original(condition, *rest)


def _call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a `tf.function` by a replica."""
    context = _context()
    if context is None or function_calls.runs_eagerly(self):
        return original(self, *args, **kwargs)

    record = inherited_state.find_function_record(self)
    if record.swallowed:
        raise MergeCallGraphError.swallowed()

    def plain() -> Any:
        with function_calls.unlocked_afterwards(self):
            result = original(self, *args, **kwargs)
        if context.attempts.needed:  # The trace without the merge call stays, so the function must not be called again.
            record.swallowed = True
        return result

    def joint() -> Any:
        if function_graphs.is_compiled(self):
            raise MergeCallGraphError(
                f"`merge_call` called in a nested tf.function with jit_compile=True, by {context.replica}, at "
                f"{context.here()}. XLA compiles that function for one device, where the other replicas do not "
                "exist. Leave jit_compile=True out, or run the whole step as one compiled program for all "
                "replicas: replica_engine.TPUStrategy()."
            )
        if not tf.executing_eagerly():
            return joint_ops.inlined(self, args, kwargs)
        own = function_calls.bound_arguments(self, args, kwargs)
        own = joint_ops.own_arguments(*own) if operators.has_tape() else own
        return context.enter_operator("tf.function", joint_ops.build_call, joint_ops.FunctionCall(self, *own))

    if tf.executing_eagerly() and context.strategy in record.joint:
        return context.attempts.enter_joint(joint)
    place = "tf.function", identity(self.python_function)
    return context.attempts.enter(place, plain, joint)


def _initialize(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The first trace of a `tf.function`, by a call or by `get_concrete_function`."""
    try:
        return original(self, *args, **kwargs)
    except joint_operator.MergeNeeded:
        function_calls.forget_first_call(self)
        raise


def _vectorize(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """tf.vectorized_map, and a tape's jacobian: TensorFlow rewrites the ops inside, so that nothing can merge there."""
    context = _context()
    if context is None:
        return original(*args, **kwargs)
    with interrupts.set_for_block(context.attempts, "vectorizing", True):
        return original(*args, **kwargs)


def _custom_gradient(original: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function with a gradient of its own, in a graph: an attempt finds out whether the gradient has merge calls."""
    context = _context()
    if context is None:
        return original(fn, args, kwargs)

    def tried(*values: Any) -> Any:
        result, gradient = fn(*values)
        operators.try_gradient(gradient, tf.nest.flatten(result))
        return result, gradient

    tries = context.attempts.active and operators.has_tape()
    results = original(tried if tries else fn, args, kwargs)
    operators.keep_by_graph(results)
    return results


def _push_tape(original: Callable[..., Any], self: tf.GradientTape) -> Any:
    """A tape begins. In a graph it can be asked again after an attempt has asked it in vain."""
    context = _context()
    if context is None:
        return original(self)
    context.attempts.note_tape(self)
    if tf.executing_eagerly():
        return original(self)
    with operators.kept_after_gradient(self):
        return original(self)


def _gradient_types(original: Callable[..., int], tensors: Sequence[Any]) -> int:
    """Which gradients tapes may be asked for: of one tape that the user did not make persistent, the first order."""
    found = original(tensors)
    context = None if tf.executing_eagerly() else _context()
    tapes = [] if context is None else context.attempts.recording_tapes()
    if context is None or len(tapes) > 1 or any(map(operators.is_persistent, tapes)):
        return found
    return operators.only_first_order(found)


def _tape_gradient(
    original: Callable[..., Any], self: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    context = _context()
    if context is None:
        return original(self, target, sources, *args, **kwargs)
    attempts = context.attempts
    attempts.note_gradient(self)
    with interrupts.set_for_block(attempts, "asked_for", tf.nest.flatten(sources)):
        return original(self, target, sources, *args, **kwargs)


def _gradient_of_op(original: Callable[..., Any], op: tf.Operation, *upstream: Any) -> Any:
    """The gradient of an If, Case or While op."""
    context = _context()
    if context is None or not joint_operator.is_joint(op):
        return original(op, *upstream)
    visited = joint_ops.Visited(original, op, upstream)
    return context.enter_operator("gradient", joint_ops.build_operator, visited, of=op)


def _ending(fn: Any, ends: Callable[[], None]) -> Any:
    """A branch or a body that raises again, at its end, what the user's code in it has caught."""
    if not callable(fn):
        return fn

    def ending(*args: Any) -> Any:
        result = fn(*args)
        ends()
        return result

    return ending


def _as_value(value: Any) -> Any:
    """Reads a variable here on the replica's thread, where it is the replica's own."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value
