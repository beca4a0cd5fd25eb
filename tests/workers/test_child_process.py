"""The child processes of this library run no file of the current folder; the user's own script may import from its."""

import os
import subprocess
import sys

import pytest
from helpers.jobs import LONGER

# Some are imported by Python itself, some by the coordinator, some by jaxlib's service and the compilers.
NAMES = ("dataclasses", "hmac", "json", "os", "random", "runpy", "selectors", "sitecustomize", "socket", "tempfile")

STARTS = """
import os, pathlib, subprocess, sys
from replica_engine.workers import child_process
from replica_engine.workers import server as serve
from replica_engine.workers.job import Limits
from replica_engine.pjrt import jaxlib_service
from replica_engine.pjrt import absent_chips as absent

for name in sys.argv[1].split():  # after this process has imported what it needs
    pathlib.Path(name + ".py").write_text(f"open('ran', 'a').write('{name} ')")
for entry in sys.argv[2:]:
    sys.path.insert(0, entry)
serve.start(1, "a secret of sixteen", "127.0.0.1:0", Limits(1.0, 1.0))
jaxlib_service.start(1, "127.0.0.1")
subprocess.run([sys.executable, *absent._COMMAND], env=child_process.environment(), check=True)
for each in serve.started:
    each.kill()
    each.wait()
ran = pathlib.Path("ran")
print(ran.read_text() if ran.exists() else "nothing ran")
"""


@pytest.mark.parametrize(
    ("variable", "entries"),
    [
        ("", []),
        (".", [""]),
        *(
            pytest.param(*case, marks=pytest.mark.full("three processes; another spelling"))
            for case in ((":", []), ("", ["."]), ("{folder}", ["{folder}"]))
        ),
    ],
)
def test_no_file_of_the_current_folder_runs_in_a_child(tmp_path, variable, entries):
    """Neither if it is the current folder only, nor if PYTHONPATH or the program itself names it."""
    script = tmp_path / "program" / "train.py"
    script.parent.mkdir()
    script.write_text(STARTS)
    here = tmp_path / "here"
    here.mkdir()
    found = os.pathsep.join(filter(None, [variable.format(folder=here), *sys.path]))
    done = subprocess.run(
        [sys.executable, script, " ".join(NAMES), *(each.format(folder=here) for each in entries)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        timeout=LONGER,
        check=False,
    )
    assert done.stdout == "nothing ran\n", done.stderr


def test_a_child_imports_what_its_parent_would(tmp_path):
    """Also from folders that only the program itself has added to the search path."""
    program = """
import subprocess, sys
from replica_engine.workers import child_process
sys.path.append(sys.argv[1])
command = [sys.executable, *child_process.arguments("mine.main"), "an argument"]
print(subprocess.run(command, env=child_process.environment(), capture_output=True, text=True, check=True).stdout)
"""
    package = tmp_path / "a:b c" / "mine"  # a name that no entry of PYTHONPATH can have
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text("import sys; import mine, replica_engine; print(__name__, sys.argv[1:])")
    command = [sys.executable, "-c", program, str(package.parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONGER, check=True)
    assert done.stdout == "__main__ ['an argument']\n\n"


def test_the_folder_of_a_launched_script_stays_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import queue\nprint(queue.MINE)\n")
    (tmp_path / "queue.py").write_text("MINE = 'of the script'\n")
    command = [sys.executable, "-m", "replica_engine", "launch", "--workers", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGER, check=True)
    assert "of the script" in done.stdout
