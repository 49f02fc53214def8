"""Compares runs: folders that exist, or one run under several strategies, trained first."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.analysis.program_cost import link_rate
from research_dp.analysis.topologies import check_name
from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.certification import noise
from research_dp.certification.noise import Noise
from research_dp.commands import entries, failures, jax_setup, plan_candidates, sweep
from research_dp.commands.certify import bench_of
from research_dp.commands.configured import (
    Bindings,
    Files,
    Run,
    Varied,
    as_gin,
    check_outputs,
    session,
    write_output,
)
from research_dp.commands.entries import interruptible
from research_dp.commands.plan import find_topology
from research_dp.commands.train import Stopped
from research_dp.comparison import differences, runs
from research_dp.comparison.comparison import Comparison, LinkTimes
from research_dp.comparison.verdicts import Judge, Verdict
from research_dp.console import Progress, Report, put
from research_dp.errors import UsageError
from research_dp.planning import estimate
from research_dp.planning.row import Row
from research_dp.training import preemption, python_objects
from research_dp.training.train import configured

_MOST_RECORDS = 25  # of a run that is trained for a comparison
_MOST_BOUND = 200  # steps for which the bound is measured, if --bound does not say
_MOST_EVALUATIONS = 5  # for which it is
_DIGITS = [digit * 10.0**power for power in range(6, 12) for digit in (1, 2, 4)]
_LINK_RATES = [rate for rate in _DIGITS if rate <= 4e11]  # bits/s: 1 Mbit/s to 400 Gbit/s


@checked
def compare(
    runs: Sequence[str | os.PathLike[str]] = (),
    *,
    gin_files: Files = (),
    bindings: Bindings = (),
    strategies: str | Sequence[str] = (),
    steps: Count | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    workdir: str | os.PathLike[str] | None = None,
    topology: str | None = None,
    bound: CountOrZero | None = None,
    model: python_objects.Model | None = None,
    data: python_objects.Data | None = None,
    optimizer: python_objects.Optimizer | None = None,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
    html_file: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Compares runs side by side, as `python -m research_dp.compare`; see docs/compare.md.

    Examples: `compare(["runs/ddp", "runs/fsdp"])`, or, trained first, `compare(gin_files=
    "runs/digits.gin", strategies=["single", "fsdp"], steps=200, workdir="runs/compared")`.

    Args:
        runs: Folders of runs, finished or running; the first is the reference.
        gin_files: As in `run`: the run that is trained under each strategy, as far as missing.
        bindings: As in `run`.
        strategies: Shipped strategies, or files; 'fsdp+bf16_collectives' adds a file.
        steps: Number of training steps of these runs; None: the configuration's.
        vary: Parameter -> values; each strategy is trained with each of them.
        workdir: Where the runs are, a folder for each.
        topology: 'h100:8x8', 'v5e-64', 'cpu:8' or 'here', for which costs are predicted; None:
            'here' with `gin_files`, else none.
        bound: Steps for which what rounding explains is measured; 0: none; None: up to 200 with
            `gin_files`, else none.
        model: As in `run`.
        data: As in `run`.
        optimizer: As in `run`.
        imports: As in `run`.
        cpu_devices: As in `run`.
        allow_unused: As in `run`.
        html_file: Where the page is written.

    Returns:
        The comparison: `is_clean`, `verdicts`, `settings`, `runs`, `as_json()`. Printed, it is the
        text of the command; a notebook shows it as tables.

    Raises:
        UsageError: No folder is a run, or the configuration is wrong.
        Stopped: A signal ended a run, after saving.
    """
    names = (strategies if isinstance(strategies, str) else ",".join(strategies)).split(",")
    varied = [(name, ",".join(map(as_gin, values))) for name, values in (vary or {}).items()]
    if runs and (model or data or optimizer):
        raise UsageError("model, data and optimizer go with strategies, not with folders of runs.")
    objects = {"model": model, "data": data, "optimizer": optimizer}
    with session(gin_files, bindings, imports=imports, allow_unused=allow_unused, **objects) as run:
        comparing = _Comparing(
            run, runs, names, varied, steps, workdir, topology, bound, cpu_devices
        )
        comparing.check()
        check_outputs(html_file=html_file)
        comparing.train_missing()
        return comparing.result(html_file)


