"""What benchmarks make of their figures; nothing is timed here."""

import json
import pathlib
import xml.etree.ElementTree

import pytest

from benchmarks import __main__ as program
from benchmarks import command, keras_models, models, page, picture, step_time, summary
from benchmarks.__main__ import FIGURES, GROUPS, PAGE, PAGES, ROOT, SUMMARY_PAGE
from benchmarks.hosts import OURS
from benchmarks.keras_training import FULL, JAX, JIT, THEIRS, THREADS, XLA, Took, Trained
from benchmarks.measure import Row, WrongResult, fitted, interleaved, same
from benchmarks.report import COLUMNS, Report, cells

MADE_UP = {"processor": "an abacus", "cores": "2"}


def row(group="eager_run", target=0.5, **rest):
    figures = {"ours": [1.0, 2.0, 6.0], "theirs": [4.0, 4.0, 4.0], "limit": [1.0, 1.0, 1.0]}
    return Row(group, "empty", figures, replicas=2, targets={"theirs": target}, check="losses 0.5", **rest)


def points():
    return [
        Row("growth", "run", {"MirroredStrategy": [1.0 + at], "tf.distribute": [2.0 + at]}, axis="merge calls", at=at)
        for at in (0.0, 1.0, 10.0)
    ]


def report():
    alone = Row("memory", "a thread", {"ours": [144.0]}, unit="KiB")
    return Report(MADE_UP, [row(), row(target=0.2), alone, *points()], {"launch": "exit status 1: a | b"})


def test_the_ratio_is_the_median_of_the_ratios_within_repeats():
    theirs, limit = row().comparisons
    assert (theirs.peer, theirs.ratios, theirs.ratio, theirs.target, theirs.met) == (
        "theirs",
        [0.25, 0.5, 1.5],
        0.5,
        0.5,
        True,
    )
    assert (limit.ratio, limit.target, limit.met) == (2.0, None, None)
    assert row(target=0.49).comparisons[0].met is False


def test_contenders_take_turns_and_each_is_first_once():
    order = []
    figures = interleaved({name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert figures == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"figures": {"ours": [1.0], "theirs": [1.0, 2.0]}},
        {"figures": {"ours": []}},
        {"figures": {}},
        {"figures": {"ours": [1.0]}, "targets": {"theirs": 1.0}},
    ],
    ids=["unequal", "empty", "nobody", "target"],
)
def test_a_row_that_no_table_can_show_is_an_error(wrong):
    with pytest.raises(ValueError, match="empty:"):
        Row("eager_run", "empty", **wrong)


def test_equal_results_are_told_and_others_raise():
    assert same("loss", {"ours": 0.5, "theirs": 0.50001}, 1e-4) == "loss 0.500005 ±0.0001"
    for other in (0.51, float("nan")):
        with pytest.raises(WrongResult, match=r"loss apart by more than 0\.0001"):
            same("loss", {"ours": 0.5, "theirs": other, "others": 0.5}, 1e-4)


def test_a_line_through_points_of_a_line():
    assert fitted([(x, 3.0 + 0.25 * x) for x in (1.0, 10.0, 1000.0)]) == pytest.approx((3.0, 0.25))


def test_json_keeps_all(tmp_path):
    report().write(tmp_path / "figures.json")
    assert Report.read(tmp_path / "figures.json") == report()
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == 6
    Report(MADE_UP).write(tmp_path / "none.json")
    assert Report.read(tmp_path / "none.json") == Report(MADE_UP)


def test_the_table_has_a_line_for_each_peer_and_failure():
    table = report().table()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert "processor an abacus, cores 2" in table
    assert "1 of 2 targets met" in table
    assert len(lines) == 2 + 2 * 2 + 1 + 3 + 1
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
    first = [cell.strip() for cell in lines[2].strip("|").split("|")]
    expected = "eager_run,empty,2,ours,2.00,1.00 to 6.00,ms,theirs,4.00,4.00 to 4.00,0.50,0.50,yes,losses 0.5"
    assert first == expected.split(",")
    assert "NO" in lines[4]
    assert lines[-1].startswith("| launch")
    assert "exit status 1: a / b" in lines[-1]


