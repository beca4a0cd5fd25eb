"""Errors of replicas on threads, of scopes, and of calls whose arguments do not fit.

Notes on a user's exception are here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from replica_engine.errors.base import ReplicaEngineError, add_note, at, brief, in_words, is_alike, plural, warning
from replica_engine.errors.timeouts import ReplicaRow

__all__ = ["InputsError", "MergeCallGraphError", "MergeCallMismatchError", "NoMethodError", "NotInBodyError"]
__all__ += ["NotInReplicaError", "ReplicaMismatchError", "ReplicaUnwound", "ScopeError", "StructureMismatchError"]
__all__ += ["VariableMismatchError"]


class MergeCallMismatchError(ReplicaEngineError, RuntimeError):
    """The replicas of one run did not meet at the same merge calls.

    Raised out of `strategy.run` when some replicas finish while others wait in a merge call, or when the
    replicas wait in different merge functions. `rows` has one `ReplicaRow` for each replica.

    Make the same merge calls in the same order on every replica: move the call out of a branch that only some replicas
    take.

    Example:
        >>> row = ReplicaRow(0, 1, "CPU:0", "finished", 0, "")
        >>> MergeCallMismatchError.about([row], "a message").rows == (row,)
        True
    """

    rows: tuple[ReplicaRow, ...] = ()

    @classmethod
    def about(cls, rows: Sequence[ReplicaRow], message: str) -> MergeCallMismatchError:
        """The error about replicas that are where the rows say."""
        error = cls(message)
        error.rows = tuple(rows)
        return error


class StructureMismatchError(ReplicaEngineError, ValueError, AssertionError):
    """Replicas returned, or passed to a merge call, values of different structure.

    It is an AssertionError as well, because `tf.distribute` raises AssertionError in this case. `path` is the place
    in the structure, and `replicas` holds the indices of the two replicas that differ.

    Raised when all replicas have returned, or have come to the merge call. Give the same structure on every replica,
    with None where a replica has nothing.
    """

    path = ""
    replicas: tuple[int, ...] = ()

    @classmethod
    def between(
        cls, what: str, path: str, replicas: tuple[int, int], details: tuple[str, str]
    ) -> StructureMismatchError:
        """Names two replicas that differ, and what each has at that place of the structure."""
        first, second = replicas
        error = cls(
            f"{what} differ in structure at `{path}`: replica {first} has {details[0]}, "
            f"replica {second} has {details[1]}. Every replica must give the same structure: the same "
            "lengths, the same keys, the same kinds of containers. Put None where a replica has nothing."
        )
        error.path, error.replicas = path, replicas
        return error


class MergeCallGraphError(ReplicaEngineError, RuntimeError):
    """merge_call was called where the replicas cannot meet: while a graph is built that only one replica sees.

    Merge calls work in tf.cond, tf.while_loop, tf.switch_case, AutoGraph's `if`, `for` and `while`, and nested
    `tf.function`s. They do not work in the places that this error's texts name.

    Raised where the call is made. Move the merge call out of that graph: reduce the value before it.
    """

    @classmethod
    def swallowed(cls) -> MergeCallGraphError:
        """User code caught the exception with which a nested `tf.function` becomes a sync point."""
        return cls(
            "`merge_call` called in a nested tf.function, which caught the exception that its trace is left with: a "
            "bare `except:`, an `except BaseException:` or a `return` in a `finally` stands around the merge call. "
            "Replicas enter such a function again, together, once the exception has left it. Write `except Exception:`."
        )


class NotInReplicaError(ReplicaEngineError, RuntimeError):
    """A replica's context was used from a thread that is not running that replica.

    Raised by the call. Use the context only in the function that `strategy.run` runs, and on its thread.
    """

    @classmethod
    def used_after_run(cls) -> NotInReplicaError:
        """A replica context was kept and used after the run that it belongs to."""
        return cls(
            "A replica context was used after its run had returned: no replica waits there any more. Call "
            "tf.distribute.get_replica_context() each time in the function that strategy.run runs. Outside of it, "
            'reduce the results: strategy.reduce("SUM", results, axis=None).'
        )


class VariableMismatchError(ReplicaEngineError, RuntimeError):
    """A replica asked for a variable that the first replica did not create.

    Raised where the replica creates the variable. Create the same variables, in the same order, on every replica; best
    before the run.
    """


class ReplicaUnwound(BaseException):
    """Raised inside a replica whose run was given up because another replica failed. Do not catch it.

    A replica that is paused in a merge call cannot continue after another replica failed. This exception unwinds its
    stack, so that `finally` blocks and context managers run. It never leaves `strategy.run`.
    """

    def __init__(self, message: str = "This run was given up because another replica, or the merge function, failed."):
        super().__init__(message)


def warn_different_lines(name: str, first: tuple[int, str], other: tuple[int, str]) -> str:
    """The warning that replicas met in one sync point from different lines: their values may not belong together."""
    return warning(
        "warn_different_lines",
        f"Replicas met in one {name} from different lines:\n"
        f"  replica {first[0]}: {first[1]}\n"
        f"  replica {other[0]}: {other[1]}\n"
        "Replicas meet in the order in which they come, so what these two lines bring is merged. If the replicas reach "
        "their sync points in different orders, values are mixed that do not belong together. Choose the values in the "
        "branch, and make the call after it, on one line for all replicas. If the lines belong together, nothing is "
        "wrong.",
    )


def note_failure(error: BaseException, row: ReplicaRow, others: Iterable[tuple[ReplicaRow, BaseException]]) -> None:
    """Adds notes to a user's exception: which replica raised it, and which other replicas of the run failed."""
    others = list(others)
    # Compare now: once `error` has notes, no exception is equal to it.
    alike = [other for other, raised in others if is_alike(raised, error)]
    calls = plural(row.merge_calls, row.points)
    where = f" (the last: {row.where})" if row.where else ""
    add_note(error, f"replica {row.replica} of {row.size}, {row.device}, after {calls}{where}")
    note_failed_alike(error, [other.replica for other in alike])
    for other, raised in others:
        if other not in alike:
            what = f"replica {other.replica} of {other.size}, {other.device}"
            add_note(error, f"also failed: {what}: {in_words(raised)}")


