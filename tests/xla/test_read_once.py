"""What another thread writes is read once: it may change between two looks, as here it does after each of them."""

import threading

import numpy as np
import pytest

from replica_engine.engine import Replica, State, SyncPoint
from replica_engine.pjrt.device_group import _left, let_go
from replica_engine.pjrt.devices import device_group
from replica_engine.pjrt.executable import Executable
from replica_engine.pjrt.partitioned_group import PartitionedGroup
from replica_engine.pjrt.stablehlo.partition_local import ReplicaMesh

PROGRAM = """module @replica_body attributes {} {
  func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %y = stablehlo.add %x, %x : tensor<2xf32>
    return %y : tensor<2xf32>
  }
}
"""


class Watched:
    """An array that ends the program for another thread: once a look has found it ready, that thread resets it."""

    def __init__(self, array, devices, ended):
        self._array, self._devices, self._ended = array, devices, ended
        self._is_first = True

    def is_ready(self):
        self._array.block_until_ready()
        if self._is_first:
            self._is_first = False
            thread = threading.Thread(target=self._devices.wait_for_interrupted)
            thread.start()
            thread.join()
            self._ended.append(self._devices.running)
        return True

    def block_until_ready(self):
        self._array.block_until_ready()


@pytest.mark.parametrize("left", [None, threading.Event()], ids=["without a limit", "with a limit"])
def test_another_thread_sees_the_end_of_a_program_first(left):
    devices = device_group("cpu", 2)
    executable = Executable(PROGRAM, devices, [((2,), np.dtype(np.float32))])
    for _ in range(2):
        ended = []
        with devices.in_flight:
            (result,) = executable.launch([devices.put([np.ones(2, np.float32)])])
            devices.running = watched = Watched(result, devices, ended)
            if left is None:
                watched.is_ready()  # between the launch and the wait
            executable.wait(left)
        assert ended == [None]
        assert devices.running is None
        assert not devices.interrupted
        assert [each.tolist() for each in devices.fetch_all(result)] == [[2.0, 2.0]] * 2


class Ready:
    """What is running, and has ended."""

    def __init__(self, parts):
        self._arrays = [self] * parts

    def is_ready(self):
        return True


@pytest.mark.parametrize("mesh", [None, ReplicaMesh((("parts", 2),), None)], ids=["one device", "two devices"])
@pytest.mark.parametrize("looks_at", ["has_ended", "ends_within", "is_left_to_a_thread", "wait_for_interrupted"])
def test_a_group_whose_program_is_reset_or_replaced_after_each_look(mesh, looks_at):
    base = type(device_group("cpu", 2)) if mesh is None else PartitionedGroup
    looks, values = [], [Ready(2), None]  # alternately

    class Changing(base):
        @property
        def running(self):
            values.reverse()
            looks.append(values[0])
            return values[0]

        @running.setter
        def running(self, value):
            pass

    plain = device_group("cpu", 2)
    group = Changing("cpu", plain.devices) if mesh is None else Changing("cpu", plain.devices, mesh)
    for _ in range(2):  # one look finds a program, the other finds none
        group.interrupted = True
        answers = {
            "has_ended": lambda: group.has_ended(0),
            "ends_within": lambda: group.ends_within(0.0),
            "is_left_to_a_thread": lambda: not group.is_left_to_a_thread,
            "wait_for_interrupted": group.wait_for_interrupted,
        }
        assert answers[looks_at]()
    assert looks


def test_devices_that_are_abandoned_while_others_are_forgotten():
    """A look at one group lets another thread add a group."""

    class Group:
        def __init__(self, others=()):
            self._others = others

        def ends_within(self, seconds):
            for each in self._others:
                _left[each] = False
            return True

    try:
        _left[Group([Group() for _ in range(100)])] = False
        let_go()
        let_go()
        assert not [each for each in _left if isinstance(each, Group)]
    finally:
        for each in [each for each in _left if isinstance(each, Group)]:
            del _left[each]


@pytest.mark.parametrize("first", list(State))
@pytest.mark.parametrize("then", [State.RUNNING, State.PAUSED, State.FINISHED])
def test_a_row_is_about_one_state(first, then):
    class Going(Replica):
        states = iter(())

        @property
        def state(self):
            return next(self.states, then)

        @state.setter
        def state(self, state):
            pass

    class Round:
        replicas = (None, None)

    replica = Going(Round(), 0, "CPU:0", threading.current_thread())
    replica.last = SyncPoint("all_reduce", "train.py", 3, "step")
    replica.states = iter([first])
    row = replica.timed_row()
    assert row.state == first.value
    assert bool(row.stack) == (first in (State.RUNNING, State.UNWINDING))
    assert (row.seconds is None) == (first in (State.IDLE, State.FINISHED, State.FAILED, State.UNWOUND))
