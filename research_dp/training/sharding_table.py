"""How a strategy shards each parameter, as a table, and what a device has of the state."""

from __future__ import annotations

import jax

from research_dp.console import Table, table
from research_dp.distributed.mesh import BATCH_AXES, sizes_text
from research_dp.distributed.placement import nbytes
from research_dp.distributed.sharding import LeafSharding
from research_dp.strategies import Strategy
from research_dp.strategies.frozen import frozen_of
from research_dp.strategies.strategy import unsharded_reason

_MAX_ROWS = 200
_UNITS = {10**3: "kB", 10**6: "MB", 10**9: "GB", 10**12: "TB"}


def parameter_table(strategy: Strategy) -> Table:
    """Rows of path, shape, dtype, shardings, bytes a device, and why it is replicated."""
    params, slices = map(jax.tree.leaves, (strategy.shardings.params, strategy.shardings.slices))
    per_device, total = strategy.nbytes("params")
    shown = table(
        f"Parameters under {strategy.name} on {sizes_text(strategy.mesh.shape)}",
        *("parameter", "shape", "dtype", "sharding", "optimizer state"),
        *("bytes per device:", "why~"),
    )
    for leaf, state in list(zip(params, slices, strict=True))[:_MAX_ROWS]:
        shown.add_row(
            *map(str, (leaf.path, leaf.shape, leaf.dtype)),
            *(_sharding_text(x) for x in (leaf, state)),
            f"{leaf.nbytes_per_device:,}",
            state.reason or leaf.reason,
        )
    if len(params) > _MAX_ROWS:
        shown.add_row(f"and {len(params) - _MAX_ROWS} more", *[""] * 6)
    shown.add_row("all", "", "", "", "", f"{per_device:,}", f"of {total:,} in all")
    if frozen := jax.tree.leaves(strategy.shardings.frozen):
        here = f"{sum(p.nbytes_per_device for p in frozen):,}"
        in_all = f"of {sum(p.nbytes for p in frozen):,} in all, in model_state"
        shown.add_row(f"{len(frozen)} frozen", "", "", "", "none", here, in_all)
    return shown


def _sharding_text(p: LeafSharding) -> str:
    return "replicated" if p.dim is None else f"{' x '.join(p.axes)} (dim {p.dim})"


def summary(strategy: Strategy) -> list[str]:
    """Bytes of parameters, gradients and optimizer state on a device, in lines of 80 columns."""
    sizes = sizes_by_part(strategy)
    lines = [
        f"{strategy.name} on {sizes_text(strategy.mesh.shape)}; per device "
        f"{_size_text('parameters', *sizes['params'])},",
        f"{_size_text('gradients', *sizes['gradients'])}, "
        f"{_size_text('optimizer state', *sizes['opt_state'])}",
    ]
    if frozen := frozen_of(strategy.abstract_state.model_state):
        lines.append(_size_text("frozen parameters", *nbytes(frozen)))
    if text := encoded_text(strategy):
        lines.append(text)
    if (outer := strategy.config.outer) is not None:
        replicas, devices = (strategy.mesh.shape[axis] for axis in BATCH_AXES)
        every, kept = outer.every, _bytes_text(strategy.nbytes("slots")[0])
        lines.append(
            f"{replicas} replicas, each of {devices}, meet every {every} steps; {kept} for it"
        )
    if reason := unsharded_reason(strategy):
        lines.append(f"{reason[0].upper()}{reason[1:]}")
        if "min_weight_size" in reason:
            lines.append("Shard smaller arrays with --gin.shard_params.min_weight_size=1024")
    return lines


def encoded_text(strategy: Strategy) -> str:
    """Which part of the parameters codecs take, and why not the others; '' without codecs."""
    codecs = strategy.config.compression
    if codecs is None:
        return ""
    shardings = jax.tree.leaves(strategy.shardings.params)
    taken = [p for p in shardings if codecs.takes(p)]
    share = sum(p.nbytes for p in taken) / max(1, sum(p.nbytes for p in shardings))
    text = f"Encoded: {len(taken)} of {len(shardings)} parameters, {share:.1%} of their bytes"
    if len(taken) == len(shardings):
        return text
    exempt = f"compression.min_size = {codecs.min_size}"
    return f"{text}; {exempt}{', exempt = ' + repr(codecs.exempt) if codecs.exempt else ''}"


def sizes_by_part(strategy: Strategy) -> dict[str, tuple[int, int]]:
    """Bytes, on a device and in all, of the parts of a state, of gradients and of a batch."""
    shardings = strategy.shardings
    params, slices = map(jax.tree.leaves, (shardings.params, shardings.slices))
    grads = [_gradient(strategy, *pair) for pair in zip(params, slices, strict=True)]
    return {
        "params": strategy.nbytes("params"),
        "gradients": (sum(size for size, _ in grads), sum(size for _, size in grads)),
        **{name: strategy.nbytes(name) for name in ("opt_state", "model_state", "slots")},
        "batch": nbytes(strategy.abstract_batch),
    }


def _gradient(strategy: Strategy, param: LeafSharding, part: LeafSharding) -> tuple[int, int]:
    """Bytes, on a device and in all, of a gradient while micro-batches are added up."""
    config = strategy.config
    if config.sync_each == "micro_batch":
        return part.nbytes_per_device, part.nbytes
    # Gradients of parameters that stay gathered are scattered at the end of a step.
    is_gathered = config.gather is not None and not config.reshard_after_forward
    return (param.nbytes if is_gathered else param.nbytes_per_device), param.nbytes


def _size_text(name: str, per_device: int, total: int) -> str:
    """E.g. 'sharded gradients 44.3 kB of 340 kB'."""
    if per_device < total:
        return f"sharded {name} {_bytes_text(per_device)} of {_bytes_text(total)}"
    return f"{name} {_bytes_text(total)}"


def _bytes_text(size: int) -> str:
    unit = max((u for u in _UNITS if size >= u), default=1)
    return f"{float(f'{size / unit:.3g}'):g} {_UNITS.get(unit, 'B')}"
