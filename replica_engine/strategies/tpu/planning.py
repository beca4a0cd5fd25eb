"""What a step needs on each device, before it runs: on the devices that are there, and on chips that are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from replica_engine._tf.graphs import autograph
from replica_engine.diagnostics.misuse import explained
from replica_engine.diagnostics.tracebacks import shortened
from replica_engine.errors import InputsError
from replica_engine.pjrt.plans.plan import DeviceMemory, Plan
from replica_engine.strategies.backend import OnBackend
from replica_engine.strategies.tpu.variable_table import Layouts
from replica_engine.strategies.validation import check_call, names_keywords
from replica_engine.xla.signature.stand_ins import with_values


class Planning(OnBackend):
    """The strategy half for compiled replicas, with the methods `plan`, `memory` and `layouts`."""

    @autograph.artifact
    @names_keywords("strategy.plan")
    def plan(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        topology: str | None = None,
    ) -> Plan:
        """Compiles `fn` as `run` would, and says what it needs on each device. Nothing runs, and no variable changes.

        Args:
            fn: the step, as for `run`.
            args: its positional arguments, as for `run`; a `tf.TensorSpec` stands for a tensor of its shape and dtype,
                which each replica gets whole, and the `element_spec` of a distributed dataset for a batch of it.
            kwargs: its keyword arguments.
            topology: the name of chips that need not be there: "v5e:2x4" are eight chips of TPU v5e, "h100:8" are eight
                GPUs. The program is compiled for the first N of them, as many as replicas, in a process of its own.
                `pip install "replica-engine[aot]"` installs the compilers. None plans for the devices of this strategy;
                a later `run` then need not compile.

        Returns:
            A `replica_engine.xla.Plan`, which prints as a table: `memory` (bytes on each device), `fits`, `cost`
            (flops, bytes, cycles and collectives). What the platform does not tell is None: `cost.cycles` on CPUs
            and GPUs.

        Raises:
            DeviceError: no chips have this name, and the message lists those that do; or they cannot serve so many
                replicas; or a host call of the step has a value that cannot be sent between the host and such a chip.
            BackendMissingError: the compiler for these chips is not installed.
            ProgramError: the compiler refuses the program, or ends its process.
            ReplicaMismatchError: the replicas have tensors of different shapes or dtypes.
            ReplicaTimeoutError: the compiler gave no answer within the `timeout` of the strategy.
            Exception: as `run` does, before the program is launched.

        Example:
            >>> import tensorflow as tf, replica_engine
            >>> strategy = replica_engine.TPUStrategy(num_cores=2)
            >>> with strategy.scope():
            ...     w = tf.Variable(tf.ones([256, 256]))
            >>> def step(x):
            ...     w.assign_sub(tf.distribute.get_replica_context().all_reduce("SUM", x) * 0.1)
            >>> plan = strategy.plan(step, args=(tf.TensorSpec([256, 256]),))
            >>> plan.memory.arguments, plan.memory.aliased, plan.fits, plan.cost.cycles
            (524288, 262144, True, None)
            >>> [(each.kind, each.bytes) for each in plan.cost.collectives]
            [('all-reduce', 262144)]
        """
        try:
            if not tf.executing_eagerly():
                raise InputsError(
                    "plan was called in a tf.function. It compiles a step and runs nothing: call it in eager mode, "
                    "with the function that the tf.function passes to strategy.run."
                )
            if isinstance(kwargs, str):
                raise InputsError(f"plan takes args and kwargs first. Write plan(fn, args, topology={kwargs!r}).")
            check_call(fn, args, kwargs)
            args, kwargs = with_values((args, dict(kwargs or {})), "plan")
            return self.extended.backend.plan(fn, args, kwargs, topology)
        except Exception as error:
            raise shortened(explained(error))

    def memory(self) -> DeviceMemory:
        """The memory that this strategy's variables and its last program need on each device.

        Returns:
            An object with `variables`, a list with the bytes of the variables on each device, `program`, the `Memory`
            of the program that ran last, and `devices`, the names of the devices. `program` is None before the first,
            and if replicas with shares of different sizes ran different programs.

        Example:
            >>> import tensorflow as tf, replica_engine
            >>> strategy = replica_engine.TPUStrategy(num_cores=2)
            >>> with strategy.scope():
            ...     w = tf.Variable(tf.zeros([1000]))
            >>> strategy.memory().variables
            [4000, 4000]
        """
        return self.extended.backend.memory()

    def layouts(self) -> Layouts:
        """How the variables of this strategy are divided over the devices of a replica: a table when printed.

        Returns:
            An object with `rows`: for each variable its path, shape, dtype, the axis of the mesh for each of its
            dimensions, or None, and its bytes on a device. `mesh` has the name and the size of each axis.

        Example:
            >>> import tensorflow as tf, replica_engine
            >>> strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
            >>> with strategy.scope():
            ...     w = tf.Variable(tf.zeros([512, 256]), name="w")
            ...     b = tf.Variable(tf.zeros([200]), name="b")
            >>> print(strategy.layouts())
            variable  shape       dtype    axes             bytes on a device
            w         (512, 256)  float32  ('batch', None)  131,072 of 524,288
            b         (200,)      float32  (None,)          800
            mesh: 'batch'=4; a device has 131,872 of 525,088 bytes
        """
        return self.extended.backend.variable_table.layouts()
