"""Runs one configuration: what the command `train`, sweeps and Python callers share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.commands import python_calls, runtime, streams
from research_dp.commands.flags import Command
from research_dp.errors import UsageError
from research_dp.runs import files
from research_dp.runs.facts import read_summary
from research_dp.training import loop, preemption


class Stopped(RuntimeError):
    """A signal ended a run, after saving; the same call continues it."""


@checked
def run(
    gin_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    bindings: Mapping[str, Any] | Sequence[str] = (),
    workdir: str | os.PathLike[str] | None = None,
    *,
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
    allow_unused: bool = False,
) -> dict[str, Any]:
    """Trains what gin files say, as `python -m research_dp.train` does, as often as you like.

    Example: `run(["runs/digits.gin"], {"train.num_steps": 20}, workdir="runs/a")["eval"]`.

    Args:
        gin_files: Later ones win. Shipped ones are found by names such as 'runs/digits.gin'.
        bindings: Parameter -> value; they win over files. A value is a Python literal; strings
            that begin with '@' or '%' are references and macros. Or texts 'NAME = VALUE'.
        workdir: Where results go, and from where a run continues.
        imports: Modules of yours that register functions with gin.
        cpu_devices: Number of devices into which this machine's CPU is split. JAX must not be in
            use yet, or have been split so.
        allow_unused: Whether a binding may be without effect.

    Returns:
        What is in `summary.json`.

    Raises:
        UsageError: Something in the configuration, the data or the workdir is wrong; the message
            has a line for each mistake.
        Stopped: A signal ended the run, after saving.
    """
    if not workdir:
        raise UsageError("run needs a workdir: results and checkpoints go there.")
    folder = files.absolute(workdir)
    command = python_calls.command_of(
        Command, gin_files, bindings, imports=imports, allow_unused=allow_unused
    )
    with python_calls.session(command):
        config = command.load()
        runtime.set_up_devices(cpu_devices)
        runtime.set_up_compilation_cache()
        with streams.dispensable():
            status = loop.train(workdir=folder, bound=config.bound())
    if status == preemption.STOPPED:
        raise Stopped(f"a signal stopped the run in {workdir}; the same call continues it.")
    return read_summary(Path(folder))
