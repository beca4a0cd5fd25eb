"""`Hook`: what the library puts in the place of an attribute, beside what others put there."""

import functools
import sys
import threading
import types

import pytest
import tensorflow as tf

from replica_engine.upstream import hook as hooks_module
from replica_engine.upstream.hook import Hook


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("hooked_by_a_test")
    made.fn = lambda x: [x]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(hooks_module, "_places", {})
    monkeypatch.setattr(hooks_module, "_declared", [])
    return made


def hook(name="fn", owner="hooked_by_a_test", **options):
    return Hook(owner, name, why="a test", since="the test", until="its end", **options)


def noting(word):
    return lambda original, x: [word, *original(x)]


def test_a_hook_that_is_declared_changes_nothing(module):
    before = module.fn
    hook()
    assert module.fn is before


def test_it_goes_around_once(module):
    own = module.fn
    only = hook()
    for _ in range(3):
        only.around(noting("ours"))
    assert module.fn(1) == ["ours", 1]
    assert only.original is own


def test_two_hooks_have_the_given_order_whichever_comes_first(module):
    outer, inner = hook(order=1), hook()
    outer.around(noting("outer"))
    by_name = module.fn
    inner.around(noting("inner"))
    assert module.fn(1) == by_name(1) == ["outer", "inner", 1]
    assert inner.original(1) == [1]


def test_what_another_library_puts_around_it_stays_and_is_not_hooked_twice(module):
    first, second = hook(), hook()
    first.around(noting("first"))
    ours = module.fn
    module.fn = lambda x: ["theirs", *ours(x)]
    for each, word in ((first, "first"), (second, "second")):
        each.around(noting(word))
    assert module.fn(1) == ["theirs", "second", "first", 1]


def test_what_another_library_has_put_there_before_is_called(module):
    own = module.fn
    module.fn = functools.wraps(own)(lambda x: ["theirs", *own(x)])
    hook().around(noting("ours"))
    assert module.fn(1) == ["ours", "theirs", 1]


def test_it_comes_back_where_another_has_put_the_original_back(module, monkeypatch):
    only = hook()
    with monkeypatch.context() as patch:
        patch.setattr(module, "fn", lambda x: ["a mock", x])
        only.around(noting("ours"))
        assert module.fn(1) == ["ours", "a mock", 1]
    assert module.fn(1) == [1]
    only.around(noting("ours"))
    assert module.fn(1) == ["ours", 1]


def test_it_waits_for_the_import_of_its_owner(module, monkeypatch):
    monkeypatch.delitem(sys.modules, module.__name__)
    only = hook()
    only.around(noting("ours"))
    only.put(pytest.fail)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    only.around(noting("ours"))
    assert module.fn(1) == ["ours", 1]


def test_a_name_that_a_version_lacks_is_left_out(module):
    hook("gone").around(noting("ours"))
    assert not hasattr(module, "gone")


def test_a_method_inside_a_filter_of_tracebacks_is_served_by_names_from_before(module):
    module.Owner = type("Owner", (), {"fn": tf.__internal__.function.Function.__call__})
    handler = sys.modules["tensorflow.python.util.traceback_utils"].filter_traceback
    module.Owner.fn = handler(lambda self, x: [x])
    bound = module.Owner().fn
    hook(owner="hooked_by_a_test.Owner").around(lambda original, self, x: ["ours", *original(self, x)])
    assert bound(1) == module.Owner().fn(1) == ["ours", 1]


def test_it_puts_what_is_no_function(module):
    module.paths = ("theirs",)
    only = hook("paths")
    for _ in range(2):
        only.put(lambda paths: paths if "ours" in paths else (*paths, "ours"))
    assert module.paths == ("theirs", "ours")


def test_threads_that_install_it_at_once_install_it_once(module):
    several = [hook(order=order) for order in range(4)]
    ready = threading.Barrier(16)

    def install():
        ready.wait()
        for order, each in enumerate(several):
            each.around(noting(order))

    threads = [threading.Thread(target=install) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert module.fn("x") == [3, 2, 1, 0, "x"]
