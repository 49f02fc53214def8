"""The strategy that plans: of several, the fastest that fits on the devices of the run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import gin
import jax

from research_dp.analysis import topologies
from research_dp.distributed.errors import UsageError, check_kind
from research_dp.planning import advice
from research_dp.planning.row import Compiled, Row, compile_row, fastest_first, refused
from research_dp.strategies import Recipe, Strategy, TrainSpec


@gin.register(module="planning")
def auto(*, candidates: Sequence[Recipe] = gin.REQUIRED) -> Recipe:
    """Compiles each candidate's training step, and takes the fastest of those that fit.

    Nothing is run: times are predicted, memory is the compiler's. Three lines tell why. The summary
    has the name of the one that was taken.

    Args:
        candidates: Strategies, e.g. `[@ddp/data_parallel(), @fsdp/data_parallel()]`, each in a gin
            scope of its own.

    Raises:
        UsageError: There is none; or, once it is built, none fits.
    """
    if not candidates:
        raise UsageError("auto.candidates is empty: give at least one strategy.")
    for candidate in candidates:
        check_kind("auto.candidates", candidate, Recipe, "[@ddp/data_parallel()]")
    # Candidates have dtypes and loss scales of their own, which `Recipe.build` sees to.
    plain = dataclasses.replace(candidates[0], name="auto", param_dtype=None, loss_scale=None)
    return dataclasses.replace(plain, engine=functools.partial(_take, tuple(candidates)))


def _take(candidates: Sequence[Recipe], recipe: Recipe, spec: TrainSpec) -> Strategy:
    """An engine: builds the winner."""
    where = topologies.of(list(recipe.mesh.devices.flat))
    rows: list[Row] = []
    best: Compiled | None = None  # the others are let go
    for candidate in candidates:
        try:
            made = compile_row(candidate.name, candidate, spec, where)
        except UsageError as error:
            rows.append(refused(candidate.name, error))
            continue
        rows.append(made.row)
        if fastest_first(rows)[:1] == [made.row]:
            best = made
    if best is None:
        told = "; ".join(f"{row.strategy} {row.problem}" for row in rows)
        raise UsageError(f"auto: no candidate can be taken on {where.name}: {told}")
    if jax.process_index() == 0:
        print("\n".join(advice.in_three_lines(rows, where)), flush=True)
    return best.strategy
