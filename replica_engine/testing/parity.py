"""`check_parity`: does a Keras model compute the same numbers on N replicas as on one device?

The run on one device gives the numbers that are expected; then each strategy computes the same numbers, as
`replicate_model` runs the model. All runs use the same model object, because some models cannot be copied. Each part of
a run begins with the same values of all variables, and restores them:

1. one forward pass in training mode, on a batch that the replicas divide evenly, for the output of each layer;
2. predictions and an evaluation on a batch that they do not divide evenly;
3. a step on each batch, with plain gradient descent in place of the model's optimizers: the change of a weight is its
   gradient. Adam would hide a wrong factor, and make large what is nothing but rounding.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine.backend import compiles
from replica_engine.errors import BackendMissingError, DeviceError, LoweringError, ParityArgumentError
from replica_engine.errors.base import brief, positive_int, shown
from replica_engine.keras import replicate_model
from replica_engine.keras.lent_model import find_original
from replica_engine.keras.replication import compiled_strategy, is_divided
from replica_engine.process.setup import logical_devices
from replica_engine.strategies import MirroredStrategy
from replica_engine.testing.parity_report import RTOL, Difference, Numbers, ParityReport, compare
from replica_engine.upstream import distribute, thread_state
from replica_engine.upstream.graphs import function_graphs
from replica_engine.upstream.keras import keras_models as keras_model
from replica_engine.upstream.keras import keras_variables as keras_state
from replica_engine.upstream.keras.keras_training import find_strategy, has_keras_step
from replica_engine.values import samples


def check_parity(
    model: keras.Model,
    x: object = None,
    y: object = None,
    sample_weight: object = None,
    *,
    replicas: int = 2,
    steps: int = 5,
    batch_size: int | None = None,
    strategies: Sequence[tf.distribute.Strategy | str] | str | None = None,
    distribution: object = None,
    rtol: float | None = None,
    atol: float | None = None,
    **unknown: object,
) -> ParityReport:
    """Compares a model on N replicas with the model on one device, and reports the numbers that differ.

    The model runs as it is, on N threads (`MirroredStrategy`) and on N compiled replicas (`TPUStrategy`), from equal
    weights on equal batches. The check leaves it as it was: weights, optimizer, metrics, traced functions, and the
    state of all random number generators. A model that is not built is built, as `fit` does.

    Args:
        model: a Keras model: functional, sequential or subclassed, compiled or not.
        x, y, sample_weight: arrays, or structures of arrays, as `fit` takes them. `x` may instead be a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterator of batches.
        replicas: the number of replicas.
        steps: the number of batches that are trained on. The last one has shards of unequal size.
        batch_size: the number of rows of a batch. None takes up to 32.
        strategies: the strategies to compare with one device: "MirroredStrategy", "TPUStrategy" or strategies of this
            library. None takes all that can run here; the report names those that cannot.
        distribution: one more candidate: `TPUStrategy(distribution=...)` with one replica, whose weights and batches
            are divided over devices: over `replicas` devices for "fsdp" and "zero1", or over the mesh of a
            `keras.distribution.ModelParallel`.
        rtol: the largest error that counts as rounding, relative to the largest element of a tensor; for a weight,
            relative to its largest change in the step. None takes 1e-4 for float32, which is 1000 roundings, 1e-8 for
            float64, 2e-2 for float16 and 8e-2 for bfloat16.
        atol: the absolute tolerance, which is added to the relative one; None is 0.

    Returns:
        The report. `report.ok` says whether all compared numbers agree. `print(report)` shows which numbers differ, and
        where they differ first. `report.raise_if_different()` is for tests.

    Raises:
        ParityArgumentError: an argument is invalid, or no strategy can run here.
        ReplicateError: the model cannot be replicated.
        DeviceError: a strategy was named, and there are fewer devices than replicas.
        BackendMissingError: a `TPUStrategy` was named, or `distribution` passed, and jax is missing.
        DistributionError: `distribution` is none, or its layouts do not fit the model.
        BatchError: arrays have different lengths.
        LoweringError: XLA cannot compile the model for a strategy that was named.

    Example:
        >>> import keras, numpy as np
        >>> from replica_engine.testing import check_parity
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((20, 4), "float32"), np.ones((20, 1), "float32")
        >>> report = check_parity(model, x, y, replicas=2, steps=2, strategies="TPUStrategy")
        >>> report.ok
        True
        >>> report.batches
        (20, 19)
    """
    if not isinstance(model, keras.Model):
        raise ParityArgumentError(
            f"check_parity takes a Keras model, check_parity(model, x, y); got {brief(model)}. A training loop of your "
            "own is compared by two runs, on one device and on N replicas, and np.allclose."
        )
    for name in unknown:
        raise ParityArgumentError(
            f"check_parity(model, x, y, sample_weight) takes no argument {name}. Three arguments are gone: write "
            "rtol for tolerance, leave out seed, since all runs draw from one, and make a model without random layers "
            "in place of random_layers."
        )
    if isinstance(x, tf.distribute.Strategy):
        raise ParityArgumentError(
            f"The second argument of check_parity is the data; got {brief(x)}. Write "
            "check_parity(model, x, y, strategies=[strategy])."
        )
    for name, count in (("replicas", replicas), ("steps", steps), ("batch_size", batch_size)):
        if count is not None and positive_int(count) is None:
            raise ParityArgumentError(f"{name} must be a positive int; got {shown(count)}.")
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        is_number = isinstance(tolerance, numbers.Real) and not isinstance(tolerance, bool)
        if tolerance is not None and not (is_number and tolerance >= 0):
            raise ParityArgumentError(f"{name} must be a number that is not negative; got {shown(tolerance)}.")
    left_out, compared = dict[str, str](), list[Difference]()
    with distribute.outside_scopes():
        candidates = _strategies(strategies, replicas, distribution, left_out)
        model, batches = find_original(model), _batches(x, y, sample_weight, replicas, steps, batch_size)
        _build(model, batches[0])
        if rtol is None:
            rtol = max(RTOL.get(each.compute_dtype, 0.0) for each in keras_model.list_layers(model)) or RTOL["float32"]
        check = _Check(model, batches, replicas)
        expected = check.numbers(None)
        for name, strategy in candidates.items():
            try:
                compared += compare(name, expected, check.numbers(strategy), rtol, atol or 0.0)
            except LoweringError as error:
                if strategies is not None:
                    raise
                left_out[name] = str(error)
    names, rows = tuple(each for each in candidates if each not in left_out), tuple(map(samples.count, batches))
    if not names:
        reasons = "".join(f"\n- {name}: {reason}" for name, reason in left_out.items())
        raise ParityArgumentError(f"No strategy can be compared with one device here:{reasons}")
    words = f"{rtol:g} of a tensor's largest value, and of a weight's largest change" + (f" + {atol:g}" if atol else "")
    return ParityReport(f"model {model.name!r}", replicas, names, left_out, rows, words, tuple(compared))


class _Check:
    """What a run of a model computes.

    Args:
        model: the model.
        batches: the batches to train on.
        replicas: the number of replicas.
    """

    def __init__(self, model: keras.Model, batches: list[Any], replicas: int):
        self._model = model
        self._layers: list[str] = []  # the names of the outputs that the run of `_outputs_of_layers` returns
        # By thread: names and outputs of layers, in the order of their calls.
        self._calls: dict[int, list[tuple[str, tf.Tensor]]] = {}
        self._even = _dataset(samples.pad(batches[0], -samples.count(batches[0]) % replicas))
        self._batches = [(f"{samples.count(batch)} rows", _dataset(batch)) for batch in batches]

    def numbers(self, strategy: tf.distribute.Strategy | None) -> list[Numbers]:
        """The numbers of a strategy, or of one device (None), as far as the model has them."""
        model, (rows, last), found = self._model, self._batches[-1], []
        if type(model).call is not keras.Model.call:  # and not only a train_step that runs other models
            with self._part(strategy) as run:
                for layer in keras_model.list_layers(model):
                    vars(layer)["call"] = self._reporting(layer)
                vars(model)["predict_step"] = self._outputs_of_layers
                outputs = run.predict(self._even, verbose=0)
            named = dict(zip(self._layers, outputs, strict=True))
            found.append(Numbers("layer output", "training mode, shares of equal size", named))
            with self._part(strategy) as run:
                leaves = tf.nest.flatten(run.predict(last, verbose=0), expand_composites=True)
                outputs = {f"output {index}": leaf for index, leaf in enumerate(leaves)}
                found.append(Numbers("prediction", rows, outputs))
                own = type(model).compute_loss is not keras.Model.compute_loss or not has_keras_step(model, "test_step")
                if model.compiled and (own or model.loss is not None or model.losses):
                    found += _logged(run.evaluate(last, verbose=0, return_dict=True), f"evaluation, {rows}")
        if model.compiled and (model.optimizer is not None or not has_keras_step(model, "train_step")):
            with self._part(strategy) as run:
                weights = model.weights  # a step of the user's that makes others is refused where it is replicated
                start = {each.path: each.numpy() for each in weights}
                for number, (rows, batch) in enumerate(self._batches, 1):
                    where = f"step {number} of {len(self._batches)}, {rows}"
                    logs = run.fit(batch, shuffle=False, verbose=0).history
                    found += _logged({name: value for name, (value,) in logs.items()}, where, number)
                    now = {each.path: each.numpy() for each in weights}
                    found.append(Numbers("weight", where, now, number, start))
                    for each in weights:
                        each.assign(start[each.path])
        return found

    @contextlib.contextmanager
    def _part(self, strategy: tf.distribute.Strategy | None) -> Iterator[keras.Model]:
        """Inside the block, a model to run: the model itself, or a new replicated one, with programs of its own.

        Its optimizers are gradient descent, whose step is the gradient. All parts draw the same random numbers.
        Restores the attributes of all layers, which the block may set, and the values of all variables.

        Args:
            strategy: the strategy; None for one device.
        """
        model = self._model
        attributes = [(vars(each), dict(vars(each))) for each in keras_model.list_layers(model)]
        variables = [*keras_model.list_variables(model), *keras_model.own_variables(model)]
        values = [variable.numpy() for variable in variables]
        try:
            keras_model.exchange_functions(model, None)
            model.jit_compile = False  # one device: XLA would draw other random numbers and round differently
            for now, before in attributes:
                optimizers = [name for name, each in before.items() if isinstance(each, keras.optimizers.Optimizer)]
                # The momentum makes no difference to a first step; it is something that "zero1" divides.
                now.update({name: keras.optimizers.SGD(1.0, momentum=0.9) for name in optimizers})
            with function_graphs.seeded(0), keras_state.seeded(0):
                yield model if strategy is None else replicate_model(model, strategy=strategy)
        finally:
            for now, before in attributes:
                now.clear()
                now.update(before)
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _reporting(self, layer: keras.layers.Layer) -> Callable[..., object]:
        """The `call` of a layer that notes the outputs."""
        own = layer.call

        @functools.wraps(own)
        def call(*args: object, **kwargs: object) -> object:
            outputs = own(*args, **kwargs)
            tensors = [each for each in tf.nest.flatten(outputs) if isinstance(each, tf.Tensor) and each.shape.rank]
            self._calls[threading.get_ident()] += [(layer.name, each) for each in tensors]
            return outputs

        return call

    def _outputs_of_layers(self, data: object) -> list[tf.Tensor]:
        """The outputs that have a row per sample and that the model's own call makes (not inside a loop)."""
        x, graph = keras.utils.unpack_x_y_sample_weight(data)[0], tf.compat.v1.get_default_graph()
        calls = self._calls[threading.get_ident()] = []
        self._model(x, training=True)
        sizes = {each.shape[0] for each in tf.nest.flatten(x) if isinstance(each, tf.Tensor) and each.shape.rank}
        outputs: dict[str, tf.Tensor] = {}
        for name, leaf in calls:
            if leaf.shape[0] in sizes and (tf.executing_eagerly() or leaf.graph is graph):
                again = sum(known.partition(" (")[0] == name for known in outputs)
                outputs[f"{name} ({again + 1})" if again else name] = tf.identity(leaf)
        self._layers = list(outputs)
        return list(outputs.values())

    _outputs_of_layers.gives_rows = True  # type: ignore[attr-defined]


