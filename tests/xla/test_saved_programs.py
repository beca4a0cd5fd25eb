"""Programs in a folder: a second process does not compile, and a folder that is broken or full fails no program."""

import concurrent.futures
import contextlib
import errno
import functools
import hashlib
import logging
import os
import pathlib
import subprocess
import tempfile
import textwrap
import unittest.mock
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import values
from jax._src import compilation_cache, lru_cache

from replica_engine import errors, xla
from replica_engine.pjrt import executable, program_folder
from replica_engine.pjrt.program_folder import CacheFolder
from replica_engine.process import setup
from replica_engine.xla.body import LaunchLimits
from replica_engine.xla.stages import saved_programs

X = [[tf.constant([1.0, 2.0])], [tf.constant([3.0, 4.0])]]
OF_THREE = [[tf.zeros([3])]] * 2

TRAINS = """
    import sys
    import tensorflow as tf
    from replica_engine import TPUStrategy, xla

    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])

    def step(x):
        weight.assign_add(xla.all_reduce(x, "SUM"))
        seen = xla.outside_compilation(lambda y: y + 0.5, weight.read_value())
        return tf.reduce_sum(seen)

    for _ in range(2):
        results = strategy.run(step, args=(tf.constant([1.0, 1.0]),))
    print([float(each) for each in strategy.experimental_local_results(results)])
    now = xla.counts()
    print(now.lowerings, now.compiles, now.cache_hits)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder, which is the cache folder of this test."""
    monkeypatch.setattr(saved_programs, "_told", set())
    saved_programs._opened.cache_clear()
    path = tmp_path / "programs"
    xla.set_cache_dir(path)
    return path


def compiled(fn, inputs=X):
    """A function compiled, with how many programs were compiled and how many read for it."""
    before = xla.counts()
    program = xla.lower(fn, inputs).compile()
    used = xla.counts() - before
    return program, (used.compiles, used.cache_hits)


def double(x):
    return 2 * x


def test_a_second_process_lowers_and_compiles_nothing(programs, tmp_path):
    environment = os.environ | {"REPLICA_ENGINE_CACHE_DIR": str(tmp_path / "other")}

    def start():
        done = programs.run(textwrap.dedent(TRAINS), env=environment)
        assert done.returncode == 0, done.stderr
        results, counted = done.stdout.splitlines()
        return results, tuple(map(int, counted.split()))

    results, (lowerings, compiles, hits) = start()
    assert results == "[12.0, 12.0]"
    assert lowerings > 0
    assert compiles > 0
    assert hits == 0
    assert start() == (results, (0, 0, compiles))


def test_a_program_that_is_read_does_the_same_and_donates():
    variable = tf.Variable([1.0, 2.0])

    def step(x):
        variable.assign_add(xla.all_reduce(x, "SUM"))
        return variable.read_value()

    first, used = compiled(step)
    assert used == (1, 0)
    assert values(first(X)) == [[5.0, 8.0]] * 2
    second, used = compiled(step)
    assert used == (0, 1)
    assert values(second(X)) == [[9.0, 14.0]] * 2
    assert first.executable.bytes_needed == second.executable.bytes_needed


def test_a_program_that_is_read_calls_this_process():
    def step(x):
        fn = xla.returns(tf.TensorSpec([2], tf.float32))(lambda y: np.asarray(y) + seen)
        return xla.outside_compilation(fn, x)

    seen = 1.0
    assert values(compiled(step)[0](X)) == [[2.0, 3.0], [4.0, 5.0]]
    seen = 10.0
    second, used = compiled(step)
    assert used == (0, 1)
    assert values(second(X)) == [[11.0, 12.0], [13.0, 14.0]]


