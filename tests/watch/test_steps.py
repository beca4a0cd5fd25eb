"""The steps of a timeline, and the replica that is named as the slowest: from recordings that are written by hand."""

import re

import pytest

from replica_engine.__main__ import main
from replica_engine.watch import timeline_report
from replica_engine.watch.timeline import Span, Track, write

NAMES = ["replica 0 of 2 (CPU:0)", "replica 1 of 2 (CPU:1)"]


@pytest.fixture
def recorded(tmp_path):
    """`recorded(work)`: the file of steps in which replica i works `work[step][i]` seconds, one after the other."""

    def recorded(work):
        at, written = 0.0, []
        for of_step in work:
            begin = at
            for name, seconds in zip(NAMES, of_step, strict=True):
                written.append(Span(Track("MirroredStrategy", name, 1), "run", "run", at, at + seconds, None))
                at += seconds
            track = Track("MirroredStrategy", "coordinator (MainThread)")
            written.append(Span(track, "run", "waiting", begin, at, None))
        path = tmp_path / "run.json"
        write(str(path), written, 0.0, at, 0)
        return path

    return recorded


def shown(capsys, *arguments):
    assert main(["timeline", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_straggler_is_found_beside_a_long_first_step_of_another_replica(recorded, capsys):
    """Replica 0 traces for half a second in the first step; replica 1 sleeps 10 ms in each of 15. It was "none"."""
    path = recorded([(0.5, 0.35), *[(0.001, 0.011)] * 14])
    out = shown(capsys, path)
    assert f"Slowest: {NAMES[1]}: it works 11 ms in a step, 11.0 times as long as the others" in out
    assert "(median of 14 steps)" in out


def test_one_slow_step_does_not_make_a_straggler(recorded, capsys):
    path = recorded([(0.01, 0.01), (0.01, 0.4), *[(0.01, 0.01)] * 5])
    assert "Slowest: none, the replicas work equally long (median of 6 steps)" in shown(capsys, path)


def test_who_traces_longest_is_no_straggler(tmp_path, capsys):
    """All that is recorded of a `tf.function` without marks is that it is traced."""
    written = [Span(Track("MirroredStrategy", "coordinator (MainThread)"), "trace", "waiting", 0.0, 1.0, None)]
    for name, begin, end in zip(NAMES, (0.0, 0.8), (0.8, 1.0), strict=True):
        written.append(Span(Track("MirroredStrategy", name, 1), "run", "run", begin, end, None))
    path = tmp_path / "run.json"
    write(str(path), written * 2, 0.0, 1.0, 0)
    out = shown(capsys, path)
    assert "MirroredStrategy, 1 s. Slowest: not known, no whole step is recorded; of steps in a loop" in out
    assert "model.compile(..., run_eagerly=True) for fit" in out


def test_of_fewer_than_five_steps_after_the_first_no_straggler_is_named(recorded, capsys):
    work = [(0.5, 0.1), *[(0.001, 0.011)] * 4]
    out = shown(capsys, recorded(work))
    assert "5 steps in" in out
    assert "Slowest: not known: record at least 5 steps after the first, which traces and compiles" in out
    assert f"Slowest: {NAMES[1]}: it works" in shown(capsys, recorded([*work, (0.001, 0.011)]))


def test_a_difference_that_is_small_in_the_step_is_not_named(recorded):
    timeline = timeline_report.read(str(recorded([(0.1, 0.1), *[(0.100, 0.102)] * 5])))
    assert timeline_report.straggler(timeline, "MirroredStrategy") is None


def test_a_difference_of_microseconds_is_not_named(recorded, capsys):
    """A fifth of 0.3 ms: as much as a thread that is woken late."""
    path = recorded([(0.1, 0.1), *[(0.0003, 0.00036)] * 9])
    assert "Slowest: none, the replicas work equally long" in shown(capsys, path)


def test_the_picture_has_a_title_marks_for_steps_and_names_the_straggler(recorded, capsys, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path, picture = recorded([(0.02, 0.02), *[(0.001, 0.011)] * 5]), tmp_path / "run.svg"
    shown(capsys, path, "--output", picture)
    drawn = picture.read_text()
    assert f"MirroredStrategy, 6 steps in 100 ms. Slowest: {NAMES[1]}: it works 11 ms in a step" in drawn
    assert marked(drawn) == [2, 3, 4, 5, 6]
    assert drawn.count("#c0392b") == 2  # the replica's name and the band behind its track


def test_marks_of_steps_leave_each_other_place(recorded, capsys, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    picture = tmp_path / "run.svg"
    shown(capsys, recorded([(2.0, 2.0), *[(0.001, 0.011)] * 4]), "--all", "--output", picture)
    assert marked(picture.read_text()) == [1, 2]


def marked(drawn):
    """The numbers of the steps that are marked in a picture."""
    return [int(number) for number in re.findall(r">step (\d+)<", drawn)]


def test_some_steps_can_be_drawn(recorded, capsys, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path, picture = recorded([(0.01, 0.01)] * 7), tmp_path / "run.svg"
    for given, numbers in (("2:4", [2, 3, 4]), ("1:1", [1]), ("7:7", [7])):
        shown(capsys, path, "--steps", given, "--output", picture)
        assert marked(picture.read_text()) == numbers
    assert main(["timeline", str(path), "--steps", "3:8", "--output", str(picture)]) == 1
    assert "there is no step 8 among the 7 that are recorded" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["3", "4:3", "0:2", "a:b", ":"])
def test_what_are_no_numbers_of_steps(capsys, given):
    with pytest.raises(SystemExit):
        main(["timeline", "run.json", "--steps", given])
    assert "write the numbers of the first and the last step, such as 2:8" in capsys.readouterr().err


def test_a_replica_has_one_line_for_all_its_threads(tmp_path):
    """A trace runs on a thread of the replica; steps of the graph are drawn from their marks."""
    written = [
        Span(Track("MirroredStrategy", NAMES[0], number), "run", "run", begin, begin + 1.0, None)
        for number, begin in ((1, 4.0), (2, 2.0), (1, 0.0))
    ]
    write(str(tmp_path / "run.json"), written, 0.0, 5.0, 0)
    (track,) = timeline_report.read(str(tmp_path / "run.json")).tracks
    assert [span.begin for span in track.spans] == [0.0, 2.0, 4.0]


def test_the_replica_whose_host_calls_take_longest_is_named(tmp_path, capsys):
    """A launch is over long before its program, of which both replicas have a span of the same length."""
    written = []
    for step in range(6):
        begin = float(step)
        written.append(Span(Track("TPUStrategy", "launch", order=-2), "step", "launch", begin, begin + 0.01, None))
        for replica, (name, seconds) in enumerate(zip(NAMES, (0.02, 0.5), strict=True)):
            track = Track("TPUStrategy", name, 1, replica + 1)
            written.append(Span(track, "step", "run", begin, begin + 0.9, None))
            written.append(Span(track, "look", "host call", begin + 0.3, begin + 0.3 + seconds, None))
    path = tmp_path / "run.json"
    write(str(path), written, 0.0, 6.0, 0)
    out = shown(capsys, path, "--output", tmp_path / "run.svg")
    assert f"Slowest: {NAMES[1]}: its host calls take 500 ms in a step, 25.0 times as long as the others" in out
    assert "(median of 5 steps)" in out


def test_compiled_replicas_without_host_calls_are_not_said_to_be_equal(tmp_path, capsys):
    written = [
        Span(Track("TPUStrategy", name, 1, replica + 1), "step", "run", float(step), step + 0.9, None)
        for step in range(6)
        for replica, name in enumerate(NAMES)
    ]
    path = tmp_path / "run.json"
    write(str(path), written, 0.0, 6.0, 0)
    assert "Slowest: not known: compiled replicas run inside one program" in shown(capsys, path)


def test_a_run_inside_a_merge_is_part_of_the_step(tmp_path):
    track = Track("MirroredStrategy", "coordinator (MainThread)")
    inside = [Span(track, "run", "waiting", begin, end, None) for begin, end in ((0.4, 0.6), (0.0, 1.0), (2.0, 3.0))]
    write(str(tmp_path / "run.json"), inside, 0.0, 3.0, 0)
    timeline = timeline_report.read(str(tmp_path / "run.json"))
    assert timeline_report.list_steps(timeline, "MirroredStrategy") == [(0.0, 1.0), (2.0, 3.0)]
