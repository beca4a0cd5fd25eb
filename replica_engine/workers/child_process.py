"""How this library starts its own child processes: so that no file of the current folder runs in them.

`python -m` and `python -c` put the current folder before the standard library, and an empty entry of PYTHONPATH is the
current folder too. A file there that is named like a module of the standard library would run in the process that has
the token of the job. `python -P` does nothing about PYTHONPATH. So a child starts isolated, with the standard library
only. Then it gets the folders of this process behind that: what it imports besides the standard library is what this
process would import.

The user's own script is not started so: its folder stays first, as with `python script.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

_SEARCH_PATH = "REPLICA_ENGINE_SEARCH_PATH"
_FOLDER = str(pathlib.Path(__file__).parents[2])  # that has the package, if this process found it in another way

# Isolated (-I): no current folder, no PYTHON... variables. Without `site` (-S): nothing but the standard library yet.
# `site` imports modules that are not of the standard library, such as sitecustomize, so our folders come after it.
_PROGRAM = (
    "import json, os, runpy, site, sys; "
    "behind = len(sys.path); "
    "site.main(); "
    f"sys.path[behind:behind] = json.loads(os.environ.pop({_SEARCH_PATH!r})); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def arguments(module: str) -> tuple[str, ...]:
    """The arguments of Python that run a module as a child process of ours, in what `environment` returns.

    Args:
        module: the module. It is run as by `python -m`, with the arguments that follow.
    """
    return ("-I", "-S", "-c", _PROGRAM, module)


def environment() -> dict[str, str]:
    """The variables of such a child process: those of this process, and the folders that this one imports from."""
    # An empty entry is the current folder, which Python adds in a console and with `-c`.
    folders = [os.path.abspath(each) for each in sys.path if isinstance(each, str) and each]
    found = folders if _FOLDER in folders else [_FOLDER, *folders]
    return {**os.environ, _SEARCH_PATH: json.dumps(found)}
