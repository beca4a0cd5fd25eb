"""TPUStrategy: the replica body compiled to one program that runs on N devices of any PJRT platform.

It is a subclass of TensorFlow's class. So a program that checks `isinstance(strategy, tf.distribute.TPUStrategy)` takes
the branch that it takes on TPUs, and in that branch asks the strategy for more. TensorFlow's class reads the answers
from a TPU system, which does not exist here. The answers here hold on every platform:

- A host is a worker, which is a process; one has all replicas, unless the job has several.
- A replica has as many logical devices as `cores_per_replica` says. XLA's partitioner, which divides the values of a
  replica, chooses on which of them an op runs; a split of a tensor says how it is divided.
- No embedding accelerator exists, also on real TPUs, because TensorFlow's embedding ops need TensorFlow's own TPU
  runtime. Layers that ask for one (`tensorflow_recommenders.layers.embedding.TPUEmbedding`) then do lookups with ops
  that XLA compiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.diagnostics import misuse, tracebacks
from replica_engine.errors import DeviceError, InputsError
from replica_engine.errors.base import positive_int, shown
from replica_engine.pjrt.plan import DeviceMemory, Plan
from replica_engine.process import setup
from replica_engine.strategies import argument_checks, device_loops, multi_step, on_backend, variable_layouts
from replica_engine.strategies.compiled_backend import CompiledBackend, TPUExtended
from replica_engine.strategies.variable_layouts import Layouts
from replica_engine.upstream.graphs import autograph
from replica_engine.xla import body, body_context, constraints
from replica_engine.xla.cluster_resolver import PjrtClusterResolver
from replica_engine.xla.replicate import with_values

__all__ = ["TPUExtended", "TPUStrategy"]


class TPUStrategy(on_backend.OnBackend, tf.distribute.TPUStrategy):
    """Runs a function on N devices as one compiled program: on TPUs, on GPUs, or on the CPU devices of a laptop.

    This class is a subclass of `tf.distribute.TPUStrategy`, so libraries that check for that class take the branch that
    they take on TPUs; `docs/libraries.md` lists them.

    The function is traced once, whatever N is. XLA compiles it for N replicas, and PJRT runs it. `scope`, `run`,
    `reduce`, datasets, Keras `fit`, checkpoints and `extended` work as TensorFlow documents them for strategies.
    Variables live on the devices between steps. Reading a variable on the host returns its value after the last step.

    `run` compiles without a `tf.function`; inside a `tf.function`, the run is a part of that function's graph. As in a
    `tf.function`, Python code runs only while tracing, arguments that are not tensors become constants of the program,
    and a change of shapes causes another compilation.

    Args:
        tpu_cluster_resolver: a `replica_engine.xla.PjrtClusterResolver` that names the platform to run on, and perhaps
            the job. None takes the first of TPUs, GPUs and CPU devices that the machine has, and the job that the
            environment describes, as `docs/hosts/tpu_strategy.md` says: the devices of all workers then run it.
        steps_per_run: how many steps one launch of a device loop runs if the call of `run_steps` does not say.
        num_cores: the number of devices, of all workers together; each gets equally many. None takes all TPUs or GPUs;
            CPU devices are made on request, so None makes one for each core that the process may use.
        same_random_numbers: let random ops draw the same numbers on all replicas. By default each replica draws
            different numbers.
        soft_placement: let ops that XLA cannot compile (strings, tables, summaries, `tf.print`, `tf.py_function`,
            assertions) run on the host, between the ops that run on the devices. False makes them a LoweringError.
            None follows `tf.config.set_soft_device_placement`, which is True by default.
        timeout: the seconds that a launch may take without a sign of life (a host call that starts or returns, a batch
            that is taken) before it raises ReplicaTimeoutError. None waits without a limit. The time to compile does
            not count.
        warn_after: the seconds after which a warning is logged, with a table of where each replica stands; the
            warning repeats at the same interval. None takes the value of the environment variable
            REPLICA_ENGINE_WARN_AFTER, or 30 if it is not set.
        distribution: how a replica with several devices divides its variables and its batch over them. "fsdp" divides
            each variable, gradient and optimizer slot along its largest dimension that divides evenly; "zero1" the
            slots alone; a `keras.distribution.ModelParallel` or `DataParallel` says it by layouts, and its mesh has the
            devices of one replica. None divides nothing. `docs/sharding.md` has more.
        cores_per_replica: the number of devices of each replica; the number of replicas is `num_cores` divided by it.
            None is all devices, or those of the mesh, with a `distribution`, and 1 without.
        experimental_device_assignment: a `tf.tpu.experimental.DeviceAssignment`, or another object with the attributes
            `num_cores_per_replica` and `num_replicas`, in the place of `num_cores` and `cores_per_replica`. The devices
            themselves are the first ones in any case.
        experimental_spmd_xla_partitioning: refuse `experimental_assign_to_logical_device`, as TensorFlow does with it.
            XLA's partitioner divides a replica of several devices in any case.

    Raises:
        BackendMissingError: jax is not installed, or its version does not work. The message names the command to run.
        DeviceError: the platform has fewer devices than `num_cores`, or none; or the workers cannot share them evenly.
        DistributionError: `distribution` is none of these, or does not fit the number of devices.
        ClusterConfigError: the description of the job is wrong.
        WorkersMissingError, WorkerVersionError or WorkerLostError: the job failed to start.
        ValueError: `steps_per_run`, `timeout` or `warn_after` is not positive.
        TypeError: `tpu_cluster_resolver` is not a `replica_engine.xla.PjrtClusterResolver`.
        ReplicaValueError: `same_random_numbers` or `soft_placement` is not True or False.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.TPUStrategy(num_cores=2)
        >>> strategy.num_hosts, strategy.num_replicas_in_sync
        (1, 2)
        >>> with strategy.scope():
        ...     total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        >>> def fn(x):
        ...     total.assign_add(2 * x)
        ...     return tf.distribute.get_replica_context().all_reduce("SUM", x)
        >>> result = strategy.run(fn, args=(tf.constant(3.0),))
        >>> [float(each) for each in strategy.experimental_local_results(result)], float(total.numpy())
        ([6.0, 6.0], 12.0)
    """

    _collective_key_base = 0  # TensorFlow's extended class asks for a key; no collective of TensorFlow is used
    _runs_again = TPUExtended

    @argument_checks.names_keywords(
        "TPUStrategy", dict.fromkeys((*argument_checks.NUMBERS_OF_REPLICAS, "devices"), "Write num_cores=4.")
    )
    def __init__(
        self,
        tpu_cluster_resolver: PjrtClusterResolver | None = None,
        steps_per_run: int = 1,
        num_cores: int | None = None,
        *,
        same_random_numbers: bool = False,
        soft_placement: bool | None = None,
        timeout: float | None = None,
        warn_after: float | None = None,
        distribution: Any = None,
        cores_per_replica: int | None = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ):
        argument_checks.check_flags(experimental_spmd_xla_partitioning=experimental_spmd_xla_partitioning)
        if experimental_device_assignment is not None:
            num_cores, cores_per_replica = variable_layouts.assigned(
                experimental_device_assignment, num_cores, cores_per_replica
            )
        argument_checks.check_seconds(timeout=timeout, warn_after=warn_after)
        argument_checks.check_flags(same_random_numbers=same_random_numbers)
        if soft_placement is not None:
            argument_checks.check_flags(soft_placement=soft_placement)
        steps = positive_int(steps_per_run)
        if steps is None:
            raise ValueError(f"steps_per_run must be a positive int; got {shown(steps_per_run)}.")
        if tpu_cluster_resolver is not None and not isinstance(tpu_cluster_resolver, PjrtClusterResolver):
            raise TypeError(
                f"tpu_cluster_resolver must be a replica_engine.xla.PjrtClusterResolver or None, got "
                f"{shown(tpu_cluster_resolver)}. For a platform write TPUStrategy(PjrtClusterResolver('gpu')), for a "
                "number of devices TPUStrategy(num_cores=4)."
            )
        resolver = tpu_cluster_resolver or PjrtClusterResolver()
        # After the checks of arguments: a look at the devices of a job joins it, and waits for all workers.
        divided = variable_layouts.read(distribution, num_cores, cores_per_replica, lambda: resolver.devices.replicas)
        devices = resolver.group(num_cores) if divided is None else resolver.group(divided.cores, divided.mesh)
        # A launch holds a thread of TensorFlow's pool.
        # If none is left for its host calls, they never run, and the launch never ends.
        setup.make_room(setup.FOR_LAUNCHES)
        limits = body.LaunchLimits(timeout, warn_after)
        backend = CompiledBackend(self, devices, same_random_numbers, limits, soft_placement, divided)
        # Not the parent's __init__: it would connect to TensorFlow's TPU system.
        tf.distribute.Strategy.__init__(self, TPUExtended(self, backend, steps))
        self._resolver, self._only_splits = tpu_cluster_resolver, experimental_spmd_xla_partitioning

    def __repr__(self) -> str:
        return argument_checks.described(self, self._compiled_half.device_group.names)

    @property
    def _extended(self) -> TPUExtended:
        """The extended half. Every use of the strategy asks for it, and in a graph of tf.compat.v1 there is none."""
        body.check_mode()
        return self._compiled_half

    @_extended.setter
    def _extended(self, extended: TPUExtended) -> None:
        self._compiled_half = extended

    @autograph.artifact
    @argument_checks.names_keywords("strategy.run_steps")
    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int | None = None,
        *,
        initial_loop_values: Any = None,
        prefetch: int | None = None,
    ) -> multi_step.MultiStepContext:
        """Runs `fn` `iterations` times on each replica, many times in a launch: a loop on the devices.

        A thread fetches batches from `iterator` while steps run. All batches must have the structure and shapes of the
        first batch. A launch takes about a second at most; a step that calls the host is a launch of its own.

        Args:
            fn: a step, `def step(context, batch)`. Its first argument is the context, a `MultiStepContext`. If a batch
                is a tuple, its parts may be arguments: `def step(context, x, y)`. The step is called in replica context
                and traced once, or twice if it calls the host; what it returns is ignored. `run`, `reduce` and
                `experimental_local_results` of the strategy also work in it.
            iterator: an iterator of a dataset, or any iterable. An iterator of a distributed dataset gives each replica
                its shard of a batch; any other one, also a plain `tf.data.Dataset`, gives each replica the whole batch.
                Write `iter(strategy.experimental_distribute_dataset(dataset))` for shards. `run_steps` takes at most
                `iterations` batches from it.
            iterations: how many steps to run; None takes `steps_per_run`.
            initial_loop_values: by name, the content of `last_step_outputs` if the iterator yields no batch.
            prefetch: the largest number of batches to fetch ahead. None means two, or more if batches are small: up to
                256, as long as they take no more than 4 MiB on a replica. On TPUs and GPUs it means
                three, or up to 384 that take no more than 12 MiB.

        Returns:
            The context, with the values that the last step passed out.

        Raises:
            tf.errors.OutOfRangeError: the iterator ended early. The results of the steps that ran are kept. The error's
                attribute `context` has the number of these steps (`steps`) and the outputs of the last one.
            InputsError: `fn` does not take a context and the batch; then no step runs. Or a batch is unlike the first
                one; the steps before it are kept, as above.
            Exception: what the iterator, or a host call in `fn`, raised (the steps before are kept, as above), or what
                `fn` raised while it was traced.

        Example:
            >>> import tensorflow as tf, replica_engine
            >>> strategy = replica_engine.TPUStrategy(num_cores=2)
            >>> with strategy.scope():
            ...     total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
            >>> def step(context, x):
            ...     total.assign_add(tf.reduce_sum(x))
            ...     context.set_last_step_output("mean", tf.reduce_mean(x), "MEAN")
            >>> data = tf.data.Dataset.range(8).map(lambda i: tf.cast(i, tf.float32))
            >>> data = data.batch(2, drop_remainder=True)
            >>> batches = iter(strategy.experimental_distribute_dataset(data))
            >>> context = strategy.run_steps(step, batches, iterations=3)
            >>> float(total.numpy()), float(context.last_step_outputs["mean"]), context.steps
            (15.0, 4.5, 3)
        """
        settings = device_loops.LoopSettings(iterations, initial_loop_values, prefetch=prefetch)
        try:
            return self.extended.backend.run_steps(fn, iterator, settings)
        except Exception as error:  # of the user's step and data, whatever it is
            raise tracebacks.shortened(misuse.translate_error(error))
        except KeyboardInterrupt as interrupt:
            raise tracebacks.shortened(tracebacks.as_raised(interrupt))

    @autograph.artifact
    @argument_checks.names_keywords("strategy.plan")
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
            argument_checks.check_call(fn, args, kwargs)
            args, kwargs = with_values((args, dict(kwargs or {})), "plan")
            return self.extended.backend.plan(fn, args, kwargs, topology)
        except Exception as error:
            raise tracebacks.shortened(misuse.translate_error(error))

    def memory(self) -> DeviceMemory:
        """The memory that this strategy's variables and its last program need on each device.

        Returns:
            An object with `variables`, a list with the bytes of the variables on each device, `program`, the `Memory`
            of the program that ran last, and `devices`, the names of the devices. `program` is None before the first.

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

    @autograph.artifact
    @argument_checks.names_keywords("strategy.reduce")
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces values over replicas, like every strategy; works in steps of `run_steps`. Takes Python numbers."""
        context = tf.distribute.get_replica_context()
        # A step of `run_steps` is in replica context, and TensorFlow's `reduce` works outside of it only.
        if isinstance(context, body_context.BodyReplicaContext) and context.is_step:
            return context.merge_call(
                lambda _, value: super(TPUStrategy, self).reduce(reduce_op, value, axis), (value,)
            )
        return super().reduce(reduce_op, value, axis)

    def combined(self, own: Callable[..., Any], values: Any, reduction: str) -> Any:
        """As in every strategy; predictions are joined by `join_rows`."""
        if self.extended.backend.saving is not None and reduction == "concat":
            return tf.nest.map_structure(self.join_rows, values)
        return super().combined(own, values, reduction)

    def join_rows(self, value: Any) -> tf.Tensor:
        """The rows of all replicas of all workers, in the order of the whole batch that they were taken from.

        TensorFlow deals the shares of a batch out in turns: with two workers of two replicas, worker 0 has the first
        and the third share. Keras calls this for predictions.
        """
        devices = self.extended.device_group
        rows = self.gather(value, axis=0)
        shape = tf.shape(rows)
        shares = tf.reshape(rows, tf.concat([[devices.replicas // devices.size, devices.size, -1], shape[1:]], 0))
        swapped = tf.transpose(shares, tf.concat([[1, 0], tf.range(2, tf.rank(shares))], 0))
        return tf.reshape(swapped, shape)

    # In a replica, the next three say how XLA divides a value over the replica's devices. Elsewhere they return it.

    @autograph.artifact
    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> tf.Tensor:
        """Names a device of the replica for a tensor. XLA's partitioner chooses the devices that compute it.

        Args:
            tensor: any tensor.
            logical_device_id: the number of the device in its replica, from 0.

        Returns:
            The tensor.

        Raises:
            DeviceError: a replica has no device of this number; or the strategy was made with
                `experimental_spmd_xla_partitioning=True`.
        """
        body.check_mode()
        if self._only_splits:
            raise DeviceError(
                "experimental_assign_to_logical_device was called under a strategy that was made with "
                "experimental_spmd_xla_partitioning=True: there tensors are split over the logical devices, with "
                "experimental_split_to_logical_devices, and never assigned to one."
            )
        count = self.extended.device_group.devices_each
        constraints.check("experimental_assign_to_logical_device", logical_device_id, count)
        return tf.identity(tensor)

    @autograph.artifact
    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> tf.Tensor:
        """Splits a tensor over the devices of its replica.

        Args:
            tensor: any tensor.
            partition_dimensions: the number of parts for each dimension of the tensor. Their product is the number of
                the replica's devices, and each divides the size of its dimension.

        Returns:
            The tensor.

        Raises:
            DeviceError: the numbers are not such ones.
        """
        tensor = tf.convert_to_tensor(tensor)
        parts = list(map(constraints.as_int, partition_dimensions))
        count = self.extended.device_group.devices_each
        if (
            min(parts, default=1) < 1
            or math.prod(parts) != count
            or len(parts) != tensor.shape.rank
            or any(size is not None and size % number for size, number in zip(tensor.shape, parts, strict=True))
        ):
            raise DeviceError(
                "experimental_split_to_logical_devices was called with "
                f"partition_dimensions={shown(partition_dimensions)} for a tensor of shape {tensor.shape}. Give one "
                f"number for each dimension, which divides its size, with the product {count}: "
                f"{constraints.devices_of_replica(count)}"
            )
        return tf.identity(tensor) if body.in_body() is None else constraints.divided(tensor, parts)

    @autograph.artifact
    def experimental_replicate_to_logical_devices(self, tensor: Any) -> tf.Tensor:
        """Copies a tensor to all devices of its replica. Returns the tensor."""
        body.check_mode()
        tensor = tf.convert_to_tensor(tensor)
        return tf.identity(tensor) if body.in_body() is None else constraints.whole(tensor)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of all workers."""
        return self._compiled_half.device_group.replicas

    @property
    def num_hosts(self) -> int:
        """The number of workers: processes that run the replicas together."""
        return self.extended.num_hosts

    @property
    def steps_per_run(self) -> int:
        """How many steps one launch of a device loop runs if the call of `run_steps` does not say."""
        return self.extended.steps_per_run

    @property
    def cluster_resolver(self) -> PjrtClusterResolver | None:
        """The resolver that was passed to the constructor; None if none was passed."""
        return self._resolver
