"""Timelines: what is on which track, in the file, in TensorFlow's profiler, in and the command."""

import glob
import itertools
import json
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import tensorflow as tf

import replica_engine
from replica_engine import logical_devices, xla
from replica_engine.__main__ import main
from replica_engine.watch import timeline as module
from replica_engine.watch.timeline import recording

STRAGGLER = 1


def straggling_step(work=lambda: threading.Event().wait(0.05)):
    """Two all-reduces; one replica comes late to the first."""
    context = tf.distribute.get_replica_context()
    if tf.get_static_value(context.replica_id_in_sync_group) == STRAGGLER:
        work()
    total = context.all_reduce("SUM", tf.ones([4]))
    return context.all_reduce("MEAN", total)


def spans(path):
    """Of a file: for each (group, track) its spans as (kind, name, begin, end), in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            span = event["cat"], event["name"], event["ts"], event["ts"] + event["dur"]
            tracks.setdefault((groups[event["pid"]], names[event["tid"]]), []).append(span)
    return {track: sorted(found, key=lambda span: span[2]) for track, found in tracks.items()}


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` moves the clock of timelines on, which else goes a microsecond a look.

    So a replica is slow because the test says so, and never because the machine is busy.
    """
    looks, now = itertools.count(1), time.perf_counter()

    def look():
        return now + next(looks) * 1e-6

    def work(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(module, "now", look)
    return work


@pytest.fixture
def mirrored():
    return replica_engine.MirroredStrategy(logical_devices(8)[:2])


@pytest.fixture
def tpu():
    pytest.importorskip("jax")
    return replica_engine.TPUStrategy(num_cores=2)


def test_each_replica_has_a_track_with_when_it_ran_waited_and_was_merged(mirrored, tmp_path):
    path = tmp_path / "run.json"
    with replica_engine.timeline(path):
        mirrored.run(straggling_step)
    tracks = spans(path)
    replicas = [tracks["MirroredStrategy", f"replica {replica} of 2 (CPU:{replica})"] for replica in range(2)]
    for track in replicas:
        assert [name for kind, name, *_ in track if kind == "merge"] == ["all_reduce", "all_reduce"]
        assert sum(kind == "run" for kind, *_ in track) == 3
        assert all(end >= begin for *_, begin, end in track)
        for (*_, end), (*_, begin, _) in itertools.pairwise(track):
            assert begin >= end - 1  # they follow one another
    runs = [sum(end - begin for kind, _, begin, end in track if kind == "run") for track in replicas]
    assert runs[STRAGGLER] >= 50_000
    waits = [end - begin for kind, _, begin, end in replicas[0] if kind == "waiting"]
    assert max(waits) >= 50_000  # for the straggler
    (coordinator,) = [track for (_, name), track in tracks.items() if name.startswith("coordinator (MainThread")]
    merges = [span for span in coordinator if span[0] == "merge"]
    assert len(merges) == 2
    for (_, _, begin, end), (_, _, own_begin, own_end) in zip(
        merges, [span for span in replicas[0] if span[0] == "merge"], strict=True
    ):
        assert own_begin <= begin <= end <= own_end


def test_compiling_launches_host_calls_and_feeding_have_tracks(tpu, tmp_path):
    path = tmp_path / "run.json"

    @xla.returns(None)
    def look(x):
        float(x)

    def step(context, x):
        xla.outside_compilation(look, xla.cross_replica_sum(x))

    with replica_engine.timeline(path):
        tpu.run_steps(step, iter([tf.constant(1.0)] * 3), iterations=3)
    tracks = spans(path)
    compiled = [name for _, name, *_ in tracks["TPUStrategy", "compile"]]
    assert [*dict.fromkeys(compiled)] == ["trace step", "lower step", "compile step"]
    assert len(tracks["TPUStrategy", "launch"]) == 3  # a step that calls the host is a launch
    assert [name for _, name, *_ in tracks["TPUStrategy", "feeding"]] == ["batch 1", "batch 2"]
    for replica in range(2):
        track = tracks["TPUStrategy", f"replica {replica} of 2 (CPU:{replica})"]
        calls = [(name, begin, end) for kind, name, begin, end in track if kind == "host call"]
        runs = [(begin, end) for kind, _, begin, end in track if kind == "run"]
        assert len(calls) == len(runs) == 3
        call = re.compile(r"outside_compilation\(look\) at .*test_timeline.py:\d+ in step")
        assert all(call.match(name) for name, *_ in calls)
        for (begin, end), (_, call_begin, call_end) in zip(runs, calls, strict=True):
            assert begin <= call_begin <= call_end <= end


def test_nothing_is_recorded_outside_the_block_and_several_may_record(mirrored, tmp_path):
    outer, inner = tmp_path / "outer.json", tmp_path / "inner.json"
    assert not recording()
    with replica_engine.timeline(outer):
        mirrored.run(straggling_step)
        with replica_engine.timeline(inner):
            mirrored.run(straggling_step)
    mirrored.run(straggling_step)
    assert not recording()
    merges = [sum(kind == "merge" for track in spans(path).values() for kind, *_ in track) for path in (outer, inner)]
    assert merges == [12, 6]


def test_a_block_that_raises_leaves_its_file(mirrored, tmp_path):
    path = tmp_path / "run.json"

    def fails():
        straggling_step()
        tf.distribute.get_replica_context().merge_call(merge_fn)

    def merge_fn(strategy):
        raise ValueError("in the merge")

    with pytest.raises(ValueError, match="in the merge"), replica_engine.timeline(path):
        mirrored.run(fails)
    assert sum(kind == "merge" for track in spans(path).values() for kind, *_ in track) == 7
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path):
    with pytest.raises(FileNotFoundError), replica_engine.timeline(tmp_path / "no" / "run.json"):
        pytest.fail("the block ran")
    assert not recording()


