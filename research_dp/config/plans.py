"""Plans: the run of gin files under several strategies, compiled for some devices and compared."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import jax

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology
from research_dp.config import environment, gin_config, sources
from research_dp.config.command_line import Options, PlanOptions
from research_dp.config.gin_config import Config, Mistakes
from research_dp.config.names import did_you_mean
from research_dp.config.show import put
from research_dp.config.sources import Mistake
from research_dp.distributed.errors import UsageError
from research_dp.distributed.mesh import planning_for
from research_dp.planning import advice, tables
from research_dp.planning.measure import measure
from research_dp.planning.row import Row, compile_row, refused
from research_dp.strategies import Recipe, TrainSpec

DONE, EXCEEDED = 0, 1


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A strategy to plan for.

    Attributes:
        name: What its row is called; '' for the run's own.
        files: Files that choose it, after the run's.
    """

    name: str
    files: tuple[str, ...] = ()


def plan(options: Options, wanted: PlanOptions) -> int:
    """Plans, and prints; returns the exit status.

    Raises:
        UsageError: A mistake in the configuration, an unknown topology or strategy, or no strategy
            can be built.
    """
    candidates = candidates_of(wanted.strategies)
    strict = check(options, candidates)
    where = topology_of(options, wanted)
    dump = _folder(wanted.dump_hlo)
    run = _Planner(options, where, dump, wanted.measure, strict)
    rows = []
    for number, candidate in enumerate(candidates, 1):
        _tell(f"[{number}/{len(candidates)}] {candidate.name or 'the run'} on {where.name}")
        rows.append(run.row(candidate))
    if all((row.problem or "").startswith("refused") for row in rows):
        told = dict.fromkeys(f"{row.strategy}: {row.problem}" for row in rows)
        raise UsageError("\nerror: ".join(told))
    words = advice.words(rows, where)
    put(*tables.tables(rows, where), "", *words)
    if wanted.json_file:
        _write(wanted.json_file, tables.as_json(rows, where, words))
    for over in run.exceeded:
        print(f"error: {over}", file=sys.stderr)
    return EXCEEDED if run.exceeded else DONE


def topology_of(options: Options, wanted: PlanOptions) -> Topology:
    """The devices, which JAX is set up for."""
    simulated = re.fullmatch(r"cpu:(\d+)", wanted.topology)
    if simulated or wanted.topology == "here":
        given = int(simulated[1]) if simulated and int(simulated[1]) else None
        environment.set_up_devices(options.cpu_devices or given)
    elif options.cpu_devices:
        raise UsageError("--cpu_devices splits this machine's CPU: use it with --topology=here.")
    if wanted.measure and not simulated and wanted.topology != "here":
        raise UsageError("--measure needs devices that are present: --topology=here, or cpu:N.")
    if wanted.topology == "here":
        return topologies.present()
    return topologies.topology(wanted.topology)


def candidates_of(strategies: Sequence[str]) -> list[Candidate]:
    """The strategies that are named; the run's own if none is.

    Args:
        strategies: Each 'fsdp', 'my/own.gin', 'fsdp+h100_speed+bf16_collectives'; or 'all'.

    Raises:
        UsageError: There is no such strategy or file.
    """
    if not strategies:
        return [Candidate("")]
    known = [Path(file).stem for file in sources.shipped() if "/strategies/" in file]
    found: dict[str, Candidate] = {}
    for text in strategies:
        for name in known if text == "all" else [text]:
            first, *others = name.split("+")
            files = [_file(first, "strategies"), *(_file(other, "") for other in others)]
            label = "+".join(Path(word).stem for word in name.split("+"))
            found[label] = Candidate(label, tuple(files))
    return list(found.values())


def _file(name: str, folder: str) -> str:
    """A file by its path, or a shipped one by its stem."""
    if name.endswith(".gin"):
        if sources.find(name) is None:
            raise UsageError(f"--strategies: no file {name}.")
        return name
    shipped = {Path(f).stem: f for f in sources.shipped() if not folder or f"/{folder}/" in f}
    if name not in shipped:
        hint = did_you_mean(name, shipped)
        raise UsageError(f"--strategies: no shipped file {name!r}.{hint} Or give a path to one.")
    return shipped[name]


def check(options: Options, candidates: Sequence[Candidate]) -> dict[str, bool]:
    """Whether each candidate's configuration is right with nothing bound in vain, by name.

    What has no effect under some strategies may have one under others, and is let through there.

    Raises:
        Mistakes: Something is wrong under every strategy, or in vain under every one.
    """
    strict: dict[str, bool] = {}
    mistakes: list[dict[str, Mistake]] = []
    for candidate in candidates:
        try:
            load(options, candidate)
            strict[candidate.name] = True
            mistakes.append({})
        except Mistakes as error:
            strict[candidate.name] = False
            # By their places: what a message suggests instead depends on the strategy.
            mistakes.append({mistake.place or str(mistake): mistake for mistake in error.mistakes})
    common = [m for place, m in mistakes[0].items() if all(place in found for found in mistakes)]
    if common:
        raise Mistakes(common)
    return strict


def load(options: Options, candidate: Candidate, *, allow_unused: bool = False) -> Config:
    """Binds the run with a candidate's strategy."""
    return gin_config.load(
        [*options.gin_files, *candidate.files],
        options.bindings,
        imports=options.imports,
        allow_unused=options.allow_unused or allow_unused,
        whole=True,
    )


class _Planner:
    """Plans one candidate after the other, each under its own configuration.

    Attributes:
        exceeded: What of the rows is above the budget, each with the place that says so.
    """

    def __init__(
        self,
        options: Options,
        where: Topology,
        dump: Path | None,
        measured: bool,
        strict: dict[str, bool],
    ):
        self.options, self.where, self.dump = options, where, dump
        self.measured, self.strict = measured, strict
        self.exceeded: list[str] = []

    def row(self, candidate: Candidate) -> Row:
        """A candidate's row."""
        from research_dp.training.loop import train

        found: list[Row] = []
        config = None

        def look(recipe: Recipe, spec: TrainSpec) -> None:
            name = candidate.name or recipe.name
            made = compile_row(name, recipe, spec, self.where, self.dump)
            if self.measured and made.row.fits:
                made.row.measured_seconds = measure(made)
            found.append(made.row)

        try:
            strict = self.strict[candidate.name]
            config = load(self.options, candidate, allow_unused=not strict)
            with planning_for(self.where.devices):
                train(look=look)
            budget = gin.get_configurable("plan")()
            for name, told in budget.exceeded(found[0]):
                self.exceeded.append(f"{told} {name} is bound in {config.origin(name)}.")
            return found[0]
        except UsageError as error:
            place = config and error.binding and config.origin(error.binding)
            told = f"{error}" + (f" ({place})" if place else "")
            return refused(candidate.name or "the run", UsageError(told))
        finally:
            jax.clear_caches()


def _folder(path: str | None) -> Path | None:
    """Makes a folder for results."""
    if path is None:
        return None
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dump_hlo={path} cannot be made: {error.strerror}.") from error
    return folder


def _write(path: str, plan: Mapping[str, Any]) -> None:
    try:
        Path(path).expanduser().write_text(json.dumps(plan, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"--json={path} cannot be written: {error.strerror}.") from error


def _tell(line: str) -> None:
    """Says how far it is, where results are not mixed with it."""
    print(line, file=sys.stderr, flush=True)
