"""What notebooks show of results, and the tutorial notebook: each of its cells runs, and shows what it says."""

import ast
import contextlib
import html.parser
import io
import json
import pathlib
import sys
import types

import keras
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.versions import HAS_XLA, WHY_NO_XLA

import replica_engine
from benchmarks.report import Report
from replica_engine.keras import replicate_model

TUTORIAL = pathlib.Path(__file__).parents[1] / "examples" / "tutorial.ipynb"


class Reader(html.parser.HTMLParser):
    """Collects the cells of tables, and complains of tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.tags = [], [], set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in ("path", "use", "meta"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in ("path", "use", "meta"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def step(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


@pytest.fixture
def mirrored():
    return replica_engine.MirroredStrategy(DEVICES[:2])


def test_sync_points_are_a_table(mirrored):
    assert Reader(mirrored.sync_points()._repr_html_()).cells[:3] == ["replica", "device", "run"]
    mirrored.run(step, args=(tf.ones([3]),))
    cells = Reader(mirrored.sync_points()._repr_html_()).cells
    assert cells.count("all_reduce") == 2
    assert cells.count("float32[3]") == 2


def test_a_line_in_a_cell_is_named_after_the_cell(mirrored, monkeypatch):
    """As IPython's `compile` names what it keeps in a temporary file."""
    file = "/tmp/ipykernel_1/2.py"
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name={file: ("Cell", "In[4]")}.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    namespace = {"tf": tf}
    exec(
        compile("def step(x):\n    return tf.distribute.get_replica_context().all_reduce('SUM', x)", file, "exec"),
        namespace,
    )
    mirrored.run(namespace["step"], args=(tf.ones([3]),))
    assert "In[4]:2 in step" in Reader(mirrored.sync_points()._repr_html_()).cells


def test_tensorflow_says_nothing_of_reductions(mirrored, caplog):
    large = tf.ones([1 << 16])  # NumPy adds smaller ones, which TensorFlow does not see
    with caplog.at_level("INFO", "tensorflow"):
        mirrored.run(step, args=(large,))
    assert caplog.messages == []


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_sync_points_of_a_program_are_a_table():
    tpu = replica_engine.TPUStrategy(num_cores=2)
    tpu.run(step, args=(tf.ones([3]),))
    assert Reader(tpu.sync_points()._repr_html_()).cells.count("float32[3]") == 2


def test_a_timeline_is_a_picture_and_names_the_slowest(mirrored, tmp_path):
    timeline = replica_engine.timeline(tmp_path / "run.json")
    assert "nothing is recorded yet" in timeline._repr_html_()
    with timeline:
        mirrored.run(step, args=(tf.ones([3]),))
        assert "nothing is recorded yet" in timeline._repr_html_()
    text = timeline._repr_html_()
    assert {"svg", "pre"} <= Reader(text).tags
    assert "MirroredStrategy, 1 step in" in text
    assert text.startswith('<svg style="max-width: 100%'), "it is wider than the cell"
    assert repr(timeline) == f"timeline({str(tmp_path / 'run.json')!r})"


@pytest.mark.parametrize("text", ["[]", "{}", '{"traceEvents": [{"ph": "X"}]}', "no JSON"])
def test_a_file_that_is_no_timeline_says_so(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert "is not a whole timeline of replica_engine" in replica_engine.timeline(tmp_path / "run.json")._repr_html_()


def test_a_replicated_model_says_how_it_runs(mirrored):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="<net>")
    replicated = replicate_model(model, strategy=mirrored)
    assert repr(replicated) == f"{model!r} on {mirrored!r}"
    cells = Reader(replicated._repr_html_()).cells
    assert dict(zip(cells[2::2], cells[3::2], strict=True)) == {
        "model": "<net> (Sequential)",
        "replicas": "2",
        "strategy": "MirroredStrategy",
        "trainable weights": "8",
        "compiled": "no: call compile() before fit()",
    }


def test_results_of_benchmarks_are_a_table():
    report = Report.read(pathlib.Path(__file__).parents[1] / "docs" / "benchmarks.json")
    assert "contender" in Reader(report._repr_html_()).cells


def run_cell(source, number, namespace):
    """Runs a cell as a kernel does: what it prints, and the value of its last line if that is an expression.

    The cell is a file in the current folder, so that AutoGraph and messages find its lines, as they do in a kernel.
    """
    path = pathlib.Path(f"cell_{number}.py")
    path.write_text(source)
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
    return printed.getvalue(), value


def outputs_of(cell, kind):
    return [output for output in cell["outputs"] if output["output_type"] == kind]


@pytest.mark.full("a page of the documentation")
def test_the_tutorial_shows_what_it_prints(monkeypatch, tmp_path):
    """Runs the cells in one namespace, and compares what they show with what is stored."""
    cells = [cell for cell in json.loads(TUTORIAL.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "tutorial"}
    for cell in cells:
        printed, value = run_cell("".join(cell["source"]), cell["execution_count"], namespace)
        assert printed == "".join(text for output in outputs_of(cell, "stream") for text in output["text"])
        results = outputs_of(cell, "execute_result")
        assert (value is not None) == bool(results)
        for result in results:
            stored = "".join(result["data"]["text/html"])
            # Not what the picture is made of: a busy machine makes other labels.
            shown, before = (Reader(text).tags & {"svg", "pre", "table"} for text in (value._repr_html_(), stored))
            assert shown == before != set()
    assert namespace["loss"] < 0.1
