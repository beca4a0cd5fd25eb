"""How a worker waits for the end of a program over several workers."""

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
