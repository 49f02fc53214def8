"""How much of a device's memory a step may count on."""

from __future__ import annotations

import jax

from research_dp.analysis.topologies import Topology

# The share of device memory that it may not count on, where devices are not there to be asked.
# GPUs: the CUDA context, NCCL's buffers, fragmentation; JAX itself takes three quarters unless
# XLA_PYTHON_CLIENT_MEM_FRACTION says more. TPUs: what the compiler may use is known already;
# batches that wait, and metrics, come on top.
_RESERVE = {"gpu": 0.08, "tpu": 0.02}


def available_bytes(where: Topology) -> int | None:
    """Bytes of a device: of what JAX took where it is there; None: CPUs have no limit of their own.

    A CPU's devices share the memory of a machine that the program does not know.
    """
    if where.chip.platform == "cpu":
        return None
    return _taken(where) or int(where.chip.memory_bytes * (1 - _RESERVE[where.chip.platform]))


def told(where: Topology) -> str:
    """Where `available_bytes` is from, in words."""
    if where.chip.platform == "cpu":
        return "CPUs have no limit of their own"
    if _taken(where):
        return "what JAX took of it when it started"
    part = _RESERVE[where.chip.platform]
    return f"{where.chip.name}'s, less {part:.0%} that no step may count on"


def _taken(where: Topology) -> int | None:
    """The size of JAX's pool on a device of this process; None where there is none to ask."""
    if not where.are_present:
        return None
    here = (d for d in where.devices if d.process_index == jax.process_index())
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in here]
    return min((limit for limit in limits if limit), default=None)
