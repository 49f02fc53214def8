"""Meshes of any axes, over the first devices, and rules for their axes (datarax, artifex)."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
from jax.sharding import AbstractMesh, Mesh

from research_dp.argument_checks import checked, fits
from research_dp.argument_types import Count, Devices, Limit, Sizes, is_integer
from research_dp.distributed.mesh import build_mesh
from research_dp.errors import UsageError


def _is_mesh_shape(x: Any) -> bool:
    """Whether it is sizes by axis name, or pairs of name and size; names may be repeated."""
    if not isinstance(x, tuple | list):
        return fits(x, Sizes)
    pairs = all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in x)
    return pairs and all(isinstance(name, str) and is_integer(size) for name, size in x)


MeshShape = Annotated[Any, Limit(_is_mesh_shape, "sizes of axes, e.g. {'data': 8}")]


class _InstanceOrClassMethod:
    """A checked method that can be called on the class too: on an instance with all devices."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self.__doc__ = checked(function), function.__doc__

    def __get__(self, instance: Any, owner: type) -> types.MethodType:
        return types.MethodType(self._function, owner() if instance is None else instance)


@checked
class DeviceMeshManager:
    """Creates meshes with axes of type `Auto`.

    Each method works on an instance, as in artifex, and on the class, as in datarax. Strategies use
    `make_mesh` instead. Meshes are built of `devices`; None: of all devices.
    """

    def __init__(self, devices: Devices | None = None) -> None:
        self._devices = None if devices is None else list(devices)

    @property
    def devices(self) -> list[jax.Device]:  # asked late: methods of the class create an instance
        return list(jax.devices() if self._devices is None else self._devices)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @_InstanceOrClassMethod
    def create_device_mesh(self, mesh_shape: MeshShape, devices: Devices | None = None) -> Mesh:
        """Creates a mesh of the first of `devices`; None: of the manager's.

        `mesh_shape` is `{'data': 4, 'model': 2}`, or pairs of name and size: positive, -1 is not
        filled up here. Raises UsageError for a name that occurs twice, or for too few devices.
        """
        available = self.devices if devices is None else list(devices)
        pairs = list(mesh_shape.items() if isinstance(mesh_shape, Mapping) else mesh_shape)
        if not pairs:
            raise UsageError("create_device_mesh.mesh_shape has no axis: give e.g. {'data': 8}.")
        mesh = f"mesh {' x '.join(f'{name} {size}' for name, size in pairs)}"
        for name, size in pairs:
            if (times := [name for name, _ in pairs].count(name)) > 1:
                raise UsageError(f"{mesh}: axis {name!r} is named {times} times.")
            if size < 1:
                raise UsageError(
                    f"{mesh}: axis {name!r} has size {size!r}; give a positive number, at most the "
                    f"{len(available)} devices that are available."
                )
        needed = math.prod(size for _, size in pairs)
        if needed > len(available):
            raise UsageError(
                f"Not enough devices: {mesh} requires {needed} devices, but only {len(available)} "
                "are available. Give smaller sizes."
            )
        return build_mesh(dict(pairs), available)

    @_InstanceOrClassMethod
    def create_data_parallel_mesh(
        self, num_devices: Count | None = None, axis_name: str = "data"
    ) -> Mesh:
        """Creates a mesh of one axis over all, or exactly (datarax: at most) so many devices."""
        size = self.num_devices if num_devices is None else num_devices
        return self.create_device_mesh({axis_name: size})

    @_InstanceOrClassMethod
    def create_model_parallel_mesh(
        self, num_devices: Count | None = None, axis_name: str = "model"
    ) -> Mesh:
        """The same with an axis named `model`."""
        return self.create_data_parallel_mesh(num_devices, axis_name)

    @_InstanceOrClassMethod
    def create_hybrid_mesh(
        self,
        data_parallel_size: Count = 1,
        model_parallel_size: Count = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Creates a mesh of two axes."""
        sizes = (data_axis, data_parallel_size), (model_axis, model_parallel_size)
        return self.create_device_mesh(sizes)

    @_InstanceOrClassMethod
    def get_mesh_info(self, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
        """`{'total_devices': 8, 'axes': {'data': 4, 'model': 2}}` of a 4 x 2 mesh."""
        return {"total_devices": mesh.size, "axes": dict(mesh.shape)}


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRules:
    """The mesh axis that each logical dim is sharded over, or None (datarax).

    `PartitionSpec(*rules('data', 'embed'))` is the spec of an array with these dims: the batch and
    embeddings. `mlp` is for hidden layers, `heads` for attention heads.
    """

    data: str | None = None
    embed: str | None = None
    mlp: str | None = None
    heads: str | None = None

    def __call__(self, *dims: str) -> tuple[str | None, ...]:
        """The mesh axis of each dim; AttributeError for a name without a rule."""
        return tuple(getattr(self, dim) for dim in dims)


@checked
def data_parallel_rules(data_axis: str = "data") -> MeshRules:
    """Rules that shard only the batch (datarax)."""
    return MeshRules(data=data_axis)
