"""Objects and calls that do not belong to the strategy whose replicas use them."""

from __future__ import annotations

from replica_engine.errors.base import ReplicaEngineError, at, warning

KERAS_RUNS = "`fit`, `predict` and such methods of a Keras model run the replicas themselves: call these outside."
_ALL_REDUCE = (
    'In a replica, ask its context, on all replicas: tf.distribute.get_replica_context().all_reduce("SUM", value).'
)


def _updated(where: str) -> str:
    """The sentence with the line of the update, or of the run or the `fit` that makes it."""
    return f" Replicas update the variable{at(where)}." if where else ""


class ScopeError(ReplicaEngineError, RuntimeError):
    """A variable, optimizer or call does not belong to the strategy whose replicas use it.

    Raised by the run, where replicas use the object or make the call. Make models, variables and optimizers under
    `strategy.scope()` of the strategy that runs them, and call methods of the strategy outside its replicas.
    """

    @classmethod
    def variable(cls, name: str, where: str) -> ScopeError:
        """Replicas update a variable that was made outside the scope."""
        return cls(
            f"The variable {name!r} was made outside `strategy.scope()`: there is one for all replicas, and an update "
            f"needs one on each.{_updated(where)} Make it, or the model that it belongs to, under the scope:\n"
            "    with strategy.scope():\n"
            "        model = make_model()"
        )

    @classmethod
    def model_and_optimizer(cls, variable: str, optimizer: str, kind: str, where: str) -> ScopeError:
        """Replicas train a model with an optimizer, and both were made outside the scope."""
        return cls(
            f"The variable {variable!r} and the optimizer {optimizer!r} that updates it were made outside "
            f"`strategy.scope()`, so neither can be on each replica.{_updated(where)} Make the optimizer "
            "and the model under the scope:\n"
            "    with strategy.scope():\n"
            "        model = make_model()\n"
            f"        optimizer = keras.optimizers.{kind}(...)"
        )

    @classmethod
    def other_strategy(cls, what: str, name: str) -> ScopeError:
        """Replicas use a variable or an optimizer that was made under the scope of another strategy."""
        return cls(
            f"The {what} {name!r} belongs to another strategy than the one whose replicas use it. Make one strategy, "
            "enter its scope to make models and optimizers, and call run of the same object:\n"
            "    with strategy.scope():\n"
            f"        {what} = ...\n"
            "    strategy.run(step)"
        )

    @classmethod
    def in_replica(cls, method: str, where: str) -> ScopeError:
        """`run`, `scope`, `reduce` or `reduce_to` is called by a function that replicas already run."""
        cure = {
            "run": "Call the inner function directly: each replica runs it. In a merge function, run works. "
            f"{KERAS_RUNS}",
            "scope": "A replica is in the scope already: leave the `with` out, and what it makes belongs to the "
            f"strategy. Better, make variables before strategy.run. {KERAS_RUNS}",
            "reduce": f"{_ALL_REDUCE} strategy.reduce is for what strategy.run returns, and for merge functions.",
            "extended.reduce_to": f"{_ALL_REDUCE} reduce_to is for merge functions.",
            "extended.batch_reduce_to": f"{_ALL_REDUCE} It takes a list of tensors too. batch_reduce_to is for merge "
            "functions.",
        }[method]
        return cls(
            f"strategy.{method}() was called inside a replica{at(where)}, by code that strategy.run runs. {cure}"
        )


def warn_shared_variable(name: str, where: str) -> str:
    """The warning that several replicas write one plain variable, each its own value."""
    return warning(
        "warn_shared_variable",
        f"The plain variable {name!r} is written by more than one replica{at(where)}. It was made outside "
        "`strategy.scope()`, so all replicas share it, and each write comes on top of the others or replaces them. "
        "Make it, or the Keras metric or layer that has it, under the scope. With `replicate_model`, keep the metric, "
        "layer or seed generator in an attribute of the model instead. Replicas that write the same value, such as an "
        "all-reduced gradient, need no more. If each writes its own, such as a number of samples, say what "
        "becomes of them:\n"
        "    with strategy.scope():\n"
        "        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)",
    )


def warn_foreign_optimizer(name: str, kind: str, size: int, where: str) -> str:
    """The warning that replicas update their variables with an optimizer that was made and built outside the scope."""
    return warning(
        "warn_foreign_optimizer",
        f"The optimizer {name!r} is used by {size} replicas{at(where)}, and was made outside `strategy.scope()`. So it "
        f"has one state for all of them (iterations, momentum, the moments of Adam), which each step changes {size} "
        "times. The numbers are not those of one device. Make and build it under the scope:\n"
        "    with strategy.scope():\n"
        f"        optimizer = keras.optimizers.{kind}(...)",
    )
