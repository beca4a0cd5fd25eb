"""What to write instead of a call of `run` whose arguments do not fit the function."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from replica_engine.errors.base import add_note
from replica_engine.strategies.validation import keywords_of


def note_arguments(error: BaseException, fn: Any, args: Any, kwargs: Any) -> None:
    """Adds a note to the TypeError of a function that `run` could not call with its arguments: what to write.

    Only the signature decides. So an error from a call inside the function has no note.

    Args:
        error: what the run raised.
        fn: the function that `run` got.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if not isinstance(error, TypeError) or not isinstance(args, (list, tuple)):
        return
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping):  # one mapping per replica
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return
    if _takes(signature, args, named):
        return
    name = getattr(fn, "__name__", type(fn).__name__)
    plain = [each.replace(default=each.empty, annotation=each.empty) for each in signature.parameters.values()]
    shown = signature.replace(parameters=plain, return_annotation=signature.empty)
    given = f"args held {_counted(args)}" + (f", and kwargs {', '.join(map(str, named))}" if named else "")
    instead = _instead(signature, args, named, name)
    add_note(error, f"strategy.run could not call `{name}{shown}`: {given}. {instead}")


def _instead(signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any], name: str) -> str:
    """What to write, for a call that does not bind."""
    parameters = list(signature.parameters.values())
    has_object = bool(args) and hasattr(type(args[0]), name)
    if parameters and parameters[0].name == "self" and not has_object:
        rest = signature.replace(parameters=parameters[1:])
        call = "the same arguments" if _takes(rest, args, named) else _call(rest, args, named)
        return f"It is a method, and has no object here. Write strategy.run(x.{name}, ...) of an object x, with {call}."
    only = args[0] if len(args) == 1 else None
    if isinstance(only, (list, tuple)) and _takes(signature, only, named):
        return f"Write args=batch for args=(batch,), or {_call(signature, only, named)}."
    if isinstance(only, Mapping) and not named and _takes(signature, (), only):
        return "Write kwargs=batch for args=(batch,)."
    if len(args) > 1 and _takes(signature, (args,), named):
        return "Write args=(batch,) for args=batch: the comma makes a batch one argument."
    call = _call(signature, args, named)
    return f"{_of_names(signature, named)}Write {call}{'' if call == 'args=()' else ', with a value for each'}."


def _call(signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """Arguments that the function takes, each as the name of its parameter: the given ones, and all without default.

    A value stays where it was given, in `args` or in `kwargs`, if the function takes it there.
    """
    by_position, by_name = [], []
    given = 0 if named and not args else None  # who gives all by name gives the missing ones by name as well
    for index, each in enumerate(signature.parameters.values()):
        if each.kind is each.VAR_POSITIONAL:
            by_position += [f"*{each.name}"] if len(args) > index else []
        elif each.kind is each.VAR_KEYWORD:
            by_name += [name for name in named if name not in keywords_of(signature)]
        elif each.kind is each.KEYWORD_ONLY:
            by_name += [each.name] if each.name in named or each.default is each.empty else []
        elif index < len(args) or (each.kind is each.POSITIONAL_ONLY and each.default is each.empty):
            by_position.append(each.name)
        elif each.name in named and each.kind is each.POSITIONAL_OR_KEYWORD:
            by_name.append(each.name)
            given = index
        elif each.default is not each.empty:
            given = index  # it is left out, and what comes after it has to have a name
        else:
            (by_position if given is None else by_name).append(each.name)
    listed = f"{by_position[0]}," if len(by_position) == 1 else ", ".join(by_position)
    keywords = "kwargs={" + ", ".join(f'"{name}": {name}' for name in by_name) + "}"
    if not by_name:
        return f"args=({listed})"
    return f"args=({listed}), {keywords}" if by_position else keywords


def _of_names(signature: inspect.Signature, named: Mapping[str, Any]) -> str:
    """Says which of the keywords the function does not take, with the nearest that it does."""
    parameters = signature.parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return ""
    free = keywords_of(signature)
    said = ""
    for name in (name for name in named if name not in free):
        near = difflib.get_close_matches(name, [each for each in free if each not in named], n=1)
        if name in parameters and parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            said += f"It takes {name} in args only. "
        else:
            said += f"It has no argument {name}" + (f"; did you mean {near[0]}? " if near else ". ")
    return said


def _takes(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this signature can be called so."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _counted(args: Sequence[Any]) -> str:
    """How many values there are; of a single one, also what is in it."""
    if len(args) != 1:
        return f"{len(args)} values" if args else "no value"
    (only,) = args
    if isinstance(only, (list, tuple, Mapping)):
        return f"1 value, a {type(only).__name__} of {len(only)}"
    return "1 value"
