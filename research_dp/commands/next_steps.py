"""Says what a user may do with a finished run."""

from __future__ import annotations

import shlex
from pathlib import Path

import jax

from research_dp.commands import entries
from research_dp.runs import files
from research_dp.runs.facts import read_summary

# What is worth comparing with a strategy, where it is not zero1.
_COMPARISONS = {"zero1": "fsdp", "single": "ddp", "spmd": "ddp"}


def show(folder: Path) -> None:
    """Prints commands for the run in a folder; only process 0 does."""
    if jax.process_index() != 0:
        return
    other = _COMPARISONS.get(read_summary(folder)["strategy"], "zero1")
    is_one_cpu = jax.device_count() == 1 and jax.devices()[0].platform == "cpu"
    split = "--cpu_devices=8 " if is_one_cpu else ""
    paths = folder / files.TENSORBOARD, folder
    curves, evaluated = (shlex.quote(str(files.shown(path))) for path in paths)
    lines = (  # not wrapped: commands are copied
        f"  curves:    tensorboard --logdir={curves}",
        f"  evaluate:  {entries.program('evaluate')} --workdir={evaluated}",
        f"  compare:   add {split}--gin_file=strategies/{other}.gin and change --workdir",
    )
    print("\n".join(lines), flush=True)