@pytest.mark.parametrize("others", ["have it", "lack it", "do not come"])
def test_workers_with_gpus_read_a_program_only_together(others, monkeypatch, caplog):
    """The bodies' names are not exchanged: workers may call one program by different names."""
    asked = []

    class Member:
        def watched(self, what, warn_after):
            return contextlib.nullcontext()

        def exchange(self, name, value, patience):
            asked.append((name, value, patience))
            return {"have it": [True, True], "lack it": [True, False], "do not come": None}[others]

    text = "module {}"
    limits = LaunchLimits(timeout=3.0)
    program = SimpleNamespace(name="step", body=SimpleNamespace(limits=limits))
    devices = SimpleNamespace(member=Member(), platform="gpu")
    monkeypatch.setattr(saved_programs, "circumstances", lambda devices: {})
    monkeypatch.setattr(saved_programs, "_read", lambda folder, key, make: "read")
    monkeypatch.setattr(saved_programs, "_write", lambda *given: None)
    monkeypatch.setattr(saved_programs, "_taken", lambda program: {})
    made = SimpleNamespace(serialized=lambda: None)
    find = functools.partial(saved_programs.found_or_compiled, text, program, devices, lambda data: made, together=True)
    with caplog.at_level(logging.INFO, "replica_engine"):
        if others == "do not come":
            with pytest.raises(errors.WorkersMissingError, match="within 3 s"):
                find()
        else:
            assert find() == ("read" if others == "have it" else made)
            assert ("another worker" in caplog.text) == (others == "lack it")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert asked == [(f"what the cache folders have of the program {digest}", True, 3.0)]


def lowered(fn, inputs=X):
    """The text of a function, and how often it was lowered for that."""
    before = xla.counts()
    text = xla.lower(fn, inputs).as_text()
    return text, (xla.counts() - before).lowerings


def test_a_graph_is_lowered_once():
    weight, other = tf.Variable([1.0, 2.0]), tf.Variable(1.0)
    text, times = lowered(lambda x: x * weight)
    assert times == 1
    assert lowered(lambda x: x * weight) == (text, 0)
    assert lowered(lambda x: x * other)[1] == 1
    assert lowered(lambda x: x + weight)[1] == 1
    assert lowered(lambda x: x * weight, [[tf.constant([1.0])]] * 2)[1] == 1


def test_a_graph_with_another_inner_function_is_lowered_again():
    def loop(by):
        return lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * by), (0, x))[1]

    assert [lowered(loop(by))[1] for by in (2.0, 3.0)] == [1, 1]


def test_a_broken_text_is_lowered_again(folder, caplog):
    text, _ = lowered(double)
    (file,) = folder.glob("replica_engine.text_double-*-cache")
    file.write_bytes(b"?")
    assert lowered(double) == (text, 1)
    assert "is broken" in caplog.text
    assert lowered(double) == (text, 0)


def test_no_folder_means_no_files(folder):
    xla.set_cache_dir(None)
    assert [compiled(double)[1] for _ in range(2)] == [(1, 0)] * 2
    assert not folder.exists()


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    saved_programs._chosen.clear()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    compiled(double)
    assert list((tmp_path / "jax").glob("*-cache"))
    monkeypatch.setenv("REPLICA_ENGINE_CACHE_DIR", str(tmp_path / "ours"))
    assert compiled(double)[1] == (1, 0)
    assert list((tmp_path / "ours").glob("*-cache"))
    xla.set_cache_dir(None)  # wins over both
    assert compiled(double)[1] == (1, 0)


@pytest.mark.parametrize("variable", ["REPLICA_ENGINE_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR", None])
class TestPaths:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setattr(setup, "_BEGAN_IN", str(tmp_path))

    def choose(self, path, variable, monkeypatch):
        saved_programs._chosen.clear()
        if variable is None:
            xla.set_cache_dir(path)
        else:
            monkeypatch.setenv(variable, path)

    def test_an_address_is_warned_of_once_and_makes_no_folder(self, tmp_path, monkeypatch, caplog, variable):
        self.choose("gs://bucket/programs", variable, monkeypatch)
        assert [compiled(double)[1] for _ in range(2)] == [(1, 0)] * 2
        assert not list(tmp_path.iterdir())
        assert caplog.text.count("gs://bucket/programs is an address") == 1

    def test_the_home_folder(self, tmp_path, monkeypatch, variable):
        self.choose("~/programs", variable, monkeypatch)
        compiled(double)
        assert list((tmp_path / "home" / "programs").glob("*-cache"))

    def test_the_current_folder_may_change(self, tmp_path, monkeypatch, variable):
        self.choose("programs", variable, monkeypatch)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")  # before the first program, as programs that hydra starts do
        compiled(double)
        assert list((tmp_path / "programs").glob("*-cache"))
        monkeypatch.chdir(tmp_path)
        assert compiled(double)[1] == (0, 1)


def levels(caplog):
    """The levels of what this library has logged; TensorFlow may warn, too."""
    return [record.levelname for record in caplog.records if record.name == "replica_engine"]


@pytest.fixture
def file(folder):
    """The file of a program in the folder."""
    compiled(double)
    (file,) = folder.glob("replica_engine_double-*-cache")
    return file


