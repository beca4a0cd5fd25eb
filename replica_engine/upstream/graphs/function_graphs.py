"""`tf.function`s and their graphs, taken apart, looked at, and changed while they are built.

Checked on TensorFlow 2.21.0; ops that call Python (`python_op`) on TensorFlow 2.19 to 2.22.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

# global_seed, _rng: the values that tf.random.set_seed set. It makes a new generator each time, even for an equal seed.
# _seed: the seed itself, to restore it without clearing TensorFlow's caches of kernels.
# op_callbacks: the callbacks of this thread.
from tensorflow.python.eager import context as _context

# record_operation: tells tapes the gradient of some tensors with respect to others. could_possibly_record: whether
# there are tapes.
from tensorflow.python.eager import record as _record

# XLA_COMPILE: the attribute that stands for jit_compile=True.
from tensorflow.python.eager.polymorphic_function.attributes import XLA_COMPILE as _XLA_COMPILE

# add_op_callback: calls a function for each new op; the function may return other results to use instead.
from tensorflow.python.framework import op_callbacks as _op_callbacks

# gradient_registry: the functions that compute the gradients of TensorFlow's ops, by the type of the op.
from tensorflow.python.framework import ops as _ops

# control_flow_util: GraphOrParentsInXlaContext, whether XLA is to compile what is put into a graph.
from tensorflow.python.ops import control_flow_util as _control_flow_util

from replica_engine.errors import ReplicaEngineError
from replica_engine.process import interrupts
from replica_engine.upstream import eager, versions
from replica_engine.upstream.hook import FIRST_THREADS, REPLICATED, Hook

# What a traced `tf.function` has captured.

CALL_FLAT = Hook(
    "tensorflow.python.eager.polymorphic_function.concrete_function.ConcreteFunction",
    "_call_flat",  # makes all calls of one trace of a `tf.function`, with or without a tape
    why="a function that was traced before, called in a callback, has the weights of then",
    since=REPLICATED,
)
_WRITES = "_replica_engine_writes"


def captured_with(function: Any, attribute: str) -> Iterator[tuple[Any, Callable[[], bool]]]:
    """The captured handles of variables that have an attribute.

    Args:
        function: a concrete function.
        attribute: its name.

    Yields:
        The value of the attribute, and what tells whether the function may write to the variable.
    """
    captured = function._captured_inputs
    for index, handle in enumerate(captured):
        if (found := getattr(handle, attribute, None)) is not None:
            yield found, functools.partial(_may_write, function.graph, index - len(captured))


def _may_write(graph: Any, index: int) -> bool:
    known: dict[int, bool] = kept_on(graph, _WRITES, dict)  # a graph that has been traced does not change
    if index not in known:
        known[index] = eager.may_write(graph.inputs[index], set())
    return known[index]


# Objects that live as long as a graph.

T = TypeVar("T")

_KEPT = "_replica_engine_kept"  # attribute of a graph


def kept_on(graph: Any, name: str, make: Callable[[], T]) -> T:
    """An object that lives as long as a graph does, its attribute of that name; made at the first request."""
    kept = getattr(graph, name, None)
    if kept is None:
        kept = make()
        setattr(graph, name, kept)
    return kept


def keep(graph: Any, what: Any) -> bool:
    """Keeps an object as long as the graph of a function lives, or that of a function around it.

    Returns:
        Whether that is the graph of a function; otherwise nothing is done.
    """
    graphs = list(eager.function_graphs(graph))
    for each in graphs:
        kept_on(each, _KEPT, list).append(what)
    return bool(graphs)


# The gradient of values in a graph, instead of `tf.custom_gradient`.
#
# In a graph, `tf.custom_gradient` registers each gradient under a name of its own, for as long as the process lives.
# The gradient refers to the tensors that it was made with, and so keeps their graph for ever. It also searches all ops
# behind the results for variables. Here a name is registered once, and a graph keeps its gradients itself.

_REGISTERED = f"ReplicaEngineGradient_{uuid.uuid4().hex}"  # unique also after a reload
is_recording = _record.could_possibly_record
"""Whether a tape of this thread may record what is computed now."""

_NUMBER = "_replica_engine_gradient"  # attribute of an op: the number of its gradient, which copies of the op have too
_numbers = itertools.count()

OF_PYTHON = ("_gradient_op_type", _NUMBER)
"""Attributes of ops that name a gradient in Python. What they say belongs to this process, and no program needs it."""


def _gradient(results: int, compute: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The gradient of an op whose outputs are some results, followed by the inputs of these.

    Args:
        results: how many results there are.
        compute: takes the upstream gradient of each result, and returns the gradient of each input.
    """

    def gradient(*upstream: Any) -> list[Any]:
        found = compute(*upstream[:results])
        return [None] * results + (list(found) if isinstance(found, (list, tuple)) else [found])

    return gradient


