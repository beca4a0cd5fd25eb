"""The random trainings of the soak: their draws, the comparison, and how a failing one is made small.

`python -m soak --only trainings` trains hundreds; here the faults are planted.
"""

import dataclasses
import gc
import itertools
import random
from unittest.mock import ANY

import keras
import numpy as np
import pytest
import tensorflow as tf

from soak.trainings import draw, judge, shrink, suite
from soak.trainings.run import make_shared_strategy, trained
from soak.trainings.spec import COMPILED, REPLICATE, SCOPE, THREADS, Head, Part, Spec

ERROR = Part("MeanAbsoluteError")
PLAIN = Spec(0, THREADS, 2, REPLICATE, "vector", (Head("numbers", Part("MeanSquaredError"), (ERROR,)),), sizes=(3, 2))

ONE_ROW = dataclasses.replace(
    PLAIN,
    body=(Part("BatchNormalization", {"synchronized": True}),),
    heads=(Head("numbers", Part("MeanSquaredError"), (Part("CosineSimilarity"), ERROR)),),
    sizes=(1,),
    api=SCOPE,
    feed="generator",
    dtype="float64",
)
"""One row is its own mean: normalized, it is 0 on one device, and so are the outputs. XLA has one rounding less in a
fused multiply-add, and is left with 1e-15. Keras multiplies outputs by 1e7 at most for their direction."""


def test_a_seed_draws_a_training_that_its_json_gives_again():
    drawn = list(suite.drawn(0, 500))
    assert drawn == list(suite.drawn(0, 500))
    assert [Spec.from_json(each.to_json()) for each in drawn] == drawn
    assert len({each.to_json() for each in drawn}) == 500


