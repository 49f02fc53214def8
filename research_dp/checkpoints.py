"""`python -m research_dp.checkpoints WORKDIR`: lists the checkpoints of a run, or exports one.

Each checkpoint is a line. `--verify` reads all arrays and compares them with their checksums; the
exit status is 1 if any is damaged. `--export` writes parameters for other programs.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.text import Text

from research_dp.commands import failures, saved_run
from research_dp.commands.flags import Parser, whole_number
from research_dp.console import Table, put, table
from research_dp.errors import UsageError
from research_dp.runs import checkpoint_files, files

_COLUMNS = ("step:", "examples seen:", "saved", "bytes:", "strategy", "mesh", "status~")


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 0, 1 something is damaged, 2 a mistake."""
    parser = Parser("checkpoints")
    parser.add_argument("workdir", type=Path, help="folder of a run")
    parser.add_argument("--verify", action="store_true", help="read all arrays")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write parameters to FILE.safetensors, or to a new folder that Orbax reads",
    )
    parser.add_argument(
        "--step",
        type=functools.partial(whole_number, least=0),
        metavar="N",
        help="of the checkpoint to export (default: the newest)",
    )

    def body(command: object) -> int:
        options = parser.parse_args(argv)
        if options.export is None and options.step is not None:
            parser.error("--step is of the checkpoint to export: add --export=FILE")
        if options.export is not None and options.verify:
            parser.error("--export verifies the checkpoint that it reads: leave out --verify")
        jax.config.update("jax_platforms", "cpu")  # a run may be using the accelerators
        if options.export is not None:
            step = saved_run.write_export(
                options.workdir.expanduser(), options.export.expanduser(), options.step
            )
            print(f"Exported step {step}: {options.export}")
            return 0
        folder = options.workdir.expanduser() / files.CHECKPOINTS
        rows = list(checkpoint_files.overview(folder, verified=options.verify))
        if not rows:
            raise UsageError(f"there are no checkpoints in {folder}.")
        put(listing(folder, rows))
        return int(any(row.damaged for row in rows))

    return failures.run_command(body)


def listing(folder: Path, rows: Sequence[checkpoint_files.Row]) -> Table:
    """A table of checkpoints."""
    shown = table(f"Checkpoints in {folder}", *_COLUMNS)
    for row in rows:
        *cells, status = row.cells()
        style = "bold red" if row.damaged else "green" if status.startswith("intact") else ""
        shown.add_row(*cells, Text(status, style))
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
