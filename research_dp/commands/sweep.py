"""Sweeps over the product of files and bindings, each combination a run in its own folder."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from research_dp import console
from research_dp.commands import exit_status, flag_values, flags, run
from research_dp.config import gin_internals
from research_dp.errors import UsageError

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 143


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value of something that is varied.

    Attributes:
        of: What is varied, the head of its column.
        label: This value's name, in the table and in the folder's name.
        files: Files that it adds.
        bindings: Bindings that it adds.
    """

    of: str
    label: str
    files: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()


@dataclasses.dataclass
class Member:
    """One run of a sweep.

    Attributes:
        choices: One of each dimension.
        folder: Its workdir.
        status: 'missing', 'done', 'failed', 'refused' or 'stopped'.
        summary: Its `summary.json`.
    """

    choices: tuple[Choice, ...]
    folder: Path
    status: str = "missing"
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join(choice.label for choice in self.choices) or "the only run"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for choice in self.choices for file in choice.files)

    @property
    def bindings(self) -> tuple[str, ...]:
        return tuple(binding for choice in self.choices for binding in choice.bindings)


def file_choices(number: int, text: str) -> list[Choice]:
    """The choices of one `--vary_file=F,G,...`; an empty name means no file."""
    names = [name.strip() for name in text.split(",")]
    stems = [Path(name).stem or "none" for name in names]
    is_unique = len(set(stems)) == len(stems)
    labels = stems if is_unique else [_for_path(name) or "none" for name in names]
    folder = Path(next(filter(None, names), "")).parent.name or f"file {number + 1}"
    return [
        Choice(folder, label, (name,) if name else ())
        for name, label in zip(names, labels, strict=True)
    ]


def binding_choices(name: str, text: str) -> list[Choice]:
    """The choices of one `--vary.NAME=V,W,...`, or `--vary.NAME=[V, W]` of any literals."""
    values = flag_values.elements(text)
    short = name.rpartition(".")[2]
    return [Choice(name, f"{short}={_for_path(v)}", (), (f"{name} = {v}",)) for v in values]


def members(workdir: Path, dimensions: Sequence[Sequence[Choice]]) -> list[Member]:
    """All combinations.

    Raises:
        UsageError: Two of them would have the same folder.
    """
    runs = [
        Member(choices, workdir / ("-".join(choice.label for choice in choices) or "run"))
        for choices in itertools.product(*dimensions)
    ]
    folders = [member.folder for member in runs]
    twice = [folder for folder in folders if folders.count(folder) > 1]
    if twice:
        raise UsageError(f"two runs of the sweep would be in {twice[0]}; vary each value once.")
    return runs


def sweep(options: flags.Options, dimensions: Sequence[Sequence[Choice]]) -> int:
    """Checks all combinations, runs those that are not done, prints a table.

    Returns:
        Exit status: 0 when all are done, 1 when one failed or was refused, 2 when all were
        refused, 143 when stopped by a signal.
    """
    runs = members(Path(options.workdir or ".").expanduser(), dimensions)
    for member in runs:
        _check(member, options)
    if all(member.status == "refused" for member in runs):
        return REFUSED
    stopped = False
    for number, member in enumerate(runs, 1):
        if options.dry_run or member.status == "refused" or stopped:
            continue
        print(f"\n== {number} of {len(runs)}: {member.label}, in {member.folder}", flush=True)
        _run(member, options)
        stopped = member.status == "stopped"
    console.put("", table(runs))
    if stopped:
        return STOPPED
    expected = "missing" if options.dry_run else "done"
    return DONE if all(member.status == expected for member in runs) else FAILED


def table(runs: Sequence[Member]) -> Table:
    """One row for each run: its choices, and how it ended."""
    heads = [choice.of for choice in runs[0].choices]
    metrics = sorted({name for member in runs for name in member.summary.get("eval", {})})
    numbers = [f"eval {name}:" for name in metrics]
    rows = console.table(
        "Sweep", *heads, "status", "step:", *numbers, "steps/s:", "parameters' fingerprint"
    )
    for member in runs:
        summary = member.summary
        rows.add_row(
            *(choice.label.rpartition("=")[2] for choice in member.choices),
            member.status,
            str(summary.get("step", "")),
            *(_number(summary.get("eval", {}).get(name)) for name in metrics),
            _number(summary.get("steps_per_second")),
            summary.get("params_fingerprint", "")[:12],
        )
    return rows


def _check(member: Member, options: flags.Options) -> None:
    try:
        with gin_internals.kept():
            exit_status.load_run(options, member.files, member.bindings)
    except UsageError as error:
        member.status = "refused"
        for line in str(error).splitlines():
            print(f"error: {member.label}: {line}", file=sys.stderr)


def _run(member: Member, options: flags.Options) -> None:
    try:
        member.summary = run.run(
            [*options.gin_files, *member.files],
            [*options.bindings, *member.bindings],
            member.folder,
            imports=options.imports,
            cpu_devices=options.cpu_devices,
            allow_unused=options.allow_unused,
        )
        member.status = "done"
    except run.Stopped as error:
        member.status = "stopped"
        print(error, file=sys.stderr)
        return
    except UsageError as error:
        member.status = "refused"
        print(f"error: {member.label}: {error}", file=sys.stderr)
    except Exception as error:  # the other runs go on
        member.status = "failed"
        print(exit_status.traceback_of(error), file=sys.stderr)
    jax.clear_caches()  # the next run has its own programs


def _for_path(text: str) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "_", text).strip("_")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