def command(
    *,
    vary: Varied = (),
    dry_run: bool = False,
    json_file: str | None = None,
    html_file: str | None = None,
    verbose: bool = False,
    **options: Any,
) -> int:
    """Trains what is missing, compares, prints and writes.

    Args:
        vary: Names of parameters with values, and files.
        dry_run: Check and show the runs that would be trained; train nothing.
        json_file: Write all that the page shows.
        html_file: Write a page that needs no network.
        verbose: Print all that differs, and where the time went.
        **options: Those of `compare`.

    Returns:
        The exit status: 1 if something differs that should not, or a run died.
    """
    of_session = ("gin_files", "bindings", "imports", "allow_unused")
    with session(**{name: options.pop(name) for name in of_session if name in options}) as run:
        names = options.pop("strategies", "").split(",")
        comparing = _Comparing(
            run, options.pop("runs", ()), names, vary, is_shared=False, **options
        )
        comparing.check(dry_run=dry_run)
        if dry_run:
            return sweep.show_all(run, comparing.members())
        check_outputs(html_file=html_file, json_file=json_file)
        try:
            comparing.train_missing()
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return preemption.STOPPED
        with interruptible():
            result = comparing.result(html_file)
    if json_file:
        write_output("json_file", json_file, result.as_json())
    put("", *result.parts(verbose=verbose))
    if html_file:
        put("", f"The page is {html_file}")
    return 0 if result.is_clean else failures.FAILED


