"""The strategies of a plan on other numbers of devices: what is compiled, and what follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology
from research_dp.commands.plan_candidates import Candidate
from research_dp.config.load import Config
from research_dp.errors import UsageError
from research_dp.planning import extrapolation
from research_dp.planning.estimate import Row, compile_row
from research_dp.planning.extrapolation import SIZES, Curve, Held
from research_dp.strategies import StrategyConfig, TrainSpec

# A strategy that takes longer is compiled for the asked devices alone.
_LONG = 60.0  # seconds

# Hands a candidate's strategy and run, on some devices, to a function; its row, or why it has none.
Under = Callable[[Candidate, Callable[[StrategyConfig, TrainSpec, Config], Any], Topology], Any]


def curves(
    chosen: Sequence[Candidate],
    rows: Sequence[Row],
    where: Topology,
    under: Under,
    tell: Callable[[str], None],
) -> list[Curve]:
    """A curve of each strategy that could be built.

    At most two more sizes a strategy are compiled, a quarter and four times the devices.

    Args:
        chosen: The strategies.
        rows: Their rows.
        where: The devices of these.
        under: Binds a candidate.
        tell: Says how far it is.
    """
    others = _others(where, tell)
    found = []
    for candidate, row in zip(chosen, rows, strict=True):
        if row.mesh is None:
            continue
        sizes = [row]
        if extrapolation.devices(row) == len(where.devices) and (row.compile_seconds or 0) <= _LONG:
            for other in others:
                tell(f"[page] {row.strategy} on {other.name}")
                sizes.append(under(candidate, _at(row, other), other))
        found.append(_curve(candidate, sizes, where, under))
    return found


def _others(where: Topology, tell: Callable[[str], None]) -> list[Topology]:
    """The other sizes that there is a compiler for: of CPUs no more than are present."""
    found = []
    for name in extrapolation.neighbours(where):
        try:
            found.append(topologies.topology(name))
        except UsageError as error:
            tell(f"[page] {name} is left out: {error}")
    return found


def _at(row: Row, other: Topology) -> Callable[[StrategyConfig, TrainSpec, Config], Row]:
    """Compiles a row's run on other devices, as many examples on each."""

    def look(recipe: StrategyConfig, spec: TrainSpec, config: Config) -> Row:
        size = (row.batch_size or 0) * len(other.devices) // extrapolation.devices(row)
        return compile_row(
            row.strategy, recipe, dataclasses.replace(spec, batch_size=size), other
        ).row

    return look


def _curve(candidate: Candidate, rows: Sequence[Row], where: Topology, under: Under) -> Curve:
    rows = [row for row in rows if row.mesh]
    at: dict[int, Held] = {}
    sizes = sorted({*SIZES, *map(extrapolation.devices, rows)})
    widest = max(rows, key=extrapolation.devices)

    def look(recipe: StrategyConfig, spec: TrainSpec, config: Config) -> None:
        at.update(extrapolation.held(recipe, spec, widest, extrapolation.meshes(rows, sizes)))

    under(candidate, look, where)
    return extrapolation.curve(rows, at, where)
