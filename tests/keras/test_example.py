"""The example that draws loss and throughput by the number of replicas."""

import pathlib
import runpy
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "keras_replicas.py"


@pytest.mark.full("an example, of what other tests watch")
def test_it_trains_with_a_progress_bar_and_writes_a_picture(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "out.png"
    flags = ["--replicas=1,2", "--epochs=1", "--strategy=mirrored", f"--output={picture}"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *flags])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("27/27") >= 2  # the progress bars
    assert "1 replicas: test accuracy 0." in printed
    assert "2 replicas: test accuracy 0." in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