def _logged(logs: Mapping[str, np.ndarray | float], where: str, step: int | None = None) -> Iterator[Numbers]:
    """The losses and the metrics among the logs of a step."""
    for kind in ("loss", "metric"):
        of_kind = {key: value for key, value in logs.items() if (key.split("_")[-1] == "loss") == (kind == "loss")}
        yield Numbers(kind, where, of_kind, step)


def _strategies(
    given: Sequence[tf.distribute.Strategy | str] | str | None,
    replicas: int,
    distribution: object,
    left_out: dict[str, str],
) -> dict[str, tf.distribute.Strategy]:
    """The strategies to compare with one device, by name; notes in `left_out` those that cannot run."""
    made: dict[str, tf.distribute.Strategy] = {}
    several = ("MirroredStrategy", "TPUStrategy") if given is None else given
    for each in several if isinstance(several, Iterable) and not isinstance(several, str) else (several,):
        name = each if isinstance(each, str) else type(each).__name__
        try:
            made[f"{name} {len(made) + 1}" if name in made else name] = _strategy(each, replicas)
        except (DeviceError, BackendMissingError) as error:
            if given is not None:
                raise
            left_out[name] = str(error)
    if distribution is not None:
        devices = replicas if isinstance(distribution, str) else None  # a mesh says how many
        made[f"TPUStrategy({distribution!r})"] = compiled_strategy(devices, distribution)
    return made


