"""The one mesh: axes `data` and `fsdp`, both carrying batch.

DDP, FSDP and HSDP are the same code on `{'data': n, 'fsdp': 1}`, `{'data': 1, 'fsdp': n}` and
`{'data': r, 'fsdp': s}`. Whatever is sharded lies on `fsdp`; `data` counts replicas.
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
    """Within it meshes are of these devices, which need not be there (`analysis.topologies`)."""
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
        axes: Size of each axis, e.g. `{'data': 2, 'fsdp': -1}`. One size may be -1: what is left.
            An axis that is not named has size 1.
        devices: The devices to lay out; all that are present, or planned for, if None.

    Returns:
        A mesh whose axes are of type `Auto`, so that `jit` may place what nobody constrains.

    Raises:
        UsageError: An unknown axis, a size below 1 that is not a single -1, or a product that is
            not the number of devices; the message prints the whole equation.
    """
    present = list(_planned.get() or jax.devices() if devices is None else devices)
    sizes = _resolve_sizes(axes, len(present), present[0].platform)
    return build_mesh(sizes, present)


@gin.register(module="distributed")
def one_device_mesh() -> Mesh:
    """A mesh of this process's first device alone, both axes of size 1: the oracle's.

    Raises:
        UsageError: There are several processes, which one device cannot serve.
    """
    refuse_several_processes(
        "one_device_mesh", "Use make_mesh, or start a single process.", "data_parallel.mesh"
    )
    return make_mesh({}, devices=list(_planned.get() or jax.devices())[:1])


def build_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of the first of these devices, its axes of type `Auto`, in the order given.

    Args:
        sizes: Size of each axis, positive.
        devices: At least as many devices as the product of the sizes.

    Raises:
        UsageError: TPUs of several slices, whose number divides no axis.
    """
    used = list(devices)[: math.prod(sizes.values())]
    kinds = (AxisType.Auto,) * len(sizes)
    shape = tuple(sizes.values())
    # Of TPUs alone: what GPUs call slices is in their order already.
    is_tpu = used[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in used}) if is_tpu else 1
    # On a TPU an axis follows the torus where it can, and otherwise takes a part of a dim of it.
    if slices == 1:
        laid_out = mesh_utils.create_device_mesh(shape, used, allow_split_physical_axes=True)
        return Mesh(laid_out, tuple(sizes), axis_types=kinds)
    # The first axis that the slices divide runs over them.
    over = next((i for i, size in enumerate(shape) if size % slices == 0), None)
    if over is None:
        raise UsageError(f"mesh {dict(sizes)}: {slices} slices divide no axis.")
    across = tuple(slices if i == over else 1 for i in range(len(shape)))
    inside = tuple(size // factor for size, factor in zip(shape, across, strict=True))
    laid_out = mesh_utils.create_hybrid_device_mesh(
        inside, across, devices=used, allow_split_physical_axes=True
    )
    return Mesh(laid_out, tuple(sizes), axis_types=kinds)


def target_platform() -> str:
    """'cpu', 'cuda', 'tpu': what a function is traced for, not what it is compiled on."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def split_axes(mesh: Mesh) -> tuple[str, ...]:
    """The batch axes with more than one device: those that anything must be summed over."""
    return tuple(name for name in BATCH_AXES if mesh.shape[name] > 1)


def batch_devices(mesh: Mesh) -> int:
    """Number of devices that each hold a different slice of the batch."""
    return math.prod(mesh.shape[name] for name in BATCH_AXES)


def refuse_several_processes(what: str, advice: str, binding: str) -> None:
    """Raises UsageError if this run has more than one process, which `what` cannot serve."""
    if jax.process_count() > 1:
        raise UsageError(
            f"{what} runs in one process; this run has {jax.process_count()}. {advice}",
            binding=binding,
        )


def sizes_text(sizes: Mapping[str, int]) -> str:
    """A mesh's axes as messages and tables name them, e.g. 'data 1 x fsdp 8'."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def _resolve_sizes(axes: Mapping[str, int], present: int, platform: str) -> dict[str, int]:
    def refuse(problem: str) -> UsageError:
        return UsageError(f"make_mesh.axes = {dict(axes)}: {problem}", binding="make_mesh.axes")

    unknown = [name for name in axes if name not in BATCH_AXES]
    if unknown:
        raise refuse(f"unknown axis {unknown[0]!r}; the axes are {list(BATCH_AXES)}.")
    sizes = {name: axes.get(name, 1) for name in BATCH_AXES}
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise refuse(f"axis {name!r} has size {size!r}; give a positive number, or one -1.")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise refuse("only one axis may be -1, for it takes what the others leave.")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    equation = " x ".join(f"{name} {'?' if size == -1 else size}" for name, size in sizes.items())
    if free:
        if present % fixed:
            raise refuse(
                f"{equation} cannot make {present} {platform} devices ({present} present)."
            )
        sizes[free[0]] = present // fixed
    elif fixed != present:
        raise refuse(
            f"{equation} = {fixed} devices, but {present} {platform} devices are present. "
            "Change a size, or give one of them -1."
        )
    return sizes
