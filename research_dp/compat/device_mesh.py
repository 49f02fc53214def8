"""`DeviceMeshManager` of datarax and artifex: meshes of any axes, over the first devices."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import gin
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
    return all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in x) and all(
        isinstance(name, str) and is_integer(size) for name, size in x
    )


MeshShape = Annotated[Any, Limit(_is_mesh_shape, "sizes of axes, e.g. {'data': 8}")]


class _InstanceOrClassMethod:
    """A method that can be called on the class too: on an instance with all devices."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> types.MethodType:
        return types.MethodType(self._function, owner() if instance is None else instance)


@gin.register(module="distributed")
@checked
class DeviceMeshManager:
    """Creates meshes with axes of type `Auto`.

    Each method works on an instance, as in artifex, and on the class, as in datarax:
    `DeviceMeshManager.create_device_mesh({'data': 4})`. Strategies use `make_mesh` instead. Meshes
    are built of `devices`; None: of all devices.
    """

    def __init__(self, devices: Devices | None = None) -> None:
        self._devices = None if devices is None else list(devices)

    @property
    def devices(self) -> list[jax.Device]:
        # JAX is asked late: accessing a method on the class creates an instance.
        return list(jax.devices() if self._devices is None else self._devices)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @_InstanceOrClassMethod
    @checked
    def create_device_mesh(self, mesh_shape: MeshShape, devices: Devices | None = None) -> Mesh:
        """Creates a mesh of the first of `devices`; None: of the manager's.

        `mesh_shape` is `{'data': 4, 'model': 2}`, or pairs of name and size.

        Raises:
            UsageError: A name is repeated, a size is not positive (-1 is not filled up here), or
                there are fewer devices than the product of the sizes.
        """
        available = self.devices if devices is None else list(devices)
        pairs = list(mesh_shape.items() if isinstance(mesh_shape, Mapping) else mesh_shape)
        if not pairs:
            raise UsageError("create_device_mesh.mesh_shape has no axis: give e.g. {'data': 8}.")
        mesh = f"mesh {' x '.join(f'{name} {size}' for name, size in pairs)}"
        names = [name for name, _ in pairs]
        for name, size in pairs:
            if names.count(name) > 1:
                raise UsageError(f"{mesh}: axis {name!r} is named {names.count(name)} times.")
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
    @checked
    def create_data_parallel_mesh(
        self, num_devices: Count | None = None, axis_name: str = "data"
    ) -> Mesh:
        """Creates a mesh of one axis over `num_devices` devices; None: all of them.

        Raises:
            UsageError: See `create_device_mesh`; datarax makes a smaller mesh instead.
        """
        size = self.num_devices if num_devices is None else num_devices
        return self.create_device_mesh({axis_name: size})

    @_InstanceOrClassMethod
    @checked
    def create_model_parallel_mesh(
        self, num_devices: Count | None = None, axis_name: str = "model"
    ) -> Mesh:
        """The same with an axis named `model`."""
        return self.create_data_parallel_mesh(num_devices, axis_name)

    @_InstanceOrClassMethod
    @checked
    def create_hybrid_mesh(
        self,
        data_parallel_size: Count = 1,
        model_parallel_size: Count = 1,
        data_axis: str = "data",
        model_axis: str = "model",
    ) -> Mesh:
        """Creates a mesh of two axes."""
        return self.create_device_mesh(
            [(data_axis, data_parallel_size), (model_axis, model_parallel_size)]
        )

    @_InstanceOrClassMethod
    @checked
    def get_mesh_info(self, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
        """`{'total_devices': 8, 'axes': {'data': 4, 'model': 2}}` of a 4 x 2 mesh."""
        return {"total_devices": mesh.size, "axes": dict(mesh.shape)}
