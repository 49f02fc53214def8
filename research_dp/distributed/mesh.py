"""The device mesh: axes `data`, which counts replicas, and `fsdp`, over which arrays are sharded.

Both carry batch. DDP, FSDP and HSDP are the same code on other sizes of the axes. Also what the
mesh is made of: the peak rates of its devices, from hardware.toml, and its processes, which agree
by collectives.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import pkgutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import gin
import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh

from research_dp.argument_checks import checked
from research_dp.argument_types import Devices, Sizes
from research_dp.errors import UsageError

BATCH_AXES = DATA_AXIS, FSDP_AXIS = ("data", "fsdp")

# The platform that a model is traced for, over how many devices the arrays it sees are split by the
# compiler, and the bytes of a device's memory (0: not known). A context of JAX's, so that what it
# caches of a traced function depends on it.
_TARGET: Any = jax.make_user_context((None, 1, 0))
_noted = contextvars.ContextVar[dict[str, str]]("noted")
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


@contextlib.contextmanager
def traced_for(mesh: Mesh | None, axes: Sequence[str] = ()) -> Iterator[None]:
    """While a model is traced for a mesh, of whose batch axes these split the arrays it sees.

    None: to be read, in operations that are the same on all devices.
    """
    target = "cpu", 1, 0
    if mesh is not None:
        device, seen = mesh.devices.flat[0], math.prod(mesh.shape[name] for name in axes)
        chip = None if device.platform == "cpu" else chip_of(device.device_kind)
        memory = chip.memory_bytes if chip else 0
        target = device.platform, batch_devices(mesh) // seen, memory
    with _TARGET(target):
        yield


def target_platform() -> str:
    """'cpu', 'cuda' or 'tpu': the platform that a function is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = _TARGET.value[0] or (device.platform if device else jax.default_backend())
    return "cuda" if platform == "gpu" else platform


def examples_on_device(count: int) -> int:
    """How many of an array's examples, tokens or rows one device has, when it is traced."""
    return -(-count // _TARGET.value[1])


def target_memory() -> int:
    """Bytes of memory of a device that a function is traced for; 0 of CPUs and unknown devices."""
    return _TARGET.value[2]


@contextlib.contextmanager
def noting() -> Iterator[dict[str, str]]:
    """Where models put meanwhile what they choose by sizes and devices: binding -> value."""
    found: dict[str, str] = {}
    before = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(before)


def note(binding: str, value: str) -> None:
    """Says what a model chose, for `noting`; `--dry_run` shows it."""
    _noted.get({})[binding] = value


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


def texts_of_all(local: str) -> list[str]:
    """The text of each process, in their order."""
    if jax.process_count() == 1:
        return [local]
    # A path may not be encodable; a single process must not fail here.
    text = np.frombuffer(local.encode(errors="backslashreplace"), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text.size))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: text.size] = text
    gathered = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


def first_problem(problem: str | None) -> str | None:
    """The problem of the first process that has one, with its number; None: none has."""
    if jax.process_count() == 1:
        return problem
    texts = enumerate(texts_of_all(problem or ""))
    return next((f"process {process}: {text}" for process, text in texts if text), None)


def of_the_first(number: int) -> int:
    """The integer of process 0, of any size."""
    return int(texts_of_all(str(number))[0])


def jax_internals(without: str, *names: str) -> list[Any] | None:
    """Attributes of `jax._src`; None, and a warning of what happens `without`: one is missing."""
    try:
        return [pkgutil.resolve_name(f"jax._src.{name}") for name in names]
    except (ImportError, AttributeError) as error:
        print(f"Warning: JAX {jax.__version__}: {error}: {without}.", file=sys.stderr, flush=True)
        return None


class Way(NamedTuple):
    """A way to run a collective: what it takes besides its bytes, in seconds."""

    form: str  # 'ring', or 'tree': of all-reduces only
    start: float
    inside_hop: float  # inside a host (GPU) or slice (TPU)
    across_hop: float
    share: float  # of the links' rate that it reaches


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How steps differ from a vendor's rates: of decoders in bfloat16, as they were published."""

    by: str  # the rows that it was fitted to
    matmul: float  # share of the peak that matmuls reach
    attention: float  # and fused attention, of which the scores of all pairs count
    memory: float  # share of the time of memory traffic that is not hidden
    overlap: float  # share of a collective's time beside compute by which compute takes longer
    spread: float  # of ten steps of sources left out, eight are within so much above or below


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device. Rates are in bytes/s, per device and in one direction."""

    name: str
    platform: str
    device_kinds: list[str]  # in JAX
    memory_bytes: int  # that a program may use
    memory_rate: float
    inside_rate: float  # to devices of the same host (GPU), or over one link of the torus (TPU)
    across_rate: float  # to other hosts (GPU) or slices (TPU)
    latency: Sequence[Way]
    flops: Mapping[str, float]  # FLOP/s by element type
    sources: Mapping[str, str]
    torus: int = 0  # dimensions of a TPU's torus
    slice_chips: int = 0  # chips of the largest slice of a TPU
    compile: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for an absent GPU
    calibration: Calibration | None = None  # None: no step is known

    def peak(self, dtype: str) -> float:
        """FLOP/s for a type by XLA's or JAX's name; unknown 8-bit floats as bf16, others as f32."""
        if dtype.startswith("f8e"):
            return self.flops.get("f8", self.flops["bf16"])
        name = {"bfloat16": "bf16", "float16": "f16"}.get(dtype, dtype)
        return self.flops.get(name, self.flops["f32"])


@functools.cache
def chips() -> dict[str, Chip]:
    """All kinds of devices by name."""
    text = resources.files(__package__).joinpath("hardware.toml").read_text()
    tables = tomllib.loads(text)
    latency = tables.pop("latency")
    for name, table in tables.items():
        library, table["name"] = table["latency"], name
        table["latency"] = [Way(*way) for way in latency[library]]
        table["sources"]["latency"] = latency["sources"][library]
        if known := table.get("calibration"):
            table["calibration"] = Calibration(**known)
    return {name: Chip(**table) for name, table in tables.items()}


def chip_of(device_kind: str) -> Chip | None:
    """The chip with this `device_kind` in JAX, if its figures are known."""
    return next((chip for chip in chips().values() if device_kind in chip.device_kinds), None)


def peak_of_mesh(mesh: Mesh, dtype: str) -> float | None:
    """FLOP/s of all devices of a mesh for a dtype; None for CPUs and unknown devices."""
    device = mesh.devices.flat[0]
    chip = None if device.platform == "cpu" else chip_of(device.device_kind)
    return chip.peak(dtype) * mesh.size if chip else None