def note_failed_alike(error: BaseException, replicas: Sequence[int]) -> None:
    """Adds a note to an exception: which other replicas raised an equal one."""
    if replicas:
        numbers = ", ".join(map(str, sorted(set(replicas))))
        add_note(error, f"also failed, in the same way: replica{'s' if len(set(replicas)) > 1 else ''} {numbers}")


def note_workers(error: BaseException, tables: Sequence[str]) -> None:
    """Adds notes to an exception: where each worker of the job is."""
    for text in tables:
        add_note(error, text)


def note_abandoned(error: BaseException, rows: Sequence[ReplicaRow]) -> None:
    """Adds a note to an exception for each replica that could not be unwound and was abandoned."""
    for row in rows:
        stack = f"\nStack of {row.name}:\n{row.stack.rstrip()}" if row.stack else ""
        add_note(error, f"abandoned, because it did not return: {row}{stack}")


# Objects and calls that do not belong to the strategy whose replicas use them.
KERAS_RUNS = "`fit`, `predict` and such methods of a Keras model run the replicas themselves: call these outside."
_ALL_REDUCE = (
    'In a replica, ask its context, on all replicas: tf.distribute.get_replica_context().all_reduce("SUM", value).'
)


def _updated(where: str) -> str:
    """The sentence with the line of the update, or of the run or the `fit` that makes it."""
    return f" Replicas update the variable{at(where)}." if where else ""


class ScopeError(ReplicaEngineError, RuntimeError):
    """A variable, optimizer or call does not belong to the strategy whose replicas use it.

    Raised by the run, where replicas use the object or make the call. Make models, variables and optimizers under
    `strategy.scope()` of the strategy that runs them, and call methods of the strategy outside its replicas.
    """

    @classmethod
    def variable(cls, name: str, where: str) -> ScopeError:
        """Replicas update a variable that was made outside the scope."""
        return cls(
            f"The variable {name!r} was made outside `strategy.scope()`: there is one for all replicas, and an update "
            f"needs one on each.{_updated(where)} Make it, or the model that it belongs to, under the scope:\n"
            "    with strategy.scope():\n"
            "        model = make_model()"
        )

    @classmethod
    def model_and_optimizer(cls, variable: str, optimizer: str, kind: str, where: str) -> ScopeError:
        """Replicas train a model with an optimizer, and both were made outside the scope."""
        return cls(
            f"The variable {variable!r} and the optimizer {optimizer!r} that updates it were made outside "
            f"`strategy.scope()`, so neither can be on each replica.{_updated(where)} Make the optimizer "
            "and the model under the scope:\n"
            "    with strategy.scope():\n"
            "        model = make_model()\n"
            f"        optimizer = keras.optimizers.{kind}(...)"
        )

    @classmethod
    def other_strategy(cls, what: str, name: str) -> ScopeError:
        """Replicas use a variable or an optimizer that was made under the scope of another strategy."""
        return cls(
            f"The {what} {name!r} belongs to another strategy than the one whose replicas use it. Make one strategy, "
            "enter its scope to make models and optimizers, and call run of the same object:\n"
            "    with strategy.scope():\n"
            f"        {what} = ...\n"
            "    strategy.run(step)"
        )

    @classmethod
    def in_replica(cls, method: str, where: str) -> ScopeError:
        """`run`, `scope`, `reduce` or `reduce_to` is called by a function that replicas already run."""
        cure = {
            "run": "Call the inner function directly: each replica runs it. In a merge function, run works. "
            f"{KERAS_RUNS}",
            "scope": "A replica is in the scope already: leave the `with` out, and what it makes belongs to the "
            f"strategy. Better, make variables before strategy.run. {KERAS_RUNS}",
            "reduce": f"{_ALL_REDUCE} strategy.reduce is for what strategy.run returns, and for merge functions.",
            "extended.reduce_to": f"{_ALL_REDUCE} reduce_to is for merge functions.",
            "extended.batch_reduce_to": f"{_ALL_REDUCE} It takes a list of tensors too. batch_reduce_to is for merge "
            "functions.",
        }[method]
        return cls(
            f"strategy.{method}() was called inside a replica{at(where)}, by code that strategy.run runs. {cure}"
        )


