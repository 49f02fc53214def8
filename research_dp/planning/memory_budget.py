"""How much of a device's memory a step may use."""

from __future__ import annotations

import jax

from research_dp.analysis.topologies import Topology

# The share of device memory that is reserved, where devices are not present to be asked. GPUs: the
# CUDA context, NCCL's buffers, fragmentation; JAX itself takes three quarters unless
# XLA_PYTHON_CLIENT_MEM_FRACTION says more. TPUs: prefetched batches and metrics; the compiler's own
# limit excludes the rest.
_RESERVE = {"gpu": 0.08, "tpu": 0.02}


def available_bytes(where: Topology) -> int | None:
    """Bytes of a device that a step may use: JAX's pool where the device is present.

    None for CPUs: their devices share the memory of an unknown machine.
    """
    if where.chip.platform == "cpu":
        return None
    return _pool_bytes(where) or int(where.chip.memory_bytes * (1 - _RESERVE[where.chip.platform]))


def source(where: Topology) -> str:
    """Where `available_bytes` is from, in words."""
    if where.chip.platform == "cpu":
        return "CPUs have no limit of their own"
    if _pool_bytes(where):
        return "what JAX took of it when it started"
    part = _RESERVE[where.chip.platform]
    return f"{where.chip.name}'s, less {part:.0%} that no step may count on"


def _pool_bytes(where: Topology) -> int | None:
    """The size of JAX's pool on a device of this process; None where there is none to ask."""
    if not where.are_present:
        return None
    local = (d for d in where.devices if d.process_index == jax.process_index())
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    return min((limit for limit in limits if limit), default=None)
