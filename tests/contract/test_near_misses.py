"""Calls that are nearly right: misspelt keywords, arguments that do not fit, one device; an exception with no text."""

import contextlib
import inspect
import itertools
import re

import pytest
import tensorflow as tf

from replica_engine import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
    call_for_each_replica,
    split_batch,
    sync_points,
)
from replica_engine.errors import NoMethodError, ReplicaValueError
from replica_engine.keras import BackupAndRestore, replicate_model


@pytest.mark.parametrize(("name", "near"), [("arg", "args"), ("kwarg", "kwargs"), ("option", "options")])
def test_a_misspelt_keyword_of_run(strategy, name, near):
    said = rf"strategy\.run got an unexpected keyword argument '{name}'\. Did you mean {near}=\?"
    with pytest.raises(TypeError, match=said):
        strategy.run(lambda: None, **{name: ()})


@pytest.mark.parametrize("name", ["replicas", "num_replicas"])
def test_the_number_of_replicas_is_no_keyword_of_a_constructor(name):
    with pytest.raises(TypeError, match=rf'\'{name}\'\. Each device has a replica: write devices=\["CPU:0", "CPU:1"\]'):
        MirroredStrategy(**{name: 2})
    with pytest.raises(TypeError, match=rf"'{name}'\. Write num_cores=4\."):
        TPUStrategy(**{name: 2})


def test_a_keyword_like_none_that_there_is():
    with pytest.raises(TypeError, match=r"It takes fn=, args=, kwargs=, options=\."):
        MirroredStrategy(["CPU:0"]).run(lambda: None, xyz=1)


@pytest.mark.parametrize(
    "device", ["CPU:0", "/cpu:1", "/device:CPU:0", tf.config.LogicalDevice("/device:CPU:1", "CPU")]
)
def test_one_device_without_a_list(device):
    assert MirroredStrategy(device).num_replicas_in_sync == 1


def without_text(base):
    class Mine(base):
        def __str__(self):
            raise KeyError("no text")

    def fail(x):
        if x.shape.rank == 0:
            raise Mine("mine")

    return Mine, fail


@pytest.mark.parametrize("base", [ValueError, TypeError, AttributeError, RuntimeError, KeyError])
def test_an_exception_whose_text_fails_arrives(strategy, base):
    mine, fail = without_text(base)
    with pytest.raises(mine) as failure:
        strategy.run(lambda x: fail(x), args=(tf.constant(1.0),))
    assert failure.value.args == ("mine",)


@pytest.mark.parametrize("base", [ValueError, TypeError, OSError])
def test_an_exception_whose_text_fails_arrives_from_a_device_loop(base):
    mine, fail = without_text(base)
    with pytest.raises(mine):
        TPUStrategy(num_cores=2).run_steps(lambda _, x: fail(x), iter(tf.data.Dataset.range(3)), 2)


@pytest.mark.parametrize("base", [ValueError, OSError])
def test_an_exception_whose_text_raises_itself_arrives_from_a_trace(strategy, base):
    class Mine(base):
        def __str__(self):
            raise self

    def step():
        raise Mine

    with pytest.raises(Mine):
        tf.function(lambda: strategy.run(step))()


@pytest.mark.parametrize("base", [ValueError, TypeError, OSError])
def test_an_exception_whose_text_raises_another_such_one_arrives(strategy, base):
    inner, _ = without_text(base)

    class Outer(base):
        def __str__(self):
            raise inner

    def step(x):
        if x.shape.rank == 0:
            raise Outer

    with pytest.raises(Outer):
        strategy.run(step, args=(tf.constant(1.0),))


@pytest.mark.parametrize(
    ("called", "name", "near"),
    [
        ("reduce", "ax", "axis"),
        ("reduce", "values", "value"),
        ("reduce", "reduce_opp", "reduce_op"),
        ("gather", "axes", "axis"),
        ("gather", "val", "value"),
    ],
)
def test_a_misspelt_keyword_of_a_method(strategy, called, name, near):
    with pytest.raises(TypeError, match=rf"strategy\.{called} got .*'{name}'\. Did you mean {near}=\?"):
        getattr(strategy, called)(**{name: 1})


def run_steps(**options):
    TPUStrategy(num_cores=1).run_steps(**options)


def plan(**options):
    TPUStrategy(num_cores=1).plan(**options)


