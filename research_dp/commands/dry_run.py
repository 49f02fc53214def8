"""What a run would be: where each value comes from, the mesh, shardings, bytes, collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import jax
from rich.text import Text

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.commands import jax_setup
from research_dp.commands.configured import Bindings, Files, in_arguments, session
from research_dp.config import gin_internals, load, reachability
from research_dp.console import Table, put, table
from research_dp.distributed.mesh import sizes_text
from research_dp.errors import some_of
from research_dp.strategies import Strategy, jaxpr_collectives
from research_dp.training import sharding_table
from research_dp.training.train import train

_COLUMN = 44  # where the origin of a value begins, unless the value is longer


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A run that was built and traced, but not started; printed, it is the command's text.

    Attributes:
        config: Binding -> where it was made: file and line, 'bindings: ...', or 'default'.
        strategy: The strategy, built: `.shardings`, `.abstract_state`, `.mesh`.
        nbytes: Part of the state -> (bytes per device, bytes in all) between steps.
        collectives: The collectives of the traced step, each with `kind`, `axes`, `dtype`, `times`
            and `wire_bytes` per device; empty where the compiler inserts them.
        text: What the command prints.
    """

    config: Mapping[str, str]
    strategy: Strategy
    nbytes: Mapping[str, tuple[int, int]]
    collectives: Sequence[Any]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


@checked
def dry_run(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
) -> DryRun:
    """Builds what gin files say without training it, as `python -m research_dp.train --dry_run`.

    Args:
        gin_files: As in `run`.
        bindings: As in `run`.
        imports: As in `run`.
        cpu_devices: As in `run`.
        allow_unused: As in `run`.

    Raises:
        UsageError: Something in the configuration is wrong.
    """
    with session(gin_files, bindings, imports=imports, allow_unused=allow_unused) as run:
        config = run.load()
        jax_setup.set_up_devices(cpu_devices)
        strategy = built()
        with contextlib.redirect_stdout(io.StringIO()) as text:
            show(config, strategy)
        return DryRun(
            config={line: in_arguments(place) for line, place in configuration(config)},
            strategy=strategy,
            nbytes={x: strategy.nbytes(x) for x in ("params", "model_state", "opt_state")},
            collectives=jaxpr_collectives.of_step(strategy),
            text=text.getvalue(),
        )


def built() -> Strategy:
    """The strategy of the run that is loaded, built for it."""
    strategies: list[Strategy] = []
    train(inspect=lambda strategy, spec: strategies.append(strategy.build(spec)))
    return strategies[0]


def show(config: load.Config, strategy: Strategy) -> None:
    """Shows the configuration, the mesh and the strategy."""
    for line, place in configuration(config):
        put([Text(line.ljust(_COLUMN)), Text(f"# {place}", "cyan")])
    for binding in config.unused:
        put(Text(f"# without effect: {binding}  # {binding.place}", style="dim"))
    mesh = strategy.mesh
    kind = mesh.devices.flat[0].device_kind
    put("", f"Mesh of {strategy.name}: {sizes_text(mesh.shape)} = {mesh.size} devices ({kind})")
    if units := strategy.spec.model.units:
        put(f"Units: {some_of(sorted(units), 12)}")
    for name, value in {**_tuned(strategy), **strategy.choices}.items():
        put(f"Chosen for these devices: {name} = {value}")
    put("", sharding_table.parameter_table(strategy))
    if text := sharding_table.encoded_text(strategy):
        put(text)
    put(state_table(strategy), collectives_table(strategy))


def _tuned(strategy: Strategy) -> dict[str, Any]:
    """What a tuning gave the strategy."""
    names = ("prefetch", "compiler_options") if strategy.config.tuning else ()
    values = {f"data_parallel.{name}": getattr(strategy.config, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def configuration(config: load.Config) -> Iterator[tuple[str, str]]:
    """(binding, origin) of every value of the run: file and line, command line, or 'default'."""
    by_function: dict[str, dict[str, tuple[str, str]]] = {}
    for binding in config.used:
        scope, function, parameter = binding.key
        if not binding.selector:
            yield str(binding), binding.place
        else:
            rows = by_function.setdefault(function, {})
            rows[f"{scope}{parameter}"] = str(binding), binding.place
    known = gin_internals.configurables()
    for name in sorted(config.functions, key=lambda name: (name != reachability.ROOT, name)):
        if name not in known:
            continue
        rows = by_function.get(name, {})
        for parameter, value in known[name].parameters.items():
            if value.default is not value.empty and value.default is not gin.REQUIRED:
                line = f"{known[name].name}.{parameter} = {default_text(value.default)}"
                rows.setdefault(parameter, (line, "default"))
        yield from (rows[parameter] for parameter in sorted(rows))


def default_text(value: Any) -> str:
    """A default as a gin file would write it, where it can."""
    if function := getattr(value, "__name__", None):
        return f"@{function}"
    return repr(value) if " at 0x" not in repr(value) else f"{type(value).__name__}(...)"


def state_table(strategy: Strategy) -> Table:
    """Bytes of parameters and state, in all and on one device."""
    rows = table("Bytes between steps", "what", "bytes in all:", "bytes per device:")
    state = strategy.abstract_state
    names = ["params", "model_state", "opt_state"]
    names += [name for name in ("loss_scale", "slots") if jax.tree.leaves(getattr(state, name))]
    sizes = {name: strategy.nbytes(name) for name in names}
    here, in_all = zip(*sizes.values(), strict=True)
    for name, (on_device, total) in {**sizes, "all": (sum(here), sum(in_all))}.items():
        rows.add_row(name, f"{total:,}", f"{on_device:,}")
    return rows


def collectives_table(strategy: Strategy) -> Table | str:
    """Collectives of the traced step, and the bytes that a device sends over a ring."""
    collectives = jaxpr_collectives.of_step(strategy)
    groups: dict[Any, list[jaxpr_collectives.Collective]] = {}
    for one in collectives:
        groups.setdefault((one.kind, ", ".join(one.axes), one.dtype), []).append(one)
    title = "Collectives per step"
    if not collectives and strategy.mesh.size > 1:
        return f"{title}: none are written out; the compiler inserts them"
    rows = table(title, "collective", "over", "dtype", "times:", "wire bytes per device:")
    for labels, same in [*sorted(groups.items()), (("all", "", ""), collectives)]:
        wire = sum(one.wire_bytes for one in same)
        rows.add_row(*labels, f"{sum(one.times for one in same)}", f"{wire:,.0f}")
    return rows
