"""AutoGraph looks for a lambda in the statement around it, and reads a file once.

By itself it parses the whole file for each lambda that it converts, in Python. Tests are long files of many lambdas:
that was a tenth of the time of all tests. And for each function it looks at all modules for that of its file, and reads
the file again: that takes a third as long as the conversion of a small function.
"""

import ast
import functools
import linecache
import threading
import types

from tensorflow.python.autograph.pyct import inspect_utils, parser

_here = threading.local()


def look_nearby():
    """Makes AutoGraph do so. What it finds is the same: it takes lambdas at the very line only."""
    parse = parser._parse_lambda

    def parse_nearby(fn):
        _here.line = fn.__code__.co_firstlineno
        return parse(fn)

    parser._parse_lambda = parse_nearby
    parser.linecache = types.SimpleNamespace(getlines=_lines)  # nothing else there uses it
    inspect_utils._fix_linecache_record = lambda fn: None  # for functions of .par files


def _lines(file, module_globals=None):
    """The lines of a file, with empty ones in place of those that are not in a statement around the lambda."""
    lines = linecache.getlines(file, module_globals)
    kept = _around(_body("".join(lines)), _here.line)
    return [line if number in kept else "\n" for number, line in enumerate(lines, 1)]


@functools.lru_cache(maxsize=8)
def _body(source):
    return ast.parse(source).body


def _around(body, line):
    """The lines of the statements that have a line; of a class only its head, and those in it."""
    kept = set()
    for node in body:
        first = _first(node)
        if first <= line <= node.end_lineno:
            inside = _around(node.body, line) if isinstance(node, ast.ClassDef) else set()
            kept |= inside | set(range(first, _first(node.body[0]) if inside else node.end_lineno + 1))
    return kept


def _first(node):
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