def test_what_is_too_much_is_counted(mirrored, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "MOST", 10)
    path = tmp_path / "run.json"
    with replica_engine.timeline(path):
        mirrored.run(straggling_step)
    data = json.loads(path.read_text())
    assert sum(event["ph"] == "X" for event in data["traceEvents"]) == 10
    assert data["otherData"]["dropped_spans"] > 0
    main(["timeline", str(path)])
    assert "more spans were not kept" in capsys.readouterr().out


def test_the_profiler_of_tensorflow_shows_the_spans(mirrored, tpu, tmp_path):
    def step():
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([2]))

    tpu.run(step)
    tf.profiler.experimental.start(str(tmp_path))
    mirrored.run(step)
    tpu.run(step)
    tf.profiler.experimental.stop()
    (profile,) = glob.glob(f"{tmp_path}/plugins/profile/*/*.xplane.pb")
    with open(profile, "rb") as file:
        data = file.read()
    for name in ("replica 1 of 2 (CPU:1) run", "replica 0 of 2 (CPU:0) waiting at all_reduce", "merge all_reduce"):
        assert f"replica_engine: {name}".encode() in data
    for name in ("launch step", "run step"):
        assert f"replica_engine: {name}".encode() in data


class TestCommand:
    def test_prints_who_was_slowest_and_draws(self, mirrored, tmp_path, capsys, clock):
        path = tmp_path / "run.json"
        with replica_engine.timeline(path):
            for _ in range(6):
                mirrored.run(lambda: straggling_step(lambda: clock(0.05)))
        assert main(["timeline", str(path)]) == 0
        output = capsys.readouterr().out
        assert re.search(r"Slowest: replica 1 of 2 \(CPU:1\): it works [\d.]+ ms in a step, [\d.]+ times as", output)
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
        svg = tmp_path / "run.svg"
        assert main(["timeline", str(path), "--output", str(svg)]) == 0
        assert "<svg" in svg.read_text()

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (None, "no such file"),
            ("not json", "is not a whole timeline"),
            ('{"traceEvents": [{"ph"', "what is there of a file that is cut off"),
        ],
    )
    def test_says_what_is_wrong_with_a_file(self, tmp_path, capsys, text, why):
        path = tmp_path / "run.json"
        if text is not None:
            path.write_text(text)
        assert main(["timeline", str(path)]) == 1
        assert why in capsys.readouterr().err

    def test_a_process_that_is_killed_in_the_block_leaves_an_empty_file(self, tmp_path, capsys):
        path = tmp_path / "run.json"
        code = """
            import os, signal, sys, replica_engine

            with replica_engine.timeline(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)
        """
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code), path], timeout=500, check=False)
        assert killed.returncode == -signal.SIGKILL
        assert main(["timeline", str(path)]) == 1
        assert "is empty: a timeline writes its file when its `with` block ends" in capsys.readouterr().err

    def test_says_when_there_is_nothing_to_draw(self, tmp_path, capsys):
        path = tmp_path / "run.json"
        with replica_engine.timeline(path):
            pass
        assert main(["timeline", str(path)]) == 1
        assert "nothing to draw" in capsys.readouterr().err


def test_a_fit_has_a_span_for_each_batch(mirrored, tmp_path):
    import keras

    from replica_engine.keras import replicate_model

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fast = replicate_model(model, strategy=mirrored)
    x = tf.ones([12, 2])
    with replica_engine.timeline(tmp_path / "fit.json"):
        fast.fit(x, x[:, :1], batch_size=4, verbose=0)
    tracks = spans(tmp_path / "fit.json")
    assert [name for _, name, *_ in tracks["MirroredStrategy", "Keras"]] == ["train_step"] * 3
    assert sum(kind == "feeding" for kind, *_ in tracks["MirroredStrategy", "feeding"]) >= 3
