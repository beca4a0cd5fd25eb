"""The faults: a sign, a comparison, a wait left out, an axis, a copy, a field of a key, a condition, a call left out.

They are found by syntax and named by function, so a name holds when lines move.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

WAITS = {"wait", "wait_for", "join", "set", "clear", "acquire", "release", "notify_all", "shutdown", "result"}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COPIES = {"list", "dict", "tuple", "set", "sorted"}


class Fault(NamedTuple):
    """A fault.

    Attributes:
        name: module, function, kind and number, such as `engine.run.Run.start:wait:0`.
        path: the file, relative to the folder of the package.
        lines: first and last line of the function, from 1, in the file as it is.
        text: the file with the fault.
        change: what the fault changes, for a reader.
    """

    name: str
    path: str
    lines: tuple[int, int]
    text: str
    change: str


def faults(package: pathlib.Path, path: pathlib.Path) -> Iterator[Fault]:
    """All faults that a file can have."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    module = ".".join(path.relative_to(package).with_suffix("").parts)
    for function, name in _functions(ast.parse(source), module):
        count: dict[str, int] = {}
        for node in _own(function):
            for kind, change in _changes(node, function):
                number = count[kind] = count.get(kind, -1) + 1
                begin, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                )
                new, raw = ast.unparse(change(node)), source.encode()
                text = (raw[:begin] + new.encode() + raw[end:]).decode()
                old = " ".join(raw[begin:end].decode().split())
                where = (function.lineno, function.end_lineno or function.lineno)
                shown = f"{old[:80]} -> {new[:80]}"
                yield Fault(f"{name}:{kind}:{number}", str(path.relative_to(package)), where, text, shown)


def _functions(tree: ast.AST, name: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The functions of a module, also those in classes and functions, with their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(node, ast.FunctionDef):
                yield node, f"{name}.{node.name}"
            yield from _functions(node, f"{name}.{node.name}")
        else:
            yield from _functions(node, name)


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body without its annotations, raised errors, texts and inner functions."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Raise, ast.JoinedStr, ast.Assert)):
            return
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from walk(each)

    for statement in function.body:
        yield from walk(statement)


Change = Callable[[ast.AST], ast.AST]


def _changes(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, Change]]:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right) if not _is_text(left) and not _is_text(right):
            op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield "sign", lambda node: ast.BinOp(node.left, op, node.right)
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", lambda node: ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "condition", lambda node: ast.BoolOp(other, node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", lambda node: node.operand
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=attr))) if attr in WAITS:
            yield "wait", lambda node: ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield "call", lambda node: ast.Pass()
        case ast.Call(keywords=keywords) if any(_is_axis(each) for each in keywords):
            yield "axis", lambda node: ast.Call(node.func, node.args, [_next_axis(each) for each in node.keywords])
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]) if name in COPIES:
            yield "copy", lambda node: node.args[0]
        case ast.Call(func=ast.Attribute(attr="copy", value=value), args=[]):
            yield "copy", lambda node: value
        case ast.Return(value=ast.Tuple(elts=[_, _, *_])) if "key" in function.name or "signature" in function.name:
            yield "key", lambda node: ast.Return(ast.Tuple(node.value.elts[:-1], ast.Load()))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


def _is_axis(keyword: ast.keyword) -> bool:
    return keyword.arg in ("axis", "dim", "dimension") and isinstance(keyword.value, ast.Constant)


def _next_axis(keyword: ast.keyword) -> ast.keyword:
    if not _is_axis(keyword) or not isinstance(keyword.value.value, int):
        return keyword
    return ast.keyword(keyword.arg, ast.Constant(keyword.value.value + 1))
