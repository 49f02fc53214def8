"""The strategy that plans: of several, the fastest that fits on the devices of the run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import gin
import jax

from research_dp.analysis import topologies
from research_dp.argument_checks import checked
from research_dp.distributed.mesh import of_the_first
from research_dp.errors import UsageError
from research_dp.planning import report
from research_dp.planning.estimate import compile_row
from research_dp.planning.row import Row, fastest_first
from research_dp.strategies import StrategyConfig, TrainSpec


@gin.register(module="planning")
@checked
def auto(*, candidates: Sequence[StrategyConfig] = gin.REQUIRED) -> StrategyConfig:
    """Compiles each candidate's training step, and takes the fastest of those that fit.

    Nothing is run: times are predicted, memory is the compiler's. Three lines say why. The summary
    has the name of the one that was taken.

    Args:
        candidates: Strategies, e.g. `[@ddp/data_parallel(), @fsdp/data_parallel()]`, each in a gin
            scope of its own.

    Raises:
        UsageError: There is none; or, once it is built, none fits.
    """
    if not candidates:
        raise UsageError("auto.candidates is empty: give at least one strategy.")
    return dataclasses.replace(
        candidates[0], name="auto", choose=functools.partial(_fastest, tuple(candidates))
    )


def _fastest(candidates: Sequence[StrategyConfig], spec: TrainSpec) -> StrategyConfig:
    where = topologies.of(list(candidates[0].mesh.devices.flat))
    rows: list[Row] = []
    for candidate in candidates:
        try:
            rows.append(compile_row(candidate.name, candidate, spec, where).row)
        except UsageError as error:
            rows.append(Row.refused(candidate.name, error))
    # Compilers of several hosts need not agree on every byte.
    chosen = of_the_first(next((rows.index(row) for row in fastest_first(rows)), -1))
    if chosen < 0:
        reasons = "; ".join(f"{row.strategy} {row.problem}" for row in rows)
        raise UsageError(f"auto: no candidate can be taken on {where.name}: {reasons}")
    if jax.process_index() == 0:
        print("\n".join(report.summary(rows, where)), flush=True)
    return candidates[chosen]
