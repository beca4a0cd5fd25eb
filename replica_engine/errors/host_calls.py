"""Host calls of compiled bodies (`outside_compilation`): how they may not be made, and what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief, in_words


class NestedHostCallError(ReplicaEngineError, NotImplementedError):
    """outside_compilation was called inside a function that outside_compilation runs."""

    @classmethod
    def inside(cls, outer: str, inner: str) -> NestedHostCallError:
        """Where both calls are."""
        return cls(
            f"outside_compilation{at(inner)} was called in a function that outside_compilation{at(outer)} runs on the "
            "host already. Calls cannot be nested: call the inner function directly."
        )


class HostResultError(ReplicaEngineError, ValueError, TypeError):
    """A host function returned what the body cannot go on with."""

    @classmethod
    def no_tensor(cls, name: str, value: object) -> HostResultError:
        """Something that is no tensor, nor a structure of tensors."""
        return cls(
            f"The host function returned {brief(value)}{_in(name)}, which is no tensor. It can return tensors, arrays, "
            "numbers, None, and nested structures of them."
        )

    @classmethod
    def host_only(cls, name: str, dtype: str) -> HostResultError:
        """A string and the like."""
        return cls(
            f"The host function returned a tensor of dtype {dtype}{_in(name)}, and no device has such values. Use it "
            "in the host function, and return numbers."
        )

    @classmethod
    def unknown_shape(cls, name: str, shape: str) -> HostResultError:
        """A shape that is not known before the run."""
        return cls(
            f"The host function's result{_in(name)} has the shape {shape}, and XLA compiles for fixed shapes. Pad it "
            "to one, and say which: @xla.returns(tf.TensorSpec(shape, dtype))."
        )

    @classmethod
    def unknown_arguments(cls, shape: str) -> HostResultError:
        """It cannot be called with zeros, since an argument's shape is not known."""
        return cls(
            "To know what the host function returns it is called with zeros before the run, and an argument has the "
            f"shape {shape}. Batch with drop_remainder=True, or say what it returns: "
            "@xla.returns(tf.TensorSpec(shape, dtype))."
        )

    @classmethod
    def other_structure(cls, name: str, given: str, wanted: str) -> HostResultError:
        """Not the structure that the body was compiled for."""
        return cls(
            f"The host function returned {given}{_in(name)}, where the body was compiled for {wanted}. It must return "
            "the same structure each time."
        )

    @classmethod
    def other_tensor(cls, name: str, given: str, wanted: str, of_zeros: bool) -> HostResultError:
        """Not the dtype or shape that the body was compiled for."""
        why = ", which is what it returned for zeros" if of_zeros else ""
        return cls(
            f"The host function returned {given}{_in(name)}, where the body was compiled for {wanted}{why}. It must "
            "return the same dtype and shape each time: cast or pad the result, or say what the function returns, "
            "@xla.returns(tf.TensorSpec(shape, dtype))."
        )

    @classmethod
    def other_shape(cls, made_by: str, given: str, wanted: str, tried_with: str) -> HostResultError:
        """An op that soft placement runs on the host returned a tensor that the body was not compiled for.

        `tried_with` says what the shape was found with: "zeros", "made-up values", or "" if the body declares it.
        """
        if not tried_with:
            return cls(f"{made_by} returned {given}, where the body declares {wanted}.")
        what, advice = (
            ("the function", "pad it in the function")
            if tried_with == "zeros"
            else ("the op", "pad it, for example ragged.to_tensor(shape=[None, 6])")
        )
        return cls(
            f"{made_by} returned {given}, where the body was compiled for {wanted}. That shape was found before the "
            f"run, by a trial of {what} with {tried_with}. The devices use the result, so it needs one shape: "
            f"{advice}. If only the trial is wrong, declare the shape: tf.ensure_shape(y, shape)."
        )


class HostAccessError(ReplicaEngineError, RuntimeError):
    """A host function, or the iterator of a device loop, uses something that is on the devices meanwhile."""

    @classmethod
    def variable(cls, name: str, where: str) -> HostAccessError:
        """A variable of the devices."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host uses the variable {name!r}, whose "
            "values are on the devices while the body runs. Pass its value as an argument, "
            "outside_compilation(fn, variable.read_value()), and assign results in the body."
        )

    @classmethod
    def of_function(cls, where: str) -> HostAccessError:
        """A function that uses a variable of the devices."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host calls a tf.function that uses a "
            "variable of a strategy, whose values are on the devices while the body runs. Pass its value."
        )

    @classmethod
    def devices(cls, where: str) -> HostAccessError:
        """A program was to be run on devices."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host uses devices: it runs a compiled body, "
            "or looks at a variable of a strategy. Devices run one program at a time, and this one waits for the "
            "function. Do it before or after the run."
        )

    @classmethod
    def in_inputs(cls) -> HostAccessError:
        """The iterator of a device loop uses devices."""
        return cls(
            "The iterator of a device loop uses devices: it runs a compiled body, or looks at a variable of a "
            "strategy. Devices run one program at a time, and the loop waits for the iterator. Do it before or "
            "after run_steps."
        )

    @classmethod
    def tensor(cls, name: str, where: str) -> HostAccessError:
        """A tensor of the body that is found neither among the arguments nor in a closure."""
        return cls(
            f"The function that outside_compilation{at(where)} runs on the host uses the tensor {name!r} of the body "
            "through an attribute or a global variable. Pass it as an argument: outside_compilation(fn, tensor)."
        )


def note_unknown_results(error: BaseException, where: str) -> None:
    """Adds to an exception of a host function that it was raised before the program was there."""
    add_note(
        error,
        f"raised while the body was traced: to know what the function that outside_compilation{at(where)} runs "
        "returns, it was called with zeros. It is not if you say what it returns: "
        "@xla.returns(tf.TensorSpec(shape, dtype)).",
    )


def note_host_failure(
    error: BaseException, place: str, call: str, times: int, other: BaseException | None = None
) -> None:
    """Adds to a user's exception which replica's host call raised it; or, if `other` is given, what else failed."""
    where = f"{place}, in {call}, execution {times} of it there"
    if other is None:
        add_note(error, where)
    else:
        add_note(error, f"also failed: {where}: {in_words(other)}")


def note_stuck(error: BaseException, replicas: int) -> None:
    """Adds to an exception of a host call that its program has not ended."""
    add_note(
        error,
        f"The program has not ended: it takes long, or its {replicas} replicas wait for each other, since the failed "
        "call's replica went on with zeros, another way than the others. If the next run does not come through, make a "
        "new strategy, and load the variables from a checkpoint.",
    )


def _in(name: str) -> str:
    return f" at result{name}" if name else ""


def moved_to_host(fn: str, pieces: Sequence[tuple[str, str, bool]]) -> str:
    """The line that is logged once a body whose ops run on the host in part: of each call its ops and its line."""
    lines = [
        f"  {ops}{at(where)}" + (": in a loop, so there may be a call in each iteration" if in_loop else "")
        for ops, where, in_loop in pieces
    ]
    return "\n".join(
        [
            f"XLA cannot compile all of `{fn}`. Each replica's program calls the host for these ops "
            "(checks only where they fail; soft_placement=False makes the others an error):",
            *lines,
        ]
    )
