"""One run of replica 0 alone in a graph, whose operations are copied for all replicas.

The run has the sync points of any run. At each, the operations up to it are copied; the arguments of all replicas are
regrouped, and the merge function runs once, as if each replica had brought its own. What it returns for each replica
becomes a placeholder, and replica 0 goes on.

Until something is copied, the graph of the run stays unchanged. So if replica 0 fails before that, each replica is
traced (`CannotCopy`), and an error of the user's looks as it does without `trace_once`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.diagnostics.tracebacks import as_raised
from replica_engine.engine import Replica, Run
from replica_engine.errors import ReplicaTimeoutError, TraceOnceError, note_merge_failure
from replica_engine.errors.base import in_words
from replica_engine.threads.agreement import assertions
from replica_engine.threads.context import MergeRequest
from replica_engine.threads.inherited_state import InheritedState
from replica_engine.threads.joint.attempt import Attempts, Decisions
from replica_engine.threads.once.comparison import Comparison
from replica_engine.threads.once.context import TemplateContext
from replica_engine.threads.once.template import Template
from replica_engine.threads.once.watch import Watch
from replica_engine.threads.variables import SharedVariables
from replica_engine.values.regroup import parts, regroup

NOWHERE = "nowhere"
"""The device of the replica that is traced for all: no tensor is on it."""


class CannotCopy(Exception):
    """Each replica must be traced; nothing was copied yet."""


MakeRun = Callable[
    [Sequence[Callable[[Replica], Any]], Callable[[list[Any]], Sequence[Any]]], contextlib.AbstractContextManager[Run]
]


class Job(NamedTuple):
    """What a run needs of its caller.

    Attributes:
        strategy: the strategy.
        fn: the function of the replicas.
        of_replicas: for each replica, its positional and its keyword arguments.
        described: the function, for messages.
        run: makes a run of the bodies of the first replicas with a function that merges.
        checked: whether replica 1 is traced as well, and compared.
    """

    strategy: tf.distribute.Strategy
    fn: Callable[..., Any]
    of_replicas: Sequence[tuple[Any, Any]]
    described: str
    run: MakeRun
    checked: bool


def run_once(job: Job) -> Any:
    """Runs the function on replica 0 and copies what it traces; with `job.checked` on replica 1 as well, to compare.

    Returns:
        The results of all replicas, regrouped.

    Raises:
        CannotCopy: each replica must be traced.
        TraceOnceError: something cannot be copied, and it is too late to trace each replica; or the replicas differ.
    """
    templates = [Template(job.strategy, index) for index in range(2 if job.checked else 1)]
    try:
        return _OneRun(job, templates).results()
    except ReplicaTimeoutError:
        raise
    except Exception as error:
        refused = next(filter(None, (template.refused for template in templates)), None)
        found = refused or (error if isinstance(error, TraceOnceError) else None)
        if not templates[0].copied and (found is None or found.reason):
            if any(template.has_made_variables for template in templates):  # their initial values are in its graph only
                if found is None:
                    raise
                raise TraceOnceError.with_variable(found.reason) from error
            raise CannotCopy(found.reason if found else in_words(error).partition("\n")[0]) from error
        if found is not None and found is not error:  # Keras replaced it by an error with more text
            raise found from (None if isinstance(error, TraceOnceError) else error)
        raise


class _OneRun:
    """One run of the first replicas.

    Args:
        job: what to run.
        templates: what each of them traces; replica 0's is copied.
    """

    def __init__(self, job: Job, templates: Sequence[Template]):
        self._job, self._templates = job, templates
        self._scope = tf.get_current_name_scope()
        self._comparison = Comparison(*templates) if job.checked else None
        if self._comparison is not None:
            templates[1].original = self._comparison.original
        self._variables = SharedVariables(False)
        self._decisions = Decisions(set())
        self._arguments = [template.joined(list(job.of_replicas), "the arguments") for template in templates]
        self._states = []
        for template in templates:
            with template.graph.as_default():
                self._states.append(InheritedState.capture())

    def results(self) -> Any:
        """Runs the replicas, and returns the results of all, regrouped."""

        def in_own_copy_of_context(replica: Replica) -> Any:
            return self._states[replica.index].context.copy().run(self._body, replica, run.replicas[0])

        def merge(requests: list[MergeRequest]) -> list[Any]:
            return self._merge(requests, run)

        with self._job.run([in_own_copy_of_context] * len(self._templates), merge) as run:
            found = run()
            self._copy(found, "the results", self._job.described)
            first = self._templates[0]
            own = [first.of_replica(replica, found[0]) for replica in range(first.size)]
            return regroup(own, f"The results of {self._job.described}")

    def _body(self, replica: Replica, first: Replica) -> Any:
        """Runs the function in the state of the caller, in the context of a template."""
        index, strategy = replica.index, self._job.strategy
        template, state = self._templates[index], self._states[index]
        context = TemplateContext(strategy, distribute.replica_id_in_sync_group(strategy, index), template)
        creator = self._variables.creator(replica, first)
        if index == 0:
            creator = template.creator(creator)
        context.attach(replica, state, NOWHERE, Attempts(self._decisions, index == 0), creator, {}, template.draws)
        # The name scope and so on are replica 0's, so that ops have the same names.
        try:
            with (
                state.entered(0, context, strategy.extended.worker_devices[index], replica.thread, creator),
                template.anywhere(),
                Watch(template).watched(),
            ):
                args, kwargs = self._arguments[index]
                try:
                    return self._job.fn(*args, **kwargs)
                except Exception as error:
                    failure = as_raised(error)
                raise failure
        finally:
            context.detach()

    def _copy(self, brought: Sequence[Any], what: str, where: str) -> None:
        """Copies what replica 0 has traced up to here, after a comparison of what the replicas bring."""
        self._templates[0].check_values(brought[0], what, where)
        segments = [template.take() for template in self._templates]
        if self._comparison is not None:
            (first, second), (one, other) = segments, brought
            self._comparison.segments(first, second, where)
            self._comparison.values(one, other, what, where)
        self._templates[0].copy(segments[0])
        for template in self._templates[1:]:
            template.draws.copied()

    def _merge(self, requests: Sequence[MergeRequest], run: Run) -> list[Any]:
        """Merges for all replicas what replica 0 has brought, as `call._merge` does with a request of each replica."""
        first, template, point = requests[0], self._templates[0], run.sync_point()[0]
        if first.eager:
            raise template.refusal("a merge call in tf.init_scope", point.where)
        brought = [(request.args, request.kwargs) for request in requests]
        self._copy(brought, f"the arguments of {point.name}", point.where)
        own = [_of_replica(template, replica, first, self._scope) for replica in range(template.size)]
        what = f"The arguments of merge_call ({point})"
        args = regroup([request.args for request in own], what, "args")
        kwargs = regroup([request.kwargs for request in own], what, "kwargs") if first.kwargs else {}
        with own[0].continued(own):
            try:
                checks = assertions(point, [run.replicas[0]] * template.size, [request.args for request in own])
                with tf.control_dependencies(checks):
                    merged = first.merge_fn(self._job.strategy, *args, **kwargs)
                template.check_brought()
                shares = parts(merged, template.size, f"the result of {point.name}")
                results = [each.joined(shares, f"the result of {point.name}") for each in self._templates]
            except BaseException as error:
                failure = as_raised(error)
            else:
                for each in self._templates:
                    each.goes_on()
                return results
        note_merge_failure(failure, point.name, point.where)
        raise failure


def _of_replica(template: Template, replica: int, first: MergeRequest, scope: str) -> MergeRequest:
    """The request that a replica would have brought."""
    return first._replace(
        args=template.of_replica(replica, first.args),
        kwargs=template.of_replica(replica, first.kwargs),
        name_scope=scope,
        control_inputs=[template.operation(replica, op) for op in first.control_inputs],
    )
