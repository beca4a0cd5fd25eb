"""What Keras calls to train, test and predict: a method of a model, run on all replicas, for the next batches.

On threads one graph takes batches of any size, and each replica takes its shard in the graph. A compiled program has
shapes, so there is one for each size, and the host divides the batches. `unequal_shards` has the program for a batch
that does not divide by the replicas. Batches that cannot be divided, or of a step whose parts would not add up to the
numbers of one device, are computed whole on every replica.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine import errors
from replica_engine.backend import Backend
from replica_engine.diagnostics import misuse, user_frames
from replica_engine.errors import base, value_errors
from replica_engine.keras import late_logs, lent_variables, shard_hooks, shard_step
from replica_engine.keras.batches import Batch, WholeBatches
from replica_engine.keras.shard import NotASum, Shard
from replica_engine.strategies.multi_step import MultiStepContext
from replica_engine.upstream.graphs import mark_ops
from replica_engine.upstream.keras import keras_models, keras_training, metric_updates
from replica_engine.values import samples, variable_numbers
from replica_engine.values.regroup import regroup, select
from replica_engine.watch import timeline, watchdog

MANY_SIZES = 8
"""A warning is logged when programs for this many batch sizes of one step exist."""

_WASTE = 4
"""A prediction may use an existing program whose batch size is up to this many times as large."""

_MOST_COMPILED = 16
"""The most steps of a compiled execution whose batches are read before the first of them runs."""

PROGRESS_EVERY = 10.0
"""Seconds between log lines that report an unfinished compilation."""

_SHARDS, _DEALT, _UNEQUAL, _WHOLE = "shards", "shards as they were dealt", "unequal shards", "whole batch"
"""What replicas compute of a batch. For each, `StepFunction._run` takes:

                   on threads, in one graph for all sizes          compiled, in a program for each size
    _SHARDS        the batch, which the graph divides              its shares, divided on the host
      in a loop    batches, and their number (`shard_step.filled`) a list of `Batch`, divided ahead of their steps
    _DEALT         the parts that were dealt, and the total        (never: dealt parts are its shares)
    _UNEQUAL       (never: a graph takes shards of any size)       its shares, and the total
    _WHOLE         all samples, for every replica                  all samples, for every replica
