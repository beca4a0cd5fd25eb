"""`python -m replica_engine` and the `replica-engine` command: reads the command line and runs its command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from replica_engine.demo import cli as demo
from replica_engine.hosts import cli as launch
from replica_engine.telemetry.report import cli as trace_report

WRONG_FLAGS = 2
INTERRUPTED = 130  # the exit status that shells report for a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command line without the program name; None takes it from `sys.argv`.

    Returns:
        The exit status.

    Raises:
        SystemExit: with status 0 after `--help`, and with status 2 after a wrong flag.
    """
    parser = OneLineParser(prog="python -m replica_engine", description="Run one TensorFlow function on N replicas.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo.add_parser(commands)
    launch.add_parser(commands)
    trace_report.add_parser(commands)
    flags = parser.parse_args(argv)
    if not hasattr(flags, "run"):
        parser.print_help(sys.stderr)
        return WRONG_FLAGS
    try:
        return flags.run(flags)
    except BaseException as error:
        if _interrupted(error):
            _leave()
        raise


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a wrong flag in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(WRONG_FLAGS, f"{self.prog}: {message} (--help shows all flags)\n")


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error. TensorFlow may raise another error while KeyboardInterrupt passes through it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _leave() -> NoReturn:
    """Exits at once, because TensorFlow may take many seconds to free a distributed dataset."""
    print("\ninterrupted", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