_registering = threading.Lock()
_gradients: weakref.WeakValueDictionary[int, Callable[..., list[Any]]] = weakref.WeakValueDictionary()  # by number


@functools.cache
def _register() -> None:
    tf.RegisterGradient(_REGISTERED)(lambda op, *upstream: _gradients[op.get_attr(_NUMBER)](*upstream))


def _register_alone(gradient: Callable[..., Any], number: int) -> str:
    """Registers a gradient under a name of its own, for as long as it lives; returns the name."""
    name, reference = f"{_REGISTERED}_{number}", weakref.ref(gradient)

    @tf.autograph.experimental.do_not_convert
    def call(op: tf.Operation | None, *upstream: Any) -> list[Any]:
        known = reference()
        assert known is not None, "kept by the graph of the op"
        return known(*upstream)

    tf.RegisterGradient(name)(call)
    weakref.finalize(gradient, _ops.gradient_registry._registry.pop, name, None).atexit = False
    return name


def _registered() -> str:
    """The name of what looks up the gradient of an op by its number, which is registered when it is first needed."""
    with _registering:
        _register()
    return _REGISTERED


def differentiable(
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    gradient: Callable[..., Any],
    may_be_saved: bool = False,
) -> list[tf.Tensor]:
    """Returns tensors equal to `results` whose gradient with respect to `inputs` is `gradient`.

    Args:
        results: tensors of the graph under construction.
        inputs: the tensors to differentiate with respect to.
        gradient: takes the upstream gradient of each result, and returns the gradient of each input: a sequence, or a
            tensor if there is one input. The graph keeps it.
        may_be_saved: whether the graph may become one of a SavedModel. For that, TensorFlow calls gradients without
            their ops, so the gradient needs a name of its own.
    """
    found = _gradient(len(results), gradient)
    number = next(_numbers)
    known = _passed_on(results, inputs, _register_alone(found, number) if may_be_saved else _registered())
    known[0].op._set_attr(_NUMBER, tf.compat.v1.AttrValue(i=number))
    keep(known[0].graph, found)
    _gradients[number] = found
    _record.record_operation(_REGISTERED, known, [*results, *inputs], found)
    return known[: len(results)]


