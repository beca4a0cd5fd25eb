"""The user's own frames and lines: of a call, a sync point, an op.

Only this module decides which frames belong to the user. It also tells which merge functions are the same (`identity`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType

import tensorflow as tf

from replica_engine.engine import Replica, Run, SyncPoint, current_replica
from replica_engine.upstream.graphs import autograph
from replica_engine.watch import watchdog

# Packages whose frames can stand between the user's line and an op, a sync point or an exception: TensorFlow, Keras,
# and the packages that they call through. tf.summary comes from tensorboard, map_structure from tree or optree, and
# wrapt and absl call the functions that they decorate or run. Any other installed package counts as the user's. numpy
# does too: its functions may take long, and a thread can be interrupted only in the user's code
# (`process.interrupts`).
_PLUMBING = ("tensorflow", "keras", "tf_keras", "tensorboard", "absl", "jax", "jaxlib", "optree", "tree", "wrapt")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of this library."""

_NAMES = "diagnostics engine keras pjrt strategies threads traced_steps upstream values workers xla"
FOLDERS = tuple(os.path.join(OURS, name, "") for name in _NAMES.split())
"""The folders of this library whose frames no user needs."""

_STANDARD_LIBRARY = os.path.dirname(functools.__file__) + os.sep
# Frames between the user's line and the function that it calls.
WRAPPERS = frozenset(("error_handler", "wrapper", "converted_call", "_call_unconverted", "op_dispatch_handler"))
# Functions that stand around those of TensorFlow and Keras; a sync point is named after theirs.
_HOOKS = (
    os.path.join(OURS, "upstream", "hook.py"),
    os.path.join(OURS, "upstream", "graphs", "operators.py"),
    os.path.join(OURS, "strategies", "keras_scopes.py"),
    os.path.join(OURS, "threads", "control_flow", ""),
)
_CONVERTED = "outer_factory.inner_factory.tf__"  # the prefix of functions that AutoGraph converted


# The user's frame at a sync point.


def sync_point(
    merge_fn: Callable[..., object], replica: Replica, detail: tuple, values: tuple, eager: bool
) -> SyncPoint:
    """The record of a merge call that `replica` is making.

    The name of the sync point is the name of the merge function if the user wrote that function. Otherwise it is the
    name of the function that the user called and that made the merge call: "all_reduce", "assign_add", "fit".

    Args:
        merge_fn: the merge function.
        replica: the replica.
        detail: further values that must be equal on all replicas.
        values: the tensors that the replica brings.
        eager: whether the merge call is made in eager mode.
    """
    plain = _plain(merge_fn)
    name = getattr(plain, "__qualname__", None) or type(plain).__qualname__
    frame, called, thread = _user_frame(replica)
    if called and is_internal(getattr(getattr(plain, "__code__", None), "co_filename", "")):
        name = called
    name = name.replace("<locals>.", "").removeprefix(_CONVERTED)
    kind = detail[0] if detail and isinstance(detail[0], str) else "merge_call"
    how = detail[1] if kind == "all_reduce" else f"axis={detail[1]}" if kind == "all_gather" else ""
    place = _place(frame, (thread, replica.run.coordinator.ident or thread))
    own = threading.get_ident()
    return SyncPoint(name, *place, (identity(merge_fn), detail), kind, how, not eager, values, own)


def user_location(replica: Replica) -> tuple[str, int, str]:
    """The file, line and function of the innermost frame that belongs to the user."""
    frame, _, thread = _user_frame(replica)
    return _place(frame, (thread, replica.run.coordinator.ident or thread))


def calling_line() -> tuple[str, str]:
    """The user's line on this thread, which runs no replica, as workers compare it: "train.py:12", and its function."""
    thread = threading.get_ident()
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and not is_users(frame, (thread,)):
        frame = frame.f_back
    file, line, function = _place(frame or here, (thread,))
    return f"{os.path.basename(file)}:{line}", function


def calling_lines(replica: int | None) -> list[str]:
    """The user's lines that led to a call on this thread, as workers compare them, the innermost first.

    All lines from a sync point of replicas out to that which called `strategy.run`. Of another call that in a
    `tf.function`, out to the function that is traced; in eager mode, its line and the next.

    Lines further out do not count, since a chief may call the same training from another line.

    Args:
        replica: the thread of the replica that waits at the sync point; None if this is no merge of replicas.
    """
    own = threading.get_ident()
    lines = []
    if replica is not None:
        lines += [
            line for frame in _outwards(sys._current_frames().get(replica)) if (line := _line(frame, replica, own))
        ]
    is_last, traces = False, not tf.executing_eagerly()
    for frame in _outwards(sys._getframe(1)):
        if replica is not None:
            is_last |= frame.f_code is _RUN
        else:
            is_last |= frame.f_code.co_name == _TRACE if traces else bool(lines)
        if line := _line(frame, own):
            lines.append(line)
        if is_last and (line or (traces and replica is None and lines)):
            break
    return lines


