"""Trains what gin files say, or shows what it would be, or what they can name.

`run` is what sweeps and Python callers use.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.commands import catalog, entries, jax_setup, streams
from research_dp.commands import dry_run as dry_runs
from research_dp.commands.configured import Bindings, Files, session
from research_dp.config.load import Config
from research_dp.errors import UsageError
from research_dp.models.flax.nnx import nnx_variables
from research_dp.runs import files
from research_dp.runs.facts import read_summary
from research_dp.training import preemption, python_objects, train
from research_dp.training.initial import InitialTree
from research_dp.types import PyTree

# What is worth comparing with a strategy, where it is not zero1.
_COMPARISONS = {"zero1": "fsdp", "single": "ddp", "spmd": "ddp"}


class Stopped(RuntimeError):
    """A signal ended a run, after saving; the same call continues it."""


@checked
def run(
    gin_files: Files = (),
    bindings: Bindings = (),
    workdir: str | os.PathLike[str] | None = None,
    *,
    model: python_objects.Model | None = None,
    data: python_objects.Data | None = None,
    optimizer: python_objects.Optimizer | None = None,
    initial: PyTree | None = None,
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
        model: The model, as an object, in place of `train.model` of the files and bindings.
        data: The same of `train.data`.
        optimizer: The same of `train.optimizer`.
        initial: A new run's first parameters, of `train.initial`: a tree of arrays such as the
            `params` of a state, Linen's variables, an NNX module or its state.
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
    if isinstance(initial, nnx.Module | nnx.State):
        params, model_state = nnx_variables(initial)
        initial = {"params": params, **model_state}
    begun = None if initial is None else InitialTree(initial)
    objects = {"model": model, "data": data, "optimizer": optimizer, "initial": begun}
    with session(
        gin_files, bindings, imports=imports, allow_unused=allow_unused, **objects
    ) as loaded:
        status = _trained(loaded.load(), files.absolute(workdir), cpu_devices)
    if status == preemption.STOPPED:
        raise Stopped(f"a signal stopped the run in {workdir}; the same call continues it.")
    return read_summary(Path(files.absolute(workdir)))


def _trained(
    config: Config, folder: str, cpu_devices: int | None, started: float | None = None
) -> int:
    """Trains a run that is loaded; returns the exit status.

    `started` is when its command was, which prints where compiled programs are kept.
    """
    jax_setup.set_up_devices(cpu_devices)
    cache = jax_setup.set_up_compilation_cache()
    with streams.dispensable():
        if started is not None:
            print(cache, flush=True)
        return train.train(workdir=folder, started=started, bound=config.bound())


def command(
    *,
    dry_run: bool = False,
    list: str | None = None,
    json: bool = False,
    coordinator: str | None = None,
    num_processes: Count | None = None,
    process_id: CountOrZero | None = None,
    heartbeat_seconds: Count = 100,
    **options: Any,
) -> int:
    """Trains, or shows what would be trained, or what there is; returns the exit status.

    Args:
        dry_run: Check and show the configuration; train nothing.
        list: Show what gin files can name: all, a group (strategies), or one name; train nothing.
        json: With --list: as JSON.
        coordinator: One run of several processes: where process 0 listens; auto: ask the cluster.
        num_processes: How many processes there are.
        process_id: Which one this is, from 0.
        heartbeat_seconds: Seconds without a heartbeat after which a process counts as dead, and the
            others end.
        **options: Those of `run`.
    """
    if list is not None:
        if options.get("gin_files") or options.get("bindings"):
            raise UsageError(
                "--list shows what there is, not a run: leave out gin files and bindings"
            )
        return catalog.print_list(list, options.get("imports", ()), as_json=json)
    workdir, cpu_devices = options.pop("workdir", None), options.pop("cpu_devices", None)
    with contextlib.nullcontext() if dry_run else streams.dispensable(), session(**options) as run:
        folder = workdir and files.absolute(workdir)
        config = run.load()
        jax_setup.set_up_processes(coordinator, num_processes, process_id, heartbeat_seconds)
        if dry_run:
            jax_setup.set_up_devices(cpu_devices)
            dry_runs.show(config, dry_runs.built())
            return train.DONE
        status = _trained(config, folder, cpu_devices, jax_setup.started())
        if status == train.DONE:
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