@dataclasses.dataclass
class _Comparing:
    """What is to be compared: folders of runs, or a run under strategies, trained first."""

    run: Run
    folders: Sequence[str | os.PathLike[str]]
    strategies: Sequence[str]
    varied: Varied
    steps: int | None = None
    workdir: str | os.PathLike[str] | None = None
    topology: str | None = None
    bound: int | None = None
    cpu_devices: int | None = None
    is_shared: bool = True  # see `find_topology`

    def check(self, *, dry_run: bool = False) -> None:
        """Refuses options that do not go together."""
        names = [name for name in self.strategies if name.strip()]
        if self.topology:
            check_name(self.topology)
        problem = ""
        if self.folders:
            if any((self.run.gin_files, names, self.varied, self.steps, self.workdir)):
                problem = "give folders of runs, or --gin_file with --strategies, not both"
            elif dry_run:
                problem = "--dry_run is for runs that are to be trained: leave it out with folders"
            elif "" in self.folders:
                problem = "the name of a folder is empty"
        elif not names and not self.varied:
            problem = "nothing to compare: give folders of runs, or --gin_file and --strategies"
        elif self.steps and any(b.startswith("train.num_steps ") for b in self.run.bindings):
            problem = "--steps is train.num_steps: give one of them"
        else:
            has_files = bool(self.run.gin_files or self.run.bindings)
            has_workdir = bool(self.workdir or dry_run)
            problem = entries.lacks("compare", has_files=has_files, has_workdir=has_workdir)
        if problem:
            raise UsageError(problem)

    def members(self) -> list[sweep.Member]:
        """The runs to train; with --steps each records at most 25 times."""
        if self.steps:
            records = math.ceil(self.steps / _MOST_RECORDS)
            own = [f"train.num_steps = {self.steps}", f"train.log_every = {records}"]
            self.run.bindings = [*own, *self.run.bindings]
        # That of one device comes first, as the reference.
        candidates = plan_candidates.of(self.strategies)
        choices = [
            sweep.Choice("strategy", candidate.name or "run", candidate.files)
            for candidate in sorted(candidates, key=lambda c: c.name != "single")
        ]
        folder = Path(self.workdir or ".").expanduser()
        return sweep.members(folder, [choices, *sweep.dimensions(self.varied)])

    def train_missing(self) -> None:
        """Trains the runs that are missing, unless folders are given.

        Raises:
            UsageError: The configuration is wrong.
            Stopped: A signal ended a run, after saving.
        """
        if self.folders:
            return
        members = self.members()
        status = sweep.train_all(self.run, members, self.workdir or ".", self.cpu_devices)
        if status == preemption.STOPPED:
            raise Stopped(f"a signal stopped a run in {self.workdir}; the same call continues it.")
        if status == failures.MISTAKEN:
            raise UsageError("no run could be trained: the reasons are above.")
        self.folders = [member.folder for member in members]

    def result(self, html_file: str | os.PathLike[str] | None) -> Comparison:
        """Compares the folders, and writes the page.

        Raises:
            UsageError: No folder is a run, or a folder is given twice.
        """
        with Progress("Reading the runs") as report:
            result = self._compared(report)
            if html_file:
                from research_dp.comparison import html_report  # its libraries are an extra

                report("Writing the page")
                write_output("html_file", html_file, html_report.page(result))
        return result

    def _compared(self, report: Report) -> Comparison:
        is_trained = bool(self.workdir)
        found = runs.read([Path(folder).expanduser() for folder in self.folders])
        known = [run for run in found if run.is_run]
        if not known:
            raise UsageError("; ".join(f"{run.folder} is {run.status.message}" for run in found))
        varied = [name for name, _ in self.varied if name]
        differing = differences.differences(known, varied)
        report("Comparing the runs")
        verdicts = Judge(differing).verdicts(found, known[0])
        default = _MOST_BOUND if is_trained else 0
        steps = min(default if self.bound is None else self.bound, max(run.step for run in found))
        measured, remarks = [], []
        try:
            doubts = (v for v in verdicts if v.kind == "unknown")
            measured = self._noise({run.name: run for run in known}, doubts, steps, report)
        except UsageError as error:  # hours of training may be behind it
            remarks.append(f"The bound of rounding could not be measured: {error}")
        if measured:
            verdicts = Judge(differing, measured).verdicts(found, known[0])
        result = Comparison(found, known[0], differing, verdicts, noise=measured, remarks=remarks)
        name = self.topology or ("here" if is_trained else None)
        try:
            return self._with_plan(result, name, report) if name else result
        except UsageError as error:
            problem = f"Nothing could be planned for {name}: {error}"
            return dataclasses.replace(result, remarks=[*remarks, problem])

    def _noise(
        self, known: Mapping[str, runs.Run], doubts: Iterable[Verdict], steps: int, report: Report
    ) -> list[Noise]:
        """What rounding explains, for each precision of gradients on which a verdict depends.

        It is that of the configuration of the first run in doubt.
        """
        pairs = [(v.a, v.b) for v in doubts if {v.a, v.b} <= known.keys()]
        if not steps or not pairs:
            return []
        report("Measuring what rounding explains")
        rebuilt = Run(imports=self.run.imports)
        config = rebuilt.load(saved=known[pairs[0][1]].folder)
        jax_setup.set_up_devices(self.cpu_devices)
        bench, data = bench_of(config, "single", configured())
        precisions = {max(known[name].precision for name in pair) for pair in pairs}
        # Evaluations of five trajectories take long: the last counts most, and a few before it.
        columns = {name: {*known[name].column("eval", "step")} for pair in pairs for name in pair}
        both = set[float]().union(*(columns[a] & columns[b] for a, b in pairs))
        possible = sorted(int(step) for step in both if 0 < step <= steps)
        few = np.linspace(0, len(possible) - 1, min(len(possible), _MOST_EVALUATIONS)).astype(int)
        options: Any = {"steps": steps, "evaluated": [possible[i] for i in few], "report": report}
        return [
            noise.measure(dataclasses.replace(bench, precision=precision), data, **options)
            for precision in sorted(precisions)
        ]

    @jax_setup.without_compilation_cache()
    def _with_plan(self, result: Comparison, name: str, report: Report) -> Comparison:
        """The comparison with a plan of each run for some devices, and its times by link speed."""
        # Training on a split CPU does not keep steps from being planned for other devices.
        is_here = name == "here" or name.startswith("cpu:")
        cpu_devices = self.cpu_devices if is_here else None
        where = find_topology(name, cpu_devices, is_shared=self.is_shared)
        own = 8 * link_rate(where)
        rates = sorted({*_LINK_RATES, own})
        rows: dict[str, Row] = {}
        seconds: dict[str, list[float]] = {}
        for run in (run for run in result.runs if run.is_run):
            report(f"Compiling {run.name} for {where.name}")
            rebuilt = Run(imports=self.run.imports)
            load_it = functools.partial(rebuilt.load, saved=run.folder)
            compile_it = functools.partial(estimate.compile_row, run.name, where=where)
            made = plan_candidates.built_under(
                rebuilt, load_it, run.name, where.devices, compile_it
            )
            rows[run.name] = made if isinstance(made, Row) else made.row
            if not isinstance(made, Row) and made.cost is not None:
                seconds[run.name] = [made.cost.seconds_at(rate / 8) for rate in rates]
        return dataclasses.replace(
            result,
            topology=where.name,
            is_timed=where.chip.platform != "cpu",
            planned=rows,
            links=LinkTimes(rates, own, seconds),
        )