"""

_NOTHING = contextlib.nullcontext()
_logger = logging.getLogger("replica_engine")
_as_keras_does = tf.autograph.experimental.do_not_convert


class StepFunction:
    """What Keras calls as `train_function`, `test_function` or `predict_function`.

    Args:
        model: the model.
        backend: what runs the replicas.
        step: the step on one replica.
        batches: takes the batches of an iterator, and divides them.
        ready: called before each step with a batch of it, or with None for a prediction. It calls `forget` if the model
            has changed, and the step runs inside the context that it returns.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        step: shard_step.ShardedStep,
        batches: WholeBatches,
        ready: Callable[[object], contextlib.AbstractContextManager[object]],
    ):
        self.batches = batches
        self._model, self._step, self._ready = model, step, ready
        self._backend: Any = backend  # one that compiles has more methods
        self._compiles = backend.compiles
        self._size = backend.strategy.num_replicas_in_sync
        group = getattr(backend, "device_group", None)  # of one that compiles
        self._is_late: bool = group is not None and group.has_queue and step.name != "predict_step"
        if self._is_late:
            late_logs.expect(model)
        self._calling = timeline.Track(type(backend.strategy).__name__, "Keras", order=-1)
        self._has_trained = False  # on a batch that all replicas share equally

    def forget(self) -> None:
        """Forgets what was traced and found out, as the model has changed; called before the first step too."""
        self._is_eager = bool(self._model.run_eagerly) and not self._compiles
        extended = self._backend.strategy.extended
        options = getattr(extended, "replica_options", None)
        # A loop is watched, and its steps have limits, where it has marks.
        may_mark = mark_ops.may_ask() and (options is None or options.marks is not False)
        self._has_marks = may_mark and all("CPU" in device for device in extended.worker_devices)
        self._functions: dict[tuple[str, int, bool], Any] = {}
        self._numbers: set[int] | None = None
        # What has run: the method, the batch size that it is compiled for, and what batches are like but for that.
        self._known: set[tuple[str, int, str, object]] = set()
        self._is_whole: bool | None = None  # whether no batch is divided; None before a step has asked
        self._are_joined = True  # whether outputs for several batches can be made in one graph, as far as is known
        self._gives: dict[str, bool] = {}  # whether outputs as long as a shard have a row per sample, by kind of batch
        if self._compiles:
            # Replicas take different branches in a step of unequal shares. In a branch, devices of several replicas
            # must not wait for each other, but they do where XLA divides a replica over devices.
            self._has_branches = self._backend.device_group.mesh is None
            if self._backend.distribution is not None:
                self._backend.distribution.check_layouts()
            self._programs = self._backend.own_programs()  # they hold the model and are freed with it

    def __call__(self, iterator: Iterator[object]) -> dict[str, tf.Tensor]:
        """Runs `train_step` or `test_step` on the next `steps_per_execution` batches; returns the logs of the last.

        Devices with a queue may still run the steps. `train_on_batch` and `test_on_batch` have a generator for an
        iterator, and read the logs at once.
        """
        left = steps = int(self._model.steps_per_execution)
        most = self._most
        logs: Any = None
        while left > 0:
            try:
                batches, failed = self.batches.next(iterator, min(most, left))
            except (StopIteration, tf.errors.OutOfRangeError):
                if left == steps:
                    raise
                break
            left -= most
            if not batches and logs is not None and failed is None:
                continue
            first = batches[0].sample if batches else None
            span = timeline.span(self._calling, self._step.name, "launch", {"batches": len(batches)})
            with span, self._ready(first), self._numbered(), _inputs_named(first) if self._compiles else _NOTHING:
                for how, data, size, is_loop, group in self._launches(batches):
                    try:
                        may_end = self._is_eager and how != _WHOLE and not self._step.is_plain
                        with self._undone_if_given_up(how) if may_end else _NOTHING:
                            logs = self._run(how, data, size, is_loop)
                        self._has_trained |= not self._is_rest(group[0])
                        continue
                    except NotASum as found:
                        self._take_whole(found)
                    except errors.CollectiveError:
                        if how != _UNEQUAL:
                            raise
                        self._has_branches = False
                    for batch in group:
                        logs = self._run(_WHOLE, self.batches.joined(batch), batch.total)
                if not batches:
                    logs = self._model.get_metrics_result()
            if failed is not None:
                raise failed
        if self._is_late and not isinstance(iterator, types.GeneratorType):
            return late_logs.late(logs)
        return select(0, logs) if self._compiles else logs

    def _take_whole(self, found: NotASum) -> None:
        """Divides no batch of the model again, and warns. A metric is excepted, since the hooks know it."""
        if found.why:
            self._is_whole = True
            name = self._step.name
            text = value_errors.warn_whole_steps(name, self._model.name, found.why, found.where, found.instead)
            misuse.warn_once(self._model, (name, found.why, found.where), text)

    def predict(self, batches: Sequence[object]) -> object:
        """The outputs for some batches as one batch, in the order of the samples."""
        outputs: list[object] = []
        wholes = itertools.chain.from_iterable(map(self.batches.wholes, batches))
        with self._ready(None), self._numbered():
            for loops, same in itertools.groupby(wholes, self._loops):
                whole = [*same]
                for start in range(0, len(whole), shard_step.MOST):
                    some = whole[start : start + shard_step.MOST]
                    together = self._outputs_together(some) if loops else None
                    outputs += [together] if together is not None else map(self._outputs_of_any, some)
        return outputs[0] if len(outputs) == 1 else samples.join(outputs)

    def _outputs_of_any(self, data: Any) -> object:
        """The outputs for a batch, which may be empty."""
        total = samples.count(data)
        with _inputs_named(data) if self._compiles else _NOTHING:
            made = self._outputs(data if total else samples.blank(data), total or 1)
        return made if total else samples.take(made, 0, 0)

    def _outputs_together(self, batches: Sequence[object]) -> object | None:
        """The outputs for batches that are alike, made by one call; None if each needs its own."""
        if self._is_whole or not self._are_joined or not all(map(samples.count, batches)):
            return None
        try:
            outputs, are_of_rows = self._run(_SHARDS, self._filled(batches), 0, True)
        except shard_step.NotJoined:
            self._are_joined = False
            return None
        return outputs if are_of_rows else None

    def _loops(self, data: object) -> tuple[str, int | str] | None:
        """What batches are like that run in one graph, a loop on threads; None if each is a launch."""
        if self._compiles or self._is_eager or self._most == 1 or not self._has_marks or not shard_step.fits(data):
            return None
        return samples.described(data), samples.places(data)

    @property
    def _most(self) -> int:
        """The most steps whose batches are held at once."""
        return min(int(self._model.steps_per_execution), _MOST_COMPILED if self._compiles else shard_step.MOST)

    def _filled(self, batches: Sequence[object]) -> tuple[tuple[object, ...], tf.Tensor]:
        return shard_step.filled(batches, self._most)

    def _alike(self, batch: Batch) -> tuple[bool, object]:
        """Whether a batch may be one of a loop on threads, and what is equal for all batches of a launch."""
        if self._most == 1:  # it is alone: nothing need be found out about it
            return False, None
        is_divided = not (self._is_rest(batch) if self._step.is_plain else self._computes_whole(batch))
        like = self._loops(batch.data) if is_divided and batch.dealt is None else None
        return like is not None, like or (batch.total, samples.described(batch.sample), samples.places(batch.sample))

    def _launches(self, batches: Sequence[Batch]) -> Iterator[tuple[str, object, int, bool, list[Batch]]]:
        """For each launch: a method, what it takes, the batch size to compile it for, if it is a loop, and its batches.

        Consecutive batches, as `steps_per_execution` requests them, run in one launch: in a loop of the devices, or in
        that of `shard_step`.
        """
        for (loops, _), same in itertools.groupby(batches, self._alike):
            group = list(same)
            total = group[0].total
            divides = total % self._size == 0
            are_whole = any([*map(self._computes_whole, group)])
            if loops and not are_whole:
                yield _SHARDS, self._filled([batch.data for batch in group]), total, True, group
                continue
            if len(group) > 1 and self._compiles and divides and not are_whole:
                yield _SHARDS, group, total, True, group
                continue
            for batch in group:
                if self._computes_whole(batch):
                    yield _WHOLE, self.batches.joined(batch), total, False, [batch]
                elif not self._compiles and batch.dealt is not None:
                    yield _DEALT, (batch.data, tf.constant(total)), total, False, [batch]
                elif not self._compiles:
                    yield _SHARDS, batch.data, total, False, [batch]
                elif divides:
                    yield _SHARDS, self.batches.shares(batch), total, False, [batch]
                else:
                    # One program serves all totals between two multiples of N: the number of larger shards is an input.
                    parts = self.batches.shares(batch), np.int32(total)
                    yield _UNEQUAL, parts, total // self._size, False, [batch]

    def _is_rest(self, batch: Batch) -> bool:
        """Whether the replicas cannot have equal shares of a batch."""
        return batch.total % self._size > 0 or batch.is_whole or batch.is_uneven

    def _computes_whole(self, batch: Batch) -> bool:
        """Whether every replica computes all of a batch.

        Raises:
            BatchError: a step that follows the rule of `tf.distribute` cannot be divided so.
        """
        total = batch.total
        if self._step.is_plain:
            rest = self._is_rest(batch)
            if self._step.name == "train_step":
                if rest:
                    self._check_rest(batch)
                return False
            return rest  # of a test, the whole batch has the loss of one device
        if self._is_whole is None:  # asked in a step: before, a model may have no losses and metrics yet
            self._is_whole = self._step.mixes_samples
        if self._is_whole or shard_hooks.has_no_sum(self._model) or batch.is_whole or total < self._size:
            return True
        if self._compiles:
            return total % self._size > 0 and (self._step.is_own or not self._has_branches)
        # An eager step cannot be given up when one of its metrics turns out not to be a sum.
        return self._is_eager and bool(metric_updates.list_own_metrics(self._model))

    def _check_rest(self, batch: Batch) -> None:
        """Warns, on threads, of a rest that does not divide by the replicas; a program has one shape on all of them.

        Raises:
            BatchError: the replicas are compiled, or it is the first batch and so no rest.
        """
        total, size = batch.total, self._size
        if self._has_trained and not self._compiles and not batch.is_whole:
            misuse.warn_once(self._model, "rest", value_errors.warn_uneven_rest(self._model.name, total, size))
            return
        what = f"A batch of {base.plural(total, 'sample')} "
        if batch.is_whole:
            what += "has arrays of different numbers of samples, so that the replicas cannot share it equally."
        elif batch.is_uneven and total % size == 0 and batch.dealt is not None:
            what += f"is dealt to {size} replicas as {', '.join(map(str, batch.dealt[0][0]))} samples."
        else:
            what += f"does not divide by {size} replicas."
        raise errors.BatchError(
            f"{what} The train_step or compute_loss of {self._model.name!r} follows the rule of tf.distribute in a "
            f"scope: each replica computes its part of a sum. Pass batches of a multiple of {size} samples, equally "
            "many to each replica, and leave out a rest: dataset.batch(n, drop_remainder=True). Or let "
            "replicate_model(model) divide batches of any size, with the results of one device."
        )

    def _undone_if_given_up(self, how: str) -> contextlib.AbstractContextManager[None]:
        """Around an eager step that may be given up: it has changed variables then, which its graph has not.

        Keras' own steps do in each call what they did in the first one; a step of the user's own may begin to clip.
        """
        is_known = (how, 0, False) in self._functions and keras_training.has_keras_step(self._model, self._step.name)
        return _NOTHING if is_known else lent_variables.kept_if(NotASum, self._model)

    def _outputs(self, data: Any, total: int) -> object:
        # An eager step does not tell an output with a row per sample from another one of that length.
        if not self._is_whole and (not self._is_eager or keras_models.gives_rows(self._model)):
            outputs, are_of_rows = (self._compiled_outputs if self._compiles else self._run)(_SHARDS, data, total)
            if are_of_rows:
                return outputs
            self._is_whole = True  # the outputs have no row per sample
        return select(0, self._run(_WHOLE, data, total))

    def _compiled_outputs(self, how: str, data: Any, total: int) -> tuple[object, bool]:
        """The outputs, and whether they have a row per sample; by a program for a larger batch, if there is one."""
        kind = samples.described(data)
        known = [size for by, size, of, _ in self._known if (by, of) == (how, kind) and total <= size <= _WASTE * total]
        size = min(known, default=-(-total // self._size) * self._size)
        padded = samples.pad(samples.views(data), size - total) if size > total else data
        parts = self._run(how, self.batches.shares(Batch(padded, size)), size)
        outputs, are_of_rows = self._joined(parts, total, size // self._size)
        if are_of_rows and kind not in self._gives:
            self._gives[kind] = keras_models.gives_rows(self._model) or self._grows(data, total, select(0, parts))
        return outputs, bool(are_of_rows) and self._gives[kind]

    def _grows(self, data: object, total: int, outputs: object) -> bool:
        """Whether outputs that are as long as a shard have a row per sample: those of a longer shard are longer."""
        rows = -(-total // self._size) + 1
        padded = samples.pad(samples.views(data), rows * self._size - total)
        longer = self.batches.shares(Batch(padded, rows * self._size))
        function = self._made(_SHARDS, rows * self._size, False)
        specs = self._backend.result_specs(self._programs, function, (longer,))
        leaves = [tf.nest.flatten(leaf, expand_composites=True) for leaf in tf.nest.flatten(outputs)]
        if len(specs) != sum(map(len, leaves)):
            return False  # a variable is among them
        left = iter(specs)
        of_leaves = [[next(left) for _ in parts] for parts in leaves]
        # Ragged and sparse outputs, of several parts, have told their numbers of rows.
        return all(spec.shape.rank and spec.shape[0] == rows for spec, *more in of_leaves if not more)

    def _joined(self, outputs: object, total: samples.Rows, rows: samples.Rows) -> tuple[object, bool | tf.Tensor]:
        """The outputs for all samples, of those for shards of so many rows; and whether they have a row per sample.

        Outputs without a row per sample are not used. In a graph they only need to be computable.
        """
        strategy, first = self._backend.strategy, select(0, outputs)
        if (are_of_rows := samples.have_row_count(first, rows)) is False:
            return first, False
        own = len(strategy.extended.worker_devices)
        if own < self._size:  # the other workers have the rest
            joined = tf.nest.map_structure(lambda leaf: strategy.gather(leaf, axis=0), outputs)
        else:
            joined = samples.join([select(replica, outputs) for replica in range(own)])
        # Numbers that a graph does not know are tensors. A slice of all rows is an op of eager mode, too.
        is_all = isinstance(total, int) and isinstance(rows, int) and total == rows * self._size
        return joined if is_all else samples.take(joined, 0, total), are_of_rows

    def _numbered(self) -> contextlib.AbstractContextManager[object]:
        """Around steps: on threads, workers compare sums with the model's variables. Programs have their own."""
        if self._compiles:
            return _NOTHING
        if self._numbers is None:
            made = [variable_numbers.handles(keras_models.underlying(each)) for each in self._model.variables]
            self._numbers = variable_numbers.numbers(itertools.chain(*made))
        return variable_numbers.of_model(self._numbers)

    def _run(self, how: str, data: Any, size: int, is_loop: bool = False) -> Any:
        """Runs a method on all replicas: compiled for batches of this size, or in a graph for those of any size."""
        compiles, known = self._compiles, self._known
        # A function takes the parts of a batch, or on threads the batches of a loop, as its arguments.
        in_parts, size = type(data) is tuple and compiles != is_loop, size if compiles else 0
        function = self._functions.get((how, size, in_parts)) or self._made(how, size, in_parts)
        if in_parts and compiles:  # a batch like the last one, of dense tensors, is found again by its objects
            again = self._backend.run_again(function, data, self._programs)
            if again is not None:
                return again[0]
        if self._is_eager:
            return function(data)
        is_of_several = is_loop and not compiles
        call = functools.partial(self._launch, function, in_parts, is_loop) if compiles else function
        args = data if is_of_several else (data,)
        like = data if not is_loop else data[0].sample if compiles else data[0][0]
        kind = samples.described(select(0, like) if compiles else like)
        key = how, size, kind, (samples.places(like), len(data[0]) if is_of_several else 0)
        if key in known:
            return call(*args)
        with self._first_run(how, size, kind):
            if not compiles:  # the graph takes any number of samples: the last batch of a dataset needs no other graph
                function.get_concrete_function(*samples.generalized(args))
            outputs = call(*args)
        known.add(key)
        if compiles and len(known) == MANY_SIZES:
            text = (
                f"{self._step.name} of {self._model.name!r} has been compiled for {MANY_SIZES} batch sizes, once for "
                "each size. Batches of one size compile once. replicate_model(model, "
                "strategy=replica_engine.MirroredStrategy(...)) has one graph for all sizes."
            )
            _logger.warning(base.warning("many_batch_sizes", text))
        return outputs

    @contextlib.contextmanager
    def _first_run(self, how: str, size: int, kind: str) -> Iterator[None]:
        """Logs at level INFO that a step was traced or compiled, with the time, and at level WARNING if it takes long.

        An XLA error inside the `with` block gets a note that names the layer of the model and a remedy.
        """
        first, last = (size * self._size + 1, (size + 1) * self._size - 1) if how == _UNEQUAL else (size, size)
        batches = (f"{first}" if first == last else f"{first} to {last}") + " samples" if self._compiles else kind
        what = f"{self._step.name} of {self._model.name!r} for {self._size} replicas, batches of {batches}"
        doing, done = ("compiling", "compiled") if self._compiles else ("tracing", "traced")
        started = time.monotonic()
        if self._compiles:
            from replica_engine import xla  # not at module level: it needs jax

            before = xla.counts()
        try:
            # `of_workers`: without the rows of the other workers, on which it does not wait.
            with watchdog.Wait(
                lambda seconds: f"still {doing} {what}: {seconds:.0f} s so far", PROGRESS_EVERY, of_workers=True
            ):
                yield
        except errors.LoweringError as error:
            if (layer := _guilty(self._model, error)) is not None:
                base.add_note(
                    error,
                    f"This is in the layer {layer.name!r} ({type(layer).__name__}) of the model {self._model.name!r}. "
                    "The threaded strategy runs layers that XLA cannot compile: "
                    "replicate_model(model, strategy=replica_engine.MirroredStrategy()).",
                )
            raise
        if self._compiles and (made := xla.counts() - before).cache_hits > 0 and made.compiles == 0:
            done = "read the program for"
        _logger.info("%s %s, and ran it once, in %.1f s", done, what, time.monotonic() - started)

    def _made(self, how: str, size: int, in_parts: bool) -> Any:
        """One function for all batches, under the name of the model's method, as messages and the watchdog call it."""
        run: Any
        if self._compiles:

            @_as_keras_does
            def run(*data: object) -> object:
                return self._on_replica(how, data if in_parts else data[0], size)

            run.reads_late = self._is_late
        elif in_parts:
            run = shard_step.joined if self._step.name == "predict_step" else shard_step.last
            run = functools.partial(run, functools.partial(self._on_threads, how))
        else:
            run = functools.partial(self._on_threads, how)
        run.__name__ = self._step.name
        if not self._compiles and not self._is_eager:
            run = tf.function(run, reduce_retracing=True, autograph=False)
        return self._functions.setdefault((how, size, in_parts), run)

    def _launch(self, function: Callable[..., object], in_parts: bool, is_loop: bool, data: Any) -> object:
        """Runs a compiled function; in a loop, for each batch of a list, which are divided ahead of their steps."""
        if not is_loop:
            return self._backend.run(function, data if in_parts else (data,), programs=self._programs)
        from replica_engine.strategies.device_loops import LoopSettings  # not at module level: it needs jax

        @_as_keras_does
        def step(context: MultiStepContext, shares: object) -> None:
            context.set_last_step_output("logs", function(shares))

        step.__name__ = self._step.name
        settings = LoopSettings(len(data), spread=False, programs=self._programs)
        shares = map(self.batches.shares, data)
        context = self._backend.run_steps(step, shares, settings)
        return (context.later or context.last_step_outputs)["logs"]

    def _on_threads(self, how: str, batch: Any) -> object:
        """Runs a method on all replicas, while a graph is built unless the model runs eagerly."""
        if how == _DEALT:
            parts, total = batch

            def dealt(data: object) -> object:
                return self._step(data, Shard(samples.count_in_graph(data), total, self._size))

            return select(0, self._backend.strategy.run(dealt, args=(regroup(parts),)))
        total = size = samples.count_in_graph(batch)
        is_padded = self._step.name == "predict_step" and how == _SHARDS
        if is_padded:
            size = -(-total // self._size) * self._size
            batch = samples.pad(batch, size - total)
        take = self.batches.taking(size) if how == _SHARDS else None

        def step(data: object) -> object:
            return self._on_replica(how, data, total) if take is None else self._step(*take(data))

        outputs = self._backend.strategy.run(step, args=(batch,))
        return self._joined(outputs, total, size // self._size) if is_padded else select(0, outputs)

    def _on_replica(self, how: str, data: Any, total: Any) -> object:
        """Runs the step in replica context; of unequal shards, `total` is the number of samples in a smaller one."""
        if how == _UNEQUAL:
            from replica_engine.keras.unequal_shards import in_branches  # not at module level: it needs jax

            return in_branches(self._step, data[0], data[1], total, self._size)
        whole = how == _WHOLE
        return self._step(data, Shard(total if whole else total // self._size, total, self._size, whole))


def check_trainable(model: keras.Model) -> None:
    """Checks that the optimizer knows all weights that Keras' step trains; one of the user's own may train a part.

    Raises:
        OptimizerError: it was built before some of them became trainable.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not keras_training.has_keras_step(model, "train_step"):
        return
    unknown = keras_models.unknown_to(optimizer, model.trainable_variables)
    if unknown:
        layers = sorted({variable.path.split("/")[-2] for variable in unknown})
        raise errors.OptimizerError(
            f"The optimizer was built before the weights of {', '.join(layers)} became trainable, so it has no "
            "state for them. Call compile() again after changing `trainable`."
        )


@contextlib.contextmanager
def _inputs_named(batch: Any) -> Iterator[None]:
    """Adds a note to an error of this library inside the `with` block: the sparse and ragged tensors of the batch."""
    try:
        yield
    except errors.ReplicaEngineError as error:
        inputs = [(name, kind, call) for name, leaf in samples.named(batch) for kind, call in _not_dense(leaf)]
        if inputs:
            named = ", ".join(f"{name} is a {kind}" for name, kind, _ in inputs)
            calls = ", ".join(dict.fromkeys(call for _, _, call in inputs))
            base.add_note(
                error,
                f"{named}. XLA compiles for dense tensors of fixed shapes: make the batches dense in dataset.map, with "
                f"{calls}. Replicas on threads accept these inputs unchanged: "
                "replicate_model(model, strategy=replica_engine.MirroredStrategy()).",
            )
        raise


def _not_dense(leaf: Any) -> list[tuple[str, str]]:
    """The kind of a leaf, and the call that makes the leaf dense; empty if it is dense already."""
    if isinstance(leaf, tf.SparseTensor):
        return [(f"SparseTensor of {leaf.dtype.name}{[None, *leaf.shape[1:]]}", "tf.sparse.to_dense(x)")]
    if isinstance(leaf, tf.RaggedTensor):
        return [(f"RaggedTensor of {leaf.dtype.name}{[None, *leaf.shape[1:]]}", "x.to_tensor(shape=...)")]
    return []


def _guilty(model: keras.Model, error: errors.LoweringError) -> keras.layers.Layer | None:
    """The layer that contains the op; otherwise the first layer that declares that XLA cannot compile it; or None."""
    layers = keras_models.list_layers(model, include_self=False)
    scopes = error.op_name.split("/")
    inside = [layer for layer in layers if any(user_frames.is_layer_scope(scope, layer.name) for scope in scopes)]
    unsupported = [layer for layer in layers if not layer.supports_jit]
    return inside[-1] if inside else unsupported[0] if unsupported else None
