"""Plans: the run of gin files under several strategies, compiled for some devices and compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import gin
import jax

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology
from research_dp.commands import exit_status, plan_candidates, runtime
from research_dp.commands.flags import Options, PlanOptions, check_writable
from research_dp.commands.plan_candidates import Candidate
from research_dp.config import load
from research_dp.config.load import Config
from research_dp.console import put
from research_dp.distributed.mesh import planning_for
from research_dp.errors import UsageError, first_line, message_of
from research_dp.planning import advice, batch, extrapolation, html_report, tables
from research_dp.planning.estimate import compile_row, compile_scaled, measure
from research_dp.planning.extrapolation import SIZES, Curve
from research_dp.planning.row import Row, fastest_first
from research_dp.strategies import StrategyConfig, TrainSpec

DONE, EXCEEDED = 0, 1
# A strategy that takes longer to compile is compiled for the given devices alone.
_LONG_COMPILATION = 60.0  # seconds
# What building and tracing a strategy may raise beside mistakes.
_UNBUILDABLE = (jax.errors.JaxRuntimeError, NotImplementedError, TypeError, ValueError)

T = TypeVar("T")


def plan(options: Options, plan_options: PlanOptions) -> int:
    """Plans, prints and writes; returns the exit status. UsageError if nothing can be built."""
    files = (plan_options.json_file, plan_options.html_file)
    json_file, html_file = (file and str(Path(file).expanduser()) for file in files)
    check_writable("--json", json_file)
    if html_file:
        html_report.check_matplotlib()
    check_writable("--html", html_file)
    candidates = plan_candidates.of(plan_options.strategies)
    strict = plan_candidates.check(options, candidates)
    where = topology_of(options, plan_options)
    dump = _dump_folder(plan_options.dump_hlo)
    planner = _Planner(options, where, dump, plan_options.measure, strict)
    rows = []
    for number, candidate in enumerate(candidates, 1):
        _report(f"[{number}/{len(candidates)}] {candidate.name or 'the run'} on {where.name}")
        rows.append(planner.row(candidate))
    if all((row.problem or "").startswith("refused") for row in rows):
        problems = dict.fromkeys(f"{row.strategy}: {row.problem}" for row in rows)
        raise UsageError("\nerror: ".join(problems))
    words = advice.words(rows, where)
    put(*tables.tables(rows, where), "", *words)
    others = planner.others(candidates, rows) if plan_options.advise else []
    if others:
        changes = advice.changes(others, fastest_first(rows))
        put("", *tables.tables(others, where), "", *changes)
        words += changes
    if json_file:
        result = tables.as_json(rows, others, where, words)
        _write("--json", json_file, json.dumps(result, indent=2, allow_nan=False) + "\n")
    if html_file:
        curves = planner.curves(candidates, rows)
        run = ", ".join([*(Path(file).stem for file in options.gin_files), *options.bindings])
        _write("--html", html_file, html_report.page(rows, curves, where, words, run))
    for message in planner.exceeded:
        print(f"error: {message}", file=sys.stderr)
    return EXCEEDED if planner.exceeded else DONE


def topology_of(options: Options, plan_options: PlanOptions) -> Topology:
    """The devices, for which JAX is set up."""
    name = plan_options.topology
    simulated = re.fullmatch(r"cpu:(\d+)", name)
    is_local = bool(simulated) or name == "here"
    if is_local:
        count = int(simulated[1]) if simulated else 0
        runtime.set_up_devices(options.cpu_devices or count or None)
    elif options.cpu_devices:
        raise UsageError("--cpu_devices splits this machine's CPU: use it with --topology=here.")
    if plan_options.measure and not is_local:
        raise UsageError("--measure needs devices that are present: --topology=here, or cpu:N.")
    return topologies.present() if name == "here" else topologies.topology(name)


@dataclasses.dataclass
class _Planner:
    """Plans one candidate after the other, each under its own configuration."""

    options: Options
    where: Topology
    dump: Path | None  # a folder for the compiled programs' text
    measures: bool  # steps are also run
    strict: dict[str, bool]  # by candidate, whether all its bindings take effect
    exceeded: list[str] = dataclasses.field(default_factory=list)  # messages on the budget
    config: Config | None = None  # the configuration that is bound

    def row(self, candidate: Candidate) -> Row:
        """A candidate's row, checked against the budget."""

        def checked_row(strategy: StrategyConfig, spec: TrainSpec) -> Row:
            assert self.config is not None
            row = self.compile(candidate.name or strategy.name, strategy, spec)
            for name, message in gin.get_configurable("plan")().exceeded(row):
                self.exceeded.append(f"{message} {name} is bound in {self.config.origin(name)}.")
            return row

        return self.under(candidate, checked_row)

    def others(self, candidates: Sequence[Candidate], rows: Sequence[Row]) -> list[Row]:
        """Variants of the fastest: other options, and the largest batch that fits.

        If nothing fits: all whose state does, with more micro-batches.
        """
        by_name = {row.strategy: c for c, row in zip(candidates, rows, strict=True)}
        variants: list[Row | None] = []
        for best in fastest_first(rows)[:1]:
            for variant in plan_candidates.variants(by_name[best.strategy], best, self.where):
                if variant.name not in by_name:
                    _report(f"[advice] {variant.name} on {self.where.name}")
                    make_row = functools.partial(self.compile, variant.name)
                    variants.append(self.under(variant, make_row))
            variants.append(self.search(by_name[best.strategy], best, batch.largest_batch))
        if not fastest_first(rows):
            unfitting = [row for row in rows if row.memory and row.memory.state_fits]
            search = functools.partial(self.search, method=batch.fewest_micro_batches)
            variants += [search(by_name[row.strategy], row) for row in unfitting]
        return [row for row in variants if row is not None and row not in rows]

    def curves(self, candidates: Sequence[Candidate], rows: Sequence[Row]) -> list[Curve]:
        """A curve by number of devices of each strategy that could be built.

        At most two more sizes a strategy are compiled, a quarter and four times the devices.
        """
        others = _neighbours(self.where)
        curves = []
        for candidate, row in zip(candidates, rows, strict=True):
            if row.setup is None:
                continue
            compiled = [row]
            is_quick = (row.compile_seconds or 0) <= _LONG_COMPILATION
            if row.setup.devices == len(self.where.devices) and is_quick:
                for other in others:
                    _report(f"[page] {row.strategy} on {other.name}")
                    make_row = functools.partial(compile_scaled, row, other)
                    scaled = self.under(candidate, make_row, other)
                    compiled += [scaled] if scaled.setup else []
            curves.append(self.curve(candidate, compiled))
        return curves

    def curve(self, candidate: Candidate, rows: Sequence[Row]) -> Curve:
        """The curve of a candidate through its rows."""
        by_devices = {row.setup.devices: row for row in rows if row.setup}
        meshes = extrapolation.scaled_meshes(rows, sorted({*SIZES, *by_devices}))
        widest = by_devices[max(by_devices)]
        infer_states = functools.partial(extrapolation.mesh_states, row=widest, meshes=meshes)
        states = self.under(candidate, infer_states)
        return extrapolation.curve(rows, {} if isinstance(states, Row) else states, self.where)

    def search(
        self, candidate: Candidate, row: Row, method: Callable[..., Row | None]
    ) -> Row | None:
        """The row of the batch that a method of searching finds for a row's strategy."""

        def compile_with(strategy: StrategyConfig, spec: TrainSpec) -> Row:
            _report(
                f"[advice] {row.strategy}, batch {spec.batch_size}, accumulation_steps "
                f"{spec.accumulation_steps} on {self.where.name}"
            )
            name = f"{row.strategy}, batch {spec.batch_size}"
            if spec.accumulation_steps > 1:
                name += f" in {spec.accumulation_steps}"
            return self.compile(name, strategy, spec)

        def make_row(strategy: StrategyConfig, spec: TrainSpec) -> Row | None:
            return method(strategy, spec, row, functools.partial(compile_with, strategy))

        return self.under(candidate, make_row)

    def compile(self, name: str, strategy: StrategyConfig, spec: TrainSpec) -> Row:
        compiled = compile_row(name, strategy, spec, self.where, self.dump)
        if self.measures and compiled.row.fits:
            measure(compiled)
        return compiled.row

    def under(
        self,
        candidate: Candidate,
        function: Callable[[StrategyConfig, TrainSpec], T],
        where: Topology | None = None,
    ) -> T | Row:
        """The result of a function of a candidate's strategy and run, or the row of a refusal."""
        from research_dp.training.loop import train

        result: list[T] = []
        self.config = None
        try:
            strict = self.strict.get(candidate.name, False)
            self.config = plan_candidates.load(self.options, candidate, allow_unused=not strict)
            with planning_for((where or self.where).devices):
                train(inspect=lambda strategy, spec: result.append(function(strategy, spec)))
            return result[0]
        except UsageError as error:
            place = self.config and error.binding and self.config.origin(error.binding)
            reason = message_of(error) + (f" Bound in {place}" if place else "")
        except _UNBUILDABLE as error:
            # JAX may refuse devices that suit other strategies, whose rows are not lost for that.
            if exit_status.is_of_users_code(error) or load.missing_binding(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        finally:
            jax.clear_caches()
        return Row.refused(candidate.name or "the run", UsageError(reason))


def _neighbours(where: Topology) -> list[Topology]:
    """The other sizes that there is a compiler for; CPUs: no more than are present."""
    others = []
    for name in extrapolation.neighbours(where):
        try:
            others.append(topologies.topology(name))
        except UsageError as error:
            _report(f"[page] {name} is left out: {error}")
    return others


def _dump_folder(path: str | None) -> Path | None:
    if path is None:
        return None
    folder = Path(path).expanduser()
    with _usage_error(f"--dump_hlo={path} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(flag: str, path: str, text: str) -> None:
    with _usage_error(f"{flag}={path} cannot be written"):
        Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _usage_error(message: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{message}: {error.strerror}.") from error


def _report(line: str) -> None:
    """Reports progress on stderr: results are on stdout."""
    print(line, file=sys.stderr, flush=True)
