"""The faults: a sign, a comparison, a condition, a wait or a call left out, an axis, a copy, a field of a key.

They are found by syntax and named by function, so a name holds when lines move.
"""

import ast
import collections
import contextlib
import itertools
import pathlib
import re
import shutil
from collections.abc import Iterator

from tests.mutants import reach

LEFT_OUT = (ast.FunctionDef, ast.ClassDef, ast.arguments, ast.Raise, ast.JoinedStr, ast.Assert)
WAITS = {"wait", "wait_for", "join", "set", "clear", "acquire", "release", "notify_all", "shutdown", "result"}
IS_KEY = re.compile("key|signature").search
COPIES = {"list", "dict", "tuple", "set", "sorted"}
OTHER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.Add: ast.Sub}
OTHER |= {ast.And: ast.Or} | {new: old for old, new in OTHER.items()} | {ast.Or: ast.And}

Fault = collections.namedtuple("Fault", "name path text change")
"""A fault: its name, such as `engine.run.Run.start:wait:0`, its file, the file's new text, and what changed."""


def faults(package: pathlib.Path, path: pathlib.Path) -> Iterator[Fault]:
    """All faults that a file of the package can have; what is no Python any more would be found by any test."""
    source = path.read_bytes()
    at = [0, 0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]  # where a line begins
    for name, function in functions(ast.parse(source), ".".join(path.relative_to(package).with_suffix("").parts)):
        count: collections.Counter[str] = collections.Counter()
        for node in _inside(ast.Module(function.body)):
            for kind, changed in _changes(node, function.name):
                begin, end = at[node.lineno] + node.col_offset, at[node.end_lineno] + node.end_col_offset
                new = ast.unparse(changed)
                put = f"({new})" if isinstance(changed, ast.expr) else new
                text = (source[:begin] + put.encode() + source[end:]).decode()
                change = f"{' '.join(source[begin:end].decode().split())[:80]} -> {new[:80]}"
                with contextlib.suppress(SyntaxError):
                    compile(text, "with a fault", "exec", dont_inherit=True)
                    yield Fault(f"{name}:{kind}:{count[kind]}", str(path.relative_to(package)), text, change)
                count[kind] += 1


def instrument(package: pathlib.Path) -> None:
    """Lets each function of a package call `called` of reach.py first."""
    for path in list(package.rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        for name, function in functions(tree, ".".join(path.relative_to(package).with_suffix("").parts)):
            (call,) = ast.parse(f"__import__('{package.name}._reach')._reach.called({name!r})").body
            function.body.insert(ast.get_docstring(function) is not None, call)
        path.write_text(ast.unparse(tree), encoding="utf-8")
    shutil.copy(reach.__file__, package / "_reach.py")


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions in a module of this name, also those in classes and functions, with their names."""
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else name
        if isinstance(child, ast.FunctionDef):
            yield inner, child
        yield from functions(child, inner)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in a node, without annotations, what is raised, texts and inner functions."""
    for child in ast.iter_child_nodes(node):
        if child is not getattr(node, "annotation", None) and not isinstance(child, LEFT_OUT):
            yield child
            yield from _inside(child)


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
        case ast.Return(ast.Tuple([*fields, _])) if fields and IS_KEY(function):
            yield "key", ast.Return(ast.Tuple(fields))
        case ast.Assign([ast.Name(name) as key], ast.Tuple([*fields, _])) if fields and IS_KEY(name):
            yield "key", ast.Assign([key], ast.Tuple(fields), lineno=0)
        case ast.Call(ast.Attribute(_, "get" | "setdefault") as func, [ast.Tuple([*fields, _]), *rest]) if fields:
            yield "key", ast.Call(func, [ast.Tuple(fields), *rest], [])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))
