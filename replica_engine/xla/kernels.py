"""Functions of JAX, kernels among them, that bodies, `tf.function`s and eager code call with tensors.

In a body a call is a marker, which becomes the function when the program is compiled (`pjrt.stablehlo.jax_functions`).
Elsewhere it is TensorFlow's op for programs of other libraries, `XlaCallModule`. Gradients are functions of JAX too.
"""

from __future__ import annotations

import collections
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.diagnostics.user_frames import here, is_raised_by_user
from replica_engine.errors import InputsError, LoweringError
from replica_engine.errors.base import add_note, at, brief, warning
from replica_engine.pjrt.jaxlib import jax
from replica_engine.pjrt.stablehlo import jax_functions
from replica_engine.pjrt.stablehlo.jax_functions import JaxFunction, KernelError
from replica_engine.pjrt.stablehlo.markers import JAX_FUNCTION
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import autograph, function_graphs, xla_ops
from replica_engine.values.structure import as_tensor
from replica_engine.xla.body import in_body

_MANY = 100  # traces of a function, after which there is a warning
_SETTINGS = ("default_matmul_precision", "default_prng_impl", "enable_x64", "numpy_dtype_promotion")
_NUMBERS = (bool, int, float, complex)


@autograph.artifact
def from_jax(fn: Callable[..., Any], *, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function of JAX as one that bodies, `tf.function`s and eager code call with tensors.

    It has the gradients that JAX has, of all orders. It works in branches and loops, with gradients of first order, and
    under every strategy. Make it once, outside of the step: what it was traced to is kept with it.

    Its `__name__` begins with `from_jax_`: Keras saves and copies functions by their names, and would take its own
    `leaky_relu` for that of JAX.

    Args:
        fn: the function, of arrays or structures of arrays: plain code of JAX, a function with `jax.custom_vjp`, a
            kernel of Pallas. Python numbers among its arguments, and its keywords, are constants: each value of them
            is traced for itself.
        otherwise: a function with the same arguments and results for platforms that `fn` is not made for. A kernel of
            Pallas is made for one kind of chip. If the kernel has no gradient, that of `otherwise` is taken.

    Returns:
        A function that takes tensors where `fn` takes arrays, and returns tensors in the structure that `fn` returns.
        `fn` is traced once for all tensors of equal shapes and dtypes: what it closes over is a constant of the trace,
        as with `jax.jit`. If an argument has 64 bits, JAX keeps 64 bits inside `fn`, as under its option
        `jax_enable_x64`.

    Raises:
        BackendMissingError: jax is not installed. This and what follows is raised by the function that it returns.
        InputsError: an argument has a dtype that JAX has not, or a shape that is not known; a keyword is no constant;
            `fn` prints or calls back, which no program of TensorFlow does; or `otherwise` returns something else.
        LoweringError: `fn` is a kernel for other chips, and there is no `otherwise`.
        Exception: `fn` raised it while JAX traced it, or JAX did.

    Example:
        >>> import jax.numpy as jnp, tensorflow as tf
        >>> from replica_engine import xla
        >>> softplus = xla.from_jax(lambda x: jnp.logaddexp(x, 0.0))
        >>> x = tf.Variable(0.0)
        >>> with tf.GradientTape() as tape:
        ...     y = softplus(x)
        >>> round(float(y), 4), float(tape.gradient(y, x))
        (0.6931, 0.5)
    """
    traces: dict[Any, _Trace] = {}

    @autograph.artifact
    @functools.wraps(fn)
    def call(*args: Any, **constants: Any) -> Any:
        made = _Call(name, here())
        with _Told(f"In {made}."):
            trace, tensors = _traced(traces, name, fn, otherwise, args, constants)
            return trace.rebuild(made.results(lambda: trace.function, tensors))

    name = getattr(fn, "__name__", type(fn).__name__)
    call.__name__ = f"from_jax_{name.strip('<>')}"
    del call.__wrapped__  # TensorFlow would call that in place of a function that is an argument
    return call


class _Trace:
    """A function of JAX that was traced for certain arguments.

    Attributes:
        function: the function, of arrays.
        rebuild: makes the structure of what it returns.
    """

    def __init__(self, name: str, fns: Sequence[Callable[..., Any]], rebuild: Callable[..., Any], kinds: Any):
        structures: list[Any] = []

        def flat(fn: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
            def call(*arrays: Any) -> Sequence[Any]:
                args, constants = rebuild(arrays)
                results, structure = jax.tree_util.tree_flatten(fn(*args, **constants))
                structures.append(structure)
                return results

            return functools.update_wrapper(call, fn)  # JAX's errors have the name and the line of the user's

        function = self.function = JaxFunction(list(map(flat, fns)), jax_functions.specs(kinds))
        returned = list(zip(structures, function.returns, strict=False))
        for found in returned[1:]:
            if found != returned[0]:
                raise InputsError(
                    f"`otherwise` of `{name}` returns {_described(*found)}, and `{name}` returns "
                    f"{_described(*returned[0])}. Both must return the same structure, shapes and dtypes."
                )
        self.rebuild = functools.partial(jax.tree_util.tree_unflatten, structures[0])


def _described(structure: Any, kinds: Sequence[Any]) -> str:
    leaves = [f"{dtype}{list(shape)}" for shape, dtype in kinds]
    return repr(jax.tree_util.tree_unflatten(structure, leaves)).replace("'", "")


def _traced(
    traces: dict[Any, _Trace],
    name: str,
    fn: Callable[..., Any],
    otherwise: Callable[..., Any] | None,
    args: tuple[Any, ...],
    constants: dict[str, Any],
) -> tuple[_Trace, list[tf.Tensor]]:
    """The function for such arguments, and the tensors among them."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(_without_wrappers(args))
    tensors: list[tf.Tensor] = []
    numbers: list[Any] = []  # for each leaf, a number as it is; for a tensor, None
    unknown = ""  # what to say if JAX needs a size that is not known
    for path, leaf in leaves:
        is_number = type(leaf) in _NUMBERS
        numbers.append(leaf if is_number else None)
        if not is_number:
            where = f"args{jax.tree_util.keystr(path)}"
            tensors.append(_checked(leaf, where))
            if not tensors[-1].shape.is_fully_defined():
                unknown = (
                    f"{where} has the shape {tensors[-1].shape} here. If `{name}` must know it, give it a fixed shape: "
                    "dataset.batch(n, drop_remainder=True), or tf.ensure_shape(x, ...). A kernel must always know it, "
                    "and where it does not, from_jax takes the function `otherwise=`, if there is one."
                )
    kinds = [(tuple(each.shape), each.dtype.as_numpy_dtype) for each in tensors]
    # JAX's settings change what a function is traced to.
    settings = tuple(getattr(jax.config, f"jax_{each}") for each in _SETTINGS)
    key = structure, tuple(kinds), *map(_exactly, (tuple(numbers), tuple(sorted(constants.items())))), settings
    try:
        trace = traces.get(key)
    except TypeError as error:
        raise InputsError(
            f"`{name}` is called with the keywords {brief(constants)}. Keywords are constants: give values that have a "
            "hash, such as numbers, texts and tuples, and pass tensors by position: "
            "xla.from_jax(lambda x, mask: fn(x, mask=mask))."
        ) from error
    if trace is None:

        def rebuild(arrays: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
            given = iter(arrays)
            values = [next(given) if each is None else each for each in numbers]
            return jax.tree_util.tree_unflatten(structure, values), constants

        fns = [fn] if otherwise is None else [fn, otherwise]
        with _Told(unknown):
            trace = traces[key] = _Trace(name, fns, rebuild, kinds)
        if len(traces) == _MANY:
            text = (
                f"`{name}`, a function of from_jax, has been traced {_MANY} times, and each trace takes memory for as "
                "long as the process runs. It is traced for new shapes and dtypes, and for new numbers of Python among "
                "its arguments and keywords: pass numbers that change as tensors."
            )
            logging.getLogger("replica_engine").warning(warning("many_traces", text))
    return trace, tensors


def _without_wrappers(structure: Any) -> Any:
    """A structure with plain lists and dicts, where attributes of modules and layers are lists and dicts that track."""
    if isinstance(structure, tuple):
        values = map(_without_wrappers, structure)
        return type(structure)(*values) if hasattr(structure, "_fields") else tuple(values)
    if isinstance(structure, list):
        return list(map(_without_wrappers, structure))
    is_wrapper = isinstance(structure, Mapping) and hasattr(structure, "__wrapped__")
    if is_wrapper or (isinstance(structure, dict) and not isinstance(structure, collections.OrderedDict)):
        return {key: _without_wrappers(value) for key, value in structure.items()}
    return structure


def _exactly(value: Any) -> Any:
    """A key that is equal for equal values of one type: 1, 1.0 and True are three, and 0.0 and -0.0 two."""
    if isinstance(value, (tuple, frozenset)):
        return type(value), tuple(map(_exactly, value))
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _checked(value: object, name: str) -> tf.Tensor:
    """An argument as a tensor that JAX can have."""
    if isinstance(value, (str, bytes)) or callable(value):
        raise InputsError(
            f"{name} is {brief(value)}, and by position a function of JAX takes arrays. Give texts and functions as "
            "keywords, which are constants."
        )
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        kind, method = (
            ("ragged", "to_tensor()") if isinstance(value, tf.RaggedTensor) else ("sparse", "tf.sparse.to_dense")
        )
        raise InputsError(f"{name} is {kind}, and JAX takes arrays alone. Give a dense tensor: {method}.")
    tensor = as_tensor(value, name)
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype.is_bool):
        raise InputsError(f"{name} is a tensor of {dtype.name}, which JAX does not have. Give numbers.")
    if tensor.shape.rank is None:
        raise InputsError(f"{name} has no known number of dimensions, which JAX must know: tf.ensure_shape(x, [...]).")
    if in_body() is not None and not tensor.shape.is_fully_defined():
        raise InputsError(
            f"{name} has the shape {tensor.shape}, and JAX must know the whole shape when it traces a body. Give it a "
            "fixed shape: dataset.batch(n, drop_remainder=True), or tf.ensure_shape(x, ...)."
        )
    return tensor


class _Told:
    """Adds a text to an exception that leaves the block, if the text is not there yet.

    To the message, which is all that a `tf.function` and Keras keep of an exception. To one that the user's code raised
    as a note: its message stays what the user wrote.
    """

    def __init__(self, text: str):
        self._text = text

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or not self._text or self._text.removeprefix("In ").rstrip(".") in str(error):
            return
        if is_raised_by_user(error) or not error.args or str(error) != error.args[0]:
            add_note(error, self._text)
        else:
            error.args = (f"{error.args[0]}\n{self._text}", *error.args[1:])


class _Call:
    """A call of a function of JAX.

    Args:
        name: the name of the function.
        where: the user's line.
    """

    def __init__(self, name: str, where: str):
        self._name = name
        self._where = where

    def __str__(self) -> str:
        return f"`{self._name}`, a function of from_jax called{at(self._where)}"

    def results(
        self,
        make: Callable[[], JaxFunction],
        tensors: Sequence[tf.Tensor],
        quick: Callable[[], list[tf.Tensor]] | None = None,
    ) -> list[tf.Tensor]:
        """Tensors with the gradient that JAX has.

        Args:
            make: makes the function.
            tensors: what it takes.
            quick: computes the results in another way. Then the function is made only if they are differentiated.
        """

        def run(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            saved: list[tf.Tensor] = []
            back: JaxFunction | None = None
            if quick is not None:
                results = quick()
            else:
                function, pair = make(), None
                inner, outer = _differentiable(function)
                if inner and outer and function_graphs.is_recording():
                    pair = function.saving(inner, outer)
                forward, back = pair or (function, None)
                results = self._op(forward, tensors)
                count = len(function.returns[0])
                results, saved = results[:count], results[count:]

            return results, lambda *upstream: self._pull_back(make, tensors, results, upstream, back, saved)

        if quick is None and not make().returns[0]:
            return []
        if tf.executing_eagerly():
            return list(tf.custom_gradient(run)(*tensors))
        # Not `tf.custom_gradient`: in loops it would trace gradients of gradients without end.
        results, pull_back = run(*tensors)
        return function_graphs.differentiable(results, tensors, pull_back, may_be_saved=in_body() is None)

    def _pull_back(
        self,
        make: Callable[[], JaxFunction],
        tensors: Sequence[tf.Tensor],
        results: Sequence[tf.Tensor],
        upstream: Sequence[Any],
        back: JaxFunction | None,
        saved: Sequence[tf.Tensor],
    ) -> list[tf.Tensor | None]:
        """The gradients of arguments: by `back`, out of what was saved; if there is none, the function runs again."""
        function = make()
        inner, outer = _differentiable(function)
        gradients: list[tf.Tensor | None] = [None] * len(tensors)
        if inner and outer:
            weights = [_weight(upstream[index], results[index]) for index in outer]
            quick = None if back is None else lambda: self._op(back, [*saved, *weights])
            with _Told(f"In the gradient of {self}."):
                found = self.results(lambda: function.pull_back(inner, outer), [*tensors, *weights], quick)
            for index, each in zip(inner, found, strict=True):
                gradients[index] = _conjugate(each)
        return gradients

    def _op(self, function: JaxFunction, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # Tapes and accumulators see the gradient around it. The op itself has none.
        with eager.no_tape():
            return self._make_op(function, tensors)

    def _make_op(self, function: JaxFunction, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The op that runs a function of JAX: a marker in a body, elsewhere TensorFlow's own op."""
        if function.effects:
            raise InputsError(
                f"{self} does more than to compute ({function.effects}): it prints, or calls a function of the host. "
                "Do that outside of it: with tf.print, or in a body with xla.outside_compilation."
            )
        shapes, dtypes = ([each[index] for each in function.returns[0]] for index in (0, 1))
        dtypes, operands = list(map(tf.as_dtype, dtypes)), list(tensors)
        body = in_body()
        if body is not None and not tf.executing_eagerly():
            digest, function = function.file(body.platform)
            function_graphs.keep(tf.compat.v1.get_default_graph(), function)
            parameters = json.dumps({"name": self._name, "digest": digest})
            return xla_ops.marker(JAX_FUNCTION, operands, parameters, dtypes, shapes)
        if any(dtype.name.endswith("int4") for dtype in (*dtypes, *(each.dtype for each in operands))):
            raise InputsError(
                f"{self} has values of 4 bits. Outside compiled bodies TensorFlow reads them wrongly: cast them to "
                "int8 in TensorFlow, and back inside the function."
            )
        platforms = ["cpu", "gpu"] if tf.config.list_logical_devices("GPU") else ["cpu"]
        try:
            exported = function.exported(platforms)
        except KernelError as error:
            words = " and ".join(platforms).upper()
            raise LoweringError.other_chips(self._name, self._where, words, str(error)) from error.__cause__
        if exported.missing:
            raise LoweringError.not_in_tensorflow(self._name, self._where, exported.missing)
        return xla_ops.call_module(exported.module, exported.program, operands, dtypes, shapes)


def _differentiable(function: JaxFunction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which arguments and which results of a function have a gradient."""
    inner, outer = (
        tuple(index for index, (_, dtype) in enumerate(kinds) if _has_gradient(tf.as_dtype(dtype)))
        for kinds in (function.takes, function.returns[0])
    )
    return inner, outer


def _has_gradient(dtype: tf.DType) -> bool:
    return bool(dtype.is_floating or dtype.is_complex)


def _weight(upstream: Any, result: tf.Tensor) -> tf.Tensor:
    """The gradient of a result, as JAX has it."""
    return tf.zeros_like(result) if upstream is None else _conjugate(tf.convert_to_tensor(upstream))


def _conjugate(tensor: tf.Tensor) -> tf.Tensor:
    """Between the gradients of TensorFlow and of JAX, which differ in that for complex numbers."""
    return tf.math.conj(tensor) if tensor.dtype.is_complex else tensor
