"""How a strategy shards each parameter, as a table."""

from __future__ import annotations

import jax
from rich.table import Table

from research_dp.console import table
from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.placement import nbytes
from research_dp.strategies import Strategy

_MAX_ROWS = 200


def parameter_table(strategy: Strategy) -> Table:
    """Rows of path, shape, dtype, shardings, bytes a device, and why it is replicated."""
    params, slices = map(jax.tree.leaves, (strategy.shardings.params, strategy.shardings.slices))
    per_device, total = nbytes(strategy.abstract_state.params)
    shown = table(
        f"Parameters under {strategy.name} on {sizes_text(strategy.mesh.shape)}",
        *("parameter", "shape", "dtype", "sharding", "of its optimizer state"),
        *("bytes a device:", "why replicated"),
    )
    for leaf, state in list(zip(params, slices, strict=True))[:_MAX_ROWS]:
        shown.add_row(
            *map(str, (leaf.path, leaf.shape, leaf.dtype)),
            *("replicated" if x.dim is None else f"fsdp (dim {x.dim})" for x in (leaf, state)),
            f"{leaf.nbytes_per_device:,}",
            state.reason or leaf.reason,
        )
    if len(params) > _MAX_ROWS:
        shown.add_row(f"and {len(params) - _MAX_ROWS} more")
    shown.add_row("all", "", "", "", "", f"{per_device:,}", f"of {total:,} in all")
    return shown


def summary_line(strategy: Strategy) -> str:
    """How many parameters are sharded, and their bytes a device."""
    params = jax.tree.leaves(strategy.shardings.params)
    per_device, total = nbytes(strategy.abstract_state.params)
    sharded = sum(leaf.dim is not None for leaf in params)
    return (
        f"{strategy.name} on {sizes_text(strategy.mesh.shape)}: {sharded} of {len(params)} "
        f"parameters sharded, {per_device:,} of {total:,} bytes a device (a dry run shows each)"
    )
