"""The device mesh: axes `data`, which counts replicas, and `fsdp`, over which arrays are sharded.

Both carry batch. DDP, FSDP and HSDP are the same code on other sizes of the axes.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from research_dp.argument_checks import checked
from research_dp.argument_types import Devices, Sizes
from research_dp.errors import UsageError

BATCH_AXES = DATA_AXIS, FSDP_AXIS = ("data", "fsdp")

_planned = contextvars.ContextVar[Sequence[jax.Device]]("planned", default=())


@contextlib.contextmanager
def planning_for(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Within this context meshes are made of these devices, which need not be present."""
    token = _planned.set(devices)
    try:
        yield
    finally:
        _planned.reset(token)


@gin.register(module="distributed")
@checked
def make_mesh(axes: Sizes, devices: Devices | None = None) -> Mesh:
    """Builds the mesh over all devices, its axes in the order (`data`, `fsdp`).

    The axes are of type `Auto`, so that `jit` may choose unconstrained shardings. Raises UsageError
    for an unknown axis, or sizes whose product is not the number of devices.

    Args:
        axes: Size of each axis, e.g. `{'data': 2, 'fsdp': -1}`. One size may be -1: the remaining
            devices. An axis that is not named has size 1.
        devices: None: all that are present, or planned for.
    """

    def mistake(problem: str) -> UsageError:
        return UsageError(f"make_mesh.axes = {dict(axes)}: {problem}", binding="make_mesh.axes")

    present = list(_planned.get() or jax.devices()) if devices is None else list(devices)
    sizes = {name: axes.get(name, 1) for name in BATCH_AXES}
    if unknown := [name for name in axes if name not in sizes]:
        raise mistake(f"unknown axis {unknown[0]!r}; the axes are {list(BATCH_AXES)}.")
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise mistake(f"axis {name!r} has size {size!r}; give a positive number, or one -1.")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise mistake("only one axis may be -1, for it takes the remaining devices.")
    fixed = abs(math.prod(sizes.values()))  # without the one -1
    equation = sizes_text({name: "?" if name in free else n for name, n in sizes.items()})
    count = f"{len(present)} {present[0].platform} devices"
    if free and len(present) % fixed:
        raise mistake(f"{equation} cannot make {count} ({len(present)} present).")
    if not free and fixed != len(present):
        advice = "Change a size, or give one of them -1."
        raise mistake(f"{equation} = {fixed} devices, but {count} are present. {advice}")
    return build_mesh(sizes | {name: len(present) // fixed for name in free}, present)


@gin.register(module="distributed")
def one_device_mesh() -> Mesh:
    """A mesh of this process's first device, both axes of size 1: the oracle's."""
    advice = "Use make_mesh, or start a single process."
    refuse_several_processes("one_device_mesh", advice, "one_device_mesh")
    return make_mesh({}, devices=(_planned.get() or jax.devices())[:1])


def build_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of the first of these devices, its axes of type `Auto`, in the order of `sizes`."""
    shape = tuple(sizes.values())
    used = list(devices)[: math.prod(shape)]
    # Only TPU slices matter: the order of GPUs already follows their hosts.
    is_tpu = used[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in used}) if is_tpu else 1
    # On a TPU an axis follows a dimension of the torus if it can, or else a part of one.
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, used, allow_split_physical_axes=True)
    else:
        # The first axis that the number of slices divides runs over them.
        outer = next((i for i, size in enumerate(shape) if size % slices == 0), None)
        if outer is None:
            raise UsageError(f"mesh {dict(sizes)}: {slices} slices divide no axis.")
        inside, across = list(shape), [1] * len(shape)
        inside[outer], across[outer] = shape[outer] // slices, slices
        grid = mesh_utils.create_hybrid_device_mesh(
            inside, across, devices=used, allow_split_physical_axes=True
        )
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def target_platform() -> str:
    """'cpu', 'cuda' or 'tpu': the platform that a function is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """The batch axes with more than one device: those that gradients are summed over."""
    return tuple(name for name in BATCH_AXES if mesh.shape[name] > 1)


def batch_devices(mesh: Mesh) -> int:
    """Number of devices that the batch is split over."""
    return math.prod(mesh.shape[name] for name in BATCH_AXES)


def refuse_several_processes(what: str, advice: str, binding: str | None = None) -> None:
    """Raises UsageError if there are several processes, which `what` does not support."""
    if jax.process_count() > 1:
        problem = f"{what} runs in one process; this run has {jax.process_count()}. {advice}"
        raise UsageError(problem, binding=binding)


def sizes_text(sizes: Mapping[str, Any]) -> str:
    """The axes of a mesh in messages and tables, e.g. 'data 1 x fsdp 8'."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
