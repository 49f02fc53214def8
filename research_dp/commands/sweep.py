"""Sweeps over the product of files and bindings, each combination a run in its own folder."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax

from research_dp import console
from research_dp.commands import failures, flags, streams, train
from research_dp.config import gin_internals
from research_dp.errors import UsageError
from research_dp.runs import files
from research_dp.training import preemption

CSV = "sweep.csv"
_COLUMNS = ("status", "step", "steps/s", "fingerprint", "folder")  # besides what is varied


class Choice(NamedTuple):
    """One value of something that is varied."""

    of: str  # what is varied: the head of its column
    label: str  # in the table and in the folder's name
    files: tuple[str, ...] = ()
    binding: str = ""


@dataclasses.dataclass
class Member:
    """One run of a sweep."""

    choices: tuple[Choice, ...]  # one of each dimension
    folder: Path
    status: str = "missing"  # or 'done', 'failed', 'refused', 'stopped'
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.label = " ".join(choice.label for choice in self.choices) or "the only run"
        self.files = [file for choice in self.choices for file in choice.files]
        self.bindings = [choice.binding for choice in self.choices if choice.binding]


@dataclasses.dataclass
class Sweep(flags.RunCommand):
    """The command `sweep`; `varied` has (name of a parameter, or '' for files; values)."""

    dry_run: bool = flags.switch("check and show all runs; train nothing")
    _vary_file: Sequence[str] = flags.texts(
        "files of which each run adds one; nothing before or after a comma: none; repeatable",
        *("F,G,...", "--vary_file"),
        dest="varied",
        type=lambda names: ("", names),
    )
    varied: Sequence[tuple[str, str]] = flags.texts(
        "values of a parameter: --vary.train.seed=0,1,2",
        *("V,W,...", "--vary.NAME"),
        type=lambda text: tuple(text.split(" = ", 1)),
    )
    rewritten: ClassVar[str] = r"--(gin\.|vary\.|vary_file$)"

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        for name, text in self.varied:
            if not text:
                refuse(f"{f'--vary.{name}' if name else '--vary_file'}: give values, V,W,...")
        super().check(refuse)

    def run(self) -> int:
        """Checks all combinations, runs those that are not done, prints a table.

        The exit status is 1 when one failed or was refused, 2 when all were refused.
        """
        with contextlib.nullcontext() if self.dry_run else streams.dispensable():
            return self.run_all(self.members(self.dimensions()))

    def dimensions(self) -> list[list[Choice]]:
        """The choices of each thing that is varied."""
        return [
            binding_choices(name, text) if name else file_choices(number, text)
            for number, (name, text) in enumerate(self.varied)
        ]

    def members(self, dimensions: Sequence[Sequence[Choice]]) -> list[Member]:
        """The runs of all combinations, in the workdir."""
        return members(Path(self.workdir or ".").expanduser(), dimensions)

    def run_all(self, runs: Sequence[Member]) -> int:
        """Checks, then trains what is missing, and prints a table; returns the exit status."""
        for member in runs:
            try:
                with gin_internals.kept():
                    self.load(member.files, member.bindings)
            except UsageError as error:
                member.status = "refused"
                for line in str(error).splitlines():
                    print(f"error: {member.label}: {line}", file=sys.stderr)
        if all(member.status == "refused" for member in runs):
            return failures.MISTAKEN
        csv_file = Path(self.workdir or ".").expanduser() / CSV
        earlier = [] if self.dry_run else _begin(runs, csv_file)
        for number, member in enumerate(runs, 1):
            if self.dry_run or member.status == "refused":
                continue
            print(f"\n== {number} of {len(runs)}: {member.label}, in {member.folder}", flush=True)
            self._run(member)
            try:
                write(runs, csv_file, earlier)
            except OSError as error:  # the other runs go on: a full disk may get room
                print(f"warning: {csv_file} is not written: {error.strerror}", file=sys.stderr)
            if member.status == "stopped":
                break
        console.put("", table(runs))
        if not self.dry_run:
            print(f"The table is in {csv_file}", flush=True)
        states = {member.status for member in runs}
        if "stopped" in states:
            return preemption.STOPPED
        is_done = states == {"missing" if self.dry_run else "done"}
        return 0 if is_done else failures.FAILED

    def _run(self, member: Member) -> None:
        try:
            member.summary = train.run(
                [*self.gin_files, *member.files],
                [*self.bindings, *member.bindings],
                member.folder,
                imports=self.imports,
                cpu_devices=self.cpu_devices,
                allow_unused=self.allow_unused,
            )
            member.status = "done"
        except train.Stopped as error:
            member.status = "stopped"
            print(error, file=sys.stderr)
            return
        except UsageError as error:
            member.status = "refused"
            print(f"error: {member.label}: {error}", file=sys.stderr)
        except Exception as error:  # the other runs go on
            member.status = "failed"
            print(failures.traceback_of(error), file=sys.stderr)
        jax.clear_caches()  # the next run has its own programs


def file_choices(number: int, text: str) -> list[Choice]:
    """The choices of one `--vary_file=F,G,...`; an empty name means no file."""
    names = [name.strip() for name in text.split(",")]
    stems = [Path(name).stem or "none" for name in names]
    labels = stems if len(set(stems)) == len(stems) else map(_for_path, names)
    folder = Path(next(filter(None, names), "")).parent.name or f"file {number + 1}"
    return [
        Choice(folder, label or "none", (name,) if name else ())
        for name, label in zip(names, labels, strict=True)
    ]


def binding_choices(name: str, text: str) -> list[Choice]:
    """The choices of one `--vary.NAME=V,W,...`, or `--vary.NAME=[V, W]` of any literals."""
    short = name.rpartition(".")[2]
    return [
        Choice(name, f"{short}={_for_path(value)}", binding=f"{name} = {value}")
        for value in flags.elements(text)
    ]


def members(workdir: Path, dimensions: Sequence[Sequence[Choice]]) -> list[Member]:
    """All combinations; UsageError if two of them would have the same folder.

    Two dimensions of one name are numbered. One that is called as another column is prefixed.
    """
    dimensions = [
        [c._replace(of=f"varied {c.of}") if _is_column(c.of) else c for c in choices]
        for choices in dimensions
    ]
    heads = [choices[0].of for choices in dimensions]
    dimensions = [
        [c._replace(of=f"{c.of} {i + 1}") if heads.count(c.of) > 1 else c for c in choices]
        for i, choices in enumerate(dimensions)
    ]
    runs = [
        Member(choices, workdir / ("-".join(choice.label for choice in choices) or "run"))
        for choices in itertools.product(*dimensions)
    ]
    folders = [member.folder for member in runs]
    twice = [folder for folder in folders if folders.count(folder) > 1]
    if twice:
        raise UsageError(f"two runs of the sweep would be in {twice[0]}; vary each value once.")
    return runs


def table(runs: Sequence[Member]) -> console.Table:
    """One row for each run: its choices, and how it ended."""
    rows, left = records(runs), (*(choice.of for choice in runs[0].choices), "status")
    heads = [name if name in left else f"{name}:" for name in rows[0] if name != "folder"]
    shown = console.table("Sweep", *heads)
    for row in rows:
        short = {**row, "fingerprint": row["fingerprint"][:12]}
        cells = (short[head.rstrip(":")] for head in heads)
        shown.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells))
    return shown


def records(runs: Sequence[Member]) -> list[dict[str, Any]]:
    """A record for each run, by name of the column; '' for what is not known."""
    metrics = sorted({name for member in runs for name in member.summary.get("eval", {})})
    return [
        {
            **{choice.of: choice.label.rpartition("=")[2] for choice in member.choices},
            "status": member.status,
            "step": member.summary.get("step", ""),
            **{f"eval {name}": member.summary.get("eval", {}).get(name, "") for name in metrics},
            "steps/s": member.summary.get("steps_per_second", ""),
            "fingerprint": member.summary.get("params_fingerprint", ""),
            "folder": str(member.folder),
        }
        for member in runs
    ]


def write(runs: Sequence[Member], file: Path, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes the records as CSV, after those of earlier sweeps.

    A sweep that is killed leaves the records of its finished runs.
    """
    rows, text = [*earlier, *records(runs)], io.StringIO()
    columns = dict.fromkeys(name for row in reversed(rows) for name in row)
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace(file, text.getvalue())


def _begin(runs: Sequence[Member], file: Path) -> list[dict[str, str]]:
    """Writes the table before the first run; returns its rows of other folders than these runs'.

    Raises:
      UsageError: the file is no table of a sweep, or cannot be written.
    """
    folders = {member.folder.name for member in runs}
    try:
        table = csv.DictReader(io.StringIO(file.read_text() if file.is_file() else ""))
        rows = list(table)
        if rows and not {"status", "folder"} <= rows[0].keys():
            raise UsageError(f"{file} is no table of a sweep. Move it away.")
        earlier = [
            {name: row[name] or "" for name in table.fieldnames or ()}
            for row in rows
            if Path(row["folder"] or "").name not in folders
        ]
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{file} is no table of a sweep ({error}). Move it away.") from error
    with flags.usage_error(f"{file}: the sweep's table cannot be written there"):
        write(runs, file, earlier)
    return earlier


def _is_column(name: str) -> bool:
    return name in _COLUMNS or name.startswith("eval ")


def _for_path(text: str) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")
