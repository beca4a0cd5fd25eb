"""Makes AutoGraph look for a lambda in the statement around it only, and read each file once.

Without this, AutoGraph parses the whole file, in Python, for each lambda that it converts. Test files are long and have
many lambdas, so that took a tenth of the time of all tests. For each function it also searches all modules for the one
of its file, and reads the file again, which takes a third as long as the conversion of a small function.
"""

import ast
import functools
import linecache
import threading
import types

from tensorflow.python.autograph.pyct import inspect_utils, parser

_here = threading.local()


def look_nearby():
    """Installs both changes. AutoGraph finds the same lambdas, because it takes only those at the very line."""
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
