"""Functions of JAX, for the programs of several platforms.

A body has a marker where it calls one (`markers.JAX_FUNCTION`), with a digest by which the function is found
again (`find`) when the program is compiled: only then it is known what for. So a plan for TPUs has the kernel of TPUs,
also where the body was traced beside CPU devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from replica_engine.pjrt.jaxlib import serialized_for_others

Kind = tuple[tuple[int | None, ...], np.dtype]
"""The shape and the dtype of an array. None is a size that is known when the function runs."""

Arrays = Callable[..., Sequence[Any]]
"""A function that takes arrays, and returns several."""

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}  # as JAX calls what it lowers for
_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))
_TARGET = re.compile(r"stablehlo\.custom_call @\"?([^\"(]+)")
_OF_JAXLIB = "lapack_"  # how the names of routines begin that jaxlib brings for CPUs
_CALLBACK = re.compile(r"\b(\w*callback)\[")  # in the text of a function; a pure one is none of its effects
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of a function: another one in each process
T = TypeVar("T")

_known: weakref.WeakValueDictionary[str, JaxFunction] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def find(digest: str) -> JaxFunction:
    """The function of a marker. The graph that has the marker keeps it alive."""
    return _known[digest]


class KernelError(Exception):
    """JAX cannot lower a function for a platform: it is a kernel for other chips.

    Attributes:
        digest: that of the function, if it has one.
    """

    digest = ""


class Exported(NamedTuple):
    """A function as a program for TensorFlow.

    Attributes:
        program: the program, and which arguments it takes.
        module: the program, serialized.
        missing: the name of a routine that it calls and TensorFlow does not have; "" for none.
    """

    program: jax.export.Exported
    module: bytes
    missing: str


def specs(kinds: Sequence[Kind]) -> list[jax.ShapeDtypeStruct]:
    """What a `JaxFunction` takes. Sizes that are not known, of one dimension, are equal: most are the batch's."""
    scope, found = jax.export.SymbolicScope(), []
    for shape, dtype in kinds:
        sizes = [f"size_{axis}" if size is None else str(size) for axis, size in enumerate(shape)]
        # A text only where it is needed: a shape of symbols is no shape of numbers for all of JAX.
        whole: Any = jax.export.symbolic_shape(", ".join(sizes), scope=scope) if None in shape else shape
        found.append(jax.ShapeDtypeStruct(whole, dtype))
    return found