MISSPELT = [
    (MirroredStrategy, {"device": "devices", "warn_afer": "warn_after", "time_out": "timeout"}),
    (TPUStrategy, {"num_core": "num_cores", "distributon": "distribution", "softplacement": "soft_placement"}),
    (MultiWorkerMirroredStrategy, {"communication_option": "communication_options", "resolver": "cluster_resolver"}),
    (replicate_model, {"replica": "replicas", "strat": "strategy"}),
    (BackupAndRestore, {"directry": "directory", "dir": "directory", "save_frequency": "save_freq"}),
    (run_steps, {"iteration": "iterations", "prefech": "prefetch", "iter": "iterator"}),
    (plan, {"arg": "args", "topologi": "topology", "kw_args": "kwargs"}),
]


@pytest.mark.parametrize(("call", "names"), MISSPELT, ids=lambda each: getattr(each, "__name__", ""))
def test_a_misspelt_keyword_of_what_users_call(call, names):
    for name, near in names.items():
        with pytest.raises(TypeError, match=rf"{call.__name__} got .*'{name}'\. Did you mean {near}=\?"):
            call(**{name: None})


@pytest.mark.parametrize(
    ("name", "said"), [("backup_dir", r"Write directory=\."), ("double_checkpoint", r"Two backups stay, .* keep= is")]
)
def test_a_keyword_that_keras_has_and_this_library_has_not(name, said):
    with pytest.raises(TypeError, match=rf"BackupAndRestore got .*'{name}'\. {said}"):
        BackupAndRestore(**{name: "there"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("split_batch", r"It is a function: write replica_engine\.split_batch\(strategy, batch\)\."),
        ("timeline", r'write with replica_engine\.timeline\("run\.json"\):'),
        ("merge_call", r"write tf\.distribute\.get_replica_context\(\)\.merge_call\(\.\.\.\)\."),
        ("all_reduce", r"write tf\.distribute\.get_replica_context\(\)\.all_reduce\(\.\.\.\)\."),
    ],
)
def test_what_another_object_has_is_no_attribute_of_a_strategy(strategy, name, said):
    with pytest.raises(NoMethodError, match=rf"Strategy has no {name}\. .*{said}"):
        getattr(strategy, name)
    assert not hasattr(strategy, name)
    setattr(strategy, name, "the user's own")
    assert getattr(strategy, name) == "the user's own"


@pytest.mark.parametrize("call", [call_for_each_replica, sync_points, split_batch], ids=lambda call: call.__name__)
def test_a_function_of_a_strategy_that_gets_none(call):
    arguments = () if call is sync_points else (MirroredStrategy(["CPU:0"]),)
    with pytest.raises(ReplicaValueError, match=r"first argument must be the strategy .*; got function <function "):
        call(lambda x: x, *arguments)


def test_any_other_name_is_missing_as_python_says_it(strategy):
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'") as failure:
        strategy.nothing  # noqa: B018
    assert (failure.value.name, failure.value.obj) == ("nothing", strategy)


@pytest.mark.parametrize(("name", "near"), [("reduce", "all_reduce"), ("gather", "all_gather")])
def test_what_a_strategy_has_is_no_attribute_of_a_replica(strategy, name, near):
    with pytest.raises(NoMethodError, match=rf"Context has no {name}\. In a replica, write context\.{near}\("):
        strategy.run(lambda: getattr(tf.distribute.get_replica_context(), name))


def test_the_context_of_a_device_loop_is_not_that_of_a_replica():
    said = r"MultiStepContext has no all_reduce\. .* write tf\.distribute\.get_replica_context\(\)\.all_reduce"
    with pytest.raises(NoMethodError, match=said):
        TPUStrategy(num_cores=1).run_steps(lambda context, x: context.all_reduce("SUM", x), [1.0], 1)


ONE = tf.constant([1.0, 2.0])


def of_two(x, y):
    return x + y


def of_one(batch):
    return batch


def with_scale(x, *, scale):
    return x * scale


def of_names(x, /):
    return x


