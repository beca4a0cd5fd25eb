"""Compiles programs for chips that are not there: the process that `absent_chips` starts.

    python -m replica_engine.pjrt.absent_child FOLDER ...

A folder has `request.json` and `program.mlir`. What the compiler says goes to `answer.json`. If the process dies,
`absent_chips` says so, with what was printed here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import numpy as np

from replica_engine.pjrt import jaxlib
from replica_engine.pjrt.plan import make_plan

# Without a GPU to try tiles on, XLA takes one, which does not suit all products. Then cuBLAS may have them.
_NO_TILES = "Couldn't find output tile sizes"


def main(folder: pathlib.Path) -> None:
    """Answers the request in a folder."""
    request = json.loads((folder / "request.json").read_text())
    try:
        answer = _answer(request, folder)
    except jaxlib.RUNTIME_ERRORS as error:
        answer = {"error": str(error)}
    whole = folder / "answer.part"  # on a full disk, or if the process is killed now, there must be no half an answer
    whole.write_text(json.dumps(answer))
    whole.rename(folder / "answer.json")


def _answer(request: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    replicas, parts = request["replicas"], request["parts"]
    if request["platform"] == "tpu":
        devices = jaxlib.absent_tpus(request["topology"], **request["options"])
    else:
        devices = jaxlib.absent_gpus(request["library"], request["target"], request["topology"])
    devices = devices[: replicas * parts]
    ids = np.array([device.id for device in devices])
    options = jaxlib.compile_options(ids.reshape((replicas, 1) if parts == 1 else (1, replicas * parts)), parts > 1)
    program, on = (folder / "program.mlir").read_text(), jaxlib.DeviceList(tuple(devices))

    def compiled(extra: list[tuple[str, object]]) -> Any:
        options.env_option_overrides = [*map(tuple, request["compile_options"]), *extra]
        with jaxlib.program_context():
            module = jaxlib.ir.Module.parse(program)
            return devices[0].client.compile(module, executable_devices=on, compile_options=options)

    began = time.perf_counter()
    try:
        made = compiled([])
    except jaxlib.RUNTIME_ERRORS as error:
        if _NO_TILES not in str(error):
            raise
        made = compiled([("xla_gpu_enable_triton_gemm", False)])
    seconds = time.perf_counter() - began
    plan = make_plan(made, request["name"], replicas, request["devices"], request["memory"], seconds, parts)
    return {"plan": dataclasses.asdict(plan)}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(pathlib.Path(argument))
    sys.stdout.flush()
    os._exit(0)  # libtpu takes seconds to leave, and may fail at it
