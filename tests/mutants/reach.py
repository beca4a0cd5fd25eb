"""Which functions of the library each test runs, in subprocesses too; also the plugin of pytest that orders the tests.

In a copy of the library each function says that it was called: the environment has the test and a folder for answers.
"""

from __future__ import annotations

import ast
import collections
import os
import pathlib

from tests.mutants import faults

CALLED = """
import hashlib, os
seen = set()
def called(function):
    test, folder = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0], os.environ.get("REACH")
    if test and folder and (key := (test, function, os.getpid())) not in seen:
        seen.add(key)
        with open(os.path.join(folder, hashlib.md5(test.encode()).hexdigest()), "a") as file:
            file.write(f"{test}\\t{function}\\n")
"""


def instrument(package: pathlib.Path) -> None:
    """Lets each function of a package call `called` first."""
    called = f"{package.name}._called"
    for path in list(package.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        begin = {}
        for name, function in faults.functions(package, path):
            for first in function.body[ast.get_docstring(function) is not None :][:1]:
                if not lines[first.lineno - 1][: first.col_offset].strip():  # else it is on the line of its def
                    line = min(each.lineno for each in [first, *getattr(first, "decorator_list", [])])
                    begin[line] = " " * first.col_offset + f"__import__('{called}')._called.called({name!r})\n"
        for line, call in begin.items():
            lines[line - 1] = call + lines[line - 1]
        path.write_text("".join(lines), encoding="utf-8")
    (package / "_called.py").write_text(CALLED, encoding="utf-8")


def of_tests(folder: pathlib.Path) -> dict[str, set[str]]:
    """By test, the functions that it ran; without the tests that failed."""
    reached = collections.defaultdict(set)
    for path in folder.iterdir():
        for line in path.read_text(encoding="utf-8").splitlines() if path.name != "failed" else []:
            test, _, function = line.rpartition("\t")
            reached[test].add(function)
    failed = folder / "failed"
    for test in failed.read_text(encoding="utf-8").splitlines() if failed.exists() else []:
        reached.pop(test, None)
    return dict(reached)


def pytest_collection_modifyitems(items):
    """Leaves the tests that are asked for, in their order."""
    if "CHOSEN" in os.environ:
        lines = pathlib.Path(os.environ["CHOSEN"]).read_text(encoding="utf-8").splitlines()
        order = {test: number for number, test in enumerate(lines)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_runtest_logreport(report):
    """Writes down which tests fail without a fault."""
    if report.failed and "REACH" in os.environ:
        with open(os.path.join(os.environ["REACH"], "failed"), "a") as file:
            file.write(f"{report.nodeid}\n")