_RUN, _TRACE = Run.__call__.__code__, "func_graph_from_py_func"  # which TensorFlow calls for each function


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType, *threads: int) -> str:
    """A line of the user, without its folder; "" for any other one."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    named = _named_line(file, line)
    if named is None:
        named = _named_line(*autograph.original_location(file, line, frame.f_code.co_name, threads)[:2])
    return named or ""


@functools.lru_cache(maxsize=4096)
def _named_line(file: str, line: int) -> str | None:
    """The line; None in a file that AutoGraph made, which has a random name."""
    if autograph.is_generated(file):
        return None
    return "" if is_internal(file) else f"{os.path.basename(shown_file(file))}:{line}"


def shown_file(file: str) -> str:
    """A file as messages name it; a cell of a notebook, which IPython keeps as a temporary file, is "In[4]"."""
    notebook = sys.modules.get("IPython")
    shell = notebook.get_ipython() if notebook is not None else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return file if cell is None else str(cell[1])


def _user_frame(replica: Replica) -> tuple[FrameType, str, int]:
    """The innermost frame of the user, the name of the function that it called, and the thread of the frame.

    In Keras' `fit`, a replica thread has no frame of the user. Then this is the frame that called `fit`, on the
    thread that called `run`.
    """
    here = sys._getframe(1)
    coordinator = replica.run.coordinator.ident or 0
    for thread, innermost in (
        (threading.get_ident(), lambda: here),
        (coordinator, lambda: sys._current_frames().get(coordinator)),
    ):
        frame, called = innermost(), ""
        while frame is not None and not is_users(frame, (thread, coordinator)):
            if frame.f_code.co_name not in WRAPPERS and not frame.f_code.co_filename.startswith(_HOOKS):
                called = frame.f_code.co_name
            frame = frame.f_back
        if frame is not None:
            return frame, called, thread
    return here, "", threading.get_ident()


def _place(frame: FrameType, threads: tuple[int, ...]) -> tuple[str, int, str]:
    code = frame.f_code
    file, line, function = autograph.original_location(code.co_filename, frame.f_lineno, code.co_name, threads)
    return shown_file(file), line, function


def is_users(frame: FrameType, threads: tuple[int, ...]) -> bool:
    """Whether a frame runs user code, which AutoGraph may have converted.

    Args:
        frame: a frame.
        threads: the idents of the threads that may know what was converted; see `autograph.original_location`.
    """
    file = frame.f_code.co_filename
    if is_internal(file):
        return False
    if not autograph.is_generated(file):
        return True
    return not is_internal(autograph.original_location(file, frame.f_lineno, frame.f_code.co_name, threads)[0])


# Whose a file is.


# Asked of each frame of a stack at each sync point, of the same few files.
@functools.lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    """Whether a file belongs to Python, to this package, to TensorFlow, to Keras or to a package that these call."""
    return filename.startswith(OURS) or _is_standard(filename) or filename.startswith(_plumbing())


def is_installed(filename: str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(part in filename for part in _INSTALLED)


def is_plumbing(filename: str) -> bool:
    """Whether a file is internal and not Python's own: what programs meet that only call TensorFlow."""
    return is_internal(filename) and not _is_standard(filename)


def _is_standard(filename: str) -> bool:
    return filename.startswith(_STANDARD_LIBRARY) and not is_installed(filename)


@functools.cache
def _plumbing() -> tuple[str, ...]:
    """The folders of the installed packages in `_PLUMBING`. The packages are found without being imported."""
    folders = []
    for name in _PLUMBING:
        spec = None
        with contextlib.suppress(ImportError):  # raised by a finder that refuses to look
            spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            if name == "tensorflow" or is_installed(folder):  # not another `tree`
                folders.append(folder + os.sep)
    return tuple(folders)


watchdog.hide(is_internal)


# Functions: where they are written, and which of them are the same.


def function_place(fn: Callable[..., object]) -> str:
    """The file, without its folder, and the first line of a function: "train.py:40"; "" if it has none."""
    code = getattr(_plain(getattr(fn, "made_of", fn)), "__code__", None)
    if code is None:
        return ""
    file, line = autograph.first_line(code)
    return f"{os.path.basename(shown_file(file))}:{line}"


def _plain(fn: Callable) -> Callable:
    """The user's function inside partial objects, bound methods and AutoGraph's wrappers."""
    if type(fn) is FunctionType and not fn.__dict__:  # it wraps nothing
        return fn
    while True:
        inner = inspect.unwrap(fn)
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        if inner is fn:
            return fn
        fn = inner


def identity(fn: Callable[..., object]) -> object:
    """A value that is equal for all functions that the same `def` or `lambda` in the source makes.

    All replicas run the same source, and each replica makes its own closure of the merge function: different function
    objects with equal code.
    """
    plain = _plain(fn)
    if inspect.isbuiltin(plain):
        return plain
    return getattr(plain, "__code__", type(plain))


# The user's line of an op, of a call and of an exception.

