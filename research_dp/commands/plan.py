"""Plans: the run of gin files under several strategies, compiled for some devices and compared."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gin
import jax
from rich.text import Text

from research_dp import html_page
from research_dp.analysis import topologies
from research_dp.commands import failures, jax_setup, plan_candidates
from research_dp.commands.flags import (
    Command,
    check_writable,
    flag,
    switch,
    usage_error,
    write_file,
)
from research_dp.commands.plan_candidates import Candidate
from research_dp.config import load
from research_dp.config.load import Config
from research_dp.console import Progress, put
from research_dp.distributed.mesh import planning_for
from research_dp.errors import UsageError, first_line, message_of
from research_dp.planning import estimate, extrapolation, html_report, report
from research_dp.planning.extrapolation import SIZES, Curve
from research_dp.planning.limits import Budget
from research_dp.planning.row import Row, fastest_first
from research_dp.planning.tables import tables
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.training.train import train

# A strategy that takes longer to compile is compiled for the given devices alone.
_LONG_COMPILATION = 60.0  # seconds
# What building and tracing a strategy may raise beside mistakes.
_UNBUILDABLE = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)

T = TypeVar("T")


@dataclasses.dataclass
class Plan(Command):
    """The command `plan`: plans one candidate after the other, each under its own configuration."""

    topology: str = flag("h100:8x8, v5e-64, cpu:8, ...; or: here", "T", required=True)
    strategies: str = flag(
        "shipped strategies, or files, to compare; +F after one adds a file: fsdp+h100_speed; "
        "without this flag the run's own",
        "all|A,B,...",
        default="",
    )
    json_file: str | None = flag("write the plan as JSON", "FILE", "--json")
    html_file: str | None = flag("write a page: charts by devices, tables", "FILE", "--html")
    dump_hlo: str | None = flag("write each compiled program's text", "DIR")
    advise: bool = switch("compile other options and batches of the fastest")
    measure: bool = switch("run each step, too, if the devices are present")
    verbose: bool = switch("print all figures, and the collectives")
    verb: ClassVar[str] = "plan"

    def run(self) -> int:
        """Plans, prints and writes; returns the exit status. UsageError if nothing can be built."""
        _, exceeded = self.result(put)
        put(*(Text(f"error: {message}", "bold red") for message in exceeded), file=sys.stderr)
        return int(bool(exceeded))

    def result(self, show: Callable[..., None]) -> tuple[dict[str, Any], list[str]]:
        """The plan as JSON, and messages on budgets that it exceeds; shows tables as they are due.

        UsageError if nothing can be built.
        """
        reading = Progress("Reading the configuration")
        with reading as self.report, jax_setup.without_compilation_cache():
            return self._plan(show)

    def _plan(self, show: Callable[..., None]) -> tuple[dict[str, Any], list[str]]:
        files = (self.json_file, self.html_file)
        json_file, html_file = (file and str(Path(file).expanduser()) for file in files)
        check_writable("--json", json_file)
        if html_file:
            html_page.check_installed("a plan's page")
        check_writable("--html", html_file)
        candidates = plan_candidates.of(self.strategies.split(","))
        self.strict = plan_candidates.check(self, candidates)
        where = self.where = find_topology(self.topology, self.cpu_devices, self.measure)
        self.dump = None if self.dump_hlo is None else Path(self.dump_hlo).expanduser()
        if self.dump:
            with usage_error(f"--dump_hlo={self.dump_hlo} cannot be made"):
                self.dump.mkdir(parents=True, exist_ok=True)
        rows, budgets = self.rows(candidates)
        words = report.words(rows, where)
        style = "bold green" if fastest_first(rows) else "bold red"
        show(Text(words[0], style), "", *tables(rows, where, verbose=self.verbose), *words[1:])
        others = self.others(candidates, rows) if self.advise else []
        if others:
            changes = report.changes(others, rows, where)
            show("", *tables(others, where, verbose=self.verbose), *changes)
            words += changes
        result = report.as_json(rows, others, where, words)
        if json_file:
            write_file("--json", json_file, json.dumps(result, indent=2, allow_nan=False) + "\n")
        if html_file:
            curves = self.curves(candidates, rows)
            run = ", ".join([*(Path(file).stem for file in self.gin_files), *self.bindings])
            write_file("--html", html_file, html_report.page(rows, curves, where, words, run))
        return result, list(_exceeded(rows, budgets))

    def rows(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Row], list[tuple[Budget, Config] | None]]:
        """A row of each candidate, and its budget with the configuration that binds it."""
        rows, budgets = [], []
        for number, candidate in enumerate(candidates, 1):
            name = candidate.name or "the run"
            self.report(f"[{number}/{len(candidates)}] {name} on {self.where.name}")
            rows.append(self.under(candidate, functools.partial(self.compile, candidate.name)))
            # Where the candidate's own files are wrong, nothing is bound.
            config = self.config
            budgets.append((gin.get_configurable("plan")(), config) if config else None)
        if all((row.problem or "").startswith("refused") for row in rows):
            problems = dict.fromkeys(f"{row.strategy}: {row.problem}" for row in rows)
            raise UsageError("\nerror: ".join(problems))
        return rows, budgets

    def others(self, candidates: Sequence[Candidate], rows: Sequence[Row]) -> list[Row]:
        """Variants of the fastest: other options, and the largest batch that fits.

        If nothing fits: all whose state does, with more micro-batches.
        """
        by_name = {row.strategy: c for c, row in zip(candidates, rows, strict=True)}
        variants: list[Row | None] = []
        for best in fastest_first(rows)[:1]:
            for variant in plan_candidates.variants(by_name[best.strategy], best, self.where):
                if variant.name not in by_name:
                    self.report(f"[advice] {variant.name} on {self.where.name}")
                    compile_it = functools.partial(self.compile, variant.name)
                    variants.append(self.under(variant, compile_it))
            variants.append(self.search(by_name[best.strategy], best, estimate.largest_batch))
        if not fastest_first(rows):
            variants += [
                self.search(by_name[row.strategy], row, estimate.fewest_micro_batches)
                for row in rows
                if row.state_fits
            ]
        return [row for row in variants if row is not None and row not in rows]

    def curves(self, candidates: Sequence[Candidate], rows: Sequence[Row]) -> list[Curve]:
        """A curve by number of devices of each strategy that could be built.

        At most two more sizes a strategy are compiled, a quarter and four times the devices.
        """
        others, curves = [], []
        for name in extrapolation.neighbours(self.where):
            try:
                others.append(topologies.topology(name))
            except UsageError as error:  # no compiler, or more CPUs than are present
                put(f"[page] {name} is left out: {error}", file=sys.stderr)
        for candidate, row in zip(candidates, rows, strict=True):
            if row.mesh is None:
                continue
            compiled = [row]
            is_quick = (row.compile_seconds or 0) <= _LONG_COMPILATION
            if row.devices == len(self.where.devices) and is_quick:
                for other in others:
                    self.report(f"[page] {row.strategy} on {other.name}")
                    compile_it = functools.partial(estimate.compile_scaled, row, other)
                    scaled = self.under(candidate, compile_it, other)
                    compiled += [scaled] if scaled.mesh else []
            by_devices = {row.devices: row for row in compiled}
            meshes = extrapolation.scaled_meshes(compiled, sorted({*SIZES, *by_devices}))
            widest = by_devices[max(by_devices)]
            infer_states = functools.partial(extrapolation.mesh_states, row=widest, meshes=meshes)
            states = self.under(candidate, infer_states)
            states = {} if isinstance(states, Row) else states
            curves.append(extrapolation.curve(compiled, states, self.where))
        return curves

    def search(
        self, candidate: Candidate, row: Row, method: Callable[..., Row | None]
    ) -> Row | None:
        """The row of the batch that a method of searching finds for a row's strategy."""

        def compile_with(strategy: StrategyConfig, spec: TrainSpec) -> Row:
            self.report(
                f"[advice] {row.strategy}, batch {spec.batch_size}, accumulation_steps "
                f"{spec.accumulation_steps} on {self.where.name}"
            )
            name = f"{row.strategy}, batch {spec.batch_size}"
            if spec.accumulation_steps > 1:
                name += f" in {spec.accumulation_steps}"
            return self.compile(name, strategy, spec)

        return self.under(
            candidate,
            lambda strategy, spec: method(
                strategy, spec, row, functools.partial(compile_with, strategy)
            ),
        )

    def compile(self, name: str, strategy: StrategyConfig, spec: TrainSpec) -> Row:
        compiled = estimate.compile_row(
            name or strategy.name, strategy, spec, self.where, self.dump
        )
        if self.measure and compiled.row.fits:
            self.report(f"Measuring {compiled.row.strategy} on {self.where.name}")
            estimate.measure(compiled)
        return compiled.row

    def under(
        self,
        candidate: Candidate,
        function: Callable[[StrategyConfig, TrainSpec], T],
        where: topologies.Topology | None = None,
    ) -> T | Row:
        """The result of a function of a candidate's strategy and run, or the row of a refusal."""
        is_strict = self.strict.get(candidate.name, False)
        load_it = functools.partial(
            self.load, candidate.files, candidate.bindings, allow_unused=not is_strict
        )
        devices = (where or self.where).devices
        return built_under(self, load_it, candidate.name or "the run", devices, function)


