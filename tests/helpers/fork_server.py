"""Runs programs in processes of their own that need not import TensorFlow first. See `fork_server_main.py`.

`python fork_server.py PROGRAM ARGUMENTS` runs one such program, for the launcher, which starts worker processes itself.
When the program has ended, the command prints the program's output and exits with its status.
"""

import ast
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading

ADDRESS = "REPLICA_ENGINE_TEST_PROGRAMS"
"""The variable with the address of the server, which the processes of the tests share."""

# TensorFlow, jaxlib and this library read these when they start. So the server must not pass on its own values.
NOT_FOR_ALL = ("XLA_FLAGS", "TF_NUM_INTEROP_THREADS")
# conftest.py sets these so that programs compile quickly; programs that tests start need them too.
FOR_EACH = ("XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS", "PYTEST_CURRENT_TEST", "REACH")


class Server:
    """The process that starts programs. It imports TensorFlow when the first program is requested.

    Attributes:
        address: the path of its socket.
    """

    def __init__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="warm")  # the path of a socket must be short
        self.address = os.path.join(self._directory.name, "socket")
        env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_ALL}
        script = pathlib.Path(__file__).with_name("fork_server_main.py")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, script, str(listener.fileno())],
                env=env,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def close(self):
        with self._process:
            self._process.stdin.close()  # the process ends when its input is closed
        self._directory.cleanup()


class Programs:
    """Starts programs through the server.

    Args:
        address: the address of the server.
    """

    def __init__(self, address):
        self._address = address

    def value(self, function, *arguments, env=None):
        """Calls a function of a module of the tests in a process of its own; arguments and result are plain values.

        What a test reads of a whole process, such as its memory, depends on no other test so.
        """
        tests = str(pathlib.Path(__file__).parents[1])
        call = f"importlib.import_module({function.__module__!r}).{function.__qualname__}(*{arguments!r})"
        done = self.run(f"import importlib, sys\nsys.path.insert(1, {tests!r})\nprint(repr({call}))\n", env=env)
        assert not done.returncode, done.stderr
        return ast.literal_eval(done.stdout.splitlines()[-1])

    def start(self, program, *arguments, env=None):
        """Starts a program, given as text or as the path of a file, like `subprocess.Popen` with pipes.

        The variables in `FOR_EACH` are added to its environment where `env` lacks them.
        """
        directory = pathlib.Path(tempfile.mkdtemp(dir=os.path.dirname(self._address)))
        if isinstance(program, str):
            program, text = directory / "program.py", program
            program.write_text(text)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        quickly = {name: os.environ[name] for name in FOR_EACH if name in os.environ}
        env = quickly | dict(os.environ if env is None else env)
        return Program(connection, program, arguments, env, directory)

    def run(self, program, *arguments, env=None, timeout=500):
        """Runs a program to its end, like `subprocess.run` with `capture_output=True, text=True`."""
        process = self.start(program, *arguments, env=env)
        try:
            stdout, stderr = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([str(program), *arguments], process.returncode, stdout, stderr)


_GLOO = re.compile(r"^\[Gloo\] .*\n", re.MULTILINE)  # jaxlib's C++ code prints it when workers have found each other


class Program:
    """A program that was started.

    Attributes:
        pid: the id of its process.
        returncode: its exit status; None while it runs.
    """

    def __init__(self, connection, program, arguments, env, directory):
        self._connection, self._files = connection, [directory / "stdout", directory / "stderr"]
        for file in self._files:
            file.touch()
        request = {
            "program": str(program),
            "arguments": [str(one) for one in arguments],
            "environment": env,
            "stdout": str(self._files[0]),
            "stderr": str(self._files[1]),
        }
        connection.sendall(f"{json.dumps(request)}\n".encode())
        self.pid, self.returncode = int(self._line()), None

    def communicate(self, timeout=None):
        """Waits for the end of the program; returns its standard output and its standard error."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._line())
            except TimeoutError:
                os.kill(self.pid, signal.SIGUSR2)  # prints the stacks of its threads, see `fork_server_main.py`
                threading.Event().wait(2.0)
                error = subprocess.TimeoutExpired("program", timeout, *(file.read_bytes() for file in self._files))
                for name, text in (("printed", error.output), ("wrote to stderr", error.stderr)):
                    error.add_note(f"It {name}:\n{text.decode(errors='replace')[-8000:]}")
                raise error from None
            self._connection.close()
        out, err = (file.read_text() for file in self._files)
        return _GLOO.sub("", out), err

    def kill(self):
        """Ends the program, if it still runs."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)
            self.communicate(300)

    def _line(self):
        line = b""
        while not line.endswith(b"\n"):
            byte = self._connection.recv(1)
            assert byte, "the process that waits for the program ended"
            line += byte
        return line


def _main(program, *arguments):
    process = Programs(os.environ[ADDRESS]).start(pathlib.Path(program), *arguments)
    for stream, text in zip((sys.stdout, sys.stderr), process.communicate(), strict=True):
        stream.write(text)
        stream.flush()
    if process.returncode < 0:
        os.kill(os.getpid(), -process.returncode)
    sys.exit(process.returncode)


if __name__ == "__main__":
    _main(*sys.argv[1:])
