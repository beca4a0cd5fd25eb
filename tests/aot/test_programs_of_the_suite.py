"""Each program that the other tests compile, compiled for TPU v5e too.

`make test-aot` lets the tests in `tests/xla` write their programs to the folder `KEPT_PROGRAMS` first. One child
process compiles many programs. If it dies, the program it was at is refused, and another process goes on with the rest.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from helpers import kept_programs

from aot.table import note
from replica_engine.errors import DeviceError
from replica_engine.pjrt import absent_chips
from replica_engine.pjrt.stablehlo import markers
from replica_engine.pjrt.stablehlo.markers import UntransferableError, expand_markers

CHIP = "v5e:2x4"
PARTS = 16  # all programs in one test took longer than a test may on a busy machine
REFUSED = {
    r"Supported lowering only of Sum (all reduce|reduce-scatter).*\b[sufc]64\[": "MIN, MAX, reduce_scatter of 64 bits",
    r"Unsupported CVT .* to c128\[": "casts to complex128",
    r"16 replicas need 16 devices": "16 replicas on 8 chips",
    r"i4> cannot be sent to the host": "host calls with int4",
}
"""By the words of a refusal, what is refused."""


def answers(folders):
    """For each folder with a request, the words of the refusal; "" if the program compiled."""
    environment = {**os.environ, **absent_chips._ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "replica_engine.pjrt.absent_chips"]
    found, left = {}, list(folders)
    while left:
        done = subprocess.run([*command, *map(str, left)], env=environment, capture_output=True, text=True)
        while left and (left[0] / "answer.json").exists():
            folder = left.pop(0)
            found[folder.name] = json.loads((folder / "answer.json").read_text()).get("error", "")
        if left:
            found[left.pop(0).name] = f"the process of the compiler ended: {done.stderr}"
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_the_programs_of_the_suite(part, tmp_path):
    assert kept_programs.FOLDER, "make test-aot lets tests/xla write their programs, and names their folder"
    files = sorted(pathlib.Path(kept_programs.FOLDER).glob("*.json"))
    assert len(files) > 500
    programs = {file.stem: json.loads(file.read_text()) for file in files[part::PARTS]}
    refusals, folders = {}, []
    for key, about in programs.items():
        try:
            slice_, request = absent_chips.check_absent(CHIP, about["replicas"])
            module = expand_markers(about["text"], slice_.chip.platform)
            markers.convert(module)
        except DeviceError as error:
            refusals[key] = str(error)
            continue
        except UntransferableError as error:
            refusals[key] = f"{error.kind} cannot be sent to the host"
            continue
        folders.append(tmp_path / key)
        folders[-1].mkdir()
        (folders[-1] / "program.mlir").write_text(str(module))
        request |= {"name": about["name"], "replicas": about["replicas"], "parts": 1, "memory": slice_.chip.memory}
        (folders[-1] / "request.json").write_text(json.dumps(request))
    refusals |= answers(folders)
    unexpected = []
    for key, words in refusals.items():
        about = programs[key]
        group = f"programs of the tests, {'with' if about['calls_host'] else 'without'} host calls"
        what = next((what for pattern, what in REFUSED.items() if re.search(pattern, words, re.DOTALL)), "")
        note(CHIP, group, what, words)
        if words and not what:
            unexpected.append(f"{about['test']}: {words[:500]}")
    assert not unexpected, "\n".join(unexpected)