def warn_shared_variable(name: str, where: str) -> str:
    """The warning that several replicas write one plain variable, each its own value."""
    return warning(
        "warn_shared_variable",
        f"The plain variable {name!r} is written by more than one replica{at(where)}. It was made outside "
        "`strategy.scope()`, so all replicas share it, and each write comes on top of the others or replaces them. "
        "Make it, or the Keras metric or layer that has it, under the scope. With `replicate_model`, keep the metric, "
        "layer or seed generator in an attribute of the model instead. Replicas that write the same value, such as an "
        "all-reduced gradient, need no more. If each writes its own, such as a number of samples, say what "
        "becomes of them:\n"
        "    with strategy.scope():\n"
        "        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)",
    )


def warn_foreign_optimizer(name: str, kind: str, size: int, where: str) -> str:
    """The warning that replicas update their variables with an optimizer that was made and built outside the scope."""
    return warning(
        "warn_foreign_optimizer",
        f"The optimizer {name!r} is used by {size} replicas{at(where)}, and was made outside `strategy.scope()`. So it "
        f"has one state for all of them (iterations, momentum, the moments of Adam), which each step changes {size} "
        "times. The numbers are not those of one device. Make and build it under the scope:\n"
        "    with strategy.scope():\n"
        f"        optimizer = keras.optimizers.{kind}(...)",
    )


# Calls of replicated functions: their arguments, and the place of the call.
LOOP = (
    "    for batch in strategy.experimental_distribute_dataset(dataset):\n"
    "        strategy.run(step, args=(batch,))\n"
    "If its batches are tuples and the step takes their parts, step(x, y), write args=batch."
)
"""What to write where a dataset is given in place of a batch."""


class NotInBodyError(ReplicaEngineError, RuntimeError):
    """A cross-replica operation was used where no replicated body is being traced.

    Raised where the operation is called. Call it in the function that `xla.replicate` or `TPUStrategy.run` is given;
    the replicas of MirroredStrategy use `tf.distribute.get_replica_context()`.
    """


class NoMethodError(ReplicaEngineError, AttributeError):
    """A strategy or a context was asked for a method that another object has; `hasattr` is False.

    Raised by the use of the method. Write what the message shows, or, for a method of another strategy, use that one.
    """


_FUNCTIONS = {
    name: f"It is a function: write {call}."
    for name, call in (
        ("split_batch", "replica_engine.split_batch(strategy, batch)"),
        ("join_outputs", "replica_engine.join_outputs(strategy, outputs)"),
        ("timeline", 'with replica_engine.timeline("run.json"):'),
        ("replicate_model", "replica_engine.keras.replicate_model(model, strategy=strategy)"),
    )
}
_OF_REPLICA = {
    name: "Replicas have it, in the function that runs on them: write "
    f"tf.distribute.get_replica_context().{name}{'' if name == 'replica_id_in_sync_group' else '(...)'}."
    for name in ("merge_call", "all_reduce", "all_gather", "replica_id_in_sync_group")
}
ELSEWHERE = {
    "strategy": _FUNCTIONS | _OF_REPLICA,
    "replica": {
        "reduce": 'In a replica, write context.all_reduce("SUM", value). strategy.reduce is for outside.',
        "gather": "In a replica, write context.all_gather(value, axis=0). strategy.gather is for outside.",
    },
    "loop": _OF_REPLICA,
}
"""What to write for an attribute that a strategy, the context of a replica, or that of `run_steps` does not have."""


