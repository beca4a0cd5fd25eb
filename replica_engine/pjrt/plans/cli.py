"""The flags of `replica-engine plan`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

DESCRIPTION = """\
Says what the compiled steps of a script need on each device, without training.

The script runs as usual, but each step is compiled and not run: it returns zeros, and variables keep their values. The
script ends as soon as a step that changes variables would run a second time (--launches). What it does before that
happens: it reads its data, and writes what it writes. TPUStrategy(num_cores=None) gets all devices of the topology, and
a script that asks for TPUs or GPUs gets CPU devices in their place, so it runs on a laptop.
"""
EPILOG = """\
examples:
  replica-engine plan --topology v5e:2x4 train.py --epochs 5
  replica-engine plan train.py          (for the CPU devices that are there)

exit status:
  0   all steps fit into the memory of a device
  1   a step does not fit, or cannot be compiled, or there was none
  2   a flag is wrong
"""
NOTHING = 1


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `plan` command to `python -m replica_engine`.

    Args:
        subparsers: the result of `ArgumentParser.add_subparsers`.
    """
    parser = subparsers.add_parser(
        "plan",
        help="say what the compiled steps of a script need, without training",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "--topology",
        metavar="NAME",
        help='chips that need not be there, such as v5e:2x4 or h100:8; needs pip install "replica-engine[aot]"',
    )
    add(
        "--launches",
        type=int,
        default=1,
        metavar="N",
        help="end the script when a step that changes variables would run more often (default: %(default)s)",
    )
    add("script", help="a Python program with a TPUStrategy, or with xla.replicate")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False  # older Pythons say it were
    parser.set_defaults(run=lambda flags: _run(parser, flags))


def _run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> int:
    from replica_engine.errors import BackendMissingError, DeviceError
    from replica_engine.errors.base import add_note

    if flags.launches < 1:
        parser.error(f"--launches must be at least 1, got {flags.launches}")
    if not os.path.exists(flags.script):
        parser.error(f"there is no file {flags.script}")
    from replica_engine.pjrt.plans import rehearsal
    from replica_engine.pjrt.plans.absent import check_absent

    try:
        if flags.topology is not None:
            check_absent(flags.topology, 1)
    except DeviceError as error:
        parser.error(str(error))
    except BackendMissingError as error:
        print(error, file=sys.stderr)
        return NOTHING
    if late := {"--topology", "--launches"} & {each.partition("=")[0] for each in flags.arguments}:
        print(f"{', '.join(sorted(late))} stands after the script, which gets it as its own argument.", file=sys.stderr)
    run = rehearsal.Rehearsal(flags.topology, flags.launches)
    rehearsal.begin(run)
    sys.argv[:] = [flags.script, *flags.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(flags.script))
    try:
        runpy.run_path(flags.script, run_name="__main__")
    except SystemExit as end:  # the script's own error counts more than its plans
        if end.code not in (None, 0):
            raise
    except Exception as error:
        if run.planned:
            add_note(error, f"The script is planned, so its {run.planned} compiled steps so far returned zeros.")
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != flags.script:
            frames = frames.tb_next
        error = error.with_traceback(frames or error.__traceback__)  # the frames of the script alone
        sys.excepthook(type(error), error, error.__traceback__)
        return NOTHING
    if not run.planned:
        print(f"{flags.script} ran no compiled step: a plan is of the steps of a TPUStrategy.", file=sys.stderr)
        return NOTHING
    run.end()
