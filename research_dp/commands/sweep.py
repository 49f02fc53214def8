"""Sweeps over the product of files and bindings, each combination a run in its own folder."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from research_dp import console
from research_dp.argument_types import Count
from research_dp.commands import cli, failures, streams, train
from research_dp.commands.configured import Run, Varied, session, usage_error
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


def command(
    *,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    workdir: str | None = None,
    vary: Varied = (),
    dry_run: bool = False,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
) -> int:
    """Checks all combinations, runs those that are not done, prints a table.

    Args:
        gin_files: As in `run`.
        bindings: As in `run`.
        workdir: Where the runs are, a folder for each.
        vary: Names of parameters with values, and files.
        dry_run: Check and show all runs; train nothing.
        imports: As in `run`.
        cpu_devices: As in `run`.
        allow_unused: As in `run`.

    Returns:
        The exit status: 1 when a run failed or was refused, 2 when all were refused.
    """
    with (
        contextlib.nullcontext() if dry_run else streams.dispensable(),
        session(gin_files, bindings, imports=imports, allow_unused=allow_unused) as run,
    ):
        folder = Path(workdir or ".").expanduser()
        runs = members(folder, dimensions(vary))
        return show_all(run, runs) if dry_run else train_all(run, runs, folder, cpu_devices)


def dimensions(vary: Varied) -> list[list[Choice]]:
    """The choices of each thing that is varied."""
    for name, text in vary:
        if not text:
            raise UsageError(f"{f'--vary.{name}' if name else '--vary_file'}: give values, V,W,...")
    return [
        binding_choices(name, text) if name else file_choices(number, text)
        for number, (name, text) in enumerate(vary)
    ]


def show_all(run: Run, runs: Sequence[Member]) -> int:
    """Checks the runs, and prints a table; returns the exit status."""
    if _all_refused(run, runs):
        return failures.MISTAKEN
    console.put("", table(runs))
    return failures.FAILED if any(member.status == "refused" for member in runs) else 0


def train_all(
    run: Run, runs: Sequence[Member], workdir: str | os.PathLike[str], cpu_devices: int | None
) -> int:
    """Checks the runs, trains what is missing, prints a table; returns the exit status."""
    if _all_refused(run, runs):
        return failures.MISTAKEN
    csv_file = Path(workdir).expanduser() / CSV
    _check_table(csv_file)
    with usage_error(f"{csv_file}: the sweep's table cannot be written there"):
        write(runs, csv_file)
    for number, member in enumerate(runs, 1):
        if member.status == "refused":
            continue
        print(f"\n== {number} of {len(runs)}: {member.label}, in {member.folder}", flush=True)
        _train(run, member, cpu_devices)
        try:
            write(runs, csv_file)
        except OSError as error:  # the other runs go on: a full disk may get room
            print(f"warning: {csv_file} is not written: {error.strerror}", file=sys.stderr)
        if member.status == "stopped":
            break
    console.put("", table(runs))
    print(f"The table is in {csv_file}", flush=True)
    states = {member.status for member in runs}
    if "stopped" in states:
        return preemption.STOPPED
    return 0 if states == {"done"} else failures.FAILED


def _all_refused(run: Run, runs: Sequence[Member]) -> bool:
    """Loads each configuration, and prints what is wrong with it; whether none is right."""
    for member in runs:
        try:
            with gin_internals.kept():
                run.load(member.files, member.bindings)
        except UsageError as error:
            member.status = "refused"
            for line in str(error).splitlines():
                print(f"error: {member.label}: {line}", file=sys.stderr)
    return all(member.status == "refused" for member in runs)


def _train(run: Run, member: Member, cpu_devices: int | None) -> None:
    try:
        member.summary = train.run(
            [*run.gin_files, *member.files],
            [*run.bindings, *member.bindings],
            member.folder,
            imports=run.imports,
            cpu_devices=cpu_devices,
            allow_unused=run.allow_unused,
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
        for value in cli.elements(text)
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


def write(runs: Sequence[Member], file: Path) -> None:
    """Writes the records as CSV. A sweep that is killed leaves those of its finished runs."""
    rows, text = records(runs), io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace(file, text.getvalue())


def _check_table(file: Path) -> None:
    """Raises UsageError if the file is something else than an earlier table of a sweep."""
    text = file.read_text("utf-8-sig", "replace") if file.is_file() else ""
    if text.strip() and not {"status", "folder"} <= {*text.strip().splitlines()[0].split(",")}:
        raise UsageError(f"{file} is no table of a sweep. Move it away.")


def _is_column(name: str) -> bool:
    return name in _COLUMNS or name.startswith("eval ")


def _for_path(text: str) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")
