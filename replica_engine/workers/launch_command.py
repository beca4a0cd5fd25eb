"""The flags of `replica-engine launch`."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable

from replica_engine.errors import ClusterConfigError
from replica_engine.workers.joining import read_limits

DESCRIPTION = """\
Starts N processes of a script on this machine, as the workers of one job, and watches them.

Each line that a worker prints has its name before it. When a worker fails, the others get ten seconds to raise by
themselves, and then are ended. What failed first is printed last. Ctrl-C, SIGTERM and SIGHUP go to all workers, which
have --grace seconds to save and end. If an output is closed, or its disk is full, the job goes on, and the other output
tells so; a pipe that nobody reads any more ends it.

With --workers MIN:MAX, a failure that comes again in the first step after all were started again, or before it, takes
one worker off the next start, as long as MIN are left. For more workers again, stop this launcher with SIGTERM, on
which the workers save if the script does so, and start it again.

On several machines it is Slurm, Kubernetes or Ray that starts the processes; docs/hosts/starting.md says how.
"""
EPILOG = """\
example:
  replica-engine launch --workers 2 --max-restarts 1 train.py --epochs 5
  replica-engine launch --workers 2:4 train.py --epochs 5

exit status:
  0        all workers ended well
  2        a flag is wrong
  128 + N  signal N ended the launcher, or the worker that failed first
  other    that of the worker that failed first
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `launch` command to `python -m replica_engine`.

    Args:
        subparsers: the result of `ArgumentParser.add_subparsers`.
    """
    parser = subparsers.add_parser(
        "launch", help="start N workers of a script on this machine", description=DESCRIPTION, epilog=EPILOG
    )
    add = parser.add_argument
    add(
        "--workers",
        type=_range,
        required=True,
        metavar="N or MIN:MAX",
        help="number of processes; with MIN:MAX, MAX are started, and at least MIN go on when others are lost",
    )
    add(
        "--max-restarts",
        type=_number(int, 0),
        metavar="K",
        help="how often to start all workers again after a failure (default: 0; with MIN:MAX, 2 * (MAX - MIN))",
    )
    add(
        "--join-timeout",
        type=_number(float, 0.001),
        metavar="S",
        help="seconds until all workers must have joined (default: REPLICA_ENGINE_JOIN_TIMEOUT, or 300)",
    )
    add(
        "--heartbeat-timeout",
        type=_number(float, 0.001),
        metavar="S",
        help="seconds of silence until a worker counts as lost (default: REPLICA_ENGINE_HEARTBEAT_TIMEOUT, or 60)",
    )
    add(
        "--stall-timeout",
        type=_number(float, 0.001),
        metavar="S",
        help="seconds that others wait for a worker which is alive, until the job ends "
        "(default: REPLICA_ENGINE_STALL_TIMEOUT, or without an end)",
    )
    add(
        "--grace",
        type=_number(float, 0),
        metavar="S",
        help="seconds from a signal to the launcher until workers that have not ended are killed (default: 30)",
    )
    add("--debug", action="store_true", help="find mistakes that raise nothing: REPLICA_ENGINE_DEBUG=1 for all workers")
    add("--dry-run", action="store_true", help="print the environment and the command of each worker, and start none")
    add("script", help="a Python program")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False  # older Pythons say it were
    parser.set_defaults(run=lambda flags: _run(parser, flags))


def _run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> int:
    from replica_engine.workers.job import Limits
    from replica_engine.workers.launcher import SIGNAL_GRACE, LaunchPlan, launch

    try:
        limits = read_limits(os.environ)
    except ClusterConfigError as error:
        parser.error(str(error))
    limits = Limits(
        flags.join_timeout or limits.join,
        flags.heartbeat_timeout or limits.heartbeat,
        flags.stall_timeout or limits.stall,
    )
    if not os.path.exists(flags.script):
        parser.error(f"there is no file {flags.script}")
    fewest, most = flags.workers
    # Each of those that may be lost fails twice.
    restarts = 2 * (most - fewest) if flags.max_restarts is None else flags.max_restarts
    grace = SIGNAL_GRACE if flags.grace is None else flags.grace
    if flags.debug:
        os.environ["REPLICA_ENGINE_DEBUG"] = "1"  # workers have this process' environment
    plan = LaunchPlan(most, [sys.executable, flags.script, *flags.arguments], limits, restarts, fewest, grace)
    if not flags.dry_run:
        return launch(plan)
    for worker in range(most):
        print(f"worker {worker}:")
        for name, value in plan.environment(
            worker, most, 0, "127.0.0.1:(a free port)", "(a secret of each start)"
        ).items():
            print(f"  {name}={value}")
        print(f"  {shlex.join(plan.command)}")
    return 0


def _range(text: str) -> tuple[int, int]:
    """Reads "4", which is 4:4, or "2:4", for argparse."""
    least, colon, most = text.partition(":")
    read = _number(int, 1)
    fewest = int(read(least))
    if not colon:
        return fewest, fewest
    if int(read(most)) < fewest:
        raise argparse.ArgumentTypeError(f"MIN:MAX needs a MIN that is not above MAX, got {text}")
    return fewest, int(read(most))


def _number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    """Makes a reader of numbers of at least `least`, for argparse."""

    def read(text: str) -> float:
        what = "a whole number" if kind is int else "a number of seconds"
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return number

    return read
