"""The record of sync points: as data, on exceptions, in files; and replicas that bring what does not go together."""

import json
import re
import time

import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index, line_of

import replica_engine
from replica_engine.errors import ReplicaMismatchError
from replica_engine.process import setup

HERE = "test_sync_points.py"


def two_meetings():
    """An all-reduce of 3 float32, and one of 2 x 2 int64."""
    first = context().all_reduce("SUM", tf.ones([3]))
    second = context().all_reduce("SUM", tf.ones([2, 2], tf.int64))
    return first, second


def test_each_replica_has_its_last_ones_in_order(strategy):
    size = strategy.num_replicas_in_sync
    assert strategy.sync_points() == []
    before = time.time()
    strategy.run(two_meetings)
    strategy.run(two_meetings)
    found = strategy.sync_points()
    assert len(found) == 4 * size
    for replica in range(size):
        own = [point for point in found if point.replica == replica]
        assert [(point.run, point.number) for point in own] == [(0, 1), (0, 2), (1, 1), (1, 2)]
        assert [point.kind for point in own] == ["all_reduce"] * 4
        assert [point.dtypes for point in own] == [("float32",), ("int64",)] * 2
        assert [point.shapes for point in own] == [((3,),), ((2, 2),)] * 2
        assert [point.bytes for point in own] == [12, 32] * 2
        assert {point.device for point in own} == {f"CPU:{replica}"}
        assert {point.size for point in own} == {size}
        assert f"{HERE}:{line_of('tf.ones([3]))')} in two_meetings" in own[0].where
        for point in own:
            assert before - 1 < point.arrived <= point.left < time.time() + 1
            assert point.waited is None or point.waited >= 0
            assert point.merge is None or point.merge >= 0
            assert str(point).startswith(f"replica {replica} of {size} (CPU:{replica}): all_reduce at ")
            assert ("bytes, waited " in str(point)) == (point.waited is not None)
            assert not point.traced
    assert str(found).split("\n") == [str(point) for point in found]


def test_the_record_is_bounded(strategy):
    for _ in range(60):
        strategy.run(two_meetings)
    found = strategy.sync_points()
    assert len(found) == 100 * strategy.num_replicas_in_sync
    assert found[-1].run == 59
    assert found[0].run == 10


def test_it_says_what_a_merge_function_of_ones_own_was_given(strategy, traces):
    def mine(strategy, values):
        return strategy.reduce("SUM", values["a"], axis=None)

    @tf.function
    def step():
        value = {"a": tf.ones([5]), "b": [tf.zeros([], tf.int32)], "c": None}
        return context().merge_call(mine, args=(value,))

    strategy.run(step)
    found = strategy.sync_points()
    if traces == 1:  # compiled: what the function does
        assert {point.kind for point in found} <= {"all_reduce", "all_gather"}
        assert {point.bytes for point in found} == {20}
        return
    assert {(point.kind, point.name, point.dtypes, point.bytes) for point in found} == {
        ("merge_call", "test_it_says_what_a_merge_function_of_ones_own_was_given.mine", ("float32", "int32"), 24)
    }
    assert all(point.traced for point in found)
    strategy.run(step)
    assert len(strategy.sync_points()) == len(found)  # a step that is traced meets out of the engine's sight


@pytest.mark.threads("a host function's failure says which of its collectives were reached; a program's does not")
def test_an_exception_says_the_last_sync_points_of_its_run(strategy):
    def step():
        two_meetings()
        if index() == 0:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        strategy.run(step)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("last sync points")]
    replicas = ", ".join(map(str, range(strategy.num_replicas_in_sync)))
    assert re.fullmatch(
        rf"last sync points of the run:\n  replicas {replicas}:\n"
        rf"    all_reduce at .*{HERE}:\d+ in two_meetings: float32\[3\], 12 bytes\n"
        rf"    all_reduce at .*{HERE}:\d+ in two_meetings: int64\[2, 2\], 32 bytes",
        note,
    )


def test_an_exception_before_any_has_no_such_note(strategy):
    def step():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        strategy.run(step)
    assert not any("sync points" in note for note in getattr(caught.value, "__notes__", ()))


def step_that_fails(strategy):
    """After two meetings, also where the step is compiled."""

    def fails():
        raise KeyError("mine")

    def step():
        two_meetings()
        if hasattr(strategy.extended, "device_group"):
            replica_engine.xla.outside_compilation(fails)
        else:
            fails()

    return step


def test_a_failed_run_leaves_a_file(make_strategy, tmp_path, monkeypatch):
    """Of a run that began: a body that cannot be traced never did."""
    folder = tmp_path / "dumps"
    monkeypatch.setenv("REPLICA_ENGINE_DUMP_DIR", "dumps")
    monkeypatch.setattr(setup, "_BEGAN_IN", str(tmp_path))  # of the process, and not where the program goes
    strategy = make_strategy(2)
    strategy.run(two_meetings)
    with pytest.raises(KeyError, match="mine") as caught:
        strategy.run(step_that_fails(strategy))
    (path,) = folder.iterdir()
    assert caught.value.__notes__[-1] == f"the full record of the run: {path}"
    data = json.loads(path.read_text())
    assert data["error"]["type"] == "builtins.KeyError"
    assert any("fails" in line for line in data["error"]["traceback"])
    assert [(point["replica"], point["run"], point["bytes"]) for point in data["sync_points"]][:4] == [
        (0, 0, 12),
        (1, 0, 12),
        (0, 0, 32),
        (1, 0, 32),
    ]
    assert {point["run"] for point in data["sync_points"]} == {0, 1}
    assert "MainThread" in {thread["thread"] for thread in data["threads"]}


