"""Trains what gin files say, or shows what it would be, or what they can name.

`run` is what sweeps and Python callers use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.commands import catalog, dry_run, entries, jax_setup, python_calls, streams
from research_dp.commands.flags import Command, RunCommand, flag, switch, whole_number
from research_dp.commands.python_calls import Bindings, Files
from research_dp.errors import UsageError
from research_dp.runs import files
from research_dp.runs.facts import read_summary
from research_dp.training import preemption, train

# What is worth comparing with a strategy, where it is not zero1.
_COMPARISONS = {"zero1": "fsdp", "single": "ddp", "spmd": "ddp"}


@dataclasses.dataclass
class Train(RunCommand):
    """`list` is None without --list, and '' for a list of everything."""

    dry_run: bool = switch("check and show the configuration; train nothing")
    list: str | None = flag(
        "show what gin files can name: all, a group (strategies), or one name; train nothing",
        "NAME",
        nargs="?",
        const="",
    )
    json: bool = switch("with --list: as JSON")
    coordinator: str | None = flag(
        "one run of several processes: where process 0 listens; auto: ask the cluster",
        "HOST:PORT|auto",
    )
    num_processes: int | None = flag("how many processes there are", "N", type=whole_number)
    process_id: int | None = flag(
        "which one this is, from 0", "I", type=functools.partial(whole_number, least=0)
    )
    heartbeat_seconds: int = flag(
        "seconds without a heartbeat after which a process counts as dead, and the others end",
        "S",
        default=100,
        type=whole_number,
    )

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        if self.list is not None:
            if self.gin_files or self.bindings:
                refuse("--list shows what there is, not a run: leave out gin files and bindings")
            return
        if self.json:
            refuse("--json goes with --list: --list --json, or --list=NAME --json")
        super().check(refuse)

    def run(self) -> int:
        if self.list is not None:
            return catalog.print_list(self.list, self.imports, as_json=self.json)
        with contextlib.nullcontext() if self.dry_run else streams.dispensable():
            folder = self.workdir and files.absolute(self.workdir)
            config = self.load()
            jax_setup.set_up_processes(
                self.coordinator, self.num_processes, self.process_id, self.heartbeat_seconds
            )
            jax_setup.set_up_devices(self.cpu_devices)
            cache = jax_setup.set_up_compilation_cache()
            if not self.dry_run:
                print(cache, flush=True)
            status = train.train(
                workdir=folder,
                inspect=functools.partial(dry_run.show, config) if self.dry_run else None,
                started=jax_setup.started(),
                bound=config.bound(),
            )
            if folder and not self.dry_run and status == train.DONE:
                _show_next_steps(Path(folder))
            return status


def _show_next_steps(folder: Path) -> None:
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


class Stopped(RuntimeError):
    """A signal ended a run, after saving; the same call continues it."""


@checked
def run(
    gin_files: Files = (),
    bindings: Bindings = (),
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
        jax_setup.set_up_devices(cpu_devices)
        jax_setup.set_up_compilation_cache()
        with streams.dispensable():
            status = train.train(workdir=folder, bound=config.bound())
    if status == preemption.STOPPED:
        raise Stopped(f"a signal stopped the run in {workdir}; the same call continues it.")
    return read_summary(Path(folder))
