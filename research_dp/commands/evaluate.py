"""Evaluates a checkpoint of a run, on any number of devices and under any strategy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.commands import jax_setup, saved_run
from research_dp.commands.configured import Bindings, Files, Run, session
from research_dp.distributed.mesh import refuse_several_processes
from research_dp.runs import files
from research_dp.runs.checkpoint import read_saved
from research_dp.strategies import TrainState
from research_dp.training.batches import eval_metrics
from research_dp.training.train import configured


@checked
def evaluate(
    workdir: str | os.PathLike[str],
    step: CountOrZero | None = None,
    *,
    gin_files: Files = (),
    bindings: Bindings = (),
    imports: Sequence[str] = (),
    cpu_devices: Count | None = None,
) -> dict[str, Any]:
    """Evaluates a checkpoint of a run, as `python -m research_dp.evaluate`.

    Example: `evaluate("runs/digits", gin_files="strategies/single.gin")["eval"]["accuracy"]`.

    Args:
        workdir: Folder of a run, which may be going on.
        step: Of the checkpoint; None: the newest.
        gin_files: They come after the run's own configuration: another strategy or data set.
        bindings: They win over files; as in `run`.
        imports: Modules of yours besides those that the run imported.
        cpu_devices: As in `run`.

    Returns:
        'step', 'eval' (the mean metrics), 'data', 'strategy' and 'mesh'.

    Raises:
        UsageError: There is no checkpoint, it is damaged, or something in the configuration is
            wrong.
    """
    with session(gin_files, bindings, imports=imports) as run:
        return _evaluated(run, workdir, step, cpu_devices)


def _evaluated(
    run: Run, workdir: str | os.PathLike[str], step: int | None, cpu_devices: int | None
) -> dict[str, Any]:
    folder = Path(workdir).expanduser()
    run.load(saved=folder)
    jax_setup.set_up_devices(cpu_devices)
    jax_setup.set_up_compilation_cache()
    saved = read_saved(folder, step)
    refuse_several_processes("evaluate", "Give --cpu_devices.", binding="")
    config, spec, data, _ = configured()
    strategy = config.build(dataclasses.replace(spec, frozen=()))  # nothing is trained here
    saved_run.check_same_model(saved, strategy)
    like = strategy.abstract_state
    state = TrainState(
        step=saved_run.place(np.int32(saved.step), like.step),
        params=saved_run.place(saved.params, like.params),
        model_state=saved_run.place(saved.model_state, like.model_state),
        opt_state=(),  # which evaluation does not read
    )
    return {
        "step": saved.step,
        "eval": eval_metrics(strategy, state, data),
        "data": data.name,
        "strategy": strategy.name,
        "mesh": dict(strategy.mesh.shape),
    }


def command(*, json: bool = False, allow_unused: bool = False, **options: Any) -> int:
    """Evaluates, and prints the metrics.

    Args:
        json: Print the result as JSON.
        allow_unused: As in `run`.
        **options: Those of `evaluate`.
    """
    own = [options.pop(name, None) for name in ("workdir", "step", "cpu_devices")]
    with session(**options, allow_unused=allow_unused) as run:
        result = _evaluated(run, *own)
    numbers = "  ".join(f"{name} {x:.4g}" for name, x in result["eval"].items())
    print(files.json_text(result) if json else f"eval  step {result['step']}  {numbers}")
    return 0
