"""The devices of a program whose replicas have several devices each, and arrays on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from replica_engine.pjrt.device_group import Array, DeviceGroup, make_aval, on_host
from replica_engine.pjrt.jaxlib import ArrayImpl, Mesh, NamedSharding, PartitionSpec
from replica_engine.pjrt.stablehlo.partition_local import REPLICAS, WHOLE, Axes, ReplicaMesh, ValuePart
from replica_engine.workers import Member


class PartitionedGroup(DeviceGroup):
    """Devices in groups of one size, one group for each replica; see `stablehlo`.

    Args:
        platform: as for `DeviceGroup`.
        devices: the devices of this process, those of a replica one behind the other.
        mesh: the devices of one replica.
        everywhere: the devices of all workers.
        member: as for `DeviceGroup`.

    A replica may have devices of several workers. Then each of its workers runs it, with the same arguments.

    Attributes:
        mesh: the devices of one replica.
        rows: whether values have a row for each replica: there is more than one.
    """

    mesh: ReplicaMesh

    def __init__(
        self,
        platform: str,
        devices: tuple,
        mesh: ReplicaMesh,
        everywhere: tuple | None = None,
        member: Member | None = None,
    ):
        super().__init__(platform, devices, everywhere, member)
        self.mesh = mesh
        # For exchanges between workers, in which each device counts for itself.
        self.flat = DeviceGroup(platform, devices, everywhere, member)
        self.spans = self.size < mesh.size
        # A worker that has only some devices of a replica runs that replica with the others.
        self.size = max(1, self.size // mesh.size)
        self.replicas //= mesh.size
        self.first //= mesh.size
        self.rows = self.replicas > 1
        each = len(devices) // self.size
        own = [self.names[index * each : (index + 1) * each] for index in range(self.size)]
        # CPU:0-3: the name of the first device, and the number of the last one.
        self.names = [f"{names[0]}-{names[-1].rpartition(':')[2]}" if len(names) > 1 else names[0] for names in own]
        shape, axes = [size for _, size in mesh.axes], [name for name, _ in mesh.axes]
        if self.rows:
            shape, axes = [self.replicas, *shape], [REPLICAS, *axes]
        self._mesh = Mesh(np.array(self.everywhere).reshape(shape), axes)
        self._shardings: dict[Axes, NamedSharding] = {}

    @property
    def grid(self) -> np.ndarray:
        """Same as in every group: XLA knows of one replica, which has all devices as partitions."""
        return np.array([device.id for device in self.everywhere]).reshape(1, -1)

    def make_sharding(self, axes: Axes) -> NamedSharding:
        """The sharding of a value with these axes."""
        found = self._shardings.get(axes)
        if found is None:
            spec = PartitionSpec(REPLICAS, *axes) if self.rows else PartitionSpec(*axes)
            found = self._shardings[axes] = NamedSharding(self._mesh, spec)
        return found

    def stored(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of the array of a value with this shape in a replica."""
        stored = self.mesh.stored(shape, axes)
        return (self.replicas, *stored) if self.rows else stored

    def on_each(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of what each device has of such a value."""
        return self.mesh.on_each(shape, axes)

    def put(self, values: Sequence[np.ndarray], axes: Axes = WHOLE) -> Array:
        """An array with one value for each replica, divided over its devices; a single value is for all replicas."""
        shape = self.stored(values[0].shape, axes)
        padded = [_padded(value, shape[1:] if self.rows else shape) for value in values]

        def part(index: tuple[slice, ...]) -> np.ndarray:
            # A single value is that of all rows.
            row = (index[0].start or 0) - self.first if self.rows and len(padded) > 1 else 0
            return padded[row][index[int(self.rows) :]]

        return self._put_each(shape, axes, values[0].dtype, part)

    def _put_each(
        self, stored: tuple[int, ...], axes: Axes, dtype: np.dtype, part: Callable[[tuple[slice, ...]], np.ndarray]
    ) -> Array:
        """An array. `part` returns what a device has, without the row, for its place in the stored value."""
        devices, parts, sharding = [], [], self.make_sharding(axes)
        for device, index in sharding.addressable_devices_indices_map(stored).items():
            assert index is not None, "a slice for each dimension"
            devices.append(device)
            value = part(index)
            parts.append(np.asarray(value[np.newaxis] if self.rows else value, order="C"))
        return self._put(make_aval(stored, dtype), sharding, parts, devices)

    def parts_here(self, shape: tuple[int, ...], axes: Axes) -> list[ValuePart]:
        """The parts of a value that this process has, each once, whichever replica has them.

        Args:
            shape: the shape of the value.
            axes: how it is divided.
        """
        stored, sharding = self.stored(shape, axes), self.make_sharding(axes)
        here = {device: shard for shard, device in enumerate(sharding.addressable_devices_indices_map(stored))}
        first: dict[tuple[tuple[int, int], ...], bool] = {}
        found: dict[tuple[tuple[int, int], ...], ValuePart] = {}
        for device, index in sharding.devices_indices_map(stored).items():  # in the order of the replicas
            place = _place(index[int(self.rows) :], shape)
            is_first = first.setdefault(place, device in here)
            if device in here and place not in found and all(length for _, length in place):
                found[place] = ValuePart(place, here[device], is_first)
        return [found[place] for place in sorted(found)]

    def fetch_part(self, array: Array, part: ValuePart) -> np.ndarray:
        """A part of a value, as `fetch` does it: on CPU devices it is a view."""
        shard = on_host(array._arrays[part.shard])
        return (shard[0] if self.rows else shard)[tuple(slice(length) for _, length in part.place)]

    def on_each_device(self, array: Array) -> Array:
        """What each device has, as an array of `flat`."""
        aval = make_aval(array.sharding.shard_shape(array.shape), array.dtype)
        return ArrayImpl(aval, self.flat.sharding, list(array._arrays), committed=True, _skip_checks=True)

    def begins(self, shape: tuple[int, ...], axes: Axes) -> list[tuple[int, ...]]:
        """Where in a value the part of each device of this process' replica begins; past its end if it has none."""
        places = self.make_sharding(axes).devices_indices_map(self.stored(shape, axes))
        own = self.everywhere[self.first * self.mesh.size :][: self.mesh.size]
        return [tuple(each.start or 0 for each in places[device][int(self.rows) :]) for device in own]

    def put_parts(self, parts: Mapping[ValuePart, np.ndarray], shape: tuple[int, ...], axes: Axes) -> Array:
        """An array with one value for all replicas; `parts` has all of `parts_here`."""
        given = {part.place: value for part, value in parts.items()}
        dtype, size = next(iter(given.values())).dtype, self.on_each(shape, axes)

        def padded(index: tuple[slice, ...]) -> np.ndarray:
            place = _place(index[int(self.rows) :], shape)
            return _padded(given[place], size) if place in given else np.zeros(size, dtype)

        return self._put_each(self.stored(shape, axes), axes, dtype, padded)

    def _parts_ready(self, shards: Sequence[Array], replica: int) -> bool:
        size = self.mesh.size
        return all(shard.is_ready() for shard in shards[replica * size : (replica + 1) * size])

    def fetch(self, array: Array, replica: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """One replica's value, put together on the host."""
        parts = array._arrays
        # Each device has all of it: no copy.
        if array.sharding.is_fully_replicated:
            value = on_host(parts[0])
            value = value[0] if self.rows else value
        else:
            row = self.first + replica
            places = array.sharding.addressable_devices_indices_map(array.shape)
            value = np.empty(array.shape[1:] if self.rows else array.shape, array.dtype)
            for part, index in zip(parts, places.values(), strict=True):
                if not self.rows:
                    value[index] = on_host(part)
                elif (index[0].start or 0) == row:
                    value[index[1:]] = on_host(part)[0]
        if shape is not None and value.shape != tuple(shape):
            value = value[tuple(map(slice, shape))]
        return value

    def is_equal(self, array: Array, replica: int, value: np.ndarray, axes: Axes) -> bool:
        """Whether the devices of this process have their parts of a value, bit by bit."""
        shape = self.stored(value.shape, axes)
        padded = _padded(value, shape[int(self.rows) :])
        places = array.sharding.addressable_devices_indices_map(shape)
        for part, index in zip(array._arrays, places.values(), strict=True):
            found = on_host(part)
            # The row of another replica, which may have another value.
            if self.rows and (index[0].start or 0) != self.first + replica:
                continue
            wanted = padded[index[int(self.rows) :]]
            if (found[0] if self.rows else found).tobytes() != wanted.tobytes():
                return False
        return True

    def fetch_all(self, array: Array, shape: tuple[int, ...] | None = None) -> list[np.ndarray]:
        """All replicas' values, on the host."""
        return [self.fetch(array, replica, shape) for replica in range(self.size)]


def make_device_group(
    platform: str,
    devices: tuple,
    mesh: ReplicaMesh | None,
    everywhere: tuple | None = None,
    member: Member | None = None,
) -> DeviceGroup:
    """A group of devices in which each replica has one device, or those of a mesh; see the two classes."""
    if mesh is None:
        return DeviceGroup(platform, devices, everywhere, member)
    return PartitionedGroup(platform, devices, mesh, everywhere, member)


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The place of a part in a value of this shape, without the zeros behind the value."""
    starts = [each.start or 0 for each in index]
    stops = [size if each.stop is None else min(each.stop, size) for each, size in zip(index, shape, strict=True)]
    return tuple((start, max(0, stop - start)) for start, stop in zip(starts, stops, strict=True))


def _padded(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A value with zeros behind it, up to a shape."""
    if value.shape == tuple(shape):
        return value
    return np.pad(value, [(0, stored - size) for stored, size in zip(shape, value.shape, strict=True)])
