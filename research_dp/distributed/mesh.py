"""The device mesh: axes `data` and `fsdp`, both carrying batch.

DDP, FSDP and HSDP are the same code on `{'data': n, 'fsdp': 1}`, `{'data': 1, 'fsdp': n}` and
`{'data': r, 'fsdp': s}`. Arrays are sharded over `fsdp`; `data` counts replicas.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import gin
import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from research_dp.argument_checks import checked
from research_dp.argument_types import Devices, Sizes
from research_dp.errors import UsageError

DATA_AXIS = "data"
FSDP_AXIS = "fsdp"
BATCH_AXES = (DATA_AXIS, FSDP_AXIS)

_planned: contextvars.ContextVar[Sequence[jax.Device] | None] = contextvars.ContextVar(
    "planned", default=None
)


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

    Args:
        axes: Size of each axis, e.g. `{'data': 2, 'fsdp': -1}`. One size may be -1: the remaining
            devices. An axis that is not named has size 1.
        devices: The devices of the mesh; None: all that are present, or planned for.

    Returns:
        A mesh with axes of type `Auto`, so that `jit` may choose unconstrained shardings.

    Raises:
        UsageError: An unknown axis, a size below 1 that is not a single -1, or a product that is
            not the number of devices; the message prints the full equation.
    """
    present = _present() if devices is None else list(devices)
    return build_mesh(_resolve_sizes(axes, len(present), present[0].platform), present)


@gin.register(module="distributed")
def one_device_mesh() -> Mesh:
    """A mesh of this process's first device, both axes of size 1: the oracle's.

    Raises UsageError if there are several processes, which do not share a device.
    """
    refuse_several_processes("one_device_mesh", "Use make_mesh, or start a single process.")
    return make_mesh({}, devices=_present()[:1])


def _present() -> list[jax.Device]:
    return list(_planned.get() or jax.devices())


def build_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of the first of these devices, its axes of type `Auto`, in the order of `sizes`.

    Raises UsageError for TPUs of several slices whose number divides no axis.
    """
    used = list(devices)[: math.prod(sizes.values())]
    types = (AxisType.Auto,) * len(sizes)
    shape = tuple(sizes.values())
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
        across = tuple(slices if i == outer else 1 for i in range(len(shape)))
        inside = tuple(size // factor for size, factor in zip(shape, across, strict=True))
        grid = mesh_utils.create_hybrid_device_mesh(
            inside, across, devices=used, allow_split_physical_axes=True
        )
    return Mesh(grid, tuple(sizes), axis_types=types)


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
        raise UsageError(
            f"{what} runs in one process; this run has {jax.process_count()}. {advice}",
            binding=binding,
        )


def sizes_text(sizes: Mapping[str, int]) -> str:
    """The axes of a mesh in messages and tables, e.g. 'data 1 x fsdp 8'."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _resolve_sizes(axes: Mapping[str, int], present: int, platform: str) -> dict[str, int]:
    """The size of each axis, -1 replaced by the remaining devices."""

    def mistake(problem: str) -> UsageError:
        return UsageError(f"make_mesh.axes = {dict(axes)}: {problem}", binding="make_mesh.axes")

    unknown = [name for name in axes if name not in BATCH_AXES]
    if unknown:
        raise mistake(f"unknown axis {unknown[0]!r}; the axes are {list(BATCH_AXES)}.")
    sizes = {name: axes.get(name, 1) for name in BATCH_AXES}
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise mistake(f"axis {name!r} has size {size!r}; give a positive number, or one -1.")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise mistake("only one axis may be -1, for it takes the remaining devices.")
    fixed = abs(math.prod(sizes.values()))  # without the one -1
    equation = " x ".join(f"{name} {'?' if size == -1 else size}" for name, size in sizes.items())
    if free:
        if present % fixed:
            devices = f"{present} {platform} devices ({present} present)"
            raise mistake(f"{equation} cannot make {devices}.")
        sizes[free[0]] = present // fixed
    elif fixed != present:
        raise mistake(
            f"{equation} = {fixed} devices, but {present} {platform} devices are present. "
            "Change a size, or give one of them -1."
        )
    return sizes
