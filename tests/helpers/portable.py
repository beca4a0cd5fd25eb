"""Whether plugins of PJRT, such as those of TPUs and GPUs, take each program that a test compiles.

Programs for CPU devices are compiled in the process, from any operation that jaxlib knows. A plugin gets a program as a
portable artifact of StableHLO. To write one needs no plugin.
"""

import contextlib
import functools

from jaxlib import _jax
from jaxlib.mlir.dialects import stablehlo

from replica_engine.pjrt import executable
from replica_engine.pjrt.stablehlo import markers
from replica_engine.pjrt.stablehlo.jax_functions import KernelError
from replica_engine.pjrt.stablehlo.markers import UntransferableError

refused = []  # what jaxlib said of programs that are not portable, since somebody last took them out

_VERSION = stablehlo.get_current_version()
_seen = set()


def artifact(program, transfers=False):
    """A program as it is handed to a plugin, for TPUs with `transfers` in place of host calls."""
    module = markers.expand_markers(program, "gpu")
    if transfers:
        markers.convert(module)
    return _jax.mlir.serialize_portable_artifact(str(module), _VERSION)


def look_at_each_program():
    """Writes an artifact of each program that is compiled from now on."""
    original = executable.expand_markers

    @functools.wraps(original)
    def expand_markers(program, *args, **options):
        if hash(program) not in _seen:
            _seen.add(hash(program))
            try:
                with contextlib.suppress(KernelError):  # a kernel for other chips, which the error says
                    artifact(program)
                if markers.HOST_CALL in program:
                    with contextlib.suppress(UntransferableError):  # a program with such a call is refused for TPUs
                        artifact(program, transfers=True)
            except Exception as error:
                refused.append(f"{type(error).__name__}: {error}\n{program[:2000]}")
        return original(program, *args, **options)

    executable.expand_markers = expand_markers
