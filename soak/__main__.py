"""`python -m soak`: faults of many kinds, load, values in parts, trainings; then writes docs/reliability.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from soak.outcome import Outcome

SUITES = ("faults", "processes", "restarts", "lost", "network", "checkpoints", "backups", "load", "parts", "trainings")


def main() -> int:
    """Runs the suites; returns 1 if a check failed, and 0 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--only", choices=SUITES, action="append", help="run only this suite")
    parser.add_argument("--injections", type=int, default=10_000, help="number of random faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first fault or training (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="stop injecting faults, and training, after this many seconds")
    parser.add_argument(
        "--moments", type=int, default=6, help="number of random moments for each signal (default %(default)s)"
    )
    parser.add_argument(
        "--restarts", type=int, default=25, help="number of killed workers of each strategy (default %(default)s)"
    )
    parser.add_argument("--lost", type=int, default=3, help="number of losses of each kind (default %(default)s)")
    parser.add_argument(
        "--network", type=int, default=20, help="number of faults of each training in a network (default %(default)s)"
    )
    parser.add_argument("--kills", type=int, default=300, help="number of killed saves, and fits (default %(default)s)")
    parser.add_argument("--runs", type=int, default=100_000, help="number of small runs in a row (default %(default)s)")
    parser.add_argument(
        "--parts", type=int, default=1_000, help="most operations of divided values (default %(default)s)"
    )
    parser.add_argument("--trainings", type=int, default=500, help="number of random trainings (default %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="how often each training is trained (default %(default)s)"
    )
    parser.add_argument("--training", metavar="JSON", help="trains this one, which a failure printed")
    parser.add_argument("--json", default="build/soak.json", help="file for the figures (default %(default)s)")
    parser.add_argument("--report", action="store_true", help="write docs/reliability.md from the figures")
    flags = parser.parse_args()

    began, outcomes = time.time(), []
    for suite in flags.only or SUITES:
        print(f"{suite}:", flush=True)
        for outcome in _suite(suite, flags):
            outcomes.append(outcome)
    failed = [problem for outcome in outcomes for problem in outcome.problems]
    from soak import report

    _save(flags.json, outcomes, report.machine(), time.time() - began)
    if flags.report:
        report.write(flags.json)
    count = sum(outcome.count for outcome in outcomes)
    print(f"{count:,} in {time.time() - began:.0f} s, {len(failed)} problems")
    for problem in failed[:20]:
        print(f"  {problem}")
    return 1 if failed else 0


def _suite(name: str, flags: argparse.Namespace) -> Iterator[Outcome]:
    if name == "processes":
        from soak import processes

        yield from processes.run(list(processes.scenarios(flags.moments, flags.seed)))
        return
    if name == "restarts":
        from soak import restarts

        yield from restarts.run(flags.restarts, flags.seed)
        return
    if name == "lost":
        from soak import lost_workers

        yield from lost_workers.run(flags.lost)
        return
    if name == "network":
        from soak import network

        yield from network.run(flags.network, flags.seed)
        return
    if name == "checkpoints":
        from soak import checkpoints

        yield from checkpoints.run(flags.kills, flags.seed)
        return
    if name == "backups":
        from soak import backups

        yield from backups.run(flags.kills, flags.seed)
        return
    if name == "parts":
        from soak import parts

        yield from parts.run(flags.parts, flags.seconds)
        return
    from replica_engine import logical_devices

    if name == "trainings":
        logical_devices(64)
        import replica_engine
        from soak.trainings import suite
        from soak.trainings.spec import Spec

        one = [Spec.from_json(flags.training)] if flags.training else None
        with tempfile.TemporaryDirectory() as folder:
            replica_engine.xla.set_cache_dir(folder)  # a training that is repeated compiles its programs once
            yield from suite.run(one or suite.drawn(flags.seed, flags.trainings), flags.repeats, flags.seconds)
            replica_engine.xla.set_cache_dir(None)
    elif name == "faults":
        logical_devices(64)
        from soak import faults

        yield from faults.run(flags.injections, flags.seed, flags.seconds)
    else:
        logical_devices(64)
        from soak import load

        yield from load.run(flags.runs)


def _save(path: str, outcomes: list[Outcome], machine: dict[str, str], seconds: float) -> None:
    """Writes the figures. Suites that were not run keep their earlier figures."""
    suites = {outcome.suite for outcome in outcomes}
    data: dict[str, Any] = {"machine": machine, "seconds": {}, "outcomes": []}
    if os.path.exists(path):
        with open(path) as file:
            data = json.load(file)
    data["machine"] = machine
    data["outcomes"] = [each for each in data["outcomes"] if each["suite"] not in suites]
    data["outcomes"] += [outcome.as_json() for outcome in outcomes]
    data["seconds"] |= {"+".join(sorted(suites)): seconds}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as file:
        json.dump(data, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
