"""Signs of other processes in an environment that does not tell this process its place among them.

Such a process would run alone without a word, and so would each of the others: every one of them trains a model of its
own and writes over the files of the others. The variables here are set by launchers whose place is not read, or are a
part of what a launcher sets whose place is read. A variable of one process alone is no sign.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping


def of_others(environ: Mapping[str, str]) -> str | None:
    """The name of a variable that says that there are other processes; None if none does."""
    return next((name for name, is_sign in _SIGNS.items() if is_sign(environ.get(name, "").strip())), None)


def _index(value: str) -> bool:
    return value.isascii() and value.isdecimal()


def _later(value: str) -> bool:
    """Whether it is the index of a process that is not the first one; 0 may be that of the only one."""
    return _index(value) and value.strip("0") != ""


def _several(value: str) -> bool:
    return _index(value) and len(value) < 10 and int(value) > 1


def _names(value: str) -> bool:
    """Whether it is a list of more than one host, as JSON or with commas."""
    with contextlib.suppress(ValueError, RecursionError):
        value = ",".join(map(str, json.loads(value))) if value.startswith("[") else value
    return len([name for name in value.split(",") if name.strip()]) > 1


def _elsewhere(value: str) -> bool:
    return value not in ("", "localhost", "127.0.0.1", "::1")


def _is_second_task(value: str) -> bool:
    """Whether it is a TF_CONFIG without a cluster, of a task that is not the first one."""
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(value)
        task = config.get("task") if isinstance(config, dict) else None
        return isinstance(task, dict) and _later(str(task.get("index")))
    return False


_SIGNS: dict[str, Callable[[str], bool]] = {
    "REPLICA_ENGINE_COORDINATOR": bool,
    "TF_CONFIG": _is_second_task,
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": bool,
    "JAX_COORDINATOR_ADDRESS": bool,
    "WORLD_SIZE": _several,
    "RANK": _index,
    "MASTER_ADDR": _elsewhere,
    "LOCAL_WORLD_SIZE": _several,
    "LOCAL_RANK": _later,
    "JOB_COMPLETION_INDEX": bool,  # an Indexed Job of Kubernetes, which does not tell how many there are
    "TPU_WORKER_HOSTNAMES": _names,
    "TPU_WORKER_ID": _later,
    "TPU_PROCESS_ADDRESSES": _names,
    "MEGASCALE_NUM_SLICES": _several,
    "PMI_SIZE": _several,  # MPICH, Intel MPI
    "PMI_RANK": _later,
    "PMIX_RANK": _later,  # PRRTE, and others that use PMIx
    "PALS_SIZE": _several,  # HPE Cray
    "MV2_COMM_WORLD_SIZE": _several,  # MVAPICH
    "FLUX_JOB_SIZE": _several,
    "JSM_NAMESPACE_SIZE": _several,  # jsrun of LSF
    "HOROVOD_SIZE": _several,
    "SM_HOSTS": _names,  # SageMaker
    "AWS_BATCH_JOB_NUM_NODES": _several,
}
