"""What users call: the strategy half of all strategies, which checks arguments and passes them to the backend.

`OnBackend` says errors in the user's terms, and passes on to the extended half (`extended`) and to its backend
(`replica_engine.backend`): `threads.replica_run.ThreadBackend` or `strategies.compiled_backend.CompiledBackend`.
`OnReplicaThreads` adds what strategies on threads have. `EagerUpdates` makes their eager updates of variables.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import tensorflow as tf

from replica_engine.backend import Arguments, Backend, Keywords
from replica_engine.checkpoints import file_owners, save
from replica_engine.diagnostics import misuse, tracebacks, user_frames
from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.engine import current_replica
from replica_engine.errors import NoMethodError, ScopeError, run_errors
from replica_engine.process.interrupts import held_off_once
from replica_engine.strategies import argument_checks, keras_scopes
from replica_engine.threads.replica_run import short_name
from replica_engine.upstream import checkpoint_hooks, distribute, eager, thread_state
from replica_engine.upstream.graphs import autograph
from replica_engine.upstream.keras import keras_hooks, keras_training
from replica_engine.values.structure import as_axis

_logger = logging.getLogger("replica_engine")


class _OfThread(threading.local):
    written: list[Any] | None = None  # the variables that the update on this thread has written


_thread = _OfThread()


def _note(variable: Any) -> None:
    """Called before a variable is written."""
    if _thread.written is not None:
        _thread.written.append(variable)


class EagerUpdates:
    """The eager updates of one strategy: all components or none, whatever exception comes in between.

    `extended.update` calls a function on one component after the other. An exception may break that off: one of the
    function itself, or one that another thread raises in this one (`PyThreadState_SetAsyncExc`). Then the components
    are made equal. If the first one is finished, the others get its value, and the update is made; otherwise the first
    one gets the value that the second one still has, and the update is undone. The same holds for other variables that
    the function has assigned on its way, such as the slots of an optimizer.

    Only variables of which all replicas have one value are made equal, and only those that this update has written. If
    the arguments of the update differ by replica, all stays as the exception left it: the components need not be equal.

    If other threads update variables of the strategy meanwhile, the last of them makes the components equal. Until then
    each update reaches all components, so that it does not matter which value is copied first.
    """

    def __init__(self) -> None:
        self._running: dict[int, list[Any]] = {}
        self._broken: list[tuple[list[Any], int]] = []  # variables, and the component whose value the others get
        self._repairing = threading.RLock()

    def noted(self, variable: Any) -> Any:
        """A new variable of the strategy, of which `make` knows when it is written."""
        return distribute.note_writes(variable, _note)

    def make(self, variable: Any, fn: Callable[..., Any], args: Any, kwargs: Any, loop: Callable[..., Any]) -> Any:
        """Updates a variable.

        Args:
            variable: the distributed variable.
            fn: the function that updates a component.
            args: its other arguments, of all components.
            kwargs: its keyword arguments.
            loop: calls a function on all components.
        """
        finished: list[None] = []

        def noted(component: Any, *args: Any, **kwargs: Any) -> Any:
            result = fn(component, *args, **kwargs)
            finished.append(None)
            return result

        held, before, outer = held_off_once(), thread_state.read_update_state(), _thread.written
        written = [variable]
        # No `with`: an exception that another thread raises in this one may come inside an `__exit__`.
        try:
            held.__enter__()
            self._running[id(finished)] = finished
            if self._broken:
                with self._repairing:  # waits until another thread has made components equal
                    pass
            _thread.written = written
            result = loop(noted)
            self._end(finished, outer)
            held.__exit__(None, None, None)
            return result
        except BaseException as error:
            # The exception may have kept TensorFlow's own `__exit__` from this.
            thread_state.restore_update_state(before)
            try:
                if len(finished) < len(variable._values) and not eager.differ_by_replica((args, kwargs)):
                    self._broken.append((written, 0 if finished else 1))
                self._end(finished, outer)
            finally:
                held.__exit__(type(error), error, error.__traceback__)
            raise

    def _end(self, finished: list[None], outer: list[Any] | None) -> None:
        """Ends an update. May be called again if an exception comes in it."""
        _thread.written = outer
        self._running.pop(id(finished), None)
        if not self._broken:
            return
        with self._repairing:
            # Not while another thread updates a variable: it may yet write the components.
            while self._broken and not self._running:
                written, source = self._broken[0]
                try:
                    for variable in written:
                        if eager.is_mirrored(variable):
                            eager.make_equal(variable, source)
                except Exception as error:  # it fails once, and not in each later update
                    _logger.warning("The copies of a variable stay unequal after an update failed: %s", error)
                # Last: if an interrupt comes before this line, the next update repairs these variables.
                self._broken.pop(0)


R = TypeVar("R")


class OnBackend(tf.distribute.Strategy):
    """The strategy half for an extended half that has a `Backend`. Put it before a class of `tf.distribute`."""

    _runs_again: type | None = None
    """The extended class whose backend may know a run; a class of the user's may run functions in another way."""

    _installed_with: tuple[bool, bool] | None = None
    """Which of Keras' modules were imported when the hooks were last installed."""

    @overload
    def run(
        self, fn: Callable[..., None], args: Arguments = ..., kwargs: Keywords = ..., options: Any = ...
    ) -> None: ...

    @overload
    def run(
        self, fn: Callable[..., R], args: Arguments = ..., kwargs: Keywords = ..., options: Any = ...
    ) -> R | Any: ...

    @autograph.artifact
    def run(
        self,
        fn: Callable[..., R],
        args: Arguments = (),
        kwargs: Keywords = None,
        options: Any = None,
        **others: NoReturn,
    ) -> R | Any | None:
        """Runs `fn` on each replica with the given arguments, like `tf.distribute.Strategy.run`.

        Args:
            fn: the function, called in replica context. Where replicas run on threads, a `tf.function` is lifted: it
                goes around the whole run. `TPUStrategy` compiles it as a part of the body.
            args: its positional arguments; each replica gets its own value of a `tf.distribute.DistributedValues`.
            kwargs: its keyword arguments, distributed in the same way.
            options: `tf.distribute.RunOptions`; `TPUStrategy` ignores them.
            others: none; a misspelt name is an error that says the nearest one.

        Raises:
            TypeError: there is no such keyword argument.
            ReplicaValueError: `fn`, `args` or `kwargs` is of the wrong kind.
            MergeCallMismatchError: replicas on threads did not meet at the same merge calls.
            LoweringError: XLA cannot compile an op; the message names the op and your line.
            ReplicaMismatchError: the replicas have tensors of different dtypes or shapes.
            ReplicaTimeoutError: a replica, a merge function or a launch took longer than `timeout`.
            Exception: any exception of `fn` or of a merge function; on threads, with notes that name the replica.
        """
        for name in others:
            raise argument_checks.misspelt("strategy.run", name, ["fn", "args", "kwargs", "options"])
        try:
            extended = self.extended
            backend: Backend = extended.backend
            compiles = backend.compiles
            if type(extended) is self._runs_again and (kwargs is None or (type(kwargs) is dict and not kwargs)):
                results = backend.run_again(fn, args)
                if results is not None:
                    return results[0]
            argument_checks.check_call(fn, args, kwargs)
            if not compiles and current_replica() is not None:
                raise ScopeError.in_replica("run", user_frames.here())
            misuse.check_inputs(self, args, kwargs, len(extended.worker_devices), compiles)
            if compiles:
                return extended.call_for_each_replica(fn, args, kwargs or {})
            if not autograph.is_out_of_play():
                return super().run(fn, args, kwargs, options)
            before = distribute.scopes()
            try:
                with self._scope_of_run():  # once here, instead of again in each call on the way
                    return extended._call_for_each_replica(fn, args, {} if kwargs is None else kwargs)
            except BaseException:
                # An interrupt may have kept a scope entered, and the program's next calls would be in it.
                distribute.set_scopes(before)
                raise
        except Exception as error:
            argument_checks.note_arguments(error, fn, args, kwargs)
            raise tracebacks.shortened(misuse.translate_error(error))
        except KeyboardInterrupt as interrupt:
            raise tracebacks.shortened(tracebacks.as_raised(interrupt))

    if not TYPE_CHECKING:  # a type checker would take each name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that is not found: says what to write for one that another object has."""
            return run_errors.elsewhere(self, "strategy", name)

    def scope(self) -> Any:
        """Like the scope of every strategy. Keras models of several workers leave their files to the chief.

        Raises:
            ScopeError: a replica calls it.
            DistributionError: `keras.distribution.set_distribution` has set a distribution.
        """
        misuse.check_outside_replicas("scope")
        keras_scopes.check_distribution(self)
        self._install_hooks()
        return super().scope()

    def _scope_of_run(self) -> contextlib.AbstractContextManager[object]:
        """The scope, for an eager run outside replicas; none if it is entered already.

        A run makes no model, so it looks for the hooks only once, and again when Keras has been imported since.
        """
        if distribute.is_in_scope(self):
            return contextlib.nullcontext()
        if getattr(self.scope, "__func__", None) is not OnBackend.scope:  # a user's own does more
            return self.scope()
        keras_scopes.check_distribution(self)
        if self._installed_with != keras_scopes.imported():
            self._install_hooks()
        return super().scope()

    def _install_hooks(self) -> None:
        """Installs what models, checkpoints and files of this strategy need."""
        now = keras_scopes.imported()
        keras_scopes.install_keras_hooks()
        save.install()
        keras_hooks.combine_logs(OnBackend)
        self.leave_files_to_chief()
        self._installed_with = now  # last: what Ctrl-C breaks off is done again

    def leave_files_to_chief(self, *models: Any) -> None:
        """Keeps all workers but the chief from writing files of Keras models that are trained on this strategy.

        It is called for the models of `replicate_model`; models that were built in the scope do not need it.
        """
        together = self.extended.backend.saving
        if together is not None:
            keras_training.let_the_chief_write(file_owners.find_team)
            checkpoint_hooks.let_the_chief_write(file_owners.find_team)
            file_owners.belong(together, *models)

    def combined(self, own: Callable[..., Any], values: Any, reduction: str) -> Any:
        """What Keras takes for the values of all replicas; `own` is Keras' function, for one worker.

        Keras logs the values of replica 0 under a `tf.distribute.TPUStrategy`. Over workers it calls
        `reduce("MEAN", value, axis=0)`, which fails for scalars, and logs are scalars.
        """
        if reduction == "auto":
            reduction = "mean"
        if self.extended.backend.saving is None or reduction not in ("mean", "sum"):
            return own(values, self, reduction)
        return self.reduce(reduction.upper(), values, axis=None)

    @autograph.artifact
    @argument_checks.names_keywords("strategy.reduce")
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces values over replicas, like `tf.distribute.Strategy.reduce`; accepts Python numbers as tensors.

        Raises:
            ReplicaValueError: `value` cannot be reduced, `reduce_op` is not a reduction, or `axis` is not an axis.
            ScopeError: a replica calls it.
        """
        misuse.check_outside_replicas("reduce")
        reduce_op, value, axis = argument_checks.checked_reduction(reduce_op, value, axis)
        try:
            return super().reduce(reduce_op, value, axis)
        except argument_checks.NOT_REDUCED as error:
            raise argument_checks.not_reduced(error, value, axis)

    @autograph.artifact
    @argument_checks.names_keywords("strategy.gather")
    def gather(self, value: Any, axis: int) -> Any:
        """Joins the rows of all replicas, like `tf.distribute.Strategy.gather`.

        Raises:
            ReplicaValueError: `axis` is not an int.
            CollectiveError: the values have no such axis.
        """
        axis = as_axis("strategy.gather", axis)
        try:
            return super().gather(value, axis)
        except argument_checks.NOT_REDUCED as error:
            raise argument_checks.not_gathered(error, value, axis)

    def sync_points(self) -> list[SyncPointRecord]:
        """The last sync points of each replica: their kind, source line, tensors and times.

        A compiled program runs where the host cannot observe it. So under `TPUStrategy` the times of a record are those
        of its launch, and each collective appears once, even if it is in a loop. See `replica_engine.sync_points`.
        """
        return self.extended.sync_points()


class OnReplicaThreads(OnBackend):
    """The strategy half for an extended half with `ReplicaThreads`. Put it before a class of `tf.distribute`."""

    def __repr__(self) -> str:
        return argument_checks.described(self, [*map(short_name, self.extended.worker_devices)])

    @property
    def run_steps(self) -> NoReturn:
        """Only `TPUStrategy` has it. As a property and not a method, so that `hasattr` is False."""
        raise NoMethodError(
            f"{type(self).__name__} has no run_steps: a loop on the devices belongs to TPUStrategy, which compiles "
            "it. Here, write the loop in a tf.function, around strategy.run:\n"
            "    @tf.function\n"
            "    def train(iterator):\n"
            "        for _ in tf.range(100):\n"
            "            strategy.run(step, args=(next(iterator),))"
        )

    @property
    def plan(self) -> NoReturn:
        """Only `TPUStrategy` has it, as a property for the same reason."""
        raise NoMethodError(
            f"{type(self).__name__} has no plan: a plan is of a compiled step. Ask the strategy that compiles it, "
            "without running it: replica_engine.TPUStrategy(num_cores=n).plan(step, args=...)."
        )
