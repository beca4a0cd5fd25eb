"""What a user sees of an op that fails while a graph runs: the message, the user's lines, and no frame of a library."""

import re

import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, logical_devices, xla
from replica_engine.diagnostics import tracebacks


def pick(index):
    if index > 3:
        return tf.gather([1.0, 2.0], index)
    return tf.constant(1.0)


def sum_up(index):
    total = tf.constant(0.0)
    while total < 3.0:
        total += tf.gather([1.0, 2.0], index)
    return total


def check(x):
    tf.debugging.assert_less(x, 5, message="too large")
    return x


def fail(value):
    raise ValueError("the host is full")


def on_host(x):
    return tf.py_function(fail, [x], x.dtype)


def outside(x):
    return xla.outside_compilation(fail, x)


@pytest.fixture
def compiled():
    return TPUStrategy(num_cores=2)


def text_of(strategy, fn):
    """The text of the error of a traced step that runs `fn`."""

    @tf.function
    def step(x):
        return strategy.run(fn, args=(x,))

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(tf.constant(7))
    return str(caught.value)


def line(fn, source):
    """The user's line with this source: "file:12 in fn"."""
    with open(__file__) as file:
        number = next(number for number, each in enumerate(file, 1) if each.strip() == source)
    return re.escape(f"{__file__}") + f'(:|", line ){number},? in {fn}'


@pytest.mark.parametrize(
    ("fn", "source", "message"),
    [
        (pick, "return tf.gather([1.0, 2.0], index)", "indices = 7 is not in"),
        (sum_up, "total += tf.gather([1.0, 2.0], index)", "indices = 7 is not in"),
        (check, 'tf.debugging.assert_less(x, 5, message="too large")', "too large"),
    ],
)
def test_ops_in_branches_and_loops_have_the_users_line(mirrored, fn, source, message):
    """TensorFlow has no stack trace for them if more than one replica fails."""
    text = text_of(mirrored, fn)
    assert message in text
    assert re.search(line(fn.__name__, source), text), text
    assert "Detected at node" in text
    assert "unavailable" not in text
    assert "replica_engine/" not in text


@pytest.mark.parametrize("fn", [pick, on_host])
def test_an_error_of_all_replicas_comes_once(fn):
    text = text_of(MirroredStrategy(logical_devices(4)), fn)
    message = "indices = 7 is not in" if fn is pick else "ValueError: the host is full"
    assert text.count(message) == 1, text
    assert "root error" not in text
    users = line("pick", "return tf.gather([1.0, 2.0], index)") if fn is pick else line("on_host", PY_FUNCTION)
    assert re.search(users, text).start() < text.index(message)


def test_errors_that_differ_are_all_there():
    """One of three is twice, and one says only that another error has ended the step."""
    head, tail = "Graph execution error:\n\n", "0 successful operations.\n0 derived errors ignored. [Op:step]"
    full = "INVALID_ARGUMENT:  the host is full\n\t [[{{node A}}]]\n"
    roots = f"4 root error(s) found.\n  (0) {full}  (1) INTERNAL:  another\n  (2) CANCELLED:  cancelled\n  (3) {full}"
    error = tf.errors.InvalidArgumentError(None, None, head + roots + tail)
    tracebacks.shorten_text(error, lambda file: False)
    assert error.message == (
        f"{head}2 root error(s) found.\n"
        "  (0) INVALID_ARGUMENT:  the host is full\n(2 times)\n  (1) INTERNAL:  another\n[Op:step]"
    )


def test_a_heading_without_frames_of_the_user_is_left_out():
    """An op that only the library has made; an op of the user's keeps its own."""
    text = (
        "Graph execution error:\n\nDetected at node Sum defined at (most recent call last):\n"
        '  File "/library/sums.py", line 3, in all_sums\n\n'
        "Detected at node Gather defined at (most recent call last):\n"
        '  File "/user/step.py", line 7, in step\n\n'
        "the host is full [Op:step]"
    )
    error = tf.errors.InvalidArgumentError(None, None, text)
    tracebacks.shorten_text(error, lambda file: file.startswith("/library"))
    assert error.message == (
        "Graph execution error:\n\nDetected at node Gather defined at (most recent call last):\n"
        '  File "/user/step.py", line 7, in step\nthe host is full [Op:step]'
    )


PY_FUNCTION = "return tf.py_function(fail, [x], x.dtype)"


def test_ops_of_a_lambda_have_the_users_line(mirrored):
    """TensorFlow looks up no op of a function whose name is "<lambda>"."""
    step = tf.function(lambda x: mirrored.run(pick, args=(x,)))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(tf.constant(7))
    assert re.search(line("pick", "return tf.gather([1.0, 2.0], index)"), str(caught.value)), caught.value


@pytest.mark.parametrize("fn", [on_host, outside])
def test_host_code_shows_its_own_frames_only(mirrored, compiled, fn):
    text = text_of(compiled if fn is outside else mirrored, fn)
    assert re.search(line("fail", 'raise ValueError("the host is full")'), text), text
    assert "ValueError: the host is full" in text
    assert not re.search("replica_engine/|site-packages|autograph", text), text
    assert len(text.split("\n")) < 20, text


def test_a_compiled_assertion_is_short(compiled):
    text = text_of(compiled, check)
    assert "assertion failed: [too large]" in text
    assert re.search(r"replica [01] of 2, CPU:[01], in Assert at .*test_graph_errors\.py:\d+ in check", text), text
    assert not re.search("replica_engine/|site-packages", text), text
    assert len(text.split("\n")) < 15, text


def test_nothing_is_removed_if_the_user_wants_all_frames(compiled):
    tf.debugging.disable_traceback_filtering()
    try:
        assert "replica_engine/xla/calls/body_calls.py" in text_of(compiled, outside)
    finally:
        tf.debugging.enable_traceback_filtering()


def test_a_message_keeps_lines_that_look_alike(mirrored):
    def full(value):
        raise ValueError("rows:\n  1\n  1\nend")

    text = text_of(mirrored, lambda x: tf.py_function(full, [x], x.dtype))
    assert "ValueError: rows:\n  1\n  1\nend" in text


def test_ctrl_c_in_run_steps_shows_the_users_frames_only(compiled):
    def step(context, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        compiled.run_steps(step, iter([tf.constant(1.0)] * 3), iterations=3)
    files = [str(each.path) for each in caught.traceback]
    ours = [file for file in files if "replica_engine/" in file]
    assert len(ours) <= 2, files  # the frames that raise it again
    assert any("step" in note for note in getattr(caught.value, "__notes__", ["step"]))


def test_what_called_the_function_is_left_to_the_traceback(mirrored):
    """The text says where the op was made, and not a second time who called the tf.function."""

    @tf.function
    def step(x):
        mirrored.run(lambda: tf.constant(1.0))
        return tf.gather([1.0, 2.0], x)

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(tf.constant(7))
    frames = re.search(
        r"\n\nDetected at node GatherV2 defined at \(most recent call last\):\n((?:  .*\n)*)", str(caught.value)
    )
    assert re.fullmatch("  .*" + line("step", "return tf.gather([1.0, 2.0], x)") + "\n", frames.group(1)), caught.value
