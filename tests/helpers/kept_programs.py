"""Writes each program that the tests compile to a folder, for `tests/aot`, which compiles them for other chips.

`KEPT_PROGRAMS=FOLDER pytest tests/xla` writes them; equal programs are one file.
"""

import functools
import hashlib
import json
import os
import pathlib

from replica_engine.pjrt.executable import Executable

FOLDER = os.environ.get("KEPT_PROGRAMS") and os.path.abspath(os.environ["KEPT_PROGRAMS"])  # tests change the folder
"""The folder; None if no programs are kept."""


def keep_each_program():
    """Keeps each program that is compiled from now on."""
    original, folder = Executable.__init__, pathlib.Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)

    @functools.wraps(original)
    def init(self, program, devices, results, host_calls=(), *args, name=("", ""), **kwargs):
        key = hashlib.sha256(f"{devices.replicas} {program}".encode()).hexdigest()[:16]
        about = {
            "name": name[0],
            "replicas": devices.replicas,
            "calls_host": bool(host_calls),
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0],
            "text": program,
        }
        (folder / f"{key}.json").write_text(json.dumps(about))
        original(self, program, devices, results, host_calls, *args, name=name, **kwargs)

    Executable.__init__ = init
