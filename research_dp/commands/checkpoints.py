"""Lists the checkpoints of a run, verifies them, and exports parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
from rich.text import Text

from research_dp.argument_types import CountOrZero
from research_dp.commands import saved_run
from research_dp.console import Table, put, table
from research_dp.errors import UsageError
from research_dp.runs import checkpoint_files, files

_COLUMNS = ("step:", "examples seen:", "saved", "bytes:", "strategy", "mesh", "status~")


def command(
    workdir: str,
    *,
    verify: bool = False,
    export: str | None = None,
    hf: bool = False,
    step: CountOrZero | None = None,
) -> int:
    """Lists checkpoints, a line each, or exports one.

    Args:
        workdir: Folder of a run.
        verify: Read all arrays.
        export: Write parameters to FILE.safetensors, or to a new folder that Orbax reads.
        hf: The folder to export to has Hugging Face's layout.
        step: Of the checkpoint to export; None: the newest.

    Returns:
        The exit status: 1 if one that is verified is damaged.
    """
    if export is None and (hf or step is not None):
        given = "--hf" if hf else "--step"
        raise UsageError(f"{given} is of the checkpoint to export: add --export=FILE")
    if export is not None and verify:
        raise UsageError("--export verifies the checkpoint that it reads: leave out --verify")
    jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
    if export is not None:
        folder, to = Path(workdir).expanduser(), Path(export).expanduser()
        done = saved_run.write_export(folder, to, step, hf=hf)
        print(f"Exported step {done}: {export}")
        return 0
    folder = Path(workdir).expanduser() / files.CHECKPOINTS
    rows = list(checkpoint_files.overview(folder, verified=verify))
    if not rows:
        raise UsageError(f"there are no checkpoints in {folder}.")
    put(listing(folder, rows))
    return int(any(row.damaged for row in rows))


def listing(folder: Path, rows: Sequence[checkpoint_files.Row]) -> Table:
    """A table of checkpoints."""
    shown = table(f"Checkpoints in {folder}", *_COLUMNS)
    for row in rows:
        *cells, status = row.cells()
        style = "bold red" if row.damaged else "green" if status.startswith("intact") else ""
        shown.add_row(*cells, Text(status, style))
    return shown
