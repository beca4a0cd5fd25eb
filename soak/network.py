"""Trainings on hosts of Linux network namespaces, which go through random faults to the same weights.

    python -m soak --only network [--network 20] [--seed 0]

Cables are pulled, hosts parted, workers stopped and killed; all workers start again after each fault, and come to the
weights of an undisturbed training bit by bit. It is the last test of `make test-network`, which needs root and `ip`,
with more faults and others for each seed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

from soak.outcome import Outcome
from soak.restarts import ROOT

STRATEGIES = {"mirrored": "MultiWorkerMirroredStrategy", "tpu": "TPUStrategy"}
SIZES = 2, 4
_TEST = "tests/network/test_network.py::test_a_training_goes_on_from_its_checkpoint_after_each_of_many_faults"


def run(faults: int, seed: int) -> Iterator[Outcome]:
    """Lets so many faults happen to a training of each strategy and number of workers."""
    if os.geteuid() or not shutil.which("ip"):
        print("  left out: it needs root and `ip`", flush=True)
        return
    for kind, strategy in STRATEGIES.items():
        for size in SIZES:
            outcome, began = Outcome("network", strategy, f"{size} workers; faults in a row"), time.monotonic()
            ended = subprocess.run(
                [sys.executable, "-m", "pytest", "-n", "0", "-q", f"{_TEST}[{kind}-{size}]"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": ROOT, "NETWORK_FAULTS": str(faults), "NETWORK_SEED": str(seed)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            passed = ended.returncode == 0 and "1 passed" in ended.stdout
            if passed:
                outcome.found = "the same bits"
            wrong = [] if passed else [f"seed {seed}, {size} workers: {ended.stdout[-3000:]}"]
            outcome.add(time.monotonic() - began, wrong, faults)
            print(f"  {strategy}, {size} workers: {outcome.found or wrong}", flush=True)
            yield outcome