def substitute_results(op: tf.Operation, results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors equal to `results` with the gradient that TensorFlow gives the results of an op.

    What computes `results` may have another gradient, since it chooses between values.
    """
    try:
        compute = _ops.gradient_registry.lookup(op.type)
    except LookupError:
        compute = None
    if compute is None:
        return list(results)
    # The op as functions that compute gradients see it, with other results than its own.
    seen = types.SimpleNamespace(type=op.type, inputs=op.inputs, get_attr=op.get_attr, outputs=list(results))
    return differentiable(results, op.inputs, functools.partial(compute, seen))


def _passed_on(results: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], registered: str) -> list[tf.Tensor]:
    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": registered}):
        known: list[tf.Tensor] = tf.identity_n([*results, *inputs])
    return known


def with_gradient(
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    registered: str,
    gradient: Callable[..., Sequence[Any]],
    in_order: Callable[..., tuple],
) -> list[tf.Tensor]:
    """Like `differentiable`, for replicas that are traced one after the other, and for graphs that may be saved.

    All that the replicas have computed is behind a sum over replicas: for ResNet-50 with four replicas, the search of
    `tf.custom_gradient` for variables took 10 s.

    Args:
        results: tensors of any ops.
        inputs: the tensors to differentiate with respect to.
        registered: the name under which `tf.RegisterGradient` registered the gradient, for `tf.gradients`: the gradient
            of an op whose results are `results`, followed by `inputs`.
        gradient: the same gradient for tapes: takes the upstream gradient of each result, and returns the gradient of
            each input.
        in_order: adds tokens to the outputs, inputs and gradient that tapes see; see `ReplicaContext.in_order`.
    """
    known = _passed_on(results, inputs, registered)
    of_tape = _gradient(len(results), gradient)
    _record.record_operation(registered, *in_order(known, [*results, *inputs], of_tape))
    return known[: len(results)]


# Ops that call a Python function of this library.

_BY_OUTERMOST = versions.minor(tf.__version__) < (2, 22)
_lock = threading.Lock()
_raised: deque[ReplicaEngineError] = deque(maxlen=8)  # by Python ops whose function has not yet been left


def python_op(fn: Callable[..., Any], inputs: Sequence[Any], dtypes: Any) -> Any:
    """Like `tf.numpy_function`, with a function that lives as long as the graph of the op.

    TensorFlow before 2.22 keeps it as long as the outermost graph: under eager mode, for the life of the process. Since
    then it keeps it as long as the graph of the op, but not as long as those around it. An error of this library that
    the function raises can be had again (`raised_in_op`): TensorFlow keeps the text only.
    """

    @functools.wraps(fn)
    def noted(*args: Any) -> Any:
        try:
            return fn(*args)
        except ReplicaEngineError as error:
            with _lock:
                _raised.append(error)
            raise

    results = tf.numpy_function(noted, inputs, dtypes, stateful=True)
    graph = tf.compat.v1.get_default_graph()
    called = noted.ag_dnc_wrapper__  # type: ignore[attr-defined]  # what TensorFlow has registered for `fn`
    if keep(graph, called) and _BY_OUTERMOST:
        eager.outermost_graph(graph).outer_graph._py_funcs_used_in_graph.remove(called)
    return results


def raised_in_op(error: BaseException) -> ReplicaEngineError | None:
    """The error of this library that a Python op has raised, if TensorFlow has made `error` of it; else None."""
    if not _raised or not isinstance(error, tf.errors.OpError):
        return None
    with _lock:
        found = next((each for each in _raised if f"{type(each).__name__}: {each}" in error.message), None)
        if found is not None:
            _raised.clear()  # the other replicas' errors of the same step; nothing keeps their frames
    return found


# A `tf.function`: its options and its traces; how to put it together again.

_UNCOMPILED = "_replica_engine_uncompiled"  # attribute of a graph, and of a context of XLA


def is_tf_function(fn: Any) -> bool:
    """Whether `fn` is a `tf.function`."""
    # Not tf.types.experimental.PolymorphicFunction, which has neither python_function nor the options.
    return isinstance(fn, tf.__internal__.function.Function)


def clone(fn: Any, python_function: Callable) -> Any:
    """A `tf.function` around another Python function, with the options of `fn`."""
    return fn._clone(python_function=python_function)


def clone_for_any(fn: Any, python_function: Callable) -> Any:
    """Like `clone`, but without the input signature: for arguments that it describes together, one for each replica."""
    if fn.input_signature is None:
        return clone(fn, python_function)
    return tf.__internal__.function.Function(
        python_function,
        name=fn._name,
        autograph=fn._autograph,
        jit_compile=fn._jit_compile,
        reduce_retracing=True,  # A signature has unknown sizes, so that other sizes are not traced again.
        experimental_attributes=fn._attributes,
        experimental_autograph_options=fn._experimental_autograph_options,
    )


def list_traced_graphs(fn: Any) -> list[tuple[str, Any]]:
    """The name and the graph of each trace of a tf.function."""
    # Not `_list_all_concrete_functions`, which traces a function with an input signature: this is asked of errors, also
    # of those that the trace has raised.
    return [(tf.compat.as_text(each.name), each.graph) for each in fn._function_cache.values()]


def set_message(error: Any, text: str) -> None:
    """Replaces the text of an error of TensorFlow's runtime, whose other properties stay."""
    error._message = text


def is_compiled(fn: Any) -> bool:
    """Whether `fn` was made with `jit_compile=True`."""
    return bool(fn._jit_compile)


def options(fn: Any) -> tuple[bool, bool, Any]:
    """The options of a `tf.function`: `autograph`, `reduce_retracing`, and its input signature."""
    return bool(fn._autograph), bool(fn._reduce_retracing), fn.input_signature


def in_body() -> bool:
    """Whether TensorFlow takes the graph under construction for one that XLA compiles: a body, or a `tf.function`."""
    return bool(_control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_being_compiled() -> bool:
    """Whether this call is made in a body, or while a `tf.function` that is to be compiled by XLA is traced."""
    context, _ = _enclosing_xla_context()
    return context is not None and not hasattr(context, _UNCOMPILED)


def leave_uncompiled() -> None:
    """Removes `jit_compile=True` from the tf.functions that are being traced around this call.

    An op that compiles its own program and launches it from the host calls this.
    """
    context, graphs = _enclosing_xla_context()
    if context is not None:
        for each in (context, *graphs):
            setattr(each, _UNCOMPILED, True)


def _enclosing_xla_context() -> tuple[Any, list[tf.Graph]]:
    """XLA's context around the graph under construction, None without one, and the graphs from there inwards.

    TensorFlow enters it in the graph of a `tf.function` with `jit_compile=True`, or in the graph that calls one: so it
    is the context that is marked. A graph may call several, and a function inside another one has none of its own.
    """
    graphs: list[tf.Graph] = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = _control_flow_util.GetContainingXLAContext(graph._get_control_flow_context())
        if isinstance(graph, tf.__internal__.FuncGraph):  # not the process' own, in which eager calls enter the context
            graphs.append(graph)
        if context is not None:
            return context, graphs
        graph = getattr(graph, "outer_graph", None)
    return None, []


def read_final_attributes(graph: Any, given: Any) -> Any:
    """The attributes of a function whose graph has been traced: those that it was given, without what it has left."""
    return given | {_XLA_COMPILE: False} if given and given.get(_XLA_COMPILE) and hasattr(graph, _UNCOMPILED) else given


_inlining = threading.local()


def inlined() -> contextlib.AbstractContextManager[bool]:
    """Inside, on this thread, a call of a `tf.function` runs its Python function, and leaves no trace of its own.

    Tensors of a graph that is thrown away must not get into traces, which outlive it.
    """
    return interrupts.set_for_block(_inlining, "on", True)


def is_inlining() -> bool:
    """Whether the calling thread is in a block of `inlined`."""
    return bool(getattr(_inlining, "on", False))


# Ops that are replaced while they are added to a graph, random ones and those of other numbers; and the global seed.

Replace = Callable[[str, Sequence[Any], Callable[[str], Any]], list[tf.Tensor] | None]
"""Takes an op's type, its inputs and a getter of its attributes; returns replacements of its results, or None."""

Draw = Callable[[Sequence[Any], tf.Tensor], list[tf.Tensor] | None]
"""Takes the inputs and the result of an op that reads the state of a generator and moves it on; as `Replace`."""

GET_SEED = Hook(
    "tensorflow.python.framework.random_seed",
    "get_seed",  # the pair of seeds of a random op, from the global seed and that of the op
    why="what a replica draws follows from the global seed and its id, not from how many replicas drew before",
    since=FIRST_THREADS,
    until="passes on to TensorFlow outside replicas on threads, and for ops with a seed of their own",
)
_DRAWS = "RngReadAndSkip"
_RANDOM = ("Random", "Truncated", "Multinomial", "StatelessRandom", "StatelessTruncated")
_ASIDE = "_replica_engine_set_aside"
_ORIGINALS = "_replica_engine_originals"


def set_aside(graph: Any) -> frozenset[str]:
    """The names of the ops of a graph that were replaced and must not run."""
    return frozenset(getattr(graph, _ASIDE, ()))


def original(tensor: tf.Tensor) -> tf.Tensor | None:
    """The result of the user's op that `tensor` replaced; None if `tensor` replaced nothing."""
    return getattr(tensor.graph, _ORIGINALS, {}).get(tensor.name)


def _note_originals(graph: Any, op: tf.Operation, results: Sequence[tf.Tensor]) -> None:
    originals: dict[str, tf.Tensor] = kept_on(graph, _ORIGINALS, dict)
    originals.update((new.name, old) for new, old in zip(results, op.outputs, strict=True))


def seeding() -> tuple[Any, int | None]:
    """Returns an object that changes with each tf.random.set_seed, and the seed."""
    return getattr(_context.context(), "_rng", None), _context.global_seed()  # None before the first call


def seed_by_replica(seed_in_replica: Callable[[Callable[[], int | None]], int | None]) -> None:
    """Lets replicas choose the seeds of random ops that have none of their own; only once per process.

    Args:
        seed_in_replica: returns the seed of an op that is being made, or None if TensorFlow's own is right. It is given
            a function that draws TensorFlow's own, which is None without a global seed.
    """

    def get_seed_of_replica(get_seed: Callable[[Any], tuple[Any, Any]], op_seed: Any) -> Any:
        if op_seed is None:
            op_seed = seed_in_replica(lambda: get_seed(None)[1])
        return get_seed(op_seed)

    GET_SEED.around(get_seed_of_replica)


def state() -> Any:
    """The global seed and how far its generator is, as plain data; None before the first tf.random.set_seed."""
    generator, seed = seeding()
    return None if generator is None else {"seed": seed, "generator": generator.getstate()}


def has_seed() -> bool:
    """Whether `tf.random.set_seed` was called, so that another process can draw the same numbers."""
    return _context.global_seed() is not None


def restore(state: Any) -> None:
    """Continues with the seeds of a `state`; None changes nothing."""
    if state is None:
        return
    context = _context.context()
    context._seed = state["seed"]
    if getattr(context, "_rng", None) is None:
        context._rng = random.Random()
    context._rng.setstate(state["generator"])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Sets TensorFlow's global seed inside the block; on leaving, the old seed and generator return."""
    context = _context.context()
    with (
        interrupts.set_for_block(context, "_seed", seed),
        interrupts.set_for_block(context, "_rng", random.Random(seed)),
    ):
        yield


@contextlib.contextmanager
def intercepted(replace: Replace, draw: Draw, kinds: Container[str]) -> Iterator[None]:
    """Calls `replace` for each random op and each op of one of some kinds, when it is made inside the block.

    The gradient of a replaced op is the one that TensorFlow gives its kind. An op that draws from a
    `tf.random.Generator` runs in any case; `draw` may give another result in its place.

    Not to be nested. TensorFlow keeps callbacks in a set, and gives each the answer of the one before, also if it is
    None, with which `tf.debugging.enable_check_numerics` fails. So this callback calls those of others, with what
    replaces an op: what is set aside must not be checked, since it does not run.
    """
    context = _context.context()
    others = [*context.op_callbacks]

    def callback(
        op_type: str, inputs: Any, attributes: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> list[tf.Tensor] | None:
        replaced = None
        if graph is not None and op_type == _DRAWS:
            replaced = draw(inputs, outputs[0])
            if replaced is not None:  # the initial value of a variable is one for all, and draws once
                _note_originals(graph, outputs[0].op, replaced)
        elif graph is not None and (op_type in kinds or op_type.startswith(_RANDOM)):
            op = outputs[0].op
            replaced = replace(op_type, inputs, op.get_attr)
            if replaced is not None:
                replaced = substitute_results(op, replaced)
                kept_on(graph, _ASIDE, set).add(op.name)
                _note_originals(graph, op, replaced)
        # None if nothing is replaced: TensorFlow gives callbacks a tuple of what an op returns to its caller as a list.
        for other in others:
            given = replaced or outputs
            answer = other(op_type, inputs, attributes, given, op_name=op_name, graph=graph)
            if answer is not None and answer is not given:
                replaced = answer
        return replaced

    _op_callbacks.add_op_callback(callback)
    for each in others:
        _op_callbacks.remove_op_callback(each)
    try:
        yield
    finally:
        for each in others:
            _op_callbacks.add_op_callback(each)
        _op_callbacks.remove_op_callback(callback)
