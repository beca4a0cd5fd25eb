"""Host calls of compiled bodies (`outside_compilation`): wrong calls, wrong results, and notes on failures."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief, in_words

_DECLARE = (
    "Declare them above the function, @xla.returns(tf.TensorSpec([...], tf.float32)), or, for a lambda or a library's "
    "function, in the call, outside_compilation(xla.returns(...)(fn), x). xla.returns(None) declares none."
)


class NestedHostCallError(ReplicaEngineError, NotImplementedError):
    """outside_compilation was called inside a function that outside_compilation runs.

    Raised while the body is traced. Call the inner function directly: the code already runs on the host.
    """


class HostResultError(ReplicaEngineError, ValueError, TypeError):
    """A host function returned a value that the compiled body cannot use.

    Raised while the body is traced, or in a run whose result differs from what the body was compiled for. Return
    tensors of the same structure, dtype and shape each time, or declare them with `xla.returns`.

    Attributes:
        failure: what tracing the host function raised, if that is why its results are not known.
    """

    failure: Exception | None = None

    @classmethod
    def no_tensor(cls, name: str, value: object) -> HostResultError:
        """The result is neither a tensor nor a structure of tensors."""
        return cls(
            f"The host function returned {brief(value)}{_in(name)}, which is not a tensor. A host function can return "
            "tensors, arrays, numbers, None, and nested structures of them."
        )

    @classmethod
    def host_only(cls, name: str, dtype: str) -> HostResultError:
        """The result has a dtype that no device can hold, such as string."""
        return cls(
            f"The host function returned a tensor of dtype {dtype}{_in(name)}, which no device can hold. Use the "
            "tensor in the host function, and return numbers."
        )

    @classmethod
    def unknown_shape(cls, name: str, shape: str) -> HostResultError:
        """The shape of the result is not known before the run."""
        return cls(
            f"The host function's result{_in(name)} has the shape {shape}, but XLA compiles for fixed shapes. Pad the "
            "result to a fixed shape, and declare that shape: @xla.returns(tf.TensorSpec(shape, dtype))."
        )

    @classmethod
    def not_traced(cls, fn: str, where: str, failure: Exception, line: str) -> HostResultError:
        """The body uses the results of a host function that needs concrete values, so they are not known."""
        raised = in_words(failure).split("\n")[0].removesuffix(".")
        error = cls(
            f"The body uses the results of {fn}, which outside_compilation{at(where)} runs on the host, but they are "
            f"not known before the run: tracing it raised {raised}{at(line)}. {_DECLARE}"
        )
        error.failure = error.__cause__ = failure
        return error

    @classmethod
    def not_fixed(cls, fn: str, where: str, name: str, shape: str) -> HostResultError:
        """The body uses the results of a host function, and tracing the function leaves the shape of one unknown."""
        return cls(
            f"The body uses the results of {fn}, which outside_compilation{at(where)} runs on the host, but they are "
            f"not known before the run: the result{name} has the shape {shape}, and XLA compiles for fixed shapes. Pad "
            f"it to a fixed shape if its shape depends on values. {_DECLARE}"
        )

    @classmethod
    def other_structure(cls, name: str, given: str, wanted: str) -> HostResultError:
        """The result has another structure than the body was compiled for."""
        return cls(
            f"The host function returned {given}{_in(name)}, but the body was compiled for {wanted}. A host function "
            "must return the same structure each time."
        )

    @classmethod
    def other_tensor(cls, name: str, given: str, wanted: str) -> HostResultError:
        """The result has another dtype or shape than the body was compiled for."""
        return cls(
            f"The host function returned {given}{_in(name)}, but the body was compiled for {wanted}. A host "
            "function must return the same dtype and shape each time: cast or pad the result, or declare it, "
            "@xla.returns(tf.TensorSpec(shape, dtype))."
        )

    @classmethod
    def other_shape(cls, made_by: str, given: str, wanted: str, tried_with: str) -> HostResultError:
        """An op that soft placement runs on the host returned a tensor that the body was not compiled for.

        `tried_with` says what the shape was found with: "made-up values", or "" if the body declares it.
        """
        if not tried_with:
            return cls(f"{made_by} returned {given}, where the body declares {wanted}.")
        return cls(
            f"{made_by} returned {given}, where the body was compiled for {wanted}. That shape was found before the "
            f"run, by a trial of the op with {tried_with}. The devices use the result, so it needs one shape: pad it, "
            "for example ragged.to_tensor(shape=[None, 6]). If only the trial is wrong, declare the shape: "
            "tf.ensure_shape(y, shape)."
        )


class HostAccessError(ReplicaEngineError, RuntimeError):
    """A host function, or the iterator of a device loop, uses what the running program keeps on the devices.

    The devices run one program at a time, and the running program waits for the host function. Pass values of variables
    and tensors as arguments, assign results in the body, and use devices before or after the run.
    """

    @classmethod
    def variable(cls, name: str, where: str) -> HostAccessError:
        """The host function uses a variable whose values are on the devices."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host uses the variable {name!r}, whose "
            "values are on the devices while the body runs. Pass the variable's value as an argument, "
            "outside_compilation(fn, variable.read_value()), and assign results in the body."
        )

    @classmethod
    def devices(cls, where: str) -> HostAccessError:
        """The host function starts another program on devices, or uses a variable of a strategy."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host uses devices: it runs a compiled body, "
            "or accesses a variable of a strategy. The devices run one program at a time, and the running program "
            "waits for this function. Use the devices before or after the run."
        )

    @classmethod
    def in_inputs(cls) -> HostAccessError:
        """The iterator of a device loop uses devices while the loop runs."""
        return cls(
            "The iterator of a device loop uses devices: it runs a compiled body, or accesses a variable of a "
            "strategy. The devices run one program at a time, and the loop waits for the iterator. Use the devices "
            "before or after run_steps."
        )


def note_host_failure(
    error: BaseException, place: str, call: str, times: int, other: BaseException | None = None
) -> None:
    """Adds a note to a user's exception: which replica's host call raised it, or which other host call failed too.

    Args:
        error: the exception that gets the note.
        place: the replica and its device, in words.
        call: the host call, in words.
        times: 1-based count of this execution of the call on that replica.
        other: what the host call at `place` raised, if that is not `error`.
    """
    where = f"{place}, in {call}, execution {times} of it there"
    if other is None:
        add_note(error, where)
    else:
        add_note(error, f"also failed: {where}: {in_words(other)}")


def _in(name: str) -> str:
    return f" at result{name}" if name else ""


def moved_to_host(fn: str, pieces: Sequence[tuple[str, str, bool]]) -> str:
    """The warning, logged once for each body, that some ops of the body run on the host.

    Args:
        fn: the name of the body.
        pieces: the ops of each host call, the user's line, and whether the call is in a loop.
    """
    lines = [
        f"  {ops}{at(where)}" + (": in a loop, so each iteration may make a call" if in_loop else "")
        for ops, where, in_loop in pieces
    ]
    return "\n".join(
        [
            f"XLA cannot compile all of `{fn}`. Each replica's program calls the host for these ops "
            "(for checks, only when they fail; soft_placement=False makes the other ops an error):",
            *lines,
        ]
    )
