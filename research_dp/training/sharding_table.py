"""What a strategy does with each parameter, as a table."""

from __future__ import annotations

import collections

import jax
from rich import box
from rich.table import Table

from research_dp.distributed.mesh import sizes_text
from research_dp.strategies import Strategy

_SHOWN = 200


def layout_table(strategy: Strategy) -> Table:
    """Rows of path, shape, dtype, where it lies, bytes a device; and why it is whole."""
    placements = jax.tree.leaves(strategy.shardings.params)
    slices = jax.tree.leaves(strategy.shardings.slices)
    mesh = sizes_text(strategy.mesh.shape)
    table = Table(
        title=f"Parameters under {strategy.name} on {mesh}", box=box.SIMPLE, title_justify="left"
    )
    for name in ("parameter", "shape", "dtype", "parameter lies on", "its optimizer state on"):
        table.add_column(name)
    table.add_column("bytes a device", justify="right")
    table.add_column("why whole")
    for held, piece in zip(placements[:_SHOWN], slices[:_SHOWN], strict=True):
        table.add_row(
            held.path,
            str(held.shape),
            str(held.dtype),
            _where(held.dim),
            _where(piece.dim),
            f"{held.nbytes_per_device:,}",
            piece.reason or held.reason,
        )
    if len(placements) > _SHOWN:
        table.add_row(f"and {len(placements) - _SHOWN} more")
    sums: collections.Counter[str] = collections.Counter()
    for held in placements:
        sums["all"] += held.nbytes
        sums["device"] += held.nbytes_per_device
    table.add_row("all", "", "", "", "", f"{sums['device']:,}", f"of {sums['all']:,} in all")
    return table


def one_line(strategy: Strategy) -> str:
    """How many parameters are sharded, and how many bytes of them a device holds."""
    placements = jax.tree.leaves(strategy.shardings.params)
    sharded = sum(p.dim is not None for p in placements)
    held = sum(p.nbytes_per_device for p in placements)
    total = sum(p.nbytes for p in placements)
    mesh = sizes_text(strategy.mesh.shape)
    return (
        f"{strategy.name} on {mesh}: {sharded} of {len(placements)} parameters sharded, "
        f"{held:,} of {total:,} bytes a device (--dry_run shows each)"
    )


def _where(dim: int | None) -> str:
    return "every device" if dim is None else f"fsdp (dim {dim})"