@pytest.mark.parametrize("damage", [b"", b"no program at all"], ids=["empty", "other bytes"])
def test_a_broken_file_is_replaced(file, caplog, damage):
    file.write_bytes(damage)
    program, used = compiled(double)
    assert used == (1, 0)
    assert values(program(X)) == [[2.0, 4.0], [6.0, 8.0]]
    assert levels(caplog).count("WARNING") == 1
    assert compiled(double)[1] == (0, 1)
    file.write_bytes(damage)
    compiled(double)
    assert levels(caplog).count("WARNING") == 1  # of one file once


def test_one_changed_byte_is_noticed(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert compiled(double)[1] == (1, 0)


def test_a_file_that_is_whole_but_not_a_program_is_replaced(folder, file, caplog):
    CacheFolder(folder).write(file.name.removesuffix("-cache"), b"something else", 1.0, {})
    assert compiled(double)[1] == (1, 0)
    assert "is broken" in caplog.text
    assert compiled(double)[1] == (0, 1)


def failing(number):
    return unittest.mock.Mock(side_effect=OSError(number, os.strerror(number)))


def test_a_full_disk_leaves_no_partial_file(folder, caplog, monkeypatch):
    monkeypatch.setattr(program_folder.os, "replace", failing(errno.ENOSPC))
    program, used = compiled(double)
    assert used == (1, 0)
    assert values(program(X)) == [[2.0, 4.0], [6.0, 8.0]]
    assert "No space left on device" in caplog.text
    assert not list(folder.iterdir())
    compiled(lambda x: 3 * x)
    assert levels(caplog).count("WARNING") == 1


def test_a_read_only_folder_is_read(folder, caplog, monkeypatch):
    compiled(double)
    monkeypatch.setattr(tempfile, "mkstemp", failing(errno.EROFS))
    saved_programs._opened.cache_clear()
    assert compiled(double)[1] == (0, 1)
    assert "WARNING" not in levels(caplog)
    assert compiled(lambda x: 3 * x)[1] == (1, 0)
    assert "Read-only file system" in caplog.text


def test_other_options_are_another_program(monkeypatch):
    compiled(double)
    monkeypatch.setattr(executable.jaxlib, "CPU_OPTIONS", ())
    assert compiled(double)[1] == (1, 0)
    assert compiled(double)[1] == (0, 1)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert compiled(double)[1] == (1, 0)
    monkeypatch.setattr(executable.markers, "VERSION", 0)
    assert compiled(double)[1] == (1, 0)


@pytest.mark.parametrize("row", ["the CPU", "the version of jaxlib", "the version of replica_engine"])
def test_another_machine_or_version_is_another_program(monkeypatch, row):
    compiled(double)
    plain = saved_programs.circumstances
    monkeypatch.setattr(saved_programs, "circumstances", lambda devices: plain(devices) | {row: "another"})
    assert compiled(double)[1] == (1, 0)


def test_the_least_used_programs_are_removed(folder):
    at_most = CacheFolder(folder, 3000)
    data = {key: os.urandom(1000) for key in "abcd"}
    for key in "abc"[:2]:
        at_most.write(key, data[key], 0.0, {"row": key})
    assert at_most.read("a") == data["a"]  # so b is the oldest
    at_most.write("c", data["c"], 0.0, {})
    assert at_most.read("b") is None
    assert at_most.read("a") == data["a"]
    assert {file.name[0] for file in folder.iterdir()} == {"a", "c"}
    at_most.write("d", os.urandom(4000), 0.0, {})  # larger than the limit
    assert at_most.read("d") is None


def test_readers_and_writers_at_the_same_time(folder):
    """With a limit of two programs, so that they also remove each other's."""
    data = {key: os.urandom(20_000) for key in "abc"}

    def use(key):
        own = CacheFolder(folder, 50_000)  # as each process has one
        for _ in range(30):
            own.write(key, data[key], 0.0, {"row": key})
            for each in data:
                assert own.read(each) in (None, data[each])
            assert all(about["row"] in data for about in own.abouts(""))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(use, "abcabc"))
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_files_are_for_this_user_only(folder, umask):
    xla.set_cache_dir(folder / "a" / "b")
    before = os.umask(umask)
    try:
        compiled(double)
    finally:
        os.umask(before)
    assert compiled(double)[1] == (0, 1)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) >= 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert {each.stat().st_mode & 0o777 for each in (folder, folder / "a", folder / "a" / "b")} == {0o700}