def test_the_draws_have_all_that_trainings_are_made_of():
    """With datasets of unknown length whose tokens are embedded, for an optimizer with slots: they once went wrong."""
    drawn = list(suite.drawn(0, 3000))
    ways = {(each.strategy, each.api, each.replicas, each.feed) for each in drawn}
    assert len(ways) == 2 * 2 * 4 * 5
    assert {each.between for each in drawn} == {None, *draw.BETWEEN}
    assert {name for each in drawn for name in each.callbacks} == set(draw.CALLBACKS)
    assert any(
        (each.inputs, each.feed, each.api, each.optimizer.name) == ("tokens", "dataset", SCOPE, "RMSprop")
        and each.body[-1].name == "GlobalAveragePooling1D"
        and "momentum" in each.optimizer.options
        for each in drawn
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_failing_training_is_made_small(seed):
    """It keeps the metric and the kind of data that make it fail, and nothing else."""
    metric = Part("own_metric")
    large = dataclasses.replace(draw.drawn(seed), feed="dataset")
    large = dataclasses.replace(large, heads=(*large.heads, Head("numbers", Part("Huber"), (ERROR, metric))))

    def fails(spec):
        return spec.feed == "dataset" and any(metric in head.metrics for head in spec.heads)

    small = shrink.smallest(large, fails)
    head = Head("numbers", Part("MeanSquaredError"), (metric,))
    smallest = Spec(seed, large.strategy, 1, large.api, "vector", (head,), sizes=(1,), feed="dataset")
    assert small == dataclasses.replace(smallest, dtype=large.dtype)


def test_a_difference_is_rounding_only_if_one_device_moves_as_far():
    """A metric that is 0 / 0 may differ as one device itself does; a weight may not, nor a number that is missing."""
    draws = random.Random(0)

    def verdict(weight):
        def train(spec, one_device=False, nudge=None):
            metric = 0.5 if one_device and nudge is None else draws.random()
            return {"metric": np.array(metric), "weight": np.array([1.0 if one_device else weight])}

        return judge.judged(PLAIN, train, repeats=1)

    assert verdict(1.0) == judge.Verdict(rounding=True)
    assert verdict(1.1).problem == judge.DEVICE
    assert verdict(1.1).details == "float32: 1 differ: weight: np.float64(1.0) and np.float64(1.1)"
    assert judge.far({"a": np.ones(2)}, {"a": np.ones(3)}, judge.TOLERANCES["float64"]) == ["a"]
    assert judge.far({"a": np.ones(2)}, {}, judge.TOLERANCES["float64"]) == ["a"]
    assert judge.unequal({"a": np.array(0.0)}, {"a": np.array(-0.0)}) == ["a"]


def test_a_fault_of_float32_alone_is_found_although_numbers_are_badly_conditioned():
    """Where float32 cannot tell, float64 does."""

    def train(spec, one_device=False, nudge=None):
        moved = 0 if nudge is None else np.finfo(spec.dtype).eps * 1e4
        return {"metric": np.array(1 + moved + (0 if one_device else 0.01))}

    verdict = judge.judged(PLAIN, train, repeats=1)
    assert verdict.problem == judge.DEVICE
    assert verdict.details.startswith("float64: 1 differ")


def test_a_difference_in_float32_is_judged_although_plain_keras_refuses_float64():
    def train(spec, one_device=False, nudge=None):
        if spec.dtype == "float64":
            raise TypeError("no float64")
        return {"metric": np.array(1.0 if one_device and nudge is None else 1.1)}

    assert judge.judged(PLAIN, train, repeats=1) == judge.Verdict(rounding=True, details=ANY)


def test_a_training_that_rounding_alone_moves_far_is_none():
    def train(spec, one_device=False, nudge=None):
        return {"first weight 0": np.array([1.0 if one_device and nudge is None else 1.1])}

    verdict = judge.judged(PLAIN, train, repeats=1)
    assert verdict.refused
    assert "first weight 0" in verdict.details


def test_a_weight_that_stays_zero_hides_no_fault():
    """Such as the bias before a normalization: a unit in the last place is more than 1% of it."""

    def train(spec, one_device=False, nudge=None):
        bias = 0.0 if nudge is None else np.finfo(spec.dtype).eps
        return {"first weight 0": np.array([1.0 if one_device else 1.1]), "first weight 1": np.array([bias])}

    verdict = judge.judged(PLAIN, train, repeats=1)
    assert not verdict.refused
    assert verdict.problem == judge.DEVICE


def test_the_direction_of_outputs_that_cancel_to_zero_is_rounding_and_no_other_number_is():
    """The same difference of another number is a fault, and of the direction of other rows too.

    The difference is planted: the tests' XLA does not optimize, and fuses no multiplication with an addition.
    """

    def faults(spec):
        device, nudged = (trained(spec, one_device=True, nudge=nudge, uses=()) for nudge in (None, 0))

        def problem(name):
            numbers = device | {name: device[name] + 2e-7}
            return judge.against_device(spec, lambda spec, **how: nudged, device, numbers).problem

        return [name for name in device if problem(name)]

    four_rows = dataclasses.replace(ONE_ROW, sizes=(4,))
    direction, error = "first history cosine_similarity", "first history mean_absolute_error"
    assert {direction, error} & {*faults(ONE_ROW)} == {error}
    assert {direction, error} <= {*faults(four_rows)}


def test_a_compiled_strategy_may_have_the_numbers_of_one_compiled_device():
    """As at an overflow, where XLA and TensorFlow differ."""
    compiled = dataclasses.replace(PLAIN, strategy=COMPILED)

    def verdict(spec, of_xla):
        def train(spec, one_device=False, nudge=None, compiled=False):
            return {"weight": np.array(of_xla if compiled else 1.0 if one_device else 2.0)}

        return judge.judged(spec, train, repeats=1)

    assert verdict(compiled, 2.0) == judge.Verdict(rounding=True)
    assert verdict(compiled, 3.0).problem == judge.DEVICE
    assert verdict(PLAIN, 2.0).problem == judge.DEVICE


def test_numbers_that_differ_in_some_runs_are_found_and_made_small(capsys):
    """As if a slot of an optimizer differed now and then in the second epoch of a dataset."""
    runs = itertools.count()

    def train(spec, one_device=False, nudge=None):
        at_fault = (spec.feed, spec.epochs, spec.optimizer.name) == ("dataset", 2, "RMSprop") and not one_device
        return {"loss": np.array(next(runs) % 3 == 0 if at_fault else 0.0)}

    drawn = (spec for spec in suite.drawn(0, 3000) if (spec.feed, spec.epochs) == ("dataset", 2))
    large = next(spec for spec in drawn if spec.optimizer.name == "RMSprop" and spec.between and len(spec.heads) == 2)
    (outcome,) = suite.run([large], repeats=3, train=train)
    (problem,) = outcome.problems
    assert "from run to run" in problem
    small = Spec.from_json(problem.split("--training ")[1].strip("'"))
    head = Head("numbers", Part("MeanSquaredError"))
    smallest = Spec(large.seed, large.strategy, 1, large.api, "vector", (head,), sizes=(1,), feed="dataset", epochs=2)
    assert small == dataclasses.replace(smallest, optimizer=Part("RMSprop"), dtype=large.dtype)
    assert f"{large}: from run to run" in capsys.readouterr().out


@pytest.fixture
def own_strategies():
    """The strategies that the soak keeps for all trainings end with the test."""
    yield
    make_shared_strategy.cache_clear()
    gc.collect()


@pytest.mark.usefixtures("own_strategies")
@pytest.mark.full("a whole training of the soak, of which the parts are tested")
def test_a_metric_that_counts_replicas_is_found(monkeypatch):
    """Real trainings: all their other numbers are those of one device, in both runs."""

    class Counting(keras.metrics.MeanAbsoluteError):
        def update_state(self, y, y_pred, sample_weight=None):
            replicas = tf.distribute.get_replica_context().num_replicas_in_sync
            super().update_state(y * replicas, y_pred * replicas, sample_weight)

    monkeypatch.setattr(keras.metrics, "MeanAbsoluteError", Counting)
    monkeypatch.setattr(judge, "NUDGES", 1)
    verdict = judge.judged(PLAIN, trained, repeats=2)
    assert verdict.problem == judge.DEVICE
    names = [each.split(":")[0].strip() for each in verdict.details.split("differ: ")[1].split(";")]
    assert names == ["first history mean_absolute_error", "evaluate mean_absolute_error"]


def test_what_plain_keras_refuses_is_no_training():
    verdict = judge.judged(dataclasses.replace(PLAIN, body=(Part("Dense", {"units": -1}),), strategy=COMPILED), trained)
    assert verdict.refused
    assert verdict.problem is None
    assert "units" in verdict.details