def test_points_of_a_plot_say_where_they_are():
    assert cells(points()[2])[0][1] == "run, 10 merge calls"


def test_newer_groups_replace_older_ones():
    newer = Report(MADE_UP, [row("launch")], {"memory": "it has no rows"})
    both = report().updated(newer).sorted(GROUPS)
    assert both.groups == ["eager_run", "launch", "growth", "memory"]
    assert both.failures == {"memory": "it has no rows"}
    assert report().updated(report()) == report()
    with pytest.raises(ValueError, match="write to another file"):
        report().updated(Report({"processor": "another"}))


@pytest.mark.parametrize("draw", [picture.draw_ratios, picture.draw_growth, picture.draw_summary])
def test_pictures_are_the_same_for_the_same_figures(draw, tmp_path):
    for name in ("one.svg", "other.svg"):
        draw(report(), tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    xml.etree.ElementTree.fromstring(drawn)
    assert drawn == (tmp_path / "other.svg").read_text()
    words = {picture.draw_growth: "MirroredStrategy", picture.draw_ratios: "empty, N = 2: ours to theirs"}
    assert words.get(draw, "lower is better") in drawn
    draw(Report(MADE_UP), tmp_path / "empty.svg")


def test_pages_get_the_rows_of_their_groups_and_keep_the_rest():
    made = "<!-- made by python -m benchmarks, rows of {}: begin -->\n\nold\n\n<!-- end -->\n"
    text = f"prose\n\n{made.format('eager_run')}\n{made.format('launch')}\n{made.format('models')}"
    once = page.with_rows(text, report())
    assert once.startswith("prose\n\n<!-- made by")
    assert "rows of eager_run: begin -->\n\nThe cost of one eager `strategy.run`" in once
    assert "**Failed:** exit status 1" in once
    assert once.count("old") == 1, "a group without figures keeps what stood there"
    assert page.with_rows(once, report()) == once
    with pytest.raises(ValueError, match="does not have <!--"):
        page.with_machine("a page", report())


def test_the_pages_show_the_published_figures():
    published = Report.read(FIGURES)
    shown = {path: path.read_text(encoding="utf-8") for path in PAGES}
    places = [place for text in shown.values() for place in page.ROWS.findall(text)]
    on_pages = [
        row for _, group, beginning in places for row in published.list_rows(group) if row.name.startswith(beginning)
    ]
    assert sorted(map(str, on_pages)) == sorted(map(str, published.rows)), "each row stands on one page"
    assert {group for _, group, _ in places} == set(GROUPS)
    for path, text in shown.items():
        assert page.with_rows(text, published) == text, f"{path}: python -m benchmarks --docs writes it."


def test_the_summary_has_ten_rows_of_the_published_figures():
    published = Report.read(FIGURES)
    assert len(summary.rows(published)) == len(summary.CHOSEN) == 10
    text = SUMMARY_PAGE.read_text(encoding="utf-8")
    assert page.with_summary(text, published) == text, "python -m benchmarks --docs writes it."


def trained(seconds, split_loss=2.0, whole_loss=2.0):
    """Two repeats of each contender on a model; the second takes twice as long."""
    losses = {
        THREADS: split_loss,
        FULL: split_loss,
        XLA: split_loss,
        THEIRS: split_loss,
        JAX: whole_loss,
        JIT: whole_loss,
    }

    def process(who, factor, start):
        taken = seconds[who] * factor / start
        stages = {"trace": 1.0, "compile": taken} if who == XLA else {}
        took = Took(taken, taken * 2 if who == XLA else taken)
        return Trained(took, took, took, 2**20, [losses[who], losses[who] / 2], stages)

    return {who: [[process(who, factor, start) for start in (1, 2)] for factor in (1, 2)] for who in losses}


SECONDS = {THREADS: 1.0, FULL: 2.0, XLA: 1.0, THEIRS: 2.0, JAX: 4.0, JIT: 8.0}


def test_the_rows_of_a_model_have_its_targets_and_the_processor_time():
    rows = {(row.name, row.contender): row for row in models.rows("resnet", 4, trained(SECONDS))}
    step = rows["ResNet-50, step", XLA]
    assert {each.peer: (each.ratio, each.target) for each in step.comparisons} == {
        THEIRS: (0.5, 1.0), JAX: (0.25, 0.5), JIT: (0.125, None)
    }  # fmt: skip
    assert step.note == (
        "processor time 3 s: 1.00 of tf.distribute, 0.50 of Keras on JAX, 0.25 of TensorFlow jit_compile"
    )
    assert step.check == "loss 1 of split batches 2 ±0.001; loss 2 of split batches 1 ±0.01; " + (
        "loss 1 of whole batches 2 ±0.001; loss 2 of whole batches 1 ±0.01"
    )
    assert rows["ResNet-50, first step", THREADS].targets == {THEIRS: 0.6}
    assert rows["ResNet-50, first step", XLA].note.endswith("; trace 1 s, lower 0 s, compile 1.5 s")
    assert rows["ResNet-50, building it, and its first step", XLA].figures[XLA] == [2.0, 4.0]
    second = rows["ResNet-50, second start", XLA]
    assert [(each.peer, each.ratio, each.met) for each in second.comparisons] == [
        (models.FIRST_START, 0.5, False),
        (JAX, 0.25, None),
    ]
    assert not any(row.targets for row in models.rows("lstm", 4, trained(SECONDS)))


def test_only_replicas_with_batch_norm_may_have_another_loss_than_the_whole_batch():
    assert [*models.rows("resnet", 2, trained(SECONDS, split_loss=3.0))]
    for name, replicas in (("resnet", 1), ("bert", 2)):
        with pytest.raises(WrongResult, match="loss 1 apart"):
            [*models.rows(name, replicas, trained(SECONDS, split_loss=3.0))]


def test_bert_is_as_large_as_that_of_keras_hub():
    model = keras_models.MODELS["bert"].build()
    head = (keras_models.BERT_WIDTH + 1) * keras_models.CLASSES
    assert model.count_params() - head == 4_385_920  # of bert_tiny_en_uncased, as KerasHub's list of presets says


def test_a_bar_has_the_colour_of_its_ratio_whether_or_not_it_meets_its_target(tmp_path):
    """A row three times as fast as its peer was red, because it missed a target."""
    fast = Row("eager_run", "one merge call", {"MirroredStrategy": [1.0], "tf.distribute": [3.0]}, replicas=4,
               targets={"tf.distribute": 0.2})  # fmt: skip
    slow = Row("launch", "one launch of a tiny body", {"TPUStrategy.run": [1.1], "jax.jit": [1.0]}, replicas=4,
               targets={"jax.jit": 1.2})  # fmt: skip
    for row_, colour, other in ((fast, picture.FASTER, picture.SLOWER), (slow, picture.SLOWER, picture.FASTER)):
        picture.draw_ratios(Report(MADE_UP, [row_]), tmp_path / "one.svg")
        drawn = (tmp_path / "one.svg").read_text()
        assert drawn.count(f"fill: {colour}") == 2  # its bar, and the legend
        assert drawn.count(f"fill: {other}") == 1  # the legend


def test_options_have_a_quick_default():
    options = [
        command.Option("merge_calls", "1,2", "1", "how many", command.numbers),
        command.Option("all_shapes", "0", "0", "whether", command.switch),
    ]
    lines = "", "--quick", "--quick --merge-calls 3,4 --all-shapes 1"
    flags = [command.parse("", options, line.split()) for line in lines]
    assert [each.merge_calls for each in flags] == [[1, 2], [1], [3, 4]]
    assert [each.all_shapes for each in flags] == [False, False, True]
    assert [each.repeats for each in flags] == [5, 2, 2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--repeats 0", "'0' is not a positive integer"),
        ("--replicas 2,x", "'x' is not a positive integer"),
        ("--models mlp,resnet", "unknown 'resnet'; choose from mlp, conv"),
        ("--all-shapes 2", "'2' is neither 0 nor 1"),
        ("--json nowhere/figures.json", "the folder 'nowhere' does not exist"),
    ],
)
def test_bad_options_are_told_before_anything_is_measured(line, words, capsys):
    options = [
        command.Option("replicas", "2", "2", "how many", command.numbers),
        command.Option("models", "mlp", "mlp", "which", command.choose_some("mlp", "conv")),
        command.Option("all_shapes", "0", "0", "whether", command.switch),
    ]
    with pytest.raises(SystemExit) as ended:
        command.parse("", options, line.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_of_a_group_that_failed_the_figures_stay():
    newer = Report(MADE_UP, [row("launch")], {"launch": "not done in 3600 s", "memory": "it has no rows"})
    assert report().updated(newer.succeeded()) == report()


def test_rows_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    def measure(flags):
        yield row()
        raise WrongResult("losses differ")

    monkeypatch.setattr("sys.argv", ["benchmark", "--json", str(tmp_path / "rows.json")])
    with pytest.raises(WrongResult):
        command.main("", measure)
    assert Report.read(tmp_path / "rows.json").rows == [row()]
    assert "| eager_run | empty | 2 | ours |" in capsys.readouterr().out


def test_every_group_is_a_module_and_stands_in_the_docs():
    modules = {
        path.stem for path in pathlib.Path(ROOT, "benchmarks").glob("*.py") if "command.main(" in path.read_text()
    }
    assert modules == {*GROUPS, "gpu"}, "gpu needs one, so it is measured by itself"
    text = PAGE.read_text(encoding="utf-8")
    assert [group for group in GROUPS if f"| [`{group}`](" not in text] == []


@pytest.mark.parametrize("flags", [["--quick"], ["--json", "figures.json"]], ids=["quick", "whole"])
def test_a_quick_trial_says_that_its_figures_mean_nothing(flags, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "measure", lambda *arguments: Report(MADE_UP, [row()]))
    monkeypatch.setattr("sys.argv", ["benchmarks", *flags])
    assert program.main() == 0
    out, err = capsys.readouterr()
    told = ["its figures mean nothing" in text for text in (out, err)]
    assert told == [flags == ["--quick"]] * 2


def test_the_model_of_step_time_finds_the_network_it_was_made_of():
    network = step_time.Network(latency=2e-4, bandwidth=5e8, memory=8e9)
    made = [
        step_time.Point(workers, replicas, size, network.all_reduce(size, workers, replicas))
        for workers in (2, 4)
        for replicas in (1, 2)
        for size in (1e3, 1e6, 1e8)
    ]
    fitted = step_time.fitted(made)
    assert (fitted.latency, fitted.bandwidth) == (pytest.approx(2e-4), pytest.approx(5e8))
    assert fitted.memory == pytest.approx(8e9)
    table = step_time.text(fitted, made)
    assert "| 1,024   | 128" in table
    assert fitted.step(0.4, 102e6, 1) == 0.4
    with pytest.raises(ValueError, match="two sizes"):
        step_time.fitted(made[:1])


def test_the_model_of_step_time_reads_rows_of_the_group():
    rows = [
        Row("hosts", f"all-reduce, 2 workers{of}", {OURS: [3.0, 1.0, 2.0]}, axis="bytes", at=1e6)
        for of in ("", " of 2")
    ]
    others = [Row("hosts", "step of mlp, 2 workers", {OURS: [5.0]})]
    assert step_time.points([*rows, *others]) == [step_time.Point(2, 1, 1e6, 0.002), step_time.Point(2, 2, 1e6, 0.002)]
