"""Devices that are not there, to compile for, by names such as 'h100:8x8'; and their links.

GPUs need JAX's CUDA plugin and NVIDIA's assembler, TPUs need libtpu; neither needs a driver.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies as jax_topologies
from jax.sharding import Mesh

from research_dp.distributed.mesh import Chip, Way, build_mesh, chip_of, chips
from research_dp.errors import UsageError
from research_dp.strategies.jaxpr_collectives import Collective

EXAMPLES = "h100:8x8 (hosts x GPUs), v5e-64 (chips), 2xv5e-64 (slices x chips), cpu:8"

# What the plugins need where no device is.
_ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # else the CUDA plugin looks for a driver
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the cloud's metadata server, and waits
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process on this machine is refused
    # Else libtpu warns, in many lines, that it does not know on which machine it runs.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-64",
}
# Modules of which one must be importable.
_PLUGINS = {"gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
# The share of memory that is reserved, where devices are not present to be asked. GPUs: the CUDA
# context, NCCL's buffers, fragmentation. TPUs: prefetched batches and metrics; the compiler's own
# limit excludes the rest.
_RESERVE = {"gpu": 0.08, "tpu": 0.02}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices, present or only compiled for, and their figures."""

    name: str  # as given, or of the devices' kind and number
    chip: Chip
    devices: tuple[Any, ...]
    are_present: bool = False

    @property
    def hosts(self) -> int:
        return len({device.process_index for device in self.devices})

    @property
    def domains(self) -> tuple[int, int]:
        """Hosts (GPU) or slices (TPU), and devices in each."""
        count = len({self.domain(device) for device in self.devices})
        return count, len(self.devices) // count

    @property
    def slices(self) -> int:
        """Slices of a TPU; 1 elsewhere: XLA numbers each host of GPUs as a slice too."""
        return self.domains[0] if self.chip.platform == "tpu" else 1

    def domain(self, device: Any) -> int:
        """The host (GPU) or slice (TPU) that a device's fast links connect."""
        if self.chip.platform == "tpu":
            return int(getattr(device, "slice_index", None) or 0)
        return int(device.process_index)

    def memory_budget(self) -> tuple[int | None, str]:
        """Bytes of a device that a step may use, None for CPUs, and where the figure is from."""
        chip = self.chip
        if chip.platform == "cpu":
            return None, "CPUs have no limit of their own"
        if self.are_present:
            local = (d for d in self.devices if d.process_index == jax.process_index())
            limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
            if pool := min((limit for limit in limits if limit), default=None):
                return pool, "what JAX took of it when it started"
        reserve = _RESERVE[chip.platform]
        source = f"{chip.name}'s, less {reserve:.0%} that no step may count on"
        return int(chip.memory_bytes * (1 - reserve)), source

    def mesh(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
        """A mesh over all devices; on a TPU its axes follow torus and slices, see `build_mesh`."""
        return build_mesh(dict(zip(axes, shape, strict=True)), self.devices)


def topology(name: str) -> Topology:
    """The devices that a name stands for.

    'h100:8x8', also h200, a100 and b200: hosts x GPUs of a host. 'v5e-64', also v5p and v6e: chips
    (of v5p too, where Google's own names count cores), or the shape, 'v5e-8x8'. '2xv5e-64': slices
    x chips. 'cpu:8': CPU devices of this process.

    Raises:
        UsageError: An unknown name, or its compiler is not installed; the message says how to.
    """
    known = chips()
    gpu = re.fullmatch(r"(\w+):(\d+)x(\d+)", name)
    tpu = re.fullmatch(r"(?:(\d+)x)?(v\d\w+)-(\d+(?:x\d+)*)", name)
    if gpu and gpu[1] in known and known[gpu[1]].platform == "gpu":
        chip, hosts, gpus = known[gpu[1]], int(gpu[2]), int(gpu[3])
        if min(hosts, gpus) < 1:
            raise UsageError(f"topology {name!r}: give at least one host and one GPU.")
        sizes = {"target_config": _target_config(chip), "topology": f"1x{hosts}x{gpus}"}
        return _described(name, chip, "", sizes)
    if tpu and tpu[2] in known:
        chip, slices, shape = known[tpu[2]], int(tpu[1] or 1), tuple(map(int, tpu[3].split("x")))
        if len(shape) == 1:
            shape = _slice_shape(name, shape[0], chip.torus)
        layout = f"{chip.name}:{'x'.join(map(str, shape))}"
        return _described(name, chip, layout, {"num_slices": slices} if slices > 1 else {})
    if cpu := re.fullmatch(r"cpu:(\d+)", name):
        count, devices = int(cpu[1]), jax.devices("cpu")
        if 1 <= count <= len(devices):
            return Topology(name, known["cpu"], tuple(devices[:count]))
        raise UsageError(
            f"topology {name!r}: {len(devices)} CPU devices are present; --cpu_devices={count} "
            "makes as many."
        )
    raise _unknown(name)


def check_name(name: str) -> None:
    """Raises UsageError if a name has the form of no devices, without asking for any."""
    form = r"(\w+):\d+x\d+|(?:\d+x)?(v\d\w+)-\d+(?:x\d+)*|(cpu):\d+|(here)"
    match = re.fullmatch(form, name)
    if match is None or not {*filter(None, match.groups())} <= {"here", *chips()}:
        raise _unknown(name)


def _unknown(name: str) -> UsageError:
    devices = ", ".join(chips())
    return UsageError(f"topology {name!r} is not known; give e.g. {EXAMPLES}. Devices: {devices}.")


def of(devices: Sequence[jax.Device]) -> Topology:
    """These devices, of this run or of a topology; all CPUs are known, with nominal figures."""
    kind = devices[0].device_kind
    chip = chips()["cpu"] if devices[0].platform == "cpu" else chip_of(kind)
    if chip is None:
        known = ", ".join(kind for chip in chips().values() for kind in chip.device_kinds)
        raise UsageError(
            f"devices of kind {kind!r}: their memory and rates are not known, so that nothing can "
            f"be planned for them. Known are {known}."
        )
    name = f"{kind} x {len(devices)}"
    return Topology(name, chip, tuple(devices), are_present=devices[0] in jax.devices())


def _described(name: str, chip: Chip, layout: str, options: dict[str, Any]) -> Topology:
    """Asks an installed compiler for devices; the caller has started this machine's, or none."""
    for variable, setting in _ENVIRONMENT.items():
        os.environ.setdefault(variable, setting)
    plugins = _PLUGINS[chip.platform]
    missing = "" if any(map(importlib.util.find_spec, plugins)) else plugins[0]
    if chip.platform == "gpu" and not missing:
        # XLA finds NVIDIA's assembler in its wheel, on the path, or in a CUDA toolkit.
        wheels = importlib.util.find_spec("nvidia")
        folders = (wheels and wheels.submodule_search_locations) or ()
        in_wheel = any(any(Path(folder).glob("*/bin/ptxas")) for folder in folders)
        if not (in_wheel or shutil.which("ptxas") or Path("/usr/local/cuda/bin/ptxas").exists()):
            missing = "nvidia-cuda-nvcc"
    if missing:
        raise UsageError(
            f"topology {name!r} needs a compiler that is not installed ({missing}): "
            f"pip install -c constraints.txt -e '.[plan-{chip.platform}]'"
        )
    plugin = "cuda" if chip.platform == "gpu" else chip.platform
    try:
        description = jax_topologies.get_topology_desc(layout, plugin, **options)
    except Exception as error:  # JAX and the plugins raise several kinds
        raise UsageError(f"topology {name!r}: its compiler does not know it: {error}") from error
    return Topology(name, chip, tuple(description.devices))


def _target_config(chip: Chip) -> str:
    """The GPU as XLA's `GpuTargetConfigProto`, in text format."""
    gpu = chip.compile
    major, minor = gpu["capability"].split(".")
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {gpu["shared_per_core"]} threads_per_core_limit: 2048
      core_count: {gpu["cores"]} fpus_per_core: {gpu["fpus_per_core"]}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {gpu["memory_bandwidth"]} l2_cache_size: {gpu["l2_bytes"]}
      clock_rate_ghz: {gpu["clock_ghz"]} device_memory_size: {chip.memory_bytes}
      shared_memory_per_block_optin: {gpu["shared_per_block"]}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
      platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{chip.device_kinds[0]}" """


def _slice_shape(name: str, chip_count: int, dims: int) -> tuple[int, ...]:
    """The shape of a TPU slice: powers of two, as even as can be."""
    power = chip_count.bit_length() - 1
    if chip_count < 1 or chip_count != 2**power:
        raise UsageError(
            f"topology {name!r}: {chip_count} chips are no power of two; give the slice's shape, "
            f"e.g. {'x'.join(['4'] * dims)}."
        )
    shape = sorted(2 ** (power // dims + (position < power % dims)) for position in range(dims))
    # A v5p slice of four chips is flat, on one host: 2x2x1.
    return tuple(shape if chip_count > 4 else reversed(shape))


class Route(NamedTuple):
    """The links of a group of devices."""

    chip: Chip
    domains: int  # hosts (GPU) or slices (TPU) that the group is in
    members: int  # its devices in each of them
    dims: int  # of a TPU's torus, in which it extends

    @property
    def crosses(self) -> bool:
        return self.domains > 1

    def seconds(self, kind: str, sending: float) -> float:
        """Time of one execution of a kind whose bytes take so long: the fastest way to run it."""
        if self.domains * self.members == 1:
            return sending
        ways = (way for way in self.chip.latency if way.form == "ring" or kind == "all-reduce")
        return min(self._latency(kind, way) + sending / way.share for way in ways)

    def _latency(self, kind: str, way: Way) -> float:
        """A start, and hops one after the other; all-to-alls and permutes reach all at once."""
        across, inside = float(self.domains - 1), float(self.domains * (self.members - 1))
        if self.dims:  # a ring along each dimension of the torus, both ways
            inside = self.dims * self.members ** (1 / self.dims) / 2
        if kind in ("all-to-all", "permute"):
            across, inside = self.crosses, self.members > 1
        elif way.form == "tree":
            across, inside = math.log2(self.domains), self.members - 1
        hops = across * way.across_hop + inside * way.inside_hop
        return way.start + hops * (2 if kind == "all-reduce" else 1)

    def sending(self, collective: Collective) -> float:
        """Time that the bytes of one execution take on the links.

        In a ring every byte leaves a host (a slice) once, over the cards of all its members, and
        passes inside at the links' rate: the slower bounds it. An all-to-all uses the sender's own
        card. On a TPU a ring goes both ways along each dimension of the torus.
        """
        inside_rate, across_rate = self.chip.inside_rate, self.chip.across_rate
        ring_rate = inside_rate * (2 * max(1, self.dims) if self.chip.platform == "tpu" else 1)
        wire_bytes = dataclasses.replace(collective, times=1, share=1.0).wire_bytes
        is_direct = collective.kind in ("all-to-all", "permute")
        if not self.crosses:
            return wire_bytes / (inside_rate if is_direct else ring_rate)
        if collective.kind == "permute":
            return wire_bytes / across_rate
        if is_direct:
            members, devices = self.members, collective.devices
            inside = collective.nbytes * (members - 1) / devices / inside_rate
            return max(inside, collective.nbytes * (devices - members) / devices / across_rate)
        return wire_bytes / min(ring_rate, self.members * across_rate)


def route(topology: Topology, devices: Sequence[Any]) -> Route:
    """The links of a group, e.g. of `[mesh.devices.flat[i] for i in collective.group]`."""
    domains, dims = len({topology.domain(device) for device in devices}), 0
    if topology.chip.platform == "tpu":
        coordinates = np.array([device.coords for device in devices])
        dims = int(np.count_nonzero(np.ptp(coordinates, axis=0)))
    return Route(topology.chip, domains, len(devices) // domains, dims)