def given_away(path, monkeypatch):
    """Lets a path belong to another user than this process seems to run as."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def link_to(folder, target):
    folder.rmdir()
    target.mkdir()
    folder.symlink_to(target)
    return target


OPEN = {
    "a team's folder": lambda folder, give: folder.chmod(0o775),
    "everybody's folder": lambda folder, give: folder.chmod(0o777),
    "everybody's, where each keeps its own": lambda folder, give: folder.chmod(0o1777),
    "in everybody's folder": lambda folder, give: folder.parent.chmod(0o777),
    "deep in a team's folder": lambda folder, give: folder.parent.parent.chmod(0o2775),
    "a link to a team's folder": lambda folder, give: link_to(folder, folder.parent / "team").chmod(0o775),
    "a link into everybody's folder": lambda folder, give: link_to(folder, folder.parent.parent / "x").parent.chmod(
        0o777
    ),
    "another user's folder": lambda folder, give: give(folder),
    "in another user's folder": lambda folder, give: give(folder.parent.parent),
    "a link to another user's folder": lambda folder, give: give(link_to(folder, folder.parent / "theirs")),
    "another user's link": lambda folder, give: (link_to(folder, folder.parent / "mine"), give(folder)),
}


def command_of(caplog):
    """The command that the one warning says."""
    (text,) = [each.message for each in caplog.records if "Write\n" in each.message]
    return text.partition("Write\n    ")[2].partition("\n")[0]


@pytest.mark.parametrize("name", OPEN)
def test_a_folder_that_others_may_write_to_is_not_used_until_it_is_mended(tmp_path, monkeypatch, caplog, name):
    folder = tmp_path / "the home" / "cache" / "programs"
    folder.mkdir(parents=True)
    xla.set_cache_dir(folder)
    compiled(double)
    (program,) = folder.glob("replica_engine_double-*-cache")
    stored = program.read_bytes()
    for file in folder.iterdir():
        file.unlink()
    OPEN[name](folder, lambda path: given_away(path, monkeypatch))
    (folder / program.name).write_bytes(stored)  # what somebody else has put there
    (folder / program.name).chmod(0o600)
    assert compiled(double)[1] == (1, 0)
    assert compiled(lambda x: 3 * x)[1] == (1, 0)
    assert [file.name for file in folder.iterdir()] == [program.name]
    assert levels(caplog).count("WARNING") == 1
    command = command_of(caplog)
    if os.geteuid() != 0 and command.startswith("chown"):
        return  # only root may mend that
    subprocess.run(command, shell=True, check=True)
    assert compiled(double)[1] == (0, 1)
    assert levels(caplog).count("WARNING") == 1


def link_into_everybodys_folder(file):
    elsewhere = file.parent.parent / "elsewhere"
    elsewhere.mkdir()
    file.rename(elsewhere / file.name)
    file.symlink_to(elsewhere / file.name)
    elsewhere.chmod(0o777)


OPEN_FILES = {
    "everybody's": lambda file, give: file.chmod(0o666),
    "a team's": lambda file, give: file.chmod(0o664),
    "another user's": lambda file, give: give(file),
    "in everybody's folder": lambda file, give: link_into_everybodys_folder(file),
}


@pytest.mark.parametrize("change", OPEN_FILES.values(), ids=OPEN_FILES)
def test_a_file_that_others_may_write_to_is_replaced(folder, monkeypatch, caplog, change):
    compiled(double)
    programs = list(folder.glob("*-cache"))
    assert len(programs) == 2  # the text and the program
    change(programs[0], lambda path: given_away(path, monkeypatch))
    before = xla.counts()
    compiled(double)
    made = xla.counts() - before
    assert made.lowerings + made.compiles == 1
    assert levels(caplog).count("WARNING") == 1
    assert programs[0].name not in command_of(caplog) or "elsewhere" in command_of(caplog)
    if os.geteuid() == os.getuid():
        assert compiled(double)[1] == (0, 1)
        assert programs[0].lstat().st_mode & 0o777 == 0o600
    assert levels(caplog).count("WARNING") == 1


def test_a_folder_that_is_opened_to_others_while_a_program_compiles_fails_nothing(folder, monkeypatch, caplog):
    compiled(lambda x: 3 * x)
    serialized = executable.Executable.serialized

    def opened(of):
        folder.chmod(0o777)
        return serialized(of)

    monkeypatch.setattr(executable.Executable, "serialized", opened)
    assert compiled(double)[1] == (1, 0)
    assert command_of(caplog) == f"chmod go-w {folder}"
    assert levels(caplog).count("WARNING") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of root")
def test_a_folder_of_root_is_used(folder, monkeypatch, caplog):
    compiled(double)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert compiled(double)[1] == (0, 1)
    assert "WARNING" not in levels(caplog)


@pytest.mark.parametrize("target", ["nothing", "link"])
def test_a_link_that_leads_nowhere_is_no_folder(tmp_path, target):
    """To nothing, or to itself. It belongs to this user, so only what it leads to can tell."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="link"):
        CacheFolder(link).check()