class JaxFunction:
    """A function of JAX, for arrays of certain shapes and dtypes.

    Args:
        fns: the function, and perhaps others in its place: the first one counts that JAX can lower for a platform.
        takes: what it takes. If it has 64 bits, JAX does not make them 32 inside.
        may_skip: whether a function that JAX cannot trace is left out, if another one follows.

    Raises:
        Exception: the function raised it while JAX traced it, or JAX did.

    Attributes:
        takes: what it takes.
        returns: for each of `fns`, what it returns.
        is_fixed: whether all shapes are known.
        effects: what it does besides, such as to print, as text; "" for nothing.
    """

    def __init__(self, fns: Sequence[Arrays], takes: Sequence[jax.ShapeDtypeStruct], may_skip: bool = False):
        self.takes = _kinds(takes)
        self._specs = takes
        self._partner: JaxFunction | None = None  # of which each platform must have the same of its functions
        self._texts: dict[tuple[int, tuple[str, ...]], str] = {}
        self._exported: dict[tuple[str, ...], Exported] = {}
        self._derived: dict[Any, Any] = {}
        self.is_fixed = not any(None in shape for shape, _ in self.takes)
        self._fns: list[Arrays] = []
        self._jitted: list[Any] = []
        self._traced: list[Any] = []
        from jax.extend.core import jaxpr_as_fun  # here, since importing it takes longer than all of this module

        with self._bits():
            for fn in fns:
                jitted = jax.jit(fn, keep_unused=True)
                traced = _attempted(jitted.trace, *takes)
                if isinstance(traced, Exception):
                    if fn is fns[-1] or not _is_jaxs(traced) or (self.is_fixed and not may_skip):
                        raise traced
                    continue  # a kernel: its sizes must be known, and it may have no gradient
                # What is differentiated is what was traced: the user's code may do something else the next time.
                plain = jaxpr_as_fun(traced.jaxpr)
                for known, new in ((self._fns, plain), (self._jitted, jitted), (self._traced, traced)):
                    known.append(new)
        self._returned = [traced.out_info for traced in self._traced]
        self.returns = list(map(_kinds, self._returned))
        self._words = [str(each.jaxpr) for each in self._traced]
        found = {str(effect) for each in self._traced for effect in each.jaxpr.effects}
        self.effects = ", ".join(sorted(found.union(*map(_CALLBACK.findall, self._words))))

    def file(self, platform: str) -> tuple[str, JaxFunction]:
        """Lets `find` find it for a marker, in a body that is traced beside devices of a platform.

        Returns:
            The digest, and the function for which it stands: this one, or an earlier one that computes the same.
        """
        # Equal in other processes: workers compare their programs, and a program is found in the cache by its text. The
        # text of a function has not all of it, and the lowered text only what this platform gets.
        parts = [_ADDRESS.sub("", each).encode() for each in self._words]
        for each in self._traced:
            parts += [b"%r %s" % (array.shape, array.tobytes()) for array in _constants(each.jaxpr)]
        with contextlib.suppress(KernelError):
            parts.append(self.text([platform]).encode())
        digest = hashlib.sha256(b"\n".join(parts)).hexdigest()[:32]
        with _lock:
            return digest, _known.setdefault(digest, self)

    def text(self, platforms: Sequence[str]) -> str:
        """The function as a module of StableHLO. One for several platforms takes first which of them runs it.

        Raises:
            KernelError: it cannot be lowered for these platforms.
        """
        names = tuple(_PLATFORMS[each] for each in platforms)
        return self._first(lambda number: self._lowered(number, names))

    def exported(self, platforms: Sequence[str]) -> Exported:
        """The function as a program for TensorFlow, on any of these platforms.

        Raises:
            KernelError: it cannot be lowered for them.
        """
        names = tuple(_PLATFORMS[each] for each in platforms)
        if names in self._exported:
            return self._exported[names]

        def export(number: int) -> Exported:
            targets = _TARGET.findall(self._lowered(number, names)) if self.is_fixed else []
            unchecked = [jax.export.DisabledSafetyCheck.custom_call(each) for each in sorted(set(targets))]
            make = jax.export.export(self._jitted[number], platforms=names, disabled_checks=unchecked)
            with self._bits():
                exported = make(*self._specs)
            if not self.is_fixed:
                targets = _TARGET.findall(exported.mlir_module())
            missing = next((each for each in targets if each.startswith(_OF_JAXLIB)), "")
            return Exported(exported, serialized_for_others(exported.mlir_module()), missing)

        found = self._exported[names] = self._first(export)
        return found

    def _first(self, make: Callable[[int], T]) -> T:
        """What is made with the first of the functions that a platform can have."""
        for number in range(len(self._jitted)):
            made = _attempted(make, number)
            if not isinstance(made, Exception):
                return made
            failed = made
        raise KernelError(f"{type(failed).__name__}: {failed}") from failed

    def saving(self, inner: tuple[int, ...], outer: tuple[int, ...]) -> tuple[JaxFunction, JaxFunction] | None:
        """Two functions that compute the results and their gradient, and nothing twice.

        Args:
            inner: which arguments have a gradient.
            outer: which results have one.

        Returns:
            A function that returns the results, and after them values for the gradient; and one that takes these values
            and the gradients of the results, and returns those of the arguments. None if there are no such functions:
            a shape is not known, JAX has no gradient of a kernel, or it saves what is no array of numbers.
        """
        key = "saving", inner, outer
        if key not in self._derived:
            made = _attempted(self._saving, inner, outer) if self.is_fixed else None
            # An error is what `pull_back` raises, which is called only where the gradient is needed.
            self._derived[key] = None if isinstance(made, Exception) else made
        return self._derived[key]

    def _saving(self, inner: tuple[int, ...], outer: tuple[int, ...]) -> tuple[JaxFunction, JaxFunction]:
        count = len(self.returns[0])
        savers = [_Saver(fn, inner, outer) for fn in self._fns]
        saved = [JaxFunction([saver], self._specs)._returned[0][count:] for saver in savers]
        # What another function would save is zeros: all have results of the same kinds, whichever a platform has.
        starts = np.cumsum([0, *map(len, saved)])
        every = [kind for kinds in saved for kind in kinds]

        def with_zeros(number: int, *arrays: Any) -> Sequence[Any]:
            made = savers[number](*arrays)
            values = [jnp.zeros(each.shape, each.dtype) for each in every]
            values[starts[number] : starts[number + 1]] = made[count:]
            return [*made[:count], *values]

        def gradients(number: int, *arrays: Any) -> Sequence[Any]:
            own = arrays[starts[number] : starts[number + 1]]
            return savers[number].gradients(own, arrays[len(every) :])

        forward = JaxFunction([_numbered(with_zeros, each) for each in range(len(savers))], self._specs)
        weights = [self._returned[0][index] for index in outer]
        back = JaxFunction([_numbered(gradients, each) for each in range(len(savers))], [*every, *weights])
        forward._partner, back._partner = back, forward
        return forward, back

    def pull_back(self, inner: tuple[int, ...], outer: tuple[int, ...]) -> JaxFunction:
        """What takes the arguments and the gradients of results, and returns the gradients of arguments.

        It computes the function once more. Its own gradients are those of second order. For the arguments see `saving`.
        """
        key = "pull_back", inner, outer
        if key not in self._derived:
            count, savers = len(self.takes), [_Saver(fn, inner, outer) for fn in self._fns]

            def pull(number: int, *arrays: Any) -> Sequence[Any]:
                made = savers[number](*arrays[:count])
                return savers[number].gradients(made[len(self.returns[0]) :], arrays[count:])

            weights = [self._returned[0][index] for index in outer]
            fns = [_numbered(pull, each) for each in range(len(savers))]
            self._derived[key] = JaxFunction(fns, [*self._specs, *weights], may_skip=True)
        return self._derived[key]

    def _lowered(self, number: int, platforms: tuple[str, ...]) -> str:
        """The text of one of the functions; an error if a platform cannot have that of the partner."""
        if self._partner is not None:
            self._partner._text(number, platforms)
        return self._text(number, platforms)

    def _text(self, number: int, platforms: tuple[str, ...]) -> str:
        if (number, platforms) not in self._texts:
            with self._bits():
                self._texts[number, platforms] = self._traced[number].lower(lowering_platforms=platforms).as_text()
        return self._texts[number, platforms]

    def _bits(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, JAX keeps 64 bits, if an argument has them."""
        return jax.enable_x64(True) if any(dtype in _WIDE for _, dtype in self.takes) else contextlib.nullcontext()


class _Saver:
    """A function that returns, after its results, all that its gradient needs of it.

    Args:
        fn: the function.
        inner: which of its arguments have a gradient.
        outer: which of its results.
    """

    def __init__(self, fn: Arrays, inner: tuple[int, ...], outer: tuple[int, ...]):
        self._fn = fn
        self._inner = inner
        self._outer = outer
        self._structure: Any = None

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        def differentiated(*some: Any) -> tuple[Sequence[Any], Sequence[Any]]:
            given = list(arrays)
            for index, each in zip(self._inner, some, strict=True):
                given[index] = each
            results = self._fn(*given)
            return [results[index] for index in self._outer], results

        _, pull, results = jax.vjp(differentiated, *[arrays[index] for index in self._inner], has_aux=True)
        saved, self._structure = jax.tree_util.tree_flatten(pull)
        return [*results, *saved]

    def gradients(self, saved: Sequence[Any], weights: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the arguments, out of what was saved by the last call and the gradients of the results."""
        return list(jax.tree_util.tree_unflatten(self._structure, saved)(list(weights)))


def _constants(function: Any) -> Iterator[np.ndarray]:
    """The constants in a traced function, and in the functions inside of it."""
    for each in getattr(function, "consts", ()):
        is_key = jnp.issubdtype(each.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(each) if is_key else each)
    for equation in getattr(function, "eqns", ()):
        for value in equation.params.values():
            for each in value if isinstance(value, (list, tuple)) else [value]:
                yield from _constants(each)


def _is_jaxs(error: Exception) -> bool:
    """Whether JAX has raised an error, and not the user's code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # JAX takes most of its frames out of a traceback, which then ends here or, for errors of its own types, anywhere.
    ends = (os.path.dirname(jax.__file__), __file__)
    return type(error).__module__.startswith("jax.") or bool(frames and frames[-1].f_code.co_filename.startswith(ends))


def _attempted(make: Callable[..., T], *args: Any) -> T | Exception:
    """What is made, or the error of it: the user's function may raise anything, and each kind of kernel another one."""
    try:
        return make(*args)
    except Exception as error:
        return error


def _numbered(fn: Callable[..., Sequence[Any]], number: int) -> Arrays:
    return lambda *arrays: fn(number, *arrays)


def _kinds(arrays: Sequence[Any]) -> list[Kind]:
    return [(tuple(map(_size, each.shape)), np.dtype(each.dtype)) for each in arrays]


def _size(size: Any) -> int | None:
    return size if isinstance(size, int) else None
