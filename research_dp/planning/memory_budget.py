"""How much of a device's memory a step may use."""

from __future__ import annotations

import jax

from research_dp.analysis.topologies import Topology

# The share of device memory that is reserved, where devices are not present to be asked. GPUs: the
# CUDA context, NCCL's buffers, fragmentation; JAX itself takes three quarters unless
# XLA_PYTHON_CLIENT_MEM_FRACTION says more. TPUs: prefetched batches and metrics; the compiler's own
# limit excludes the rest.
_RESERVE = {"gpu": 0.08, "tpu": 0.02}


def memory_budget(where: Topology) -> tuple[int | None, str]:
    """Bytes of a device that a step may use, and where the figure is from.

    JAX's pool where the device is present. None for CPUs: their devices share the memory of an
    unknown machine.
    """
    chip = where.chip
    if chip.platform == "cpu":
        return None, "CPUs have no limit of their own"
    if where.are_present:
        local = (d for d in where.devices if d.process_index == jax.process_index())
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
        if pool := min((limit for limit in limits if limit), default=None):
            return pool, "what JAX took of it when it started"
    reserve = _RESERVE[chip.platform]
    available = int(chip.memory_bytes * (1 - reserve))
    return available, f"{chip.name}'s, less {reserve:.0%} that no step may count on"
