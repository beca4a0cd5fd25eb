"""The thread that writes asynchronous checkpoints: one write at a time in a process.

A second save waits for the first write, so memory holds one snapshot. The thread is not a daemon: the interpreter waits
for it at exit, and it is never in the middle of a write when the interpreter goes. An error is raised by the next save
on any checkpoint. If there is none, the exit of the process prints it, and gives the process the status 1. If another
exception ends the process, that is what the user has to read, and the error of a write is one line after it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

from replica_engine.errors import CheckpointError, ReplicaEngineError
from replica_engine.errors.base import add_note, in_words
from replica_engine.telemetry.watchdog import Wait

_saving = threading.RLock()
_thread: threading.Thread | None = None
_error: ReplicaEngineError | None = None


def start(path: str, write: Callable[[], None]) -> None:
    """Runs `write` on the thread. The caller is in `alone`.

    Args:
        path: of the checkpoint.
        write: writes it, or raises CheckpointError.
    """

    begins = threading.Event()

    def work() -> None:
        global _error
        begins.wait()
        try:
            write()
        except CheckpointError as error:
            _error = error
        except ReplicaEngineError as error:  # of the job: it is what a save that is not asynchronous raises
            add_note(
                error,
                f"The checkpoint {path!r}, which was saved asynchronously by an earlier call, was not written. Earlier "
                "checkpoints, and what was at this path before, are untouched.",
            )
            _error = error
        except BaseException as error:  # no failed write may stay unknown
            _error = CheckpointError.not_written(path, f"{type(error).__name__}: {error}", True)
            _error.__cause__ = error

    global _thread
    _thread = threading.Thread(target=work, name=f"writer of {os.path.basename(path)}")
    try:
        _thread.start()
    finally:  # only now: a thread that runs Python keeps `start` from returning for some milliseconds
        begins.set()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, nothing is being written, and no other thread saves.

    Raises:
        CheckpointError: the last write has failed; raised once.
        WorkerLostError: or another failure of the job has ended it; raised once.
    """
    if threading.current_thread() is _thread:  # a callback of the save that is being written
        yield
        return
    with _saving:
        wait()
        yield


def wait() -> None:
    """Waits until nothing is being written.

    Raises:
        CheckpointError: the last write has failed; raised once.
        WorkerLostError: or another failure of the job has ended it; raised once.
    """
    global _error
    if join():
        error, _error = _error, None
        if error is not None:
            raise error


def join() -> bool:
    """Like `wait`, but leaves the error to the next save. Returns False on the thread itself, where it never waits."""
    thread = _thread
    if thread is threading.current_thread():  # a callback of a save may restore or save
        return False
    if thread is not None:
        with Wait(
            lambda seconds: f"A checkpoint that is being written ({thread.name}) is awaited for {seconds:.3g} s."
        ):
            thread.join()
    return True


def _after_fork() -> None:
    """A forked child neither has the thread nor must tell of its error."""
    global _thread, _error, _saving
    _thread, _error, _saving = None, None, threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    try:
        wait()
    except ReplicaEngineError as error:
        if hasattr(sys, "last_value"):  # an exception has ended the program, and its status is 1
            if isinstance(error, CheckpointError):  # else that exception has ended the write too
                print(in_words(error).splitlines()[0], file=sys.stderr)
            return
        sys.excepthook(type(error), error, error.__traceback__)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception in a function of `atexit` leaves the status 0, and nobody would start the job again
