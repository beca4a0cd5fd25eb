"""That a program started by `Programs` is like one started by itself."""

import os
import signal
import subprocess
import textwrap

import pytest


def test_it_is_a_main_module_of_a_process_of_its_own(programs):
    program = """
        import inspect, os, sys

        def fn():
            return 1

        print(__name__, sys.argv[1:], os.getpid() != os.getppid(), os.environ["MINE"], "TMPDIR" in os.environ)
        print(sys.modules["__main__"].fn is fn, inspect.getsource(fn).splitlines()[0], sorted(globals())[-4:])
        print("replica_engine" in sys.modules, "tensorflow" in sys.modules, file=sys.stderr)
    """
    done = programs.run(textwrap.dedent(program), "a", 2, env={"MINE": "yes"})
    assert done.stdout.splitlines() == [
        "__main__ ['a', '2'] True yes False",
        "True def fn(): ['fn', 'inspect', 'os', 'sys']",
    ]
    assert (done.stderr, done.returncode) == ("False True\n", 0)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError('mine')", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_how_it_ends_is_known(programs, end, code):
    done = programs.run(f"import atexit, os, signal, sys\natexit.register(print, 'at exit')\n{end}\n")
    assert done.returncode == code
    assert done.stdout == ("at exit\n" if code in (3, 1, -signal.SIGINT) else "")
    assert ("ValueError: mine" in done.stderr) == (code == 1)


def test_one_that_takes_too_long_is_killed(programs):
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run("import time\nprint('pid', flush=True)\ntime.sleep(100)\n", timeout=0.1)
    process = programs.start("import time\ntime.sleep(100)\n")
    process.kill()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