def find_topology(name: str, cpu_devices: int | None, measure: bool) -> topologies.Topology:
    """The devices of `--topology`, for which JAX is set up."""
    simulated = re.fullmatch(r"cpu:(\d+)", name)
    if simulated or name == "here":
        count = int(simulated[1]) if simulated else 0
        jax_setup.set_up_devices(cpu_devices or count or None)
    elif cpu_devices:
        raise UsageError("--cpu_devices splits this machine's CPU: use it with --topology=here.")
    elif measure:
        raise UsageError("--measure needs devices that are present: --topology=here, or cpu:N.")
    return topologies.of(jax.devices()) if name == "here" else topologies.topology(name)


def built_under(
    command: Command,
    load_it: Callable[[], Config],
    name: str,
    devices: Sequence[Any],
    function: Callable[[StrategyConfig, TrainSpec], T],
) -> T | Row:
    """The result of a function of the strategy and run that a command loads, for some devices.

    It is the row of a refusal, by this name, if they cannot be built.
    """
    result: list[T] = []
    command.config = None
    try:
        load_it()
        with planning_for(devices):
            train(inspect=lambda strategy, spec: result.append(function(strategy, spec)))
        return result[0]
    except UsageError as error:
        place = command.config and error.binding and command.config.origin(error.binding)
        reason = message_of(error) + (f" Bound in {place}" if place else "")
    except _UNBUILDABLE as error:
        # JAX may refuse devices that suit other strategies, whose rows are not lost for that.
        if failures.is_of_users_code(error) or load.missing_binding(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
    finally:
        jax.clear_caches()
    return Row.refused(name, UsageError(reason))


def _exceeded(
    rows: Sequence[Row], budgets: Sequence[tuple[Budget, Config] | None]
) -> Iterator[str]:
    """Messages on rows above their budget, which those that are refused exceed too."""
    known = [budget for budget in budgets if budget]
    for row, own in zip(rows, budgets, strict=True):
        budget, config = own or known[0]  # if nothing can be built, the plan has ended
        for limit, message in budget.exceeded(row):
            yield f"{message} {limit} is bound in {config.origin(limit)}."
