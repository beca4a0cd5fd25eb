"""The flags of `python -m replica_engine timeline`."""

from __future__ import annotations

import argparse
import os
import sys

from replica_engine.telemetry.report import picture, spans, steps

DESCRIPTION = """\
Draws a timeline that `with replica_engine.timeline("run.json"):` recorded, and names the slowest replica: the one that
works longest in a step, by the median over all steps but the first, if they are at least five.
"""
EPILOG = """\
example:
  %(prog)s run.json --output run.svg

The picture needs matplotlib: pip install matplotlib. To zoom, open run.json in ui.perfetto.dev.
"""
FAILED = 1
FORMATS = (".png", ".svg", ".pdf")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `timeline` command to those of `python -m replica_engine`.

    Args:
        subparsers: the object that `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "timeline", help="draw a recorded timeline and name the slowest replica", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("path", metavar="run.json", help="the recording")
    parser.add_argument(
        "--output",
        metavar="PICTURE",
        type=_picture,
        help="file to draw to: .png, .svg or .pdf (default: the recording's name with .png)",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--all", action="store_true", help="draw the first step too, which traces and compiles")
    part.add_argument(
        "--steps", metavar="2:8", type=_numbers, help="draw some steps only: the numbers of the first and the last one"
    )
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Runs the command, and returns the exit status: 0, or 1 after a failure."""
    try:
        timeline = spans.read(flags.path)
    except FileNotFoundError:
        return _failed(f"no such file: {flags.path}")
    except OSError as error:
        return _failed(f"cannot read {flags.path}: {error.strerror}")
    except ValueError as error:
        return _failed(str(error))
    print("\n".join(steps.summary(timeline)))
    if not any(track.spans for track in timeline.tracks):
        return _failed("nothing is recorded, so there is nothing to draw; steps in a loop of a tf.function are not")
    output = flags.output or f"{os.path.splitext(flags.path)[0]}.png"
    try:
        picture.draw(timeline, output, _part(timeline, flags))
    except ImportError:
        return _failed("drawing needs matplotlib: pip install matplotlib")
    except (OSError, ValueError) as error:
        return _failed(f"could not draw {output}: {error}")
    print(f"wrote {output}")
    return 0


def _part(timeline: spans.Timeline, flags: argparse.Namespace) -> tuple[float, float]:
    """Where the picture begins and ends, as the flags say."""
    if flags.steps is None:
        return picture.whole(timeline) if flags.all else picture.after_tracing(timeline)
    first, last = flags.steps
    found = steps.numbered(timeline)
    if last > len(found):
        raise ValueError(f"there is no step {last} among the {len(found)} that are recorded")
    return found[first - 1][0], found[last - 1][1]


def _numbers(text: str) -> tuple[int, int]:
    """The numbers of two steps, for argparse."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text}: write the numbers of the first and the last step, such as 2:8")
    return int(first), int(last)


def _picture(path: str) -> str:
    """The path of a picture, for argparse."""
    suffix = os.path.splitext(path)[1]
    if suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{suffix or path}: a picture must end in one of {', '.join(FORMATS)}")
    return path


def _failed(why: str) -> int:
    print(f"timeline: {why}", file=sys.stderr)
    return FAILED
