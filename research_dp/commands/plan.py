"""Plans: the run of gin files under several strategies, compiled for some devices and compared."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gin
import jax

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology
from research_dp.commands import exit_status, plan_candidates, plan_sizes, runtime
from research_dp.commands.flags import Options, PlanOptions, check_writable
from research_dp.commands.plan_candidates import Candidate
from research_dp.config import load
from research_dp.config.load import Config
from research_dp.console import put
from research_dp.distributed.mesh import planning_for
from research_dp.errors import UsageError, first_line, message_of
from research_dp.planning import advice, batch, html_report, tables
from research_dp.planning.estimate import Row, compile_row, fastest_first, refused
from research_dp.planning.measure import measure
from research_dp.strategies import StrategyConfig, TrainSpec

DONE, EXCEEDED = 0, 1

# What building and tracing a strategy may raise beside mistakes.
_UNBUILDABLE = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)

# Makes a row of a strategy and a run under a configuration.
Look = Callable[[StrategyConfig, TrainSpec, Config], Row | None]


def plan(options: Options, wanted: PlanOptions) -> int:
    """Plans, and prints; returns the exit status.

    Raises:
        UsageError: A mistake in the configuration, an unknown topology or strategy, or no strategy
            can be built.
    """
    json_file, html_file = (
        file and str(Path(file).expanduser()) for file in (wanted.json_file, wanted.html_file)
    )
    check_writable("--json", json_file)
    if html_file:
        html_report.check_matplotlib()
    check_writable("--html", html_file)
    chosen = plan_candidates.of(wanted.strategies)
    strict = plan_candidates.check(options, chosen)
    where = topology_of(options, wanted)
    dump = _folder(wanted.dump_hlo)
    run = _Planner(options, where, dump, wanted.measure, strict)
    rows = []
    for number, candidate in enumerate(chosen, 1):
        _tell(f"[{number}/{len(chosen)}] {candidate.name or 'the run'} on {where.name}")
        rows.append(run.row(candidate))
    if all((row.problem or "").startswith("refused") for row in rows):
        told = dict.fromkeys(f"{row.strategy}: {row.problem}" for row in rows)
        raise UsageError("\nerror: ".join(told))
    words = advice.words(rows, where)
    put(*tables.tables(rows, where), "", *words)
    others = run.others(chosen, rows) if wanted.advise else []
    if others:
        more = advice.changes(others, fastest_first(rows))
        put("", *tables.tables(others, where), "", *more)
        words += more
    if json_file:
        made = tables.as_json(rows, others, where, words)
        _write("--json", json_file, json.dumps(made, indent=2, allow_nan=False) + "\n")
    if html_file:
        curves = plan_sizes.curves(chosen, rows, where, run.under, _tell)
        _write("--html", html_file, html_report.page(rows, curves, where, words, _run(options)))
    for over in run.exceeded:
        print(f"error: {over}", file=sys.stderr)
    return EXCEEDED if run.exceeded else DONE


def topology_of(options: Options, wanted: PlanOptions) -> Topology:
    """The devices, which JAX is set up for."""
    simulated = re.fullmatch(r"cpu:(\d+)", wanted.topology)
    if simulated or wanted.topology == "here":
        given = int(simulated[1]) if simulated and int(simulated[1]) else None
        runtime.set_up_devices(options.cpu_devices or given)
    elif options.cpu_devices:
        raise UsageError("--cpu_devices splits this machine's CPU: use it with --topology=here.")
    if wanted.measure and not simulated and wanted.topology != "here":
        raise UsageError("--measure needs devices that are present: --topology=here, or cpu:N.")
    if wanted.topology == "here":
        return topologies.present()
    return topologies.topology(wanted.topology)


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
        """A candidate's row, held to the budget."""

        def look(recipe: StrategyConfig, spec: TrainSpec, config: Config) -> Row:
            row = self.compile(candidate.name or recipe.name, recipe, spec)
            budget = gin.get_configurable("plan")()
            for name, told in budget.exceeded(row):
                self.exceeded.append(f"{told} {name} is bound in {config.origin(name)}.")
            return row

        row = self.under(candidate, look)
        assert row is not None  # this look always has one
        return row

    def others(self, chosen: Sequence[Candidate], rows: Sequence[Row]) -> list[Row]:
        """Rows with other options than the fastest has, and with the largest batch that it can.

        If nothing fits: with more micro-batches.
        """
        known = {row.strategy: row for row in rows}
        by_name = {found.strategy: c for c, found in zip(chosen, rows, strict=True)}
        found = []
        for best in fastest_first(rows)[:1]:
            for candidate in plan_candidates.variants(by_name[best.strategy], best, self.where):
                if candidate.name not in known:
                    _tell(f"[advice] {candidate.name} on {self.where.name}")
                    found.append(self.under(candidate, self.plain(candidate.name)))
            found.append(self.under(by_name[best.strategy], self.search(best, batch.largest)))
        if not fastest_first(rows):
            for row in rows:
                if batch.state_fits(row):
                    look = self.search(row, batch.smallest_steps)
                    found.append(self.under(by_name[row.strategy], look))
        return [row for row in found if row is not None and row not in rows]

    def plain(self, name: str) -> Look:
        """Compiles a strategy as it is."""
        return lambda recipe, spec, config: self.compile(name, recipe, spec)

    def search(self, row: Row, how: Callable[..., Row | None]) -> Look:
        """Searches a batch for a row's strategy."""

        def attempt(recipe: StrategyConfig, spec: TrainSpec) -> Row:
            _tell(
                f"[advice] {row.strategy}, batch {spec.batch_size}, accumulation_steps "
                f"{spec.accumulation_steps} on {self.where.name}"
            )
            name = f"{row.strategy}, batch {spec.batch_size}"
            if spec.accumulation_steps > 1:
                name += f" in {spec.accumulation_steps}"
            return self.compile(name, recipe, spec)

        return lambda recipe, spec, config: how(
            recipe, spec, row, functools.partial(attempt, recipe)
        )

    def compile(self, name: str, recipe: StrategyConfig, spec: TrainSpec) -> Row:
        """One row."""
        made = compile_row(name, recipe, spec, self.where, self.dump)
        if self.measured and made.row.fits:
            measure(made)
        return made.row

    def under(self, candidate: Candidate, look: Look, where: Topology | None = None) -> Row | None:
        """What a function makes of a candidate's strategy and run; why not, if it is refused."""
        from research_dp.training.loop import train

        found: list[Row | None] = []
        config: Config | None = None
        try:
            strict = self.strict.get(candidate.name, False)
            config = bound = plan_candidates.load(self.options, candidate, allow_unused=not strict)
            with planning_for((where or self.where).devices):
                train(look=lambda recipe, spec: found.append(look(recipe, spec, bound)))
            return found[0]
        except UsageError as error:
            place = config and error.binding and config.origin(error.binding)
            told = message_of(error) + (f" Bound in {place}" if place else "")
            return refused(candidate.name or "the run", UsageError(told))
        except _UNBUILDABLE as error:
            # JAX may refuse devices that suit other strategies, whose rows are not lost for that.
            if exit_status.is_of_users_code(error) or load.missing_binding(error):
                raise
            told = f"{type(error).__name__}: {first_line(error)}"
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


def _run(options: Options) -> str:
    """The run in a few words: its files and bindings."""
    return ", ".join([*(Path(file).stem for file in options.gin_files), *options.bindings])


def _write(flag: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}={path} cannot be written: {error.strerror}.") from error


def _tell(line: str) -> None:
    """Says how far it is, where results are not mixed with it."""
    print(line, file=sys.stderr, flush=True)
