"""Collectives that only some replicas may reach: in a branch or a loop whose condition differs from replica to replica.

The replicas that reach such a collective wait forever for those that do not. So the conditions around each collective
are looked at while the body is traced. A condition that is equal on all replicas is never reported. One that is known
to differ is an error. One that may differ is a warning if it depends on the replica id, or on values that each replica
has of its own. Only results of the host are left out, since nothing is known about them.

A collective whose result nothing needs is not in the program, so nobody waits in it. It is an error nevertheless where
it is known that only some replicas reach it, as on replica threads: whether a result is used must not change what is
right. No warning is given of one that perhaps not all replicas reach.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs
from replica_engine.diagnostics.op_lines import merge_line, user_line
from replica_engine.errors import CollectiveError
from replica_engine.errors.base import at
from replica_engine.xla.analysis.differences import CollectiveOp, Differences, OpsOf, Reason
from replica_engine.xla.analysis.known_values import Decisions


class Apart(NamedTuple):
    """A collective that perhaps not all replicas reach.

    Attributes:
        name: "all_reduce", "all_gather", ..., or "merge_call" if a merge function of the user's makes it.
        where: its line.
        is_loop: whether the condition is that of a loop, rather than of a branch.
        condition: the line of the condition.
        by_replica_id: whether the condition depends on the replica id, rather than on a replica's own values only.
    """

    name: str
    where: str
    is_loop: bool
    condition: str
    by_replica_id: bool


def diverging(graph: Any, of_input: Callable[[int], Reason]) -> str:
    """The line of a branch or loop whose condition may differ between replicas, for the arguments of `check`."""
    causes = Differences(graph, of_input).conditions
    for op in subgraphs.everywhere(graph):
        if causes.get(id(op), Reason.NONE) & (Reason.REPLICA_ID | Reason.OWN_DATA):
            return user_line(op) or "an unknown line"
    return ""


def check(graph: Any, size: int, of_input: Callable[[int], Reason], names: dict[str, str]) -> list[Apart]:
    """Looks at the conditions around the collectives of a body.

    Args:
        graph: the body.
        size: the number of replicas.
        of_input: as for `Differences`.
        names: by the line of the user's program, what the user called there.

    Returns:
        The collectives that may be reached by some replicas only, one for each condition.

    Raises:
        CollectiveError: not all replicas reach a collective.
    """
    inner = _Collectives(host_ops.made_ops)
    entered = inner.everywhere(graph) if size > 1 else []
    if not entered:
        return []
    causes = Differences(graph, of_input, host_ops.made_ops).conditions
    suspects = [op for op in entered if causes.get(id(op))]
    if not suspects:
        return []
    needed = _Collectives(host_ops.needed_ops)
    in_program = {id(op) for op in needed.everywhere(graph)}
    decisions = Decisions(graph, suspects, size, host_ops.made_ops).found
    found: list[Apart] = []
    seen: list[tf.Tensor] = []
    for op in suspects:
        unknown = False
        for taken in decisions[id(op)]:
            unknown = unknown or None in taken
            _check_known(op, taken, inner, names)
        condition = op.inputs[0]  # that of a branch also belongs to the gradient of the branch
        is_seen = op.type not in subgraphs.LOOPS and any(condition is each for each in seen)
        may_differ = unknown and causes[id(op)] & (Reason.REPLICA_ID | Reason.OWN_DATA)
        if may_differ and id(op) in in_program and not is_seen:
            seen.append(condition)
            _, first, collective = needed.of(op)[0]
            name, where = _called(first, collective, names)
            is_loop, by_id = op.type in subgraphs.LOOPS, bool(causes[id(op)] & Reason.REPLICA_ID)
            found.append(Apart(name, where, is_loop, user_line(op), by_id))
    return list(dict.fromkeys(found))


def _check_known(op: tf.Operation, taken: Sequence[int | None], inner: _Collectives, names: dict[str, str]) -> None:
    """Raises an error if some replicas of a group reach a collective of a branch or loop, and others do not."""
    is_loop = op.type in subgraphs.LOOPS
    for number, collective_op, collective in inner.of(op):
        for group in collective.groups or [list(range(len(taken)))]:
            decided = [each for each in (taken[replica] for replica in group) if each is not None]
            counts = decided if is_loop else [int(each == number) for each in decided]
            if len(counts) == len(group) and len(set(counts)) > 1:
                name, where = _called(collective_op, collective, names)
                raise _not_by_all(name, where, user_line(op), is_loop, dict(zip(group, counts, strict=True)))


def _called(op: tf.Operation, collective: CollectiveOp, names: dict[str, str]) -> tuple[str, str]:
    """What the user called that made the op of a collective, and the line of it."""
    if merged := merge_line(op):
        return "merge_call", merged
    where = user_line(op)
    return names.get(where, collective.name), where


_TIMES = {0: "never", 1: "once", 2: "twice"}
_SAME_BRANCH = "Move it out of the branch, and choose its result there: tf.where(replica_id == 0, total, x)."
_SAME_LOOP = "Let all replicas run as many iterations, and ignore the results of some: tf.where(step < n, total, x)."


def _not_by_all(name: str, where: str, condition: str, is_loop: bool, times: dict[int, int]) -> CollectiveError:
    """The error for a collective that each replica reaches so many times."""
    by_times: dict[int, list[int]] = {}
    for replica, count in times.items():
        by_times.setdefault(count, []).append(replica)
    rows = " and ".join(
        f"{_TIMES.get(count, f'{count} times')} by {_replicas(replicas)}"
        for count, replicas in sorted(by_times.items(), reverse=True)[:4]
    )
    kind, instead = ("loop", _SAME_LOOP) if is_loop else ("branch", _SAME_BRANCH)
    return CollectiveError(
        f"{name}{at(where)} is in a {kind} whose condition{at(condition)} depends on the replica id: it is reached "
        f"{rows}. Replicas that reach it would wait forever for the others. {instead}"
    )


def _replicas(numbers: Sequence[int]) -> str:
    """Replicas in words: "replica 0", "replicas 1, 2 and 5 more"."""
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    rest = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"replicas {', '.join(map(str, numbers[:8]))}{rest}"


class _Collectives:
    """The collectives in the functions of a body, each looked up once.

    Args:
        ops_of: the ops of a graph to look at.
    """

    def __init__(self, ops_of: OpsOf):
        self._ops_of = functools.cache(ops_of)
        self.of = functools.cache(self._of)

    def _of(self, op: tf.Operation) -> list[tuple[int, tf.Operation, CollectiveOp]]:
        """The collectives in the functions of a branch, loop or call, with the number of the function."""
        found = []
        for number, graph in enumerate(subgraphs.functions_of(op)):
            for inner in self._ops_of(graph):
                if (collective := CollectiveOp.of(inner)) is not None:
                    found.append((number, inner, collective))
                else:
                    found += [(number, *each[1:]) for each in self.of(inner)]
        return found

    def everywhere(self, graph: Any) -> list[tf.Operation]:
        """All branches and loops of a body with collectives in them, the outer ones before the inner ones."""
        found: dict[int, tf.Operation] = {}
        pending = [graph]
        for each in pending:
            for op in filter(self.of, self._ops_of(each)):
                if op.type not in subgraphs.CALLS:
                    found[id(op)] = op
                pending += subgraphs.functions_of(op)
        return list(found.values())