def test_an_about_whose_program_is_gone_is_removed(folder):
    for key in ("old", "new"):
        CacheFolder(folder).write(key, b"a program", 1.0, {})
    for key in ("old", "new"):
        (folder / f"{key}-cache").unlink()  # as jax removes programs: it knows no -about
    os.utime(folder / "old-about", (0, 0))
    CacheFolder(folder).write("another", b"a program", 1.0, {})
    assert {file.name for file in folder.glob("*-about")} == {"new-about", "another-about"}


def test_the_layout_is_that_of_jax(folder):
    CacheFolder(folder).write("ours", b"a program", 7.9, {})
    packed = lru_cache.LRUCache(str(folder), max_size=-1).get("ours")
    assert compilation_cache.extract_executable_and_time(zlib.decompress(packed)) == (b"a program", 7)
    assert len((folder / "ours-atime").read_bytes()) == 8  # without it, jax fails when it removes programs


class TestWhyAProgramIsCompiledAgain:
    @pytest.fixture(autouse=True)
    def _log(self, caplog):
        caplog.set_level(logging.INFO, "replica_engine")

    def test_nothing_of_this_name(self, caplog):
        compiled(double)
        assert "`double` is compiled" in caplog.text
        assert "no program of this name" in caplog.text
        caplog.clear()
        compiled(double)
        assert "`double` was read from the cache folder" in caplog.text

    def test_a_shape_and_a_dtype(self, caplog):
        compiled(double)
        caplog.clear()
        compiled(double, OF_THREE)
        assert "`double` is compiled for a new shape: the program of this name" in caplog.text
        assert "args[0]: float32 (3,) now, float32 (2,) there" in caplog.text
        caplog.clear()
        compiled(double, [[tf.zeros([3], tf.int32)]] * 2)
        assert "`double` is compiled again: the nearest of 2 programs" in caplog.text
        assert "args[0]: int32 (3,) now, float32 (3,) there" in caplog.text

    def test_a_value_among_the_arguments(self, two, caplog):
        scale = lambda x, by: x * by  # noqa: E731
        two.run(scale, args=(tf.constant(1.0), 2))
        two.run(scale, args=(tf.constant(1.0), 3))
        assert "args[1]: 3 now, 2 there" in caplog.text

    def test_the_number_of_replicas(self, caplog):
        compiled(double)
        compiled(double, [[tf.zeros([2])]] * 3)
        assert "the number of replicas: 3 now, 2 there" in caplog.text

    def test_something_that_it_calls(self, caplog):
        class By:
            value = 2.0

        scale = lambda x: x * By.value  # noqa: E731
        compiled(scale)
        By.value = 3.0
        compiled(scale)
        assert "other operations" in caplog.text

    @pytest.mark.parametrize("text", ["[1]", "1", "null", "{", "[" * 100_000], ids=["list", "1", "null", "cut", "deep"])
    def test_an_about_that_is_no_object(self, folder, caplog, text):
        compiled(double)
        (about,) = folder.glob("replica_engine_double-*-about")
        about.write_text(text)
        caplog.clear()
        assert compiled(double, OF_THREE)[1] == (1, 0)
        assert "no program of this name" in caplog.text

    def test_no_secret_is_written(self, two, folder, caplog):
        two.run(lambda x, key: x * len(key), args=(tf.constant(1.0), "SECRET"))
        assert list(folder.glob("*-about"))
        assert "SECRET" not in "".join(file.read_text() for file in folder.glob("*-about"))
        assert "SECRET" not in caplog.text


def test_a_folder_given_as_bytes_is_refused():
    with pytest.raises(TypeError, match="takes the path of a folder"):
        xla.set_cache_dir(b"/tmp")
    xla.set_cache_dir(pathlib.Path("/tmp/elsewhere"))
