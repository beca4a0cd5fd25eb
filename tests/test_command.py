"""The command `replica-engine` as a program of absl: its version, its flags, and what it logs."""

import subprocess
import sys

import pytest

import replica_engine
from replica_engine.__main__ import main
from replica_engine.watch import timeline_report
from replica_engine.watch.timeline import write

# The command, with another body, so that it needs no TensorFlow.
LOGGING = """
import logging, sys
from replica_engine import __main__
from replica_engine.watch import timeline_report as cli

def run(flags):
    for logger in ("replica_engine", "another"):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING):
            logging.getLogger(logger).log(level, "%s of %s", logging.getLevelName(level), logger)
    return 7

cli.run = run
sys.argv[0] = "replica-engine"
__main__.console()
"""


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], ["INFO of replica_engine", "WARNING of replica_engine", "WARNING of another"]),
        (["--verbosity=-1"], ["WARNING of replica_engine", "WARNING of another"]),
        (
            ["--verbosity=0"],
            [f"{level} of {who}" for who in ("replica_engine", "another") for level in ("INFO", "WARNING")],
        ),
    ],
    ids=["default", "warnings", "all"],
)
def test_messages_are_shown_as_verbosity_says(flags, shown):
    done = subprocess.run(
        [sys.executable, "-c", LOGGING, "timeline", "run.json", *flags], capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr
    assert [line.partition("] ")[2] for line in done.stderr.splitlines()] == shown


def test_flags_of_absl_stand_before_the_command_too():
    done = subprocess.run(
        [sys.executable, "-c", LOGGING, "-v=-2", "timeline", "run.json"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    """As `head -1` does."""
    write(str(tmp_path / "run.json"), [], 0.0, 1.0, 0)
    command = [sys.executable, "-m", "replica_engine", "timeline", tmp_path / "run.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait()
    assert process.returncode == 141


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert (exit_.value.code, capsys.readouterr().out) == (0, f"replica-engine {replica_engine.__version__}\n")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["timeline", "absent.json"], 1, "timeline: no such file: absent.json\n"),
        (["timeline", "."], 1, "timeline: cannot read .: Is a directory\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(capsys, flags, status, message):
    assert main(flags) == status
    assert capsys.readouterr().err == message


def test_a_picture_in_an_unknown_format_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["timeline", "run.json", "--output", "run.jpg"])
    assert exit_.value.code == 2
    assert ".jpg: a picture must end in one of .png, .svg, .pdf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        (["demo", "--replicas", "2"], "python -m examples.demo"),
        (["plan", "train.py"], "print(strategy.plan(step, "),
        (["explain"], "help(replica_engine.errors.NAME)"),
        (["explain", "words", "of a message"], "errors/NAME.html"),
    ],
)
def test_a_command_of_version_0_3_says_what_to_do_instead(capsys, command, instead):
    with pytest.raises(SystemExit) as exit_:
        main(["--verbosity=1", *command])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    assert f"there is no command {command[0]} any more; " in err
    assert instead in err
    assert err.count("\n") == 1


def test_what_a_report_of_a_fault_needs(capsys, monkeypatch):
    monkeypatch.setenv("REPLICA_ENGINE_TOKEN", "a secret of this job")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"replica_engine {replica_engine.__version__}, Python 3." in out
    assert "MirroredStrategy() is MirroredStrategy(" in out
    assert "REPLICA_ENGINE_TOKEN=(hidden)" in out
    assert "secret" not in out
    assert "tensorflow.python.eager.polymorphic_function.polymorphic_function.Function.__call__" in out


def test_what_a_worker_of_a_job_says_of_its_place(capsys, monkeypatch):
    """To make a strategy would be to join the job."""
    monkeypatch.setenv("REPLICA_ENGINE_PROCESS_ID", "1")
    monkeypatch.setenv("REPLICA_ENGINE_NUM_PROCESSES", "2")
    monkeypatch.setenv("REPLICA_ENGINE_COORDINATOR", "node-a:4000")
    assert main(["env"]) == 0
    assert "worker 1 of 2, coordinator at node-a:4000" in capsys.readouterr().out


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "launch    start N workers of a script on this machine" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["launch", "--workers", "many", "train.py"], "argument --workers: "),
        (["timeline", "run.json", "--outputs", "x.png"], "did you mean --output, and not --outputs?"),
    ],
    ids=["value", "name"],
)
def test_a_wrong_flag_is_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_ctrl_c(capsys, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(timeline_report, "run", interrupted)
    assert main(["timeline", "run.json"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("command", [[], ["launch"], ["timeline"]], ids=" ".join)
@pytest.mark.parametrize(
    ("started", "named"),
    [
        ("/usr/bin/replica-engine", "replica-engine"),
        ("/usr/lib/replica_engine/__main__.py", "python -m replica_engine"),
    ],
)
def test_the_usage_names_the_command_as_it_was_typed(monkeypatch, capsys, started, named, command):
    monkeypatch.setattr(sys, "argv", [started])
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"usage: {' '.join([named, *command])} [-h]")
    if named == "replica-engine":
        assert "python -m replica_engine" not in shown