def _strategy(given: Any, replicas: int) -> tf.distribute.Strategy:
    if given == "TPUStrategy":
        return compiled_strategy(replicas)
    if given == "MirroredStrategy":
        gpus = tf.config.list_logical_devices("GPU")[:replicas] if thread_state.started() else []
        return MirroredStrategy([gpu.name for gpu in gpus] if len(gpus) == replicas else logical_devices(replicas))
    is_ours = isinstance(given, tf.distribute.Strategy) and (isinstance(given, MirroredStrategy) or compiles(given))
    if is_ours and given.num_replicas_in_sync == (1 if is_divided(given) else replicas):
        return given
    raise ParityArgumentError(
        'strategies must list "MirroredStrategy", "TPUStrategy", or strategies of this library with '
        f"{replicas} replicas, or be None for all strategies that can run here; got {brief(given)}"
        + (f" with {given.num_replicas_in_sync} replicas, but replicas={replicas}." if is_ours else ".")
    )


def _batches(x: Any, y: object, sample_weight: object, replicas: int, steps: int, batch_size: int | None) -> list[Any]:
    """Batches as an epoch has them, which begins again after its last full one; the last is divided unevenly."""
    if isinstance(x, keras.utils.PyDataset):
        x = (x[index % len(x)] for index in range(steps))
    if isinstance(x, tf.data.Dataset) or hasattr(x, "__next__"):
        epoch = [keras.utils.unpack_x_y_sample_weight(samples.as_tensors(each)) for each in itertools.islice(x, steps)]
    else:
        whole = samples.as_tensors(keras.tree.map_structure(_in_keras_dtype, (x, y, sample_weight)))
        total = samples.count(whole)
        size = min(batch_size or max(min(32, total) // replicas, 1) * replicas, total) or 1
        epoch = [samples.take(whole, start, start + size) for start in range(0, total - size + 1, size)]
    epoch = [each for each in epoch if samples.count(each)]
    if not epoch:
        raise ParityArgumentError("The data has no rows, so there is no batch to compare on.")
    batches = list(itertools.islice(itertools.cycle(epoch), steps))
    rows = samples.count(batches[-1])
    if replicas > 1 and rows > 1 and rows % replicas == 0:
        batches[-1] = samples.take(batches[-1], 0, rows - 1)
    return batches


def _in_keras_dtype(array: object) -> object:
    """Converts arrays of floating-point numbers, as `fit` does."""
    return array.astype(keras.config.floatx()) if isinstance(array, np.ndarray) and array.dtype.kind == "f" else array


def _dataset(batch: Any) -> tf.data.Dataset:
    # tf.data would stack the items of a list.
    return tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*batch)))


def _build(model: keras.Model, batch: Any) -> None:
    if find_strategy(model) is None and keras_model.unbuilt_layers(model):
        if isinstance(model, keras.Sequential) and isinstance(batch[0], tf.Tensor):
            model.build((None, *batch[0].shape[1:]))  # a call would fix the batch size
        else:
            model(samples.take(batch[0], 0, 1))