def elsewhere(owner: object, kind: str, name: str) -> Any:
    """Looks up an attribute that was not found, for the `__getattr__` of an object.

    Args:
        owner: the object.
        kind: what it is, a key of `ELSEWHERE`.
        name: the attribute.

    Raises:
        NoMethodError: another object has it.
        AttributeError: nothing is known of it; or a property of this name raised the error.
    """
    if name in ELSEWHERE[kind]:
        raise NoMethodError(f"{type(owner).__name__} has no {name}. {ELSEWHERE[kind][name]}")
    return object.__getattribute__(owner, name)


class InputsError(ReplicaEngineError, ValueError, TypeError):
    """A replicated function, compiled body or device loop was called with unusable arguments, or in the wrong place.

    Raised by the call, before any replica runs. The message names the argument, and shows how to write the call.
    """

    @classmethod
    def no_cache_dir(cls, path: object) -> InputsError:
        """The cache folder is not a path."""
        return cls(f"set_cache_dir takes the path of a folder, or None for no cache; got {brief(path)}.")

    @classmethod
    def distributed(cls, name: str, kind: str) -> InputsError:
        """`strategy.run` gets a distributed dataset, or an iterator over one."""
        return cls(
            f"{name} is a {kind}, and replicas take one batch of it at a time. Loop over it around the run:\n"
            "    for batch in distributed_dataset:\n"
            "        strategy.run(step, args=(batch,))\n"
            "If its batches are tuples and the step takes their parts, step(x, y), write args=batch. With an iterator, "
            "args=(next(iterator),)."
        )

    @classmethod
    def not_of_signature(cls, fn: str, name: str, given: str, wanted: str) -> InputsError:
        """An argument does not match the input signature."""
        return cls(f"{name} of `{fn}` is {given}, but the input_signature has {wanted}.")


class ReplicaMismatchError(ReplicaEngineError, ValueError):
    """The replicas were given tensors of different shapes or dtypes, or brought such tensors to a sync point.

    Raised before a program is compiled, or at the sync point. Replicas that meet need equal shapes and dtypes: divide
    batches evenly, pad the last one, or use `replica_engine.split_batch`.

    Attributes:
        by_replica: the shapes of an argument of a compiled program that differ, one for each replica; else empty.
    """

    by_replica: Sequence[tuple[int, ...]] = ()

    @classmethod
    def shapes(cls, name: str, replica: int, first: str, other: str, met: str = "") -> ReplicaMismatchError:
        """Two replicas have different shapes; `met` is where they meet, such as "all_reduce at file.py:3 in step"."""
        met = met or "cross-replica operations (sums of gradients, for example)"
        return cls(
            f"{name} has shape {first} on replica 0 and {other} on replica {replica}. The replicas meet in {met}, so "
            "one program runs on all of them, and their shapes must be equal. Use a batch size that is a multiple of "
            "the number of replicas. If only the last batch is smaller, leave it out, dataset.batch(n, "
            "drop_remainder=True), or give Keras fit a number of samples that is a multiple of the batch size. For "
            "batches of any size in your own loop, replica_engine.split_batch(strategy, batch) makes equal shares, "
            "with weights that are 0 for padding."
        )

    @classmethod
    def other_conditions(cls, what: str, where: str, values: Sequence[tuple[str, str]]) -> ReplicaMismatchError:
        """The replicas do not agree which way to go in an operator with merge calls; one row for each replica."""
        rows = "\n".join(f"  {replica}: {value}" for replica, value in values)
        return cls(
            f"The replicas do not agree on the condition of {what} at {where}:\n{rows}\n"
            "There is a merge call inside (all_reduce, optimizer.apply), so all replicas must go the same way. Make "
            "the condition of values that are equal on all replicas, or reduce it first: "
            'context.all_reduce("SUM", value).'
        )

    @classmethod
    def not_tensors(cls, name: str, value: object) -> ReplicaMismatchError:
        """A value differs by replica and is not a tensor."""
        return cls(
            f"{name} differs by replica and holds {brief(value)}. A value that differs by replica must be a tensor, "
            "because one program runs on all replicas. To tell the replicas apart, use the replica id."
        )


def warn_dataset_for_each(name: str, size: int, where: str) -> str:
    """The warning that a dataset is given to `run`, so that each replica goes through all of it."""
    return warning(
        "warn_dataset_for_each",
        f"{name} of strategy.run{at(where)} is a tf.data.Dataset: each of {size} replicas goes through all of it. "
        f"Distribute it, and run one batch at a time:\n{LOOP}",
    )
