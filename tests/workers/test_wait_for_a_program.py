"""How a worker waits for the end of a program over several workers."""

import threading
import types

import pytest

pytest.importorskip("jax")


class EndsInTheSleep:
    """A job that does not fail, and a program in it that ends in the first sleep of the wait for it."""

    def __init__(self, clock):
        self.clock = clock
        self.failed = types.SimpleNamespace(wait=self.sleep)
        self.slept = 0.0

    def sleep(self, seconds):
        self.slept = seconds
        self.clock.now += 1.06 * seconds  # to be woken takes a while
        return False

    def is_ready(self):
        return self.slept > 0


class EndsAtTheThirdLook(threading.Event):
    """A program that has not ended yet twice, and the event of the thread that waits for it, which says how long."""

    def __init__(self):
        super().__init__()
        self.looks, self.pauses = 0, []

    def is_ready(self):
        self.looks += 1
        return self.looks > 2

    def wait(self, timeout=None):
        self.pauses.append(timeout)
        return False


@pytest.mark.parametrize(("calls_host", "sleeps"), [(False, False), (True, True)])
def test_the_wait_for_a_small_program_has_no_sleep_unless_it_calls_the_host(monkeypatch, calls_host, sleeps):
    """To be woken takes longer than the program; but a host call needs the interpreter lock."""
    from replica_engine.pjrt import executable as module

    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))
    executable = module.Executable.__new__(module.Executable)
    executable._took, executable._calls_host = 3e-4, calls_host
    executable._devices = types.SimpleNamespace(member=None)
    program = EndsAtTheThirdLook()
    assert executable._poll(program, program)
    assert [pause > 0 for pause in program.pauses] == [sleeps, sleeps]


def test_a_small_program_is_not_expected_to_take_as_long_as_the_sleep_that_it_ended_in(monkeypatch):
    from replica_engine.pjrt import executable as module

    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    executable = module.Executable.__new__(module.Executable)
    executable._took, executable._calls_host = 3e-3, False  # the first launch took long
    slept = []
    while executable._took > 1e-3 and len(slept) < 20:
        program = EndsInTheSleep(clock)
        executable._devices = types.SimpleNamespace(member=program)
        executable._poll(program, None)
        slept.append(program.slept)
    assert len(slept) < 10, slept
    assert slept == sorted(slept, reverse=True)
