"""Runs programs in processes of their own, and gathers what each of them computes."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

CHECKOUT = pathlib.Path(__file__).parents[2]
PROCESSES = 2
LIMIT = 600
"""Seconds for one program. Most take one or two."""

RAISED = "raised"
"""The name of the only result of a program that raised, or that ended its process."""
IN_FULL = ", in full"
"""How the names of texts end that are compared, and not kept."""

Recorded = dict[str, dict[str, np.ndarray]]
"""What each program computes, by its name."""


def of_library(
    library: pathlib.Path,
    folder: pathlib.Path,
    only: str = "",
    nudge: int | None = None,
    package: str = "tests.baseline",
) -> Recorded:
    """What all programs of a package compute on the library in a folder.

    The package is a command that passes the arguments `--record`, `--share`, `--only` and `--done` on to `write`, and
    its module `programs` has a function of that name.

    The share of a process depends on its number alone, so programs have the same ones before them on each library. A
    program at which the process ends is recorded as that, and the rest of the share runs in another process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shares = [_Share(library, folder, index, only, nudge, package) for index in range(PROCESSES)]
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        try:
            for each in [pool.submit(share.finish) for share in shares]:
                each.result()
        finally:
            for share in shares:
                share.end()
    return {name: numbers for share in shares for name, numbers in share.recorded.items()}


class _Share:
    """The programs of one process, and of those that go on after it."""

    def __init__(
        self, library: pathlib.Path, folder: pathlib.Path, index: int, only: str, nudge: int | None, package: str
    ):
        self.recorded: Recorded = {}
        self._is_given_up = False
        self._package = package
        self._library, self._index, self._only, self._nudge = library, index, only, nudge
        self._file, self._log = folder / f"share {index}.pickle", folder / f"share {index}.log"
        self._log.unlink(missing_ok=True)
        self._begin()

    def _begin(self) -> None:
        self._file.unlink(missing_ok=True)
        command = [sys.executable, "-m", self._package, "--record", str(self._file)]
        command += ["--share", f"{self._index}/{PROCESSES}", "--only", self._only]
        command += ["--done", ",".join(self.recorded)] if self.recorded else []
        command += ["--nudge", str(self._nudge)] if self._nudge is not None else []
        paths = [self._library, CHECKOUT, CHECKOUT / "tests"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        with self._log.open("a") as log:  # where Python starts, the current folder comes before PYTHONPATH
            self._process = subprocess.Popen(command, cwd=self._library, env=environment, stdout=log, stderr=log)

    def end(self) -> None:
        """Ends the process, if it has not ended; none goes on after it."""
        self._is_given_up = True
        self._process.kill()
        self._process.wait()

    def finish(self) -> None:
        """Waits for the last program; starts the next process where one has ended in a program."""
        while not self._has_finished(self._process.wait()) and not self._is_given_up:
            self._begin()

    def _has_finished(self, status: int) -> bool:
        begun = None
        for name, numbers in _entries(self._file):
            begun = name if numbers is None else None
            if numbers is not None:
                self.recorded[name] = numbers
        if status == 0:
            return True
        if begun is None:
            raise RuntimeError(f"No program has begun. {self._log} has the reason:\n{self._log.read_text()[-2000:]}")
        self.recorded[begun] = {RAISED: np.array(f"the process ended with {status}")}
        return False


def _entries(file: pathlib.Path) -> Iterator[tuple[str, dict[str, np.ndarray] | None]]:
    """What a process wrote: a name when a program begins, and its numbers when it has ended."""
    if not file.exists():
        return
    with file.open("rb") as stream:
        while True:
            try:
                yield pickle.load(stream)
            except (EOFError, pickle.UnpicklingError):
                return


def write(
    file: pathlib.Path,
    share: str,
    only: str,
    done: str,
    nudge: int | None = None,
    package: str = "tests.baseline",
) -> None:
    """Runs the programs of a share in this process."""
    import faulthandler
    import gc
    import importlib

    from helpers import devices  # noqa: F401  # sets TensorFlow up

    import replica_engine

    programs = importlib.import_module(f"{package}.programs").programs()  # it starts TensorFlow
    assert pathlib.Path(replica_engine.__file__).is_relative_to(pathlib.Path.cwd()), replica_engine.__file__
    gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that stay
    index, count = map(int, share.split("/"))
    with file.open("wb", buffering=0) as stream:
        for program in programs[index::count]:
            if only not in program.name or program.name in done.split(","):
                continue
            pickle.dump((program.name, None), stream)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            began = time.process_time()
            numbers = program.numbers(nudge)
            print(f"{program.name}: {time.process_time() - began:.2f} s of CPU", flush=True)
            faulthandler.cancel_dump_traceback_later()
            pickle.dump((program.name, numbers), stream)
