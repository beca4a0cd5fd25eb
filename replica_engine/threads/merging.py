"""The merge functions of a run: each runs once for all replicas, on the thread that called `run`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine._tf.graphs import marks
from replica_engine.diagnostics.suspicions import check_lines
from replica_engine.diagnostics.tracebacks import as_raised
from replica_engine.engine import ErrandsFailed, Run, SyncPoint
from replica_engine.errors.base import add_note
from replica_engine.threads.agreement import assertions, check_alike, check_variables_and_gradients
from replica_engine.threads.context import MergeRequest
from replica_engine.threads.joint.operator import JointOperator, Part
from replica_engine.threads.marks import StepMarks
from replica_engine.values.regroup import parts, regroup

Around = Callable[[SyncPoint], contextlib.AbstractContextManager[None]]
"""Takes the sync point where the replicas have met; what it returns is entered around the merge function."""


class Merge:
    """Merges the requests of all replicas of one run.

    The merge function continues where replica 0 paused: in its name scope and variable scope, and in eager mode if the
    merge call was made under `tf.init_scope`. Ops of the merge function depend on the control inputs of all replicas.

    Args:
        strategy: the strategy.
        step_marks: the marks of the step that is traced; None if it gets none.
        around: what is entered around merge functions; None for nothing.

    Attributes:
        run: the run, which needs this object before it is made.
    """

    run: Run

    def __init__(self, strategy: tf.distribute.Strategy, step_marks: StepMarks | None, around: Around | None):
        self._strategy, self._step_marks, self._around = strategy, step_marks, around

    def __call__(self, requests: list[MergeRequest]) -> list[Any]:
        """Runs the merge function of the requests; returns what it has for each replica."""
        first, points, replicas = requests[0], self.run.sync_point(), self.run.replicas
        point = points[0]
        if isinstance(first.args, Part):
            return _build(requests, self.run)
        check_alike(points, replicas)
        check_lines(self._strategy, points)
        what = f"The arguments of merge_call ({point})"
        args = regroup([request.args for request in requests], what, "args")
        of_kwargs = [request.kwargs for request in requests]
        kwargs = regroup(of_kwargs, what, "kwargs") if any(of_kwargs) else {}
        step_marks, around, meeting = self._step_marks, self._around, None
        if step_marks is not None and not first.eager and marks.can_mark(thread_state.default_graph()):
            meeting = step_marks.met(point, requests)
        with first.continued(requests):
            try:
                checks = [] if first.eager else assertions(point, replicas, [request.args for request in requests])
                with (
                    tf.control_dependencies(checks) if checks else contextlib.nullcontext(),
                    around(point) if around else contextlib.nullcontext(),
                ):
                    merged = first.merge_fn(self._strategy, *args, **kwargs)
                results = parts(merged, len(requests), f"the result of {point.name}")
                if meeting is not None and step_marks is not None:
                    meeting.left(results, closes=thread_state.default_graph() is not step_marks.graph)
                return results
            except BaseException as error:
                failure = as_raised(error)
        if isinstance(failure, Exception):
            check_variables_and_gradients(first.merge_fn, point, (args, kwargs), failure)
        place = f"raised in merge function {point.name}, in cross-replica context; the replicas met at {point.where}"
        add_note(failure, place)
        raise failure


def _build(requests: list[MergeRequest], run: Run) -> list[Any]:
    """Builds an operator that all replicas enter together, where replica 0 stands."""
    first = requests[0]
    with first.continued(requests):
        operator = JointOperator(run, [request.args for request in requests])
        try:
            return first.merge_fn(operator)
        except ErrandsFailed as failed:
            return list(failed.outcomes)
        except Exception as error:
            failure = as_raised(error)
            for replica in run.replicas:
                if replica.error is error:  # so that its note goes to the exception that leaves the run
                    replica.error = failure
        finally:
            operator.captures.unwatch()
    raise failure
