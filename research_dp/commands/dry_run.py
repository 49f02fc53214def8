"""Shows for `--dry_run` where each value comes from, the mesh, shardings, bytes, collectives."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import gin
from rich.table import Table
from rich.text import Text

from research_dp.config import gin_internals
from research_dp.config.load import Config
from research_dp.config.reachability import ROOT
from research_dp.console import put, table
from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.placement import nbytes
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, jaxpr_collectives
from research_dp.training import sharding_table

_COLUMN = 60


def inspect(config: Config) -> Callable[[StrategyConfig, TrainSpec], None]:
    """A function that builds a strategy, then shows the configuration and the strategy."""

    def show(strategy_config: StrategyConfig, spec: TrainSpec) -> None:
        strategy = strategy_config.build(spec)
        for line, place in configuration(config):
            put(Text(f"{line:<{_COLUMN}}  ").append(f"# {place}", style="cyan"))
        for binding in config.unused:
            put(Text(f"# without effect: {binding}  # {binding.place}", style="dim"))
        put("", mesh_line(strategy), "", sharding_table.parameter_table(strategy))
        put(state_table(strategy), collectives_table(strategy))

    return show


def configuration(config: Config) -> Iterator[tuple[str, str]]:
    """(binding, origin) of every value of the run: file and line, command line, or 'default'."""
    by_function: dict[str, dict[str, tuple[str, str]]] = {}
    for binding in config.used:
        where = binding.key
        if not binding.selector:
            yield str(binding), binding.place
        else:
            rows = by_function.setdefault(where[1], {})
            rows[f"{where[0]}{where[2]}"] = str(binding), binding.place
    known = gin_internals.configurables()
    for name in sorted(config.functions, key=lambda name: (name != ROOT, name)):
        if name not in known:
            continue
        rows = by_function.get(name, {})
        for parameter in known[name].parameters.values():
            if parameter.default is not parameter.empty and parameter.default is not gin.REQUIRED:
                line = f"{known[name].name}.{parameter.name} = {default_text(parameter.default)}"
                rows.setdefault(parameter.name, (line, "default"))
        yield from (rows[parameter] for parameter in sorted(rows))


def default_text(value: Any) -> str:
    """A default as a gin file would write it, where it can."""
    function = getattr(value, "__name__", None)
    if function:
        return f"@{function}"
    return repr(value) if " at 0x" not in repr(value) else f"{type(value).__name__}(...)"


def mesh_line(strategy: Strategy) -> str:
    """The mesh, its sizes and devices."""
    mesh = strategy.mesh
    device = mesh.devices.flat[0].device_kind
    return f"Mesh of {strategy.name}: {sizes_text(mesh.shape)} = {mesh.size} devices ({device})"


def state_table(strategy: Strategy) -> Table:
    """Bytes of parameters and state, in all and on one device."""
    rows = table("Bytes between steps", "what", "bytes in all:", "bytes a device:")
    sums: collections.Counter[str] = collections.Counter()
    for what in ("params", "model_state", "opt_state"):
        on_device, total = nbytes(getattr(strategy.abstract_state, what))
        sums.update(all=total, device=on_device)
        rows.add_row(what, f"{total:,}", f"{on_device:,}")
    rows.add_row("all", f"{sums['all']:,}", f"{sums['device']:,}")
    return rows


def collectives_table(strategy: Strategy) -> Table | str:
    """Collectives of the traced step, and the bytes that a device sends over a ring."""
    collectives = jaxpr_collectives.of_step(strategy)
    groups: dict[Any, list[jaxpr_collectives.Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, ", ".join(one.axes), one.dtype), []).append(one)
    title = "Collectives a step"
    if not collectives and strategy.mesh.size > 1:
        return f"{title}: none are written out; the compiler inserts them"
    rows = table(title, "kind", "over", "dtype", "times:", "bytes a device sends:")
    for labels, same in [*sorted(groups.items()), (("all", "", ""), collectives)]:
        wire = sum(one.wire_bytes for one in same)
        rows.add_row(*labels, f"{sum(one.times for one in same)}", f"{wire:,.0f}")
    return rows
