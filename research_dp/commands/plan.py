"""Plans: the run of gin files under several strategies, compiled for some devices and compared."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gin
import jax
from rich.text import Text

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology
from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.commands import jax_setup, plan_candidates
from research_dp.commands.configured import (
    Bindings,
    Files,
    Run,
    check_outputs,
    session,
    usage_error,
    write_output,
)
from research_dp.commands.plan_candidates import Candidate
from research_dp.config.load import Config
from research_dp.console import Progress, Report, put
from research_dp.errors import UsageError, first_line, message_of
from research_dp.planning import estimate
from research_dp.planning import report as report_words
from research_dp.planning.limits import Budget
from research_dp.planning.row import Curves, Row, fastest_first
from research_dp.planning.tables import size_table, tables
from research_dp.strategies import StrategyConfig, TrainSpec
from research_dp.training import python_objects

T = TypeVar("T")


@checked
def plan(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    topology: str,
    strategies: str | Sequence[str] = (),
    sizes: Sequence[Count] = (),
    model: python_objects.Model | None = None,
    data: python_objects.Data | None = None,
    optimizer: python_objects.Optimizer | None = None,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
    advise: bool = False,
    measure: bool = False,
    html_file: str | os.PathLike[str] | None = None,
    dump_hlo: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """What strategies cost on devices that need not be present, as `python -m research_dp.plan`.

    Example: `plan("runs/digits.gin", topology="cpu:8", strategies=["ddp", "fsdp"])`.

    Args:
        gin_files: As in `run`.
        bindings: As in `run`.
        topology: 'h100:8x8', 'v5e-64', 'cpu:8', or 'here'.
        strategies: Shipped strategies, or files, to compare, or 'all'; none: the run's own.
            'fsdp+h100' adds a file.
        sizes: Numbers of devices to compile each strategy for besides the topology's own. Each
            device keeps its examples.
        model: As in `run`.
        data: As in `run`.
        optimizer: As in `run`.
        imports: As in `run`.
        cpu_devices: As in `run`; with topology 'here'.
        allow_unused: As in `run`.
        advise: Whether other options and batches of the fastest are compiled too.
        measure: Whether each step is run too, if the devices are present.
        html_file: Where a page with charts and tables is written.
        dump_hlo: Folder for each compiled program's text.

    Returns:
        What `--json` writes: 'strategies' has a dict for each strategy, with numbers in bytes,
        seconds and FLOPs. 'sizes' has those on each number of devices, if `sizes` are given, and
        'advice' has sentences. 'exceeded' has a message for each limit of the run's budget
        (`plan.max_...`) that a strategy exceeds.

    Raises:
        UsageError: The configuration is wrong, or no strategy can be built.
    """
    return _plan(locals())


def command(*, json_file: str | None = None, verbose: bool = False, **options: Any) -> int:
    """Plans, prints and writes; the exit status is 1 if a budget is exceeded.

    Args:
        json_file: Write the plan as JSON.
        verbose: Print all figures, and the collectives.
        **options: Those of `plan`.
    """
    result = _plan(options, put, json_file=json_file, verbose=verbose, is_shared=False)
    exceeded = result.pop("exceeded")
    if json_file:
        write_output("json_file", json_file, result)
    if file := options.get("html_file"):
        put("", f"The page is {file}")
    put(*(Text(f"error: {message}", "bold red") for message in exceeded), file=sys.stderr)
    return int(bool(exceeded))


def _plan(
    given: Mapping[str, Any],
    show: Callable[..., None] = lambda *parts: None,
    *,
    json_file: str | None = None,
    verbose: bool = False,
    is_shared: bool = True,
) -> dict[str, Any]:
    """`plan` of the parameters that are given; shows tables as soon as they are known.

    `json_file` is written by the caller, and only checked here, with the other files.
    """
    defaults = {name: x.default for name, x in inspect.signature(plan).parameters.items()}
    asked = types.SimpleNamespace(**{**defaults, **given})
    named = asked.strategies
    names = named if isinstance(named, str) else ",".join(named)
    of_session = ("imports", "allow_unused", *python_objects.REFERENCES)
    common = {name: getattr(asked, name) for name in of_session if hasattr(asked, name)}
    with (
        session(asked.gin_files, asked.bindings, **common) as run,
        Progress("Reading the configuration") as report,
        jax_setup.without_compilation_cache(),
    ):
        check_outputs(json_file=json_file, html_file=asked.html_file)
        candidates = plan_candidates.of(names.split(","))
        strict = plan_candidates.check(run, candidates)
        where = find_topology(
            asked.topology, asked.cpu_devices, measure=asked.measure, is_shared=is_shared
        )
        sizes = sizes_of(where, asked.sizes)
        dump = None if asked.dump_hlo is None else Path(asked.dump_hlo).expanduser()
        if dump:
            with usage_error(f"--dump_hlo={asked.dump_hlo} cannot be made"):
                dump.mkdir(parents=True, exist_ok=True)
        planner = _Planner(run, where, strict, report, dump, asked.measure)
        rows, budgets = planner.rows(candidates)
        words = report_words.words(rows, where)
        style = "bold green" if fastest_first(rows) else "bold red"
        report("")
        show(Text(words[0], style), "", *tables(rows, where, verbose=verbose), *words[1:])
        others = planner.others(candidates, rows) if asked.advise else []
        if others:
            changes = report_words.changes(others, rows, where)
            report("")
            show("", *tables(others, where, verbose=verbose), *changes)
            words += changes
        curves = planner.curves(candidates, rows, sizes)
        report("")
        if sizes:
            show("", size_table(curves, where))
        result = report_words.as_json(rows, others, curves if sizes else {}, where, words)
        if asked.html_file:
            from research_dp.planning import html_report  # its libraries are an extra

            report(f"Drawing {os.fspath(asked.html_file)}", at_once=False)
            name = ", ".join([*(Path(file).stem for file in run.gin_files), *run.bindings])
            page = html_report.page(rows, curves, where, words, name)
            write_output("html_file", asked.html_file, page)
        return {**result, "exceeded": list(_exceeded(rows, budgets))}


@dataclasses.dataclass
class _Planner:
    """Plans one candidate after the other, each under its own configuration."""

    run: Run
    where: Topology
    strict: Mapping[str, bool]
    report: Report
    dump: Path | None
    measure: bool

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
            config = self.run.config
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

    def curves(
        self, candidates: Sequence[Candidate], rows: Sequence[Row], sizes: Sequence[Topology]
    ) -> Curves:
        """Each strategy's rows by number of devices, compiled on those of other sizes, too."""
        curves, planned = {}, len(self.where.devices)
        for candidate, row in zip(candidates, rows, strict=True):
            curve = {row.devices if row.mesh else planned: row}
            for other in sizes if planned in curve else ():  # else it is of one device
                self.report(f"[sizes] {row.strategy} on {other.name}")
                compile_it = functools.partial(
                    estimate.compile_resized, row.strategy, self.where, other
                )
                scaled = self.under(candidate, compile_it, other)
                if scaled.mesh is None or scaled.devices == len(other.devices):
                    curve[len(other.devices)] = scaled
            curves[row.strategy] = dict(sorted(curve.items()))
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
        where: Topology | None = None,
    ) -> T | Row:
        """The result of a function of a candidate's strategy and run, or the row of a refusal."""
        is_strict = self.strict.get(candidate.name, False)
        load_it = functools.partial(
            self.run.load, candidate.files, candidate.bindings, allow_unused=not is_strict
        )
        devices = (where or self.where).devices
        return plan_candidates.built_under(
            self.run, load_it, candidate.name or "the run", devices, function
        )


