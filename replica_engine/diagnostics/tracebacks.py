"""The exceptions of a run and of a graph, cut to the user's lines.

The traceback of an exception keeps the user's frames, without the frames of this library and TensorFlow between them.
If AutoGraph converted the function, a note shows the lines that the user wrote, in place of the frames of the generated
code.

An error that a graph raised while it ran also has whole tracebacks in its text: where the op was made, and where the
Python code of a `tf.py_function` failed. These are cut too. What stays is the message, and the frames of the user's
files. For each op that failed, the text names the user's line.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import tensorflow as tf

from replica_engine.diagnostics.user_frames import FOLDERS, OURS, is_internal, is_plumbing, user_line
from replica_engine.errors import ReplicaEngineError
from replica_engine.upstream.graphs import autograph, function_graphs, graph_walk

E = TypeVar("E", bound=BaseException)


def as_raised(error: E) -> E:
    """The exception of a function that AutoGraph may have converted, with a note of the user's lines if it did."""
    return autograph.as_user_raised(error, is_internal)


def shortened(error: E, is_hidden: Callable[[str], bool] = is_internal) -> E:
    """Reduces an exception's traceback to the user's frames; without such a frame, it ends at the call of the library.

    TensorFlow filters its tracebacks in the same way. `tf.debugging.disable_traceback_filtering()` switches off both.

    Args:
        error: the exception.
        is_hidden: whether the frames of a file are left out.
    """
    if not tf.debugging.is_traceback_filtering_enabled():
        return error
    if isinstance(error, tf.errors.OpError):
        shorten_text(error, is_hidden)
    frames = []
    frame = error.__traceback__
    in_note = autograph.has_note(error)
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not is_hidden(file) and not (in_note and autograph.is_generated(file)):
            frames.append(frame)
        frame = frame.tb_next
    traceback: TracebackType | None = None
    for each in reversed(frames):
        traceback = TracebackType(traceback, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(traceback)  # this also works for exceptions that take no attributes


def shortened_of_graph(error: E, fn: object) -> E:
    """Like `shortened`, for what the call of a `tf.function` raised; it names the user's lines of the ops that failed.

    TensorFlow's own filter has removed its frames, and left in what this library puts around its functions. AutoGraph
    passes the errors of this library on, and so has named no lines of the function.
    """
    if isinstance(error, ReplicaEngineError) and not autograph.has_note(error):
        as_raised(error)
    if tf.debugging.is_traceback_filtering_enabled() and isinstance(error, tf.errors.OpError):
        with contextlib.suppress(Exception):  # a failure here must not hide the exception itself
            name_lines(error, fn)
    return shortened(error, is_plumbing)


def without_ours(error: E) -> E:
    """The error of a `tf.function` in which no replicas run, as TensorFlow raises it without this library.

    TensorFlow's own filter cuts the traceback. The text has the frames of what this library puts around functions.
    """
    is_filtered = tf.debugging.is_traceback_filtering_enabled()
    if is_filtered and isinstance(error, tf.errors.OpError) and OURS in error.message:
        function_graphs.set_message(error, _OF_OURS.sub("", error.message))
    return error


# The text of an error that a graph raised.

_FRAME = re.compile(r'\s*File "(.+)", line (\d+), in (.*)')
_OF_OURS = re.compile(rf'^ *File "(?:{"|".join(map(re.escape, FOLDERS))}).*\n\n?', re.MULTILINE)
_DETECTED = re.compile(r"Detected at node (\S+) defined at ")
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_FUNCTION = re.compile(r"\{\{function_node [^}]*\}\} ?")  # names that TensorFlow makes up; its own text drops most
_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+(?:Error|Exception)\b)")
_ROOT = re.compile(r"^\(\d+\) [A-Z_]+: *")  # one of several errors
_ROOTS = re.compile(  # several errors
    r"\d+ root error\(s\) found\.\n(?P<entries>  \(0\) .*?)\n\d+ successful operations\.\n"
    r"\d+ derived errors ignored\. ?(?P<op>.*)",
    re.DOTALL,
)
_ENTRY = re.compile(r"^  \(\d+\) ", re.MULTILINE)
_NAMES = re.compile(r"\n\t \[\[.*\]\]")  # of ops, which differ by replica
_CALL = "_call"  # the hook around the call of a tf.function
_UNKNOWN = "<stack traces unavailable>"
_HEADS = (
    "Traceback (most recent call last):",
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


def shorten_text(error: tf.errors.OpError, is_hidden: Callable[[str], bool]) -> None:
    """Removes the frames of hidden files from the text of an error, and what the frames repeat.

    Args:
        error: an error of TensorFlow's runtime.
        is_hidden: whether the frames of a file are left out.
    """
    text = error.message
    if '  File "' in text or _UNKNOWN in text:
        text = "\n".join(_kept(_FUNCTION.sub("", text).split("\n"), is_hidden))
    text = _once(text)
    if text != error.message:
        function_graphs.set_message(error, text)


def name_lines(error: tf.errors.OpError, fn: tf.types.experimental.PolymorphicFunction) -> None:
    """Adds the user's lines to the text of an error, for ops without a stack trace.

    TensorFlow looks an op up in the innermost function that the text names. If several replicas fail, the function
    named last is the outermost one, which does not have the ops of branches and loops. It looks up no op of a lambda.

    Args:
        error: an error of TensorFlow's runtime.
        fn: the `tf.function` that raised it.
    """
    text = error.message
    nodes = [each for each in dict.fromkeys(_NODE.findall(text)) if f"Detected at node {each} " not in text]
    if not nodes and _UNKNOWN not in text:
        return
    graphs = [graph for name, graph in function_graphs.list_traced_graphs(fn) if f"[Op:{name}]" in text]

    def place(node: str) -> str:
        lines = {user_line(op) for op in graph_walk.everywhere(*graphs) if op.name == node} - {""}
        return f"Detected at node {node}, at {lines.pop()}" if len(lines) == 1 else ""  # two: it is not known which

    unknown = rf"Detected at node (\S+) defined at .*\n{_UNKNOWN}"
    text = re.sub(unknown, lambda detected: place(detected[1]) or detected[0], text)
    function_graphs.set_message(error, "\n".join([*filter(None, map(place, nodes)), text]))


def _once(text: str) -> str:
    """The text with each of several root errors once: replicas that run the same ops mostly fail in the same way.

    Errors that say only that another one has ended the step are left out.
    """
    found = _ROOTS.search(text)
    if found is None:
        return text
    entries = [each.rstrip("\n") for each in _ENTRY.split(found["entries"])[1:]]
    counts = Counter(_NAMES.sub("", entry) for entry in entries if not entry.startswith("CANCELLED: "))
    if not counts or len(counts) == len(entries):
        return text
    shown = [entry if count == 1 else f"{entry}\n({count} times)" for entry, count in counts.items()]
    if len(shown) > 1:
        shown = [f"{len(shown)} root error(s) found.", *(f"  ({n}) {entry}" for n, entry in enumerate(shown))]
    return text[: found.start()] + "\n".join([*shown, found["op"]]) + text[found.end() :]


def _kept(lines: list[str], is_hidden: Callable[[str], bool]) -> list[str]:
    """The lines of a text without hidden frames, headings of tracebacks, and what a traceback repeats at its end."""
    kept: list[str] = []
    # The text is that of several tracebacks, one inside the other, each with its own heading and last line.
    seen: set[str] = set()
    frame: bool | None = None  # whether the frame that these lines belong to is kept; None outside frames
    quoted = False  # whether a traceback has begun
    outside = False  # whether these frames are outside the tf.function so far
    detected: int | None = None  # where the heading stands whose frames made an op; None outside these frames
    for line in lines:
        found = _FRAME.match(line)
        if found is not None:
            file, number, name = found.groups()
            written = autograph.written(file, int(number))
            frame = bool(written) or not (is_hidden(file) or autograph.is_generated(file))
            if frame:
                kept.append(written or line)
            elif detected is not None and outside and name == _CALL and file.startswith(OURS):
                del kept[detected + 1 :]  # what called the tf.function: the traceback of the exception shows it
                outside = False
            frame = frame and not written  # the source of generated code follows
            continue
        if frame is not None and (not line.strip() or line.startswith("    ")):
            if frame and line.strip(" \t^~"):
                kept.append(line)
            continue
        if line == _UNKNOWN:
            continue
        if detected is not None:  # its frames end here
            block = "\n".join(kept[detected:])
            if len(kept) == detected + 1 or block in seen:  # two replicas may fail in one op
                del kept[detected:]
            seen.add(block)
        frame, detected = None, None
        if _DETECTED.match(line):
            detected, outside = len(kept), True
            kept.append(line)
        elif line in _HEADS:
            quoted = True
        else:
            root = _ROOT.match(line.strip())
            plain = _MODULE.sub("", _ROOT.sub("", line.strip()))
            if root or not quoted or (plain and plain not in seen):
                kept.append(line)
            seen.add(plain)
    return kept
