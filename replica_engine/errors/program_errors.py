"""Errors of compiled bodies and of the functions that they call on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replica_engine.errors.base import ReplicaEngineError, at, meant_reduction, shown, warning

__all__ = ["CaptureError", "CollectiveError", "GraphModeError", "HostAccessError", "HostResultError"]
__all__ += ["LostVariableError", "LoweringError", "NestedHostCallError", "ProgramError", "StuckProgramError"]
__all__ += ["VariableCreationError"]

# What to write in place of a lookup whose number of rows is that of the different ids.
ROWS_OF_UNIQUE = (
    "The number of different ids, which tf.unique and tf.nn.embedding_lookup_sparse find, depends on data. Look up "
    "every id instead: tf.reduce_sum(tf.gather(table, ids), axis=1) for a ragged tensor. Make a sparse one dense with "
    "tf.sparse.to_dense, and write tf.reduce_sum(tf.gather(table, ids) * mask[..., None], axis=1)."
)


_OF_SCALARS = {
    ("strategy.gather", "()"): " It joins the rows of all replicas, and a scalar has none. The value of each replica: "
    "strategy.experimental_local_results(x). One tensor of them: tf.stack(strategy.experimental_local_results(x)).",
    ("all_gather", "()"): " It joins the rows of all replicas, and a scalar has none. One row of each replica: "
    "all_gather(x[tf.newaxis], axis=0).",
}


class CollectiveError(ReplicaEngineError, ValueError):
    """A cross-replica operation was called with unusable arguments, or in the wrong place.

    Raised while the replica is traced, or when it makes the call. All replicas must make the same call, with a
    reduction, axis and groups that exist for the tensor.
    """

    @classmethod
    def unknown_reduction(cls, op: object, known: Sequence[str]) -> CollectiveError:
        """The reduction is unknown."""
        return cls(
            f"Values of replicas cannot be reduced with {shown(op)}. The reduction must be one of {', '.join(known)}."
            f"{meant_reduction(op, known, 'context.all_gather(x[tf.newaxis], axis=0)')}"
        )

    @classmethod
    def wrong_dtype(cls, op: str, dtype: str) -> CollectiveError:
        """The reduction does not exist for this dtype."""
        return cls(f"Values of dtype {dtype} cannot be reduced with {op}. Cast the values first: tf.cast(x, tf.int32).")

    @classmethod
    def host_only(cls, name: str, where: str, dtype: str) -> CollectiveError:
        """Values that no device can have: strings, variants, resources, quantized numbers."""
        return cls(
            f"{name}{at(where)} cannot combine values of dtype {dtype}: they stay on the host, and replicas meet on "
            "the devices. Turn them into numbers first. In one process, and under MultiWorkerMirroredStrategy, strings "
            "can also be returned from the step and gathered after the run: strategy.gather(result, axis=0)."
        )

    @classmethod
    def apart(cls, name: str) -> CollectiveError:
        """Not all replicas take this branch; `replicate_model` then lets every replica run the whole batch."""
        return cls(f"{name} needs all replicas, but not all of them take this branch.")

    @classmethod
    def bad_groups(cls, groups: object, size: int) -> CollectiveError:
        """`groups` is not a partition of the replicas."""
        return cls(
            f"`groups` must contain each of the {size} replicas exactly once; got {groups}. For two halves of four "
            "replicas: groups=[[0, 1], [2, 3]]."
        )

    @classmethod
    def bad_pairs(cls, pairs: object, size: int) -> CollectiveError:
        """`pairs` is not a partial permutation of the replicas."""
        return cls(
            f"`pairs` must be pairs (from, to) of replicas 0 to {size - 1}, and each replica may send and receive at "
            f"most once; got {pairs}."
        )

    @classmethod
    def no_axis(cls, name: str, axis: object, shape: str) -> CollectiveError:
        """The axis is out of range for the tensor; a loss of each replica is mostly a scalar."""
        of_scalars = _OF_SCALARS.get((name, shape), "")
        return cls(f"{name}: axis {axis} is out of range for a tensor of shape {shape}.{of_scalars}")

    @classmethod
    def not_divisible(cls, axis: int, length: int, parts: int) -> CollectiveError:
        """The axis cannot be split into equal parts."""
        return cls(
            f"Axis {axis} has length {length} and cannot be split into {parts} equal parts, one for each replica. "
            f"Pad the axis to a multiple of {parts}."
        )

    @classmethod
    def unknown_shape(cls, name: str, where: str, shape: str, arguments: Sequence[str]) -> CollectiveError:
        """The shape of the tensor is not static; `arguments` names the arguments that the shape comes from."""
        source = f"comes from {' and '.join(arguments)}" if arguments else "depends on data"
        return cls(
            f"{name}{at(where)} needs a shape that is known while the body is traced for all replicas, but this shape "
            f"is {shape}, which {source}. Give the batch a fixed size, dataset.batch(n, drop_remainder=True), or set "
            "the shape: tf.ensure_shape(x, ...)."
        )


def may_wait_forever(fn: str, rows: Sequence[tuple[str, str, bool, str, bool]]) -> str:
    """The warning that not all replicas may reach a collective.

    Args:
        fn: the function.
        rows: for each collective its name and line, whether the condition is that of a loop, the line of the condition,
            and whether the condition depends on the replica id.
    """
    lines = []
    for name, where, is_loop, condition, by_replica_id in rows:
        kind = "loop" if is_loop else "branch"
        on = "the replica id" if by_replica_id else "values that each replica has of its own"
        lines.append(f"  {name}{at(where)}: in a {kind} whose condition{at(condition)} depends on {on}")
    table = "\n".join(lines)
    return warning(
        "may_wait_forever",
        f"The replicas of `{fn}` may wait for each other forever. Perhaps not all of them reach these cross-replica "
        f"operations, or not equally often:\n{table}\n"
        'Let all replicas decide alike: reduce what the condition depends on first, as in all_reduce("MAX", value).',
    )


class CaptureError(ReplicaEngineError, ValueError):
    """A replica body uses a resource, variable or tensor from outside that cannot be on a device.

    Raised before the program is compiled. Pass the value as an argument of the run, or use it on the host, with
    `xla.outside_compilation`.
    """


class VariableCreationError(ReplicaEngineError, ValueError):
    """A replica body cannot create this variable.

    Raised while the body is traced. Create variables once, before the run and under the scope, with an initial value
    that does not depend on the run.
    """


class LoweringError(ReplicaEngineError, ValueError):
    """XLA cannot compile a replica body. The error is raised before the program runs.

    Use ops and shapes that XLA can compile, run the op on the host with `xla.outside_compilation`, or use
    MirroredStrategy, which compiles nothing. The message names the op and the line.

    Attributes:
        op_name: the name of the op, with its name scopes; "" if the op is not known.
    """

    op_name = ""

    @classmethod
    def unsupported_op(cls, fn: str, op: str, where: str) -> LoweringError:
        """XLA has no lowering for an op."""
        return cls(
            f"`{fn}` uses {op}{at(where)}, which XLA cannot compile. Run it on the host: in the middle of the body "
            "with xla.outside_compilation(fn, ...), or before the run, or use MirroredStrategy."
        )

    @classmethod
    def stays_on_host(
        cls, fn: str, op: str, where: str, described: str, is_dtype: bool, made_by: str, made_at: str
    ) -> LoweringError:
        """An op that only the devices can run needs a value that cannot leave the host."""
        value = f"a value of dtype {described}" if is_dtype else f"a value of the unknown shape {described}"
        made = f", made by {made_by}{at(made_at)}" if made_by else ""
        if is_dtype:
            advice = "Convert the value to numbers first."
        elif made_by == "Unique":
            advice = ROWS_OF_UNIQUE
        else:
            advice = (
                "Give the value a static shape first: pad it, or, if you know the shape, call tf.ensure_shape(x, ...)."
            )
        return cls(
            f"In `{fn}`, {op}{at(where)} runs on the devices and needs {value}, which cannot leave the host{made}. "
            f"{advice}"
        )

    @classmethod
    def not_constant(cls, fn: str, op: str, where: str) -> LoweringError:
        """A shape or axis depends on data."""
        return cls(
            f"In `{fn}`, a shape or an axis of {op} depends on data{at(where)}. XLA compiles for fixed shapes: use a "
            "Python number instead, or mask values instead of removing them."
        )

    @classmethod
    def other_chips(cls, kernel: str, where: str, platform: str, cause: str) -> LoweringError:
        """A function of JAX is a kernel that is made for other chips."""
        return cls(
            f"`{kernel}`, a function of from_jax called{at(where)}, cannot be lowered for {platform}. A kernel of "
            "Pallas is made for one kind of chip: give from_jax a function for the others, otherwise=. JAX says:\n"
            f"{cause}"
        )

    @classmethod
    def not_in_tensorflow(cls, kernel: str, where: str, target: str) -> LoweringError:
        """A function of JAX calls a routine that TensorFlow does not have."""
        return cls(
            f"`{kernel}`, a function of from_jax called{at(where)}, calls {target}, which JAX has and TensorFlow "
            "has not. It works under TPUStrategy. Elsewhere write that part with TensorFlow: tf.linalg has the "
            "factorizations of jax.numpy.linalg."
        )

    @classmethod
    def dynamic_result(cls, fn: str, index: int, where: str) -> LoweringError:
        """The shape of a result depends on data."""
        return cls(
            f"Result {index} of `{fn}` has a shape that depends on data{at(where)}, such as the result of "
            "tf.where(mask), tf.unique or tf.boolean_mask. Return a mask, or values padded to a fixed size."
        )

    @classmethod
    def host_only(cls, fn: str, name: str, dtype: str) -> LoweringError:
        """An argument has a dtype that no device can hold, such as string."""
        return cls(
            f"{name} of `{fn}` has dtype {dtype}, which no device can hold. Convert it to numbers before the run, in "
            "the input pipeline for example. MirroredStrategy runs the function without changes."
        )

    @classmethod
    def other(cls, fn: str, message: str, where: str) -> LoweringError:
        """XLA reports another problem."""
        return cls(f"XLA cannot compile `{fn}`{at(where)}: {message}")


class GraphModeError(ReplicaEngineError, RuntimeError):
    """A TPUStrategy, a compiled body or a job of several workers was used in a graph of tf.compat.v1.

    Raised by the run. Leave the graph of tf.compat.v1, or use MirroredStrategy, which runs in one.
    """


class ProgramError(ReplicaEngineError, RuntimeError):
    """A compiled program failed while it ran, or cannot run on this machine, or the compiler of a chip refuses it.

    Raised by the run, and by plans for a chip. The usual cause is memory: use a smaller batch. Variables that a program
    writes may be lost if it ran.

    Attributes:
        plan: what the compiler says of a program that needs more memory than there is, a `replica_engine.xla.Plan`;
            otherwise None.
    """

    plan: Any = None

    @classmethod
    def failed(cls, program: str, devices: Sequence[str], message: str) -> ProgramError:
        """The runtime reports a failure of a program: its name in words, of its devices, and what the runtime says."""
        return cls(
            f"The compiled program of {program} failed while it ran on {len(devices)} replicas "
            f"({', '.join(devices)}):\n"
            f"{message}\n"
            "The variables that the program writes may be lost; reading a lost variable raises LostVariableError. "
            "Assign these variables, or load a checkpoint. If memory is the cause, use a smaller batch."
        )

    @classmethod
    def over_workers(cls, call: str, worker: int, message: str) -> ProgramError:
        """The runtime reports that a sum or a gather over the workers, which `call` names, failed in this one."""
        return cls(f"The call over the workers of {call} failed in worker {worker}: {message.strip()}")


class StuckProgramError(ReplicaEngineError, RuntimeError):
    """A compiled program that was interrupted has not ended, so no other program can run on its devices.

    Raised by the next run. Let the program end, and give it more time with `PATIENCE`; if it never ends, look for a
    host call that does not return, or for replicas that wait for each other, and make a new strategy.
    """

    PATIENCE = 10.0
    """Seconds that the next run waits for the interrupted program to end. A program with long steps may set more."""

    @classmethod
    def given_up(cls, name: str, replicas: int) -> StuckProgramError:
        """A run was given up, but its program still runs."""
        return cls(
            f"The compiled program of `{name}` on {replicas} replicas was given up earlier (Ctrl-C, or timeout=) and "
            f"has not ended within another {cls.PATIENCE:g} s, so nothing else can run on its devices. If the program "
            "is only long, let it end: raise the limit of the strategy, TPUStrategy(timeout=...), which is in seconds, "
            "or leave it out; after Ctrl-C, let the next run wait longer: "
            "replica_engine.errors.StuckProgramError.PATIENCE = 600. If it never ends, perhaps a host call in it does "
            "not return, or its replicas wait for each other: every replica must reach the same cross-replica "
            "operations, so a branch on the replica id must not contain one. Then make a new strategy, and load the "
            "variables from a checkpoint."
        )


class LostVariableError(ReplicaEngineError, RuntimeError):
    """The value of a variable was donated to a program that failed, and is lost.

    Raised when the variable is read. Assign it, or load a checkpoint; the failure of the program came before.
    """


def broken_cache_file(file: str, reason: str) -> str:
    """The warning that a file in the cache folder is broken."""
    return warning(
        "broken_cache_file",
        f"The file {file} is broken ({reason.splitlines()[0] if reason else 'it is empty'}). Its program is compiled "
        "again, and the file is replaced. A full disk or a copy that was cut short can leave such a file.",
    )


def unusable_cache_dir(folder: str, reason: str) -> str:
    """The warning that programs cannot be read from the cache folder, or cannot be written to it."""
    return warning(
        "unusable_cache_dir",
        f"The cache folder {folder} cannot be used: {reason}. Programs are compiled, and later processes will compile "
        "them again. Make room or make the folder writable, name another one with REPLICA_ENGINE_CACHE_DIR or "
        "replica_engine.xla.set_cache_dir, or turn the cache off with set_cache_dir(None).",
    )


def untrusted_cache_dir(folder: str, reason: str, command: str, is_file: bool) -> str:
    """The warning that other users can have written what is in the cache folder.

    Args:
        folder: the folder.
        reason: whose it is, or who may write to it.
        command: what makes it this user's own.
        is_file: whether it is a file in the folder, rather than the folder or one around it.
    """
    what = f"Files in the cache folder {folder} are" if is_file else f"The cache folder {folder} is"
    happens = (
        "They are compiled again, and the files are replaced" if is_file else "Programs are compiled in each process"
    )
    return warning(
        "untrusted_cache_dir",
        f"{what} not used: {reason}. A program that is read runs what its file says, so the folder, its files and the "
        "folders around it must belong to this user or to root, and nobody else may write to them. "
        f"{happens}. Write\n    {command}\nor, where others need it as it is, name another folder with "
        "REPLICA_ENGINE_CACHE_DIR or replica_engine.xla.set_cache_dir. set_cache_dir(None) turns the cache off.",
    )


# Host calls of compiled bodies (`outside_compilation`).
class NestedHostCallError(ReplicaEngineError, NotImplementedError):
    """outside_compilation was called inside a function that outside_compilation runs.

    Raised while the body is traced. Call the inner function directly: the code already runs on the host.
    """


class HostResultError(ReplicaEngineError, ValueError, TypeError):
    """A host function returned a value that the compiled body cannot use, or its declaration is not one of tensors.

    Raised by `xla.returns`, while the body is traced, or in a run whose result differs from what the body was compiled
    for. Return tensors of the same structure, dtype and shape each time, or declare them with `xla.returns`.

    Attributes:
        failure: what tracing the host function raised, if that is why its results are not known.
    """

    failure: Exception | None = None


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
    def in_inputs(cls) -> HostAccessError:
        """The iterator of a device loop uses devices while the loop runs."""
        return cls(
            "The iterator of a device loop uses devices: it runs a compiled body, or accesses a variable of a "
            "strategy. The devices run one program at a time, and the loop waits for the iterator. Use the devices "
            "before or after run_steps."
        )


def at_result(name: str) -> str:
    """Where in the structure that a host function returned; "" for a single tensor."""
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
    said = (
        f"XLA cannot compile all of `{fn}`. Each replica's program calls the host for these ops (for checks, only when "
        "they fail; soft_placement=False makes the other ops an error):"
    )
    return "\n".join([said, *lines])
