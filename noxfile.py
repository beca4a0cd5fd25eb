"""The pairs of versions that matter, each in a fresh environment: `make matrix`.

    make matrix                         all cells
    make matrix ARGS="--tags oldest"    the cells with a tag; CI runs the oldest

A cell is skipped if none of its interpreters is found: on PATH, among those of pyenv, or in the environment variable
PYTHONS (paths of interpreters, separated as in PATH). Each cell writes what it came to into docs/versions.json, and
docs/generate_versions.py makes the table in docs/versions.md of that.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from typing import NamedTuple

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv"

RESULTS = pathlib.Path("docs/versions.json")


class Cell(NamedTuple):
    """One environment.

    Attributes:
        pythons: minor versions of Python; the first that is found is taken.
        tensorflow: what to install as TensorFlow.
        pins: the versions of other packages.
        keras: the package of Keras that is there alone. keras and keras-nightly have the same files, and an environment
            gets both where TensorFlow asks for the other one than this library.
        xla: whether replicas can be compiled there, for which jax is needed.
        tags: by which nox selects it.
        required: whether a failure is one of this library.
    """

    pythons: tuple[str, ...]
    tensorflow: str
    pins: tuple[str, ...] = ()
    keras: str = ""
    xla: bool = True
    tags: tuple[str, ...] = ()
    required: bool = True


CELLS = {
    "oldest": Cell(
        ("3.11",),
        "tensorflow-cpu==2.19.0",
        ("keras==3.10.*", "numpy==2.0.*", "jax==0.8.0", "jaxlib==0.8.0"),
        tags=("oldest",),
    ),
    "without jax": Cell(("3.11",), "tensorflow-cpu==2.19.0", ("keras==3.10.*", "numpy==1.26.*"), xla=False),
    "2.20": Cell(("3.12",), "tensorflow-cpu==2.20.*", ("keras==3.11.*", "jax==0.9.*", "jaxlib==0.9.*")),
    "2.21, old jax": Cell(("3.11",), "tensorflow-cpu==2.21.*", ("jax==0.8.0", "jaxlib==0.8.0")),
    "2.21": Cell(("3.12",), "tensorflow==2.21.*", ("keras==3.13.*", "jax==0.10.*", "jaxlib==0.10.*")),
    "2.21, Python 3.13": Cell(("3.13",), "tensorflow-cpu==2.21.*", ("jax==0.11.*", "jaxlib==0.11.*")),
    "2.22": Cell(
        ("3.13",), "tensorflow==2.22.0rc0", ("jax==0.12.*", "jaxlib==0.12.*"), keras="keras==3.15.*", tags=("newest",)
    ),
    "2.22, Python 3.14": Cell(
        ("3.14",), "tensorflow==2.22.0rc0", ("jax==0.12.*", "jaxlib==0.12.*"), keras="keras==3.15.*", tags=("newest",)
    ),
    "keras-nightly": Cell(
        ("3.13",), "tensorflow==2.22.0rc0", ("jax==0.12.*", "jaxlib==0.12.*"), keras="keras-nightly", tags=("newest",)
    ),
    "nightly": Cell(("3.12",), "tf-nightly-cpu", ("jax==0.12.*", "jaxlib==0.12.*"), required=False),
}
"""At most ten: the ends of each range, and each minor version of TensorFlow and of Python between them."""

TESTS = (
    "tests/engine",
    "tests/test_rules.py",
    "tests/contract/test_run.py",
    "tests/contract/test_merge_call.py",
    "tests/contract/test_keras.py",
    "tests/contract/test_accumulation.py::test_fit_in_a_scope",
    "tests/keras/test_example.py",
    "tests/test_custom_strategies.py",
)
XLA_TESTS = ("tests/xla/test_stages.py", "tests/xla/test_jax_functions_in_programs.py")
SELECTED = "not concurrent and not test_imports_run_one_way"  # the second checks the source, on any version alike

SHOWN = ("tensorflow", "tensorflow-cpu", "tf-nightly-cpu", "keras", "keras-nightly", "numpy", "jax")


def interpreter(version: str) -> str | None:
    """The path of a Python of a minor version, or None."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    given = os.environ.get("PYTHONS", "").split(os.pathsep)
    of_pyenv = sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))
    for path in filter(None, [*given, *of_pyenv, shutil.which(f"python{version}")]):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which(path) else None
        if done is not None and done.stdout.strip() == version:
            return path
    return None


def add(name: str, cell: Cell) -> None:
    """Makes a nox session of a cell."""
    found = next(filter(None, map(interpreter, cell.pythons)), None)

    def run(session: nox.Session) -> None:
        if found is None:
            session.skip(f"Python {' or '.join(cell.pythons)} is not found")
        extras = "test,xla" if cell.xla else "test"
        before = () if cell.required else ("--prerelease", "allow")
        session.install(*before, "--editable", f".[{extras}]", cell.tensorflow, *cell.pins)
        if cell.keras:
            session.run_install("uv", "pip", "uninstall", "keras", "keras-nightly", external=True)
            session.install("--no-deps", cell.keras)
        else:
            session.run_install("uv", "pip", "check", external=True)
        began = time.monotonic()
        report = pathlib.Path(session.create_tmp()) / "report.xml"
        session.run(
            *("python", "-m", "pytest", "--quiet", "--numprocesses=2", "--replicas=2", "-k", SELECTED),
            *(f"--junitxml={report}", *TESTS, *(XLA_TESTS if cell.xla else ()), *session.posargs),
            success_codes=(0, 1),  # what failed is counted below
        )
        failed = note(name, session, report, round(time.monotonic() - began))
        session.run("python", "docs/generate_versions.py")
        if failed and cell.required:
            session.error(f"{failed} tests failed")

    run.__doc__ = f"{cell.tensorflow} on Python {' or '.join(cell.pythons)}"
    nox.session(run, name=name, python=found or False, tags=list(cell.tags))


def note(name: str, session: nox.Session, report: pathlib.Path, seconds: int) -> int:
    """Adds to the results what a cell came to. Returns how many tests failed."""
    listed = session.run("uv", "pip", "list", "--format=json", "--quiet", silent=True, external=True)
    versions = {each["name"]: each["version"] for each in json.loads(str(listed))}
    python = session.run("python", "-c", "import platform; print(platform.python_version())", silent=True)
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {
        "python": str(python).strip(),
        **{package: versions[package] for package in SHOWN if package in versions},
        "passed": sum(case.find("skipped") is None for case in cases) - len(failed),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": sorted(f"{case.get('classname')}.{case.get('name')}" for case in failed),
        "seconds": seconds,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    }
    RESULTS.write_text(json.dumps({each: results[each] for each in CELLS if each in results}, indent=1) + "\n")
    return len(failed)


for _name, _cell in CELLS.items():
    add(_name, _cell)


@nox.session(name="aot, oldest jax", python=interpreter("3.11") or False, tags=["aot"])
def aot(session: nox.Session) -> None:
    """The compiler of TPUs that belongs to the oldest jax; `make test-aot` has the one of the newest."""
    pins = ("tensorflow-cpu==2.21.*", "jax[tpu]==0.8.0", "jaxlib==0.8.0")
    session.install("--editable", ".[test,xla]", *pins)
    session.run("python", "-m", "pytest", "--quiet", "-k", "v5e:2x4 or v6e:2x4", "tests/aot/test_bodies.py")