_MERGES = os.path.join(OURS, "xla", "body_context.py")  # the file of the `merge_call` of a compiled body


def user_line(made: tf.Operation | tf.Tensor | Iterable[tuple[str, int, str]]) -> str:
    """Returns the user's line as "file.py:12 in step", or "" if there is none.

    Args:
        made: an op, its tensor, or the frames of a stack trace that XLA printed (file, line, function), the outermost
            first.
    """
    if isinstance(made, tf.Tensor):
        while made.op.type == "Identity":  # added when values leave a graph
            made = made.op.inputs[0]
        made = made.op
    return _innermost(_frames(made) if isinstance(made, tf.Operation) else _with_whole_paths(list(made)))


def merge_line(op: tf.Operation) -> str:
    """The user's line that calls `merge_call`, for an op of its merge function in a compiled body; otherwise ""."""
    frames = _frames(op)
    for index, (file, _, name) in enumerate(frames):
        if name == "merge_call" and file == _MERGES:
            callers = [frame for frame in frames[:index] if frame[2] not in WRAPPERS]
            return _innermost(callers[-1:])  # nothing for a call of an optimizer, or of this library
    return ""


def _frames(op: tf.Operation) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that made an op, the outermost first."""
    # An op of a loaded graph has no frames.
    frames = [(frame.filename, frame.lineno, frame.name) for frame in op.traceback or ()]
    if any(autograph.is_generated(frame[0]) for frame in frames):  # of a function inside a converted function
        known = autograph.source_map()
        frames = [known.get((file, line), (file, line, name)) for file, line, name in frames]
    return frames


def here() -> str:
    """The user's line that led to this call, or "" if there is none.

    In Keras' `fit`, a replica thread has no line of the user. Then this is the line that called `fit`, on the thread
    that called `run`.
    """
    own, replica = threading.get_ident(), current_replica()
    line = _users_line(sys._getframe(1), (own,))
    if line or replica is None or replica.run.coordinator.ident in (None, own):
        return line
    coordinator = replica.run.coordinator.ident
    return _users_line(sys._current_frames().get(coordinator), (coordinator,))


def users_place(frame: FrameType, number: int) -> str:
    """The user's line in a frame of a traceback, "train.py:12 in step"; "" if the frame is not the user's."""
    file = frame.f_code.co_filename
    is_users = not (is_internal(file) or autograph.is_generated(file))
    written = autograph.written_at(file, number)
    return written or (_innermost([(file, number, frame.f_code.co_name)]) if is_users else "")


def raised_at(error: BaseException) -> str:
    """The innermost line of the user in an exception's traceback, or "" if there is none.

    A line of the user's program, rather than one of an installed package that the program calls.
    """
    places = [users_place(*step) for step in traceback.walk_tb(error.__traceback__)]
    users = [place for place in places if place]
    own = [place for place in users if not is_installed(place)]
    return (own or users or [""])[-1]


def is_raised_by_user(error: BaseException) -> bool:
    """Whether the user's code raised an exception, rather than TensorFlow, JAX or this library."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # JAX takes its own frames out of tracebacks. What is left may end at the user's line.
    is_theirs = type(error).__module__.partition(".")[0] in _PLUMBING
    return bool(frames) and not is_theirs and not is_internal(frames[-1].f_code.co_filename)


def _users_line(frame: FrameType | None, threads: tuple[int, ...]) -> str:
    while frame is not None:
        if is_users(frame, threads):
            place = autograph.original_location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, threads)
            if not autograph.is_generated(place[0]):
                return _innermost([place])
        frame = frame.f_back
    return ""


def _innermost(frames: Iterable[tuple[str, int, str]]) -> str:
    users = [frame for frame in frames if not is_internal(frame[0])]
    if not users:
        return ""
    file, line, name = users[-1]
    return f"{shown_file(file)}:{line} in {'a lambda' if name in ('', '<lambda>') else name.removeprefix('tf__')}"


def _with_whole_paths(frames: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Frames of a stack trace that XLA printed, with the beginning of the paths, which XLA drops.

    XLA drops the folders that all files of a trace have in common. Files of TensorFlow or of this package are among
    them, so this is a folder above those.
    """
    files = [file for file, _, _ in frames]
    folders = ["", *map(str, Path(tf.__file__).parents[1:]), *map(str, Path(__file__).parents[1:])]
    found = [sum(_is_whole(os.path.join(folder, file)) for file in files) for folder in folders]
    folder = folders[found.index(max(found))]
    # A cell of a notebook, "<ipython-input-1>", is not a file.
    return [(os.path.join(folder, file) if file[:1] != "<" else file, line, name) for file, line, name in frames]


def _is_whole(path: str) -> bool:
    return os.path.isabs(path) and os.path.exists(path)


def is_layer_scope(scope: str, name: str) -> bool:
    """Whether a name scope belongs to a layer; TensorFlow adds a number to a scope that is entered again."""
    return scope == name or (scope.startswith(f"{name}_") and scope[len(name) + 1 :].isdigit())