def test_a_file_that_cannot_be_written_hides_nothing(make_strategy, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REPLICA_ENGINE_DUMP_DIR", str(tmp_path / "file"))
    strategy = make_strategy(2)
    with pytest.raises(KeyError, match="mine"):
        strategy.run(step_that_fails(strategy))
    assert "REPLICA_ENGINE_DUMP_DIR" in caplog.text


@pytest.mark.threads("a compiled body has one shape on all replicas")
@pytest.mark.replicas(2, 4)
class TestMismatch:
    @pytest.mark.parametrize(
        ("of_replica", "texts"),
        [
            (lambda i: tf.ones([i + 1, 2]), ("float32[1, 2]", "float32[2, 2]")),
            (lambda i: tf.ones([2], tf.float64 if i else tf.float32), ("float32[2]", "float64[2]")),
            (lambda i: tf.ones([2] if i else [2, 2]), ("float32[2, 2]", "float32[2]")),
            (lambda i: [tf.ones([2]), tf.ones([2 + i])], ("float32[2], float32[2]", "float32[2], float32[3]")),
        ],
        ids=["shape", "dtype", "rank", "second of a list"],
    )
    def test_all_reduce(self, strategy, run, of_replica, texts):
        reached = []

        def step():
            result = context().all_reduce("SUM", of_replica(index()))
            reached.append(result)
            return result

        with pytest.raises(ReplicaMismatchError) as caught:
            run(step)
        lines = str(caught.value).splitlines()
        assert re.match(rf"The replicas brought different tensors to all_reduce at .*{HERE}:\d+ in step:", lines[0])
        assert lines[1:3] == [f"  replica {i} of {strategy.num_replicas_in_sync} (CPU:{i}): {texts[i]}" for i in (0, 1)]
        assert reached == []

    def test_all_gather_takes_what_differs_along_the_axis_and_nothing_else(self, strategy):
        def step(of_replica):
            return context().all_gather(of_replica(index()), axis=0)

        gathered = strategy.run(step, args=(lambda i: tf.fill([i + 1, 2], i),))
        size = strategy.num_replicas_in_sync
        assert strategy.experimental_local_results(gathered)[0].shape == (size * (size + 1) // 2, 2)
        for unfit in (lambda i: tf.zeros([2] if i else [2, 2]), lambda i: tf.zeros([2, 2 + i])):
            with pytest.raises(ReplicaMismatchError, match="shapes that differ along the axis only"):
                strategy.run(step, args=(unfit,))

    @pytest.mark.parametrize("axis", [0, -2])
    def test_all_gather_off_the_axis_where_the_shapes_are_static(self, strategy, run, axis):
        def step():
            return context().all_gather(tf.zeros([2, 3 + index()]), axis)

        with pytest.raises(ReplicaMismatchError) as caught:
            run(step)
        lines = str(caught.value).splitlines()
        size = strategy.num_replicas_in_sync
        assert re.match(rf"The replicas brought different tensors to all_gather at .*{HERE}:\d+ in step:", lines[0])
        assert lines[1:3] == [f"  replica {i} of {size} (CPU:{i}): float32[2, {3 + i}]" for i in (0, 1)]

    @pytest.mark.parametrize("shape", [[None, None], None], ids=["rank", "no rank"])
    def test_all_gather_off_the_axis_where_the_shapes_are_known_when_it_runs(self, strategy, shape):
        """The assertion in the graph has the words of the error; along the axis the sizes may differ."""

        @tf.function(input_signature=[tf.TensorSpec(shape)] * 2)
        def gathered(first, others):
            def step():
                x = others if index() else first
                return context().all_gather(x, axis=0)

            return strategy.run(step)

        size = strategy.num_replicas_in_sync
        result = strategy.experimental_local_results(gathered(tf.ones([5, 2]), tf.ones([3, 2])))[0]
        assert result.shape == (5 + 3 * (size - 1), 2)
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            gathered(tf.ones([2, 2]), tf.ones([2, 3]))
        text = str(caught.value)
        assert f"different tensors to all_gather at {__file__}" in text
        assert f"[  replica 1 of {size} (CPU:1): float32] [2 3]" in text
        assert "differ along the axis only" in text

    def test_the_next_run_works(self, strategy):
        with pytest.raises(ReplicaMismatchError):
            strategy.run(lambda: context().all_reduce("SUM", tf.ones([index() + 1])))
        first, _ = strategy.run(two_meetings)
        value = strategy.experimental_local_results(first)[0]
        assert value.numpy().tolist() == [strategy.num_replicas_in_sync] * 3
