"""The example that draws loss and throughput by the number of replicas."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "keras_replicas.py"


@pytest.mark.parametrize("kind", ["mirrored", "tpu"] if sys.version_info >= (3, 11) else ["mirrored"])
def test_it_trains_with_a_progress_bar_and_writes_a_picture(tmp_path, kind):
    command = [sys.executable, EXAMPLE, "--replicas=1,2", "--epochs=2", f"--strategy={kind}", "--output=out.png"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Epoch 2/2" in done.stdout
    assert "27/27" in done.stdout  # the progress bar
    assert "1 replicas: test accuracy 0." in done.stdout
    assert "2 replicas: test accuracy 0." in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
