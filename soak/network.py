"""Trainings on hosts of Linux network namespaces, which go through random faults to the same weights.

Cables are pulled, hosts parted, workers stopped and killed; all workers start again after each fault, and come to the
weights of an undisturbed training bit by bit. It is the last test of `make test-network`, which needs root and `ip`,
with more faults and others for each seed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Iterator

from soak.outcome import Outcome, tell
from soak.processes import python

STRATEGIES = {"mirrored": "MultiWorkerMirroredStrategy", "tpu": "TPUStrategy"}
SIZES = 2, 4
_TEST = "tests/network/test_network.py::test_a_training_goes_on_from_its_checkpoint_after_each_of_many_faults"


def outcomes(flags: argparse.Namespace) -> Iterator[Outcome]:
    """Lets faults happen to a training of each strategy and number of workers."""
    if os.geteuid() or not shutil.which("ip"):
        print("  left out: it needs root and `ip`", flush=True)
        return
    env = {"NETWORK_FAULTS": str(flags.network), "NETWORK_SEED": str(flags.seed)}
    for (kind, strategy), size in itertools.product(STRATEGIES.items(), SIZES):
        outcome, began = Outcome("network", strategy, f"{size} workers; faults in a row"), time.monotonic()
        ended = python("-m", "pytest", "-n", 0, "-q", f"{_TEST}[{kind}-{size}]", longest=None, env=env)
        passed = ended.code == 0 and "1 passed" in ended.output
        outcome.found = "the same bits" if passed else ""
        wrong = [] if passed else [f"seed {flags.seed}, {size} workers: {(ended.output + ended.errors)[-3000:]}"]
        outcome.add(time.monotonic() - began, wrong, flags.network)
        tell(f"{strategy}, {size} workers", wrong, outcome.found)
        yield outcome
