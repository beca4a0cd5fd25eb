"""Starts programs in processes of their own, with TensorFlow imported and not started: importing it takes seconds.

The argument is the descriptor of a listening socket. Each connection requests one program, which runs as the main
module of a fork of this process. The program ends as in any interpreter, except that the modules of TensorFlow are not
torn down. The program itself imports everything else, such as this library; jax is imported already if Keras does so.
"""

import atexit
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys

import quiet


def _serve(listener):
    """Forks a process for each requested program, and returns there: the path of the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the first forks only wait for programs, and nothing waits for them
    server = socket.socket(fileno=int(listener))
    while True:
        if sys.stdin in select.select([server, sys.stdin], [], [])[0]:  # the process that started this has ended
            sys.exit()
        if "tensorflow" not in sys.modules:
            _import()
        connection, _ = server.accept()
        with connection, connection.makefile("rw") as stream:
            request = json.loads(stream.readline())
            if os.fork():
                continue
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if pid := os.fork():
                _report(stream, pid)
        _enter(request)
        return request["program"]


def _import():
    gc.disable()  # the imported objects stay for ever
    own, others = set(sys.modules), []
    atexit.register(_keep, others)  # runs after all functions that are registered later
    with quiet.quiet_start():
        import keras  # noqa: F401
        import tensorflow as tf  # noqa: F401

    gc.freeze()  # programs need not look at these objects each time that they collect garbage
    gc.enable()
    others += [name for name in sys.modules if name not in own and not name.startswith(("jax", "_"))]


def _keep(names):
    """Keeps the interpreter from tearing down modules at its end, which takes half the time of a small program."""
    import ctypes  # the program has taken the place of this module's names
    import sys

    kept = [sys.modules.pop(name) for name in names if name in sys.modules]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _report(stream, pid):
    stream.write(f"{pid}\n")
    stream.flush()
    stream.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    stream.flush()
    os._exit(0)


def _enter(request):
    """Gives this process the files, signals, variables and arguments that the program was requested with."""
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        file = os.open(name, os.O_RDWR | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in what they start in the background
    faulthandler.register(signal.SIGUSR2)  # for a parent that waits too long
    for name in BEFORE - set(request["environment"]):
        os.environ.pop(name, None)
    os.environ.update(request["environment"])
    sys.argv[:] = [request["program"], *request["arguments"]]
    sys.path[0] = os.path.dirname(request["program"])


def _run(path):
    with open(path) as program:
        code = compile(program.read(), path, "exec")
    names = globals()
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names["__file__"], names["__doc__"] = path, None
    exec(code, names)


BEFORE = set(os.environ)
_run(_serve(*sys.argv[1:]))
