"""Compares runs: folders that exist, or one run under several strategies, trained first."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from research_dp import html_page
from research_dp.analysis.topologies import check_name
from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.commands import failures, plan_candidates, python_calls, rebuild
from research_dp.commands.entries import interruptible
from research_dp.commands.flags import check_writable, flag, switch, whole_number, write_file
from research_dp.commands.plan import find_topology
from research_dp.commands.python_calls import Bindings, Files
from research_dp.commands.sweep import Choice, Member, Sweep
from research_dp.commands.train import Stopped
from research_dp.comparison import differences, html_report, runs
from research_dp.comparison.comparison import Comparison
from research_dp.comparison.verdicts import Judge
from research_dp.console import Progress, Report, put
from research_dp.errors import UsageError
from research_dp.training import preemption

_MOST_RECORDS = 25  # of a run that is trained for a comparison
_MOST_BOUND = 200  # steps for which the bound is measured, if --bound does not say


@dataclasses.dataclass
class Compare(Sweep):
    """The command `compare`."""

    folders: Sequence[str] = flag(
        "folders of runs, finished or running; the first is the reference",
        "RUN",
        "folders",
        default=list,
        nargs="*",
    )
    strategies: str = flag(
        "train the run of the gin files under each of these first, as far as it is missing",
        "A,B,...|all",
        default="",
    )
    steps: int | None = flag("train.num_steps of these runs", "N", type=whole_number)
    topology: str | None = flag(
        "predict memory, bytes and times for h100:8x8, v5e-64, cpu:8, ...; or: here", "T"
    )
    bound: int | None = flag(
        "steps for which what rounding explains is measured; 0: none",
        "N",
        type=functools.partial(whole_number, least=0),
    )
    html_file: str | None = flag("write a page that needs no network", "FILE", "--html")
    json_file: str | None = flag("write all that the page shows", "FILE", "--json")
    verbose: bool = switch("print all that differs, and where the time went")
    verb: ClassVar[str] = "compare"

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        if self.topology:
            check_name(self.topology)
        if self.folders:
            trains = (self.gin_files, self.strategies, self.varied, self.steps, self.workdir)
            if any(trains):
                refuse("give folders of runs, or --gin_file with --strategies, not both")
            if self.dry_run:
                refuse("--dry_run is for runs that are to be trained: leave it out with folders")
            if "" in self.folders:
                refuse("the name of a folder is empty")
            return
        if not self.strategies and not self.varied:
            refuse("nothing to compare: give folders of runs, or --gin_file and --strategies")
        if self.steps and any(b.startswith("train.num_steps ") for b in self.bindings):
            refuse("--steps is train.num_steps: give one of them")
        super().check(refuse)

    def run(self) -> int:
        """Trains what is missing, compares, prints and writes; returns the exit status.

        It is 1 if something differs that should not, or a run died.
        """
        if self.dry_run:
            return self.run_all(self._members())
        try:
            self.train_missing()
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return preemption.STOPPED
        with interruptible():
            result = self.compared()
        put("", *result.parts(verbose=self.verbose))
        if self.html_file:
            put("", f"The page is {self.html_file}")
        return 0 if result.is_clean else failures.FAILED

    def compared(self) -> Comparison:
        """Compares the folders, and writes the files that are asked for.

        Raises:
            UsageError: No folder is a run, or a folder is given twice.
        """
        with Progress("Reading the runs") as report:
            result = self._compared(report)
            if self.html_file:
                report("Writing the page")
                write_file("--html", self.html_file, html_report.page(result))
        if self.json_file:
            text = json.dumps(result.as_json(), indent=1, allow_nan=False)
            write_file("--json", self.json_file, text + "\n")
        return result

    def train_missing(self) -> None:
        """Checks the files that are to be written, and trains the runs that are missing.

        Raises:
            UsageError: The configuration is wrong.
            Stopped: A signal ended a run, after saving.
        """
        if self.html_file:
            html_page.check_installed("a comparison's page")
        named = {"--html": self.html_file, "--json": self.json_file}
        paths = {name: Path(file).expanduser() for name, file in named.items() if file}
        if len({path.resolve() for path in paths.values()}) < len(paths):
            raise UsageError("--html and --json are the same file: give two names.")
        for name, path in paths.items():
            check_writable(name, str(path))
        if not self.folders:
            self._train()

    def _members(self) -> list[Member]:
        """The runs to train; with --steps each records at most 25 times."""
        if self.steps:
            records = math.ceil(self.steps / _MOST_RECORDS)
            own = [f"train.num_steps = {self.steps}", f"train.log_every = {records}"]
            self.bindings = [*own, *self.bindings]
        return self.members([self._strategies(), *self.dimensions()])

    def _train(self) -> None:
        members = self._members()
        status = self.run_all(members)
        if status == preemption.STOPPED:
            raise Stopped(f"a signal stopped a run in {self.workdir}; the same call continues it.")
        if status == failures.MISTAKEN:
            raise UsageError("no run could be trained: the reasons are above.")
        self.folders = [str(member.folder) for member in members]

    def _strategies(self) -> list[Choice]:
        """A choice for each strategy; that of one device comes first, as the reference."""
        names = [name for name in self.strategies.split(",") if name.strip()]
        return [
            Choice("strategy", candidate.name or "run", candidate.files)
            for candidate in sorted(plan_candidates.of(names), key=lambda c: c.name != "single")
        ]

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
        options: dict[str, Any] = {"imports": self.imports, "report": report}
        noise, remarks = [], []
        try:
            doubts = (v for v in verdicts if v.kind == "unknown")
            noise = rebuild.measure_noise(found, doubts, steps, self.cpu_devices, **options)
        except UsageError as error:  # hours of training may be behind it
            remarks.append(f"The bound of rounding could not be measured: {error}")
        if noise:
            verdicts = Judge(differing, noise).verdicts(found, known[0])
        result = Comparison(found, known[0], differing, verdicts, noise=noise, remarks=remarks)
        name = self.topology or ("here" if is_trained else None)
        try:
            return self._with_plan(result, name, options) if name else result
        except UsageError as error:
            problem = f"Nothing could be planned for {name}: {error}"
            return dataclasses.replace(result, remarks=[*remarks, problem])

    def _with_plan(self, result: Comparison, name: str, options: Mapping[str, Any]) -> Comparison:
        # Training on a split CPU does not keep steps from being planned for other devices.
        is_here = name == "here" or name.startswith("cpu:")
        where = find_topology(name, self.cpu_devices if is_here else None, measure=False)
        return rebuild.with_plan(result, where, **options)


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
    names = [strategies] if isinstance(strategies, str) else strategies
    command = python_calls.command_of(
        Compare,
        gin_files,
        bindings,
        imports=imports,
        cpu_devices=cpu_devices,
        allow_unused=allow_unused,
        folders=[os.fspath(folder) for folder in runs],
        strategies=",".join(names),
        varied=[
            (name, ",".join(map(python_calls.as_gin, values)))
            for name, values in (vary or {}).items()
        ],
        steps=steps,
        workdir=workdir and os.fspath(workdir),
        topology=topology,
        bound=bound,
        html_file=html_file and os.fspath(html_file),
    )
    with python_calls.session(command):
        command.check(_refuse)
        command.train_missing()
        return command.compared()


def _refuse(message: str) -> NoReturn:
    raise UsageError(message)