class Steps:
    def bound(self, x, y, z=0.0):
        return x + y + z


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "said"),
    [
        (
            of_two,
            ((ONE, ONE),),
            None,
            "held 1 value, a tuple of 2. Write args=batch for args=(batch,), or args=(x, y).",
        ),
        (of_two, ([ONE, ONE],), None, "held 1 value, a list of 2. Write args=batch for args=(batch,), or args=(x, y)."),
        (of_two, ({"x": ONE, "y": ONE},), None, "a dict of 2. Write kwargs=batch for args=(batch,)."),
        (of_two, (ONE,), None, "`of_two(x, y)`: args held 1 value. Write args=(x, y), with a value for each."),
        (of_two, (), None, "args held no value. Write args=(x, y)"),
        (of_two, (ONE,), {"z": ONE}, "args held 1 value, and kwargs z. It has no argument z. Write args=(x, y),"),
        (of_two, (), {"x": ONE, "z": ONE}, 'It has no argument z. Write kwargs={"x": x, "y": y}, with'),
        (with_scale, (ONE,), {"scael": ONE}, 'no argument scael; did you mean scale? Write args=(x,), kwargs={"scale"'),
        (with_scale, (ONE, ONE), None, "`with_scale(x, *, scale)`: args held 2 values. Write args=(x,), kwargs={"),
        (of_names, (), {"x": ONE}, "It takes x in args only. Write args=(x,)"),
        (Steps.bound, (ONE, ONE), None, "object here. Write strategy.run(x.bound, ...) of an object x, with the same "),
        (Steps.bound, (), {"x": ONE}, 'Write strategy.run(x.bound, ...) of an object x, with kwargs={"x": x, "y": y}.'),
        (Steps.bound, (Steps(), ONE), None, "held 2 values. Write args=(self, x, y), with a value for each."),
        (of_one, (ONE, ONE), None, "`of_one(batch)`: args held 2 values. Write args=(batch,) for args=batch"),
        (Steps().bound, ((ONE, ONE),), None, "`bound(x, y, z)`: args held 1 value, a tuple of 2. Write args=batch"),
        (tf.function(of_two), ((ONE, ONE),), None, "`of_two(x, y)`: args held 1 value, a tuple of 2. Write args=batch"),
    ],
)
def test_arguments_that_the_function_does_not_take(strategy, fn, args, kwargs, said, in_function):
    def run():
        return strategy.run(fn, args=args, kwargs=kwargs)

    with pytest.raises(TypeError) as failure:
        (tf.function(run) if in_function else run)()
    text = "\n".join([str(failure.value), *getattr(failure.value, "__notes__", ())])
    assert text.count("strategy.run could not call") == 1, text
    assert said in text, text


def test_a_call_inside_the_function_is_not_that_of_run(strategy):
    with pytest.raises(TypeError) as failure:
        strategy.run(lambda batch: of_two(batch), args=(ONE,))
    assert "strategy.run could not call" not in "".join(getattr(failure.value, "__notes__", ()))


SIGNATURES = {
    each: eval(f"lambda {each}: None")
    for each in (
        "",
        "x",
        "x, y",
        "x, y=0",
        "x=0, y=0",
        "x, /",
        "x, /, y",
        "x, y=0, /, z=0",
        "x, *, z",
        "x, *, y=0, z",
        "x, *rest",
        "x, *rest, z",
        "*rest",
        "x, **others",
        "x, /, **others",
        "x, y=0, *rest, z, **others",
        "x, y=0, /, z=0, *, w",
        "self, x, y",
    )
}

ADVISED = re.compile(r"(?:Write|\bor) (args=\(.*?\)(?:, kwargs=\{.*?\})?|kwargs=\{.*?\}|args=batch|kwargs=batch)")


KEYWORDS = ("", "x", "y", "z", "x y", "x z", "y z", "no", "x no", "self", "w z")
ARGUMENTS = ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, 2),), ([1, 2, 3],), ({"x": 1},), ({"x": 1, "y": 2},))


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_call_that_is_advised_can_be_made(signature):
    strategy, fn = MirroredStrategy(["CPU:0"]), SIGNATURES[signature]
    values = dict.fromkeys(("x", "y", "z", "w", "no", "self"), 1) | {"rest": (1,)}
    for args, named in itertools.product(ARGUMENTS, KEYWORDS):
        kwargs = dict.fromkeys(named.split(), 1)
        with contextlib.suppress(TypeError):
            inspect.signature(fn).bind(*args, **kwargs)
            continue
        with pytest.raises(TypeError) as failure:
            strategy.run(fn, args=args, kwargs=kwargs)
        text = "\n".join([str(failure.value), *getattr(failure.value, "__notes__", ())])
        assert "strategy.run could not call" in text
        if "has no object" in text:
            continue
        advised = ADVISED.findall(text)
        assert advised, text
        for each in advised:
            batch = args if each == "args=(batch,)" else args[0] if len(args) == 1 else None
            call = eval(f"dict({each})", values | {"batch": batch})
            strategy.run(fn, **({"kwargs": kwargs} | call if "batch" in each else call))
