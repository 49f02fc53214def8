"""Peak rates and memory of accelerators, from hardware.toml."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from jax.sharding import Mesh


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
    flops: Mapping[str, float]  # FLOP/s by element type
    sources: Mapping[str, str]
    torus: int = 0  # dimensions of a TPU's torus
    slice_chips: int = 0  # chips of the largest slice of a TPU
    compile: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for an absent GPU

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
    return {name: Chip(name=name, **table) for name, table in tomllib.loads(text).items()}


def chip_of(device_kind: str) -> Chip | None:
    """The chip with this `device_kind` in JAX, if its figures are known."""
    return next((chip for chip in chips().values() if device_kind in chip.device_kinds), None)


def peak_of_mesh(mesh: Mesh, dtype: str) -> float | None:
    """FLOP/s of all devices of a mesh for a dtype; None for CPUs and unknown devices."""
    device = mesh.devices.flat[0]
    chip = None if device.platform == "cpu" else chip_of(device.device_kind)
    return chip.peak(dtype) * mesh.size if chip else None