def find_topology(
    name: str, cpu_devices: int | None, *, measure: bool = False, is_shared: bool
) -> Topology:
    """The devices of `--topology`, for which JAX is set up.

    For absent ones, a command leaves accelerators to the runs that may be using them. A script or
    notebook may train afterwards (`is_shared`): there this machine's devices are started first.
    """
    topologies.check_name(name)
    simulated = re.fullmatch(r"cpu:(\d+)", name)
    if simulated or name == "here":
        count = int(simulated[1]) if simulated else 0
        jax_setup.set_up_devices(cpu_devices or count or None)
    elif cpu_devices:
        raise UsageError("--cpu_devices splits this machine's CPU: use it with --topology=here.")
    elif measure:
        raise UsageError("--measure needs devices that are present: --topology=here, or cpu:N.")
    elif is_shared:
        jax_setup.set_up_devices(None)
        try:
            jax.devices()  # before variables are set that compilers for absent devices need
        except RuntimeError as error:
            problem = f"this machine's devices cannot be started: {first_line(error)}"
            raise UsageError(f"{problem} JAX_PLATFORMS=cpu leaves them alone.") from error
    elif not os.environ.get("JAX_PLATFORMS"):  # JAX itself names the TPU of a TPU's machine
        jax.config.update("jax_platforms", "cpu")
    return topologies.of(jax.devices()) if name == "here" else topologies.topology(name)


def sizes_of(where: Topology, sizes: Sequence[int]) -> list[Topology]:
    """The devices of `--sizes`, the fewest first, without the topology's own number."""
    others = []
    for count in sorted({*sizes} - {len(where.devices)}):
        try:
            others.append(estimate.resized(where, count))
        except UsageError as error:
            raise UsageError(f"--sizes={count}: {message_of(error)}") from error
    return others


def _exceeded(
    rows: Sequence[Row], budgets: Sequence[tuple[Budget, Config] | None]
) -> Iterator[str]:
    """Messages on rows above their budget, which those that are refused exceed too."""
    known = [budget for budget in budgets if budget]
    for row, own in zip(rows, budgets, strict=True):
        budget, config = own or known[0]  # if nothing can be built, the plan has ended
        for limit, message in budget.exceeded(row):
            yield f"{message} {limit} is bound in {config.origin(limit)}."
