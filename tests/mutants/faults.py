"""The faults: a sign, a comparison, a condition, a wait or a call left out, an axis, a copy, a field of a key.

They are found by syntax and named by function, so a name holds when lines move.
"""

from __future__ import annotations

import ast
import collections
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

WAITS = {"wait", "wait_for", "join", "set", "clear", "acquire", "release", "notify_all", "shutdown", "result"}
COPIES = {"list", "dict", "tuple", "set", "sorted"}
OTHER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.Add: ast.Sub}
OTHER |= {ast.And: ast.Or} | {new: old for old, new in OTHER.items()} | {ast.Or: ast.And}


class Fault(NamedTuple):
    """A fault: its name, such as `engine.run.Run.start:wait:0`, its file, the file's new text, and what changed."""

    name: str
    path: str
    text: str
    change: str


def faults(package: pathlib.Path, path: pathlib.Path) -> Iterator[Fault]:
    """All faults that a file of the package can have."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for name, function in functions(package, path):
        count: collections.Counter[str] = collections.Counter()
        for node in _inside(function):
            for kind, changed in _changes(node, function.name):
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                new = ast.unparse(changed)
                text = (source[:begin] + new.encode() + source[end:]).decode()
                change = f"{' '.join(source[begin:end].decode().split())[:80]} -> {new[:80]}"
                yield Fault(f"{name}:{kind}:{count[kind]}", str(path.relative_to(package)), text, change)
                count[kind] += 1


def functions(package: pathlib.Path, path: pathlib.Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a file, also those in classes and functions, with their names."""

    def of(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
            if isinstance(child, ast.FunctionDef):
                yield inner, child
            yield from of(child, inner)

    yield from of(ast.parse(path.read_bytes()), ".".join(path.relative_to(package).with_suffix("").parts))


def _inside(function: ast.FunctionDef) -> Iterator[ast.expr | ast.stmt | ast.keyword]:
    """The nodes of a function's body without annotations, what is raised, texts and inner functions."""
    left: list[ast.AST] = list(reversed(function.body))
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr, ast.Assert)):
            continue
        if isinstance(node, (ast.expr, ast.stmt, ast.keyword)):
            yield node
        left += reversed([each for each in ast.iter_child_nodes(node) if each is not getattr(node, "annotation", None)])


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not _is_text(left) and not _is_text(right):
            yield "sign", ast.BinOp(left, OTHER[type(op)](), right)
        case ast.Compare(left, [op], right) if type(op) in OTHER:
            yield "comparison", ast.Compare(left, [OTHER[type(op)]()], right)
        case ast.BoolOp(op, values):
            yield "condition", ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "condition", operand
        case ast.Expr(ast.Call(func)):
            yield "wait" if isinstance(func, ast.Attribute) and func.attr in WAITS else "call", ast.Pass()
        case ast.keyword("axis", ast.Constant(int(number))):
            yield "axis", ast.keyword("axis", ast.Constant(number + 1))
        case ast.Call(ast.Name(name), [only], []) if name in COPIES:
            yield "copy", only
        case ast.Call(ast.Attribute(only, "copy"), [], []):
            yield "copy", only
        case ast.Return(ast.Tuple([*fields, _], context)) if fields and ("key" in function or "signature" in function):
            yield "key", ast.Return(ast.Tuple(fields, context))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
