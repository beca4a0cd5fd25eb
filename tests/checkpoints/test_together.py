"""What the workers of a save do when one of them fails. They are threads here, each with its part of one variable."""

import queue
import threading

import numpy as np
import pytest
import tensorflow as tf

from replica_engine.checkpoints import checkpoint_files, save
from replica_engine.errors import CheckpointError


class Job:
    """What the workers tell each other."""

    def __init__(self):
        self._told = {}
        self._changed = threading.Condition()

    def tell(self, name, value):
        with self._changed:
            self._told[name] = value
            self._changed.notify_all()

    def hear(self, name):
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._told, timeout=300), f"nobody told {name}"
            return self._told[name]


class Turn:
    together, size = True, 2

    def __init__(self, job, worker):
        self.worker, self.writes = worker, worker == 0
        self.tell, self.hear = job.tell, job.hear

    def exchange(self, what, value):
        self.tell(f"{what} {self.worker}", value)
        return [self.hear(f"{what} {worker}") for worker in range(self.size)]


def save_together(paths, asynchronous=False, own=False):
    """The errors of both workers, or None; each writes one half of eight rows, at a path of its own if it has one."""
    job, errors = Job(), queue.Queue()

    def worker(number):
        taken = checkpoint_files.Snapshot(together=True, asynchronous=asynchronous)
        rows = [checkpoint_files.SavedValue("w", f"8 {4 * number},4", tf.constant(np.arange(8.0)[4 * number :][:4]))]
        taken.bundles = [[*rows, *([checkpoint_files.SavedValue("step", "", tf.constant(number))])]]
        turn = Turn(job, number)
        turn.writes |= own
        try:
            save._begin(paths[number], turn)
            save._write(taken, paths[number], lambda writes: None, turn, asynchronous)
        except CheckpointError as error:
            errors.put((number, str(error)))

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return dict(sorted(errors.queue))


@pytest.fixture
def path(tmp_path):
    """A prefix at which a complete checkpoint is already."""
    checkpoint_files.write([checkpoint_files.SavedValue("w", "", tf.zeros([8], tf.float64))], str(tmp_path / "ckpt"))
    return str(tmp_path / "ckpt")


def value(path):
    return tf.train.load_variable(path, "w").tolist()


def test_each_writes_its_part(path):
    assert save_together([path, path]) == {}
    assert value(path) == list(range(8))
    assert tf.train.load_variable(path, "step") == 0  # the chief's
    assert not tf.io.gfile.exists(path + checkpoint_files.TEMPORARY)


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_fails_all_fail_and_what_was_there_stays(failing, path, monkeypatch):
    write = checkpoint_files.write

    def write_or_fail(rows, prefix):
        if f"part-{failing}" in prefix:
            raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")
        write(rows, prefix)

    monkeypatch.setattr(checkpoint_files, "write", write_or_fail)
    errors = save_together([path, path])
    assert set(errors) == {0, 1}
    assert all("No space left on device" in text for text in errors.values())
    assert value(path) == [0.0] * 8
    assert not tf.io.gfile.exists(path + checkpoint_files.TEMPORARY)


def test_a_chief_that_cannot_begin_tells_the_others(tmp_path):
    (tmp_path / "file").touch()
    path = str(tmp_path / "file" / "ckpt")
    errors = save_together([path, path])
    assert set(errors) == {0, 1}
    assert all("could not be written" in text for text in errors.values())


@pytest.mark.parametrize("failing", [0, 1])
def test_workers_with_paths_of_their_own_fail_together_before_any_value_is_taken(failing, tmp_path, monkeypatch):
    """The state of a training, which is a value, is exchanged by all of them."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(Turn, "together", False)
    monkeypatch.setattr(save, "_write", lambda *_: pytest.fail("it began"))
    paths = [str(tmp_path / ("file" if worker == failing else "own") / f"ckpt {worker}") for worker in range(2)]
    errors = save_together(paths, own=True)
    assert set(errors) == {0, 1}
    assert errors[0] == errors[1]
    assert paths[failing] in errors[0]


def test_a_folder_that_is_not_shared_is_named(path, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "ckpt"
    (tmp_path / "elsewhere" / f"ckpt{checkpoint_files.TEMPORARY}").mkdir(parents=True)
    errors = save_together([path, str(elsewhere)])
    assert "the chief does not find there what worker 1 has written" in errors[0]
    assert errors[1] == errors[0]
    assert value(path) == [0.0] * 8
