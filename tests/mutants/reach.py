"""Which functions of the library each test runs, in subprocesses too; also a plugin of pytest that orders the tests.

A copy of the library whose functions call `called` has this file too, so it imports nothing of the tests.
"""

import os
import pathlib

_seen = set()


def called(function):
    """Writes down that the test runs a function."""
    test, process = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0], os.getpid()
    if test and "REACH" in os.environ and (test, function, process) not in _seen:
        _seen.add((test, function, process))
        with open(f"{os.environ['REACH']}/{process}", "a") as file:
            file.write(f"{test}\t{function}\n")


def pytest_collection_modifyitems(items):
    """Leaves the tests that are asked for, if any are, in their order."""
    chosen = pathlib.Path(os.environ["CHOSEN"]).read_text(encoding="utf-8").splitlines()
    order = {test: number for number, test in enumerate(chosen)}
    if order:
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


def pytest_runtest_logstart(nodeid):
    """Writes down which test runs, for whoever finds that the process has died."""
    pathlib.Path(os.environ["BEGUN"]).write_text(nodeid, encoding="utf-8")
