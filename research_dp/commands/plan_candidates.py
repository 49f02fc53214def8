"""Which strategies a plan compares, and the configuration of a run under each of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax

from research_dp.analysis.topologies import Topology
from research_dp.commands import failures
from research_dp.commands.configured import Run
from research_dp.config import load, parser, spellings
from research_dp.config.load import Config
from research_dp.distributed.mesh import planning_for
from research_dp.errors import UsageError, first_line, message_of
from research_dp.planning.row import Row
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.training.train import train

# What building and tracing a strategy may raise beside mistakes.
_UNBUILDABLE = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy to plan for: the files and bindings that choose it come after the run's."""

    name: str  # of its row; '' for the run's own
    files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()


def of(strategies: Sequence[str], place: str = "--strategies") -> list[Candidate]:
    """The strategies that are named; the run's own if none is.

    A name is 'fsdp', 'my/own.gin', 'fsdp+h100+bf16_collectives' or 'all'. Messages begin with
    `place`.
    """
    # Those of the folder alone: what compresses computes something else, and is asked for by name.
    shipped = [Path(file).stem for file in parser.shipped() if re.match("strategies/[^/]*$", file)]
    candidates: dict[str, Candidate] = {}
    texts = filter(None, map(str.strip, strategies))
    for name in (n for text in texts for n in (shipped if text == "all" else [text])):
        first, *others = name.split("+")
        files = [_file(first, "strategies", place), *(_file(x, "", place) for x in others)]
        label = "+".join(Path(word).stem for word in name.split("+"))
        candidate = Candidate(label, tuple(files))
        if candidates.setdefault(label, candidate) != candidate:
            both = (", ".join(c.files) for c in (candidates[label], candidate))
            raise UsageError(
                f"{place}: {' and '.join(both)} would both be row {label!r}. Rename a file."
            )
    return list(candidates.values()) or [Candidate("")]


def _file(name: str, folder: str, place: str) -> str:
    """A file by its path, or a shipped one by its stem."""
    if name.endswith(".gin"):
        if parser.find(name) is None:
            raise UsageError(f"{place}: no file {name}.{parser.nearest_file(name)}")
        return name
    shipped = {Path(f).stem: f for f in parser.shipped() if f.startswith(folder)}
    if name not in shipped:
        near = spellings.nearest_file(name, shipped.values())
        hint = f" Did you mean {Path(near).stem}?" if near else ""
        raise UsageError(f"{place}: no shipped file {name!r}.{hint} Or give a path to one.")
    return shipped[name]


def check(run: Run, candidates: Sequence[Candidate]) -> dict[str, bool]:
    """By candidate, whether its configuration is correct and all its bindings take effect.

    A binding without effect under some strategies may have one under others, and is allowed. What
    is wrong, or without effect, under every strategy raises Mistakes.
    """
    mistakes: list[dict[str, parser.Mistake]] = []
    for candidate in candidates:
        try:
            run.load(candidate.files, candidate.bindings)
            mistakes.append({})
        except load.Mistakes as error:
            # By their places: what a message suggests instead depends on the strategy.
            mistakes.append({mistake.place or str(mistake): mistake for mistake in error.mistakes})
    common = [m for place, m in mistakes[0].items() if all(place in others for others in mistakes)]
    if common:
        raise load.Mistakes(common)
    return {c.name: not wrong for c, wrong in zip(candidates, mistakes, strict=True)}


def variants(candidate: Candidate, row: Row, where: Topology) -> list[Candidate]:
    """What else a strategy could be: other dtypes, kept parameters, groups of 1, 8, 64 hosts."""
    assert row.mesh is not None
    result = []
    if row.is_wide and row.narrow_file and row.narrow_file not in candidate.files:
        name = f"{row.strategy}+{Path(row.narrow_file).stem}"
        result.append(Candidate(name, (*candidate.files, row.narrow_file)))
    if row.mesh["fsdp"] > 1:
        result += [_replaced(candidate, stem, stem) for stem in ("fsdp", "fsdp_keep")]
        devices, size = len(where.devices), where.domains[1]
        while 1 < size < devices and devices % size == 0:
            axes = f"make_mesh.axes = {{'data': {devices // size}, 'fsdp': {size}}}"
            result.append(_replaced(candidate, "hsdp", f"hsdp {devices // size} x {size}", axes))
            size *= 8
    return result


def _replaced(candidate: Candidate, stem: str, label: str, *bindings: str) -> Candidate:
    """A candidate with another shipped strategy; its further files stay."""
    _, *others = candidate.files or ("",)
    name = "+".join([label, *(Path(file).stem for file in others)])
    return Candidate(name, (f"strategies/{stem}.gin", *others), bindings)


def built_under(
    run: Run,
    load_it: Callable[[], Config],
    name: str,
    devices: Sequence[Any],
    function: Callable[[StrategyConfig, TrainSpec], T],
) -> T | Row:
    """The result of a function of the strategy and run that `load_it` loads, for some devices.

    It is the row of a refusal, by this name, if they cannot be built.
    """
    result: list[T] = []
    run.config = None
    try:
        load_it()
        with planning_for(devices):
            train(inspect=lambda strategy, spec: result.append(function(strategy, spec)))
        return result[0]
    except UsageError as error:
        place = run.config and error.binding and run.config.origin(error.binding)
        reason = message_of(error) + (f" Bound in {place}" if place else "")
    except _UNBUILDABLE as error:
        # JAX may refuse devices that suit other strategies, whose rows are not lost for that.
        if failures.is_of_users_code(error) or load.missing_binding(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
    finally:
        jax.clear_caches()
    return Row.refused(name, UsageError(reason))
