"""What `--dry_run` shows: where each value comes from, the mesh, the layout, bytes, collectives."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import gin
from rich.table import Table
from rich.text import Text

from research_dp.config import gin_internals, load
from research_dp.config.load import Config
from research_dp.config.reachability import key
from research_dp.console import put, table
from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.placement import nbytes
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, jaxpr_collectives
from research_dp.training import sharding_table

_COLUMN = 60


def look(config: Config) -> Callable[[StrategyConfig, TrainSpec], None]:
    """A function that builds a strategy and shows it, and before it the configuration."""

    def show(recipe: StrategyConfig, spec: TrainSpec) -> None:
        strategy = recipe.build(spec)
        for line, place in configuration(config):
            shown = Text(f"{line:<{_COLUMN}}  ")
            put(shown.append(f"# {place}", style="cyan"))
        for binding in config.unused:
            put(Text(f"# without effect: {binding}  # {binding.place}", style="dim"))
        put("", mesh_line(strategy), "", sharding_table.parameter_table(strategy))
        put(state_table(strategy), collectives_table(strategy))

    return show


def configuration(config: Config) -> Iterator[tuple[str, str]]:
    """(binding, origin) of every value of the run: file and line, command line, or 'default'."""
    macros = [b for b in config.used if not b.selector]
    for binding in macros:
        yield str(binding), binding.place
    by_function: dict[str, dict[str, tuple[str, str]]] = {}
    for binding in config.used:
        where = key(binding)
        if where is not None and binding.selector:
            rows = by_function.setdefault(where[1], {})
            rows[f"{where[0]}{where[2]}"] = str(binding), binding.place
    for name in sorted(config.functions, key=lambda name: name != load.ROOT):
        entry = gin_internals.configurables().get(name)
        if entry is None:
            continue
        rows = dict(by_function.get(name, {}))
        for parameter, default in _defaults(entry).items():
            rows.setdefault(parameter, (f"{entry.name}.{parameter} = {default}", "default"))
        yield from (rows[parameter] for parameter in sorted(rows))


def _defaults(entry: gin_internals.Configurable) -> dict[str, str]:
    """Parameters that a function has a value for."""
    shown = {}
    for name, parameter in entry.parameters.items():
        if parameter.default is not parameter.empty and parameter.default is not gin.REQUIRED:
            shown[name] = default_text(parameter.default)
    return shown


def default_text(value: Any) -> str:
    """A default as it would stand in a gin file, where it can."""
    function = getattr(value, "__name__", None)
    if function:
        return f"@{function}"
    return repr(value) if " at 0x" not in repr(value) else f"{type(value).__name__}(...)"


def mesh_line(strategy: Strategy) -> str:
    """The mesh, its sizes and devices."""
    mesh = strategy.mesh
    sizes = sizes_text(mesh.shape)
    kind = mesh.devices.flat[0].device_kind
    return f"Mesh of {strategy.name}: {sizes} = {mesh.size} devices ({kind})"


def state_table(strategy: Strategy) -> Table:
    """Bytes of parameters and state, in all and a device."""
    shown = table("Bytes between steps", "what", "bytes in all:", "bytes a device:")
    sums: collections.Counter[str] = collections.Counter()
    state = strategy.abstract_state
    for what in ("params", "model_state", "opt_state"):
        held, total = nbytes(getattr(state, what))
        sums.update(all=total, device=held)
        shown.add_row(what, f"{total:,}", f"{held:,}")
    shown.add_row("all", f"{sums['all']:,}", f"{sums['device']:,}")
    return shown


def collectives_table(strategy: Strategy) -> Table | str:
    """Collectives of the traced step, and the bytes that a device sends over a ring."""
    found = jaxpr_collectives.of_step(strategy)
    groups: dict[Any, list[jaxpr_collectives.Collective]] = {}
    for one in found:
        groups.setdefault((one.kind, ", ".join(one.axes), one.dtype), []).append(one)
    title = "Collectives a step"
    if not found and strategy.mesh.size > 1:
        return f"{title}: none are written out; the compiler inserts them"
    shown = table(title, "kind", "over", "dtype", "times:", "bytes a device sends:")
    for (kind, axes, dtype), same in sorted(groups.items()):
        wire = sum(one.wire_bytes for one in same)
        shown.add_row(kind, axes, dtype, f"{sum(one.times for one in same)}", f"{wire:,.0f}")
    total = sum(one.wire_bytes for one in found)
    shown.add_row("all", "", "", str(sum(one.times for one in found)), f"{total:,.0f}")
    return shown
