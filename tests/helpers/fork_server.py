"""Programs in processes of their own that need not wait for TensorFlow to be imported. See `fork_server_main.py`.

`python fork_server.py PROGRAM ARGUMENTS` is one of them by another name: for the launcher, which starts workers itself.
It prints what the program prints, once that has ended, and ends as it does.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading

ADDRESS = "REPLICA_ENGINE_TEST_PROGRAMS"
"""The variable with the address of the server, which the processes of the tests share."""

# Read when TensorFlow, jaxlib and this library start: the server must not have them for a program that has not.
NOT_FOR_ALL = ("XLA_FLAGS", "TF_NUM_INTEROP_THREADS")
# What conftest.py sets so that programs compile quickly, and those that tests start too.
FOR_EACH = ("XLA_FLAGS", "TF_ENABLE_ONEDNN_OPTS")


class Server:
    """The process that starts them. It imports TensorFlow when the first one is asked for, which waits for that.

    Attributes:
        address: of its socket.
    """

    def __init__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="warm")  # a short path: those of sockets may not be long
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
            self._process.stdin.close()  # which ends it
        self._directory.cleanup()


class Programs:
    """Starts them.

    Args:
        address: of the server.
    """

    def __init__(self, address):
        self._address = address

    def start(self, program, *arguments, env=None):
        """Starts a program, which is text, or the path of a file: as `subprocess.Popen` with pipes does.

        What makes it compile quickly is in its environment, also where `env` has not got it.
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

    def run(self, program, *arguments, env=None, timeout=100):
        """Runs it to its end: as `subprocess.run` with `capture_output=True, text=True`."""
        process = self.start(program, *arguments, env=env)
        try:
            stdout, stderr = process.communicate(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([str(program), *arguments], process.returncode, stdout, stderr)


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
            "environment": env,
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
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)
            self.communicate(10)

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
