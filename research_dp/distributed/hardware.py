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
    """One kind of device. Rates are per second, per device and in one direction.

    Attributes:
        device_kinds: Its `device_kind`s in JAX.
        memory_bytes: Device memory that a program may use.
        memory_rate: Bytes/s of that memory.
        inside_rate: Bytes/s to devices of the same host (GPU), or over one link of the torus (TPU).
        across_rate: Bytes/s to other hosts (GPU) or slices (TPU).
        flops: FLOP/s by element type.
        torus: Dimensions of a TPU's torus.
        slice_chips: Chips of the largest slice of a TPU.
        compile: Properties that XLA needs to compile for a GPU that is not present.
    """

    name: str
    platform: str
    device_kinds: list[str]
    memory_bytes: int
    memory_rate: float
    inside_rate: float
    across_rate: float
    flops: Mapping[str, float]
    sources: Mapping[str, str]
    torus: int = 0
    slice_chips: int = 0
    compile: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s for an element type by XLA's name; unknown 8-bit floats as bf16, others as f32."""
        if dtype.startswith("f8e"):
            return self.flops.get("f8", self.flops["bf16"])
        return self.flops.get(dtype, self.flops["f32"])

    def peak_of(self, dtype: str) -> float:
        """FLOP/s for a dtype by JAX's name; all but bfloat16 and float16 count as f32."""
        return self.peak({"bfloat16": "bf16", "float16": "f16"}.get(dtype, "f32"))


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
    chip = chip_of(device.device_kind)
    if chip is None or device.platform == "cpu":
        return None
    return chip.peak_of(dtype) * mesh.size
