"""Programs in processes of their own that need not wait for TensorFlow to be imported. See `fork_server_main.py`."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading

# Read when TensorFlow, jaxlib and this library start: the server must not have them for a program that has not.
NOT_FOR_ALL = ("XLA_FLAGS", "TF_NUM_INTEROP_THREADS")


class Programs:
    """Starts them. The first one waits for the import."""

    def __init__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="warm")  # a short path: those of sockets may not be long
        self._server = None

    def start(self, program, *arguments, env=None):
        """Starts a program, which is text, or the path of a file: as `subprocess.Popen` with pipes does."""
        directory = pathlib.Path(tempfile.mkdtemp(dir=self._directory.name))
        if isinstance(program, str):
            program, text = directory / "program.py", program
            program.write_text(text)
        return Program(self._connect(), program, arguments, os.environ if env is None else env, directory)

    def run(self, program, *arguments, env=None, timeout=100):
        """Runs it to its end: as `subprocess.run` with `capture_output=True, text=True`."""
        process = self.start(program, *arguments, env=env)
        try:
            stdout, stderr = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([str(program), *arguments], process.returncode, stdout, stderr)

    def close(self):
        if self._server is not None:
            with self._server:
                self._server.stdin.close()  # which ends it
        self._directory.cleanup()

    def _connect(self):
        path = os.path.join(self._directory.name, "socket")
        if self._server is None:
            env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_ALL}
            script = pathlib.Path(__file__).with_name("fork_server_main.py")
            self._server = subprocess.Popen(
                [sys.executable, script, path],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            assert self._server.stdout.readline() == b"ready\n", "the server of programs ended"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return connection


class Program:
    """A program that was started.

    Attributes:
        pid: of its process.
        returncode: None as long as it runs.
    """

    def __init__(self, connection, program, arguments, env, directory):
        self._connection, self._files = connection, [directory / "stdout", directory / "stderr"]
        for file in self._files:
            file.touch()
        request = {
            "program": str(program),
            "arguments": [str(one) for one in arguments],
            "environment": dict(env),
            "stdout": str(self._files[0]),
            "stderr": str(self._files[1]),
        }
        connection.sendall(f"{json.dumps(request)}\n".encode())
        self.pid, self.returncode = int(self._line()), None

    def communicate(self, timeout=None):
        """Waits for its end: what it printed and its errors."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._line())
            except TimeoutError:
                os.kill(self.pid, signal.SIGUSR2)  # the stacks of its threads, see `fork_server_main.py`
                threading.Event().wait(2.0)
                error = subprocess.TimeoutExpired("program", timeout, *(file.read_bytes() for file in self._files))
                for name, text in (("printed", error.output), ("wrote to stderr", error.stderr)):
                    error.add_note(f"It {name}:\n{text.decode(errors='replace')[-8000:]}")
                raise error from None
            self._connection.close()
        return tuple(file.read_text() for file in self._files)

    def kill(self):
        """Ends it, if it has not ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.communicate(10)

    def _line(self):
        line = b""
        while not line.endswith(b"\n"):
            byte = self._connection.recv(1)
            assert byte, "the process that waits for the program ended"
            line += byte
        return line
