"""`python -m replica_engine` and the `replica-engine` command: reads the command line and runs its command.

The command line takes absl's flags too, as programs around TensorFlow do: `--verbosity=1` shows debugging messages,
`--verbosity=-1` warnings only. Log messages of the library go through absl's handler.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import select
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import app
from absl.flags import FLAGS, argparse_flags

from replica_engine._version import __version__
from replica_engine.watch import timeline_report as trace_report
from replica_engine.workers import launch_command as launch

DESCRIPTION = "Run one TensorFlow function on N replicas."
COMMAND = "replica-engine"
EPILOG = """\
Each command also takes --help, and absl's flags, such as --verbosity=-1
(warnings only) or 1 (debugging)."""
WRONG_FLAGS = 2
INTERRUPTED = 130  # the exit status that shells report for a program that Ctrl-C ended
UNREAD = 141  # the one for a program that SIGPIPE ended
REMOVED = {
    "demo": "run `make demo` in a clone, or `python -m examples.demo`",
    "plan": 'write `print(strategy.plan(step, args=(batch,), topology="v5e:2x4"))` in the script',
    "explain": "`help(replica_engine.errors.NAME)`, in Python, says what the error NAME means, and its page in the "
    "documentation (`make docs`), errors/NAME.html, has a program that shows it",
}
"""Commands of version 0.3, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command inside a program; leaves the program's logging as it is.

    Args:
        argv: the command line without the program name; None takes it from `sys.argv`.

    Returns:
        The exit status.

    Raises:
        SystemExit: with status 0 after `--help` and `--version`, and with status 2 after a wrong flag.
    """
    return _run(_parse(sys.argv[1:] if argv is None else argv))


def console() -> None:
    """The `replica-engine` command: `main` as a program of `absl.app`, which exits with its status."""
    try:
        try:
            app.run(_run, flags_parser=_parse_for_console)
        finally:
            if sys.stdout is not None:  # `>&-`
                sys.stdout.flush()  # Python itself would do so at exit, and print a traceback if nobody reads
    except BrokenPipeError:
        if not _is_unread():
            raise
        sys.exit(UNREAD)


def _parse_for_console(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; without `--verbosity`, messages at level INFO come from this library only."""
    flags = _parse(argv[1:])
    if FLAGS["verbosity"].using_default_value:
        FLAGS.verbosity = -1  # type: ignore[assignment]
        logging.getLogger("replica_engine").setLevel(logging.INFO)
    return flags


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(prog=_name(), description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"replica-engine {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    launch.add_parser(commands)
    trace_report.add_parser(commands)
    environment = commands.add_parser("env", help="print what a report of a fault needs: versions, devices, settings")
    environment.set_defaults(run=lambda _: importlib.import_module("replica_engine.debugging.environment").report())
    parser.set_defaults(run=lambda flags: _no_command(parser))
    return parser.parse_args(argv)


def _name() -> str:
    """The command as the user typed it."""
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    return COMMAND if started.removesuffix(".exe") == COMMAND else "python -m replica_engine"


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return WRONG_FLAGS


def _run(flags: argparse.Namespace) -> int:
    try:
        return flags.run(flags)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


class OneLineParser(argparse_flags.ArgumentParser):
    """A parser with absl's flags that reports a wrong flag in one line, without the usage text before it.

    The line says which flag is nearly the one that is missing or unknown, and that flags stand before a script.
    """

    _given: Sequence[str] = ()

    def __init__(self, **settings: Any):  # of the program, and of each command
        super().__init__(**settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # of each command too
        """Parses what is known, as argparse does."""
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        for removed, instead in REMOVED.items():
            if message.startswith(f"argument COMMAND: invalid choice: {removed!r}"):
                self.exit(WRONG_FLAGS, f"{self.prog}: there is no command {removed} any more; {instead}\n")
        hint = ""
        if message.startswith(("the following arguments are required", "unrecognized arguments")):
            hint = self._hint([word.strip(",") for word in message.split() if word.startswith("--")])
        self.exit(WRONG_FLAGS, f"{self.prog}: {message}{hint} (--help shows all flags)\n")

    def _hint(self, wrong: Sequence[str]) -> str:
        """What is said of flags that are missing or unknown, beside their names."""
        known = self._known_flags()
        given = [each.partition("=")[0] for each in self._given if each.startswith("--")]
        for flag in (each.partition("=")[0] for each in wrong):
            if flag in known and flag in given:
                return "; flags stand before the script, and what follows it is the script's own"
            others = [each for each in given if each not in known] if flag in known else known
            near = difflib.get_close_matches(flag, others, n=1, cutoff=0.75)
            if near:
                meant, typed = (flag, near[0]) if flag in known else (near[0], flag)
                return f"; did you mean {meant}, and not {typed}?"
        return ""

    def _known_flags(self) -> list[str]:
        """The flags of this parser, and those of the command that was given to it."""
        commands = [each.choices for each in self._actions if isinstance(each.choices, dict)]
        chosen = [every[each] for every in commands for each in self._given if each in every][:1]
        return [*self._option_string_actions, *(flag for parser in chosen for flag in parser._known_flags())]


def _is_unread() -> bool:
    """Whether nobody reads what this process prints, as in `replica-engine ... | head -1`; the rest is dropped."""
    poll = select.poll()
    poll.register(sys.stdout, 0)  # only whether the other end is closed
    if not poll.poll(0):
        return False
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
    return True


if __name__ == "__main__":
    console()
