"""Evaluates a checkpoint of a run, on any number of devices and under any strategy."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.commands import jax_setup, python_calls, saved_run
from research_dp.commands.flags import Command, flag, switch, whole_number
from research_dp.commands.python_calls import Bindings, Files
from research_dp.distributed.mesh import refuse_several_processes
from research_dp.runs import files, saved_state
from research_dp.strategies import TrainState
from research_dp.training.batches import eval_metrics
from research_dp.training.train import configured


@dataclasses.dataclass
class Evaluate(Command):
    """The command `evaluate`; files and bindings come after the run's own configuration."""

    workdir: str | None = flag("folder of a run, which may be going on", "DIR")
    step: int | None = flag(
        "of the checkpoint; without this flag the newest",
        "N",
        type=functools.partial(whole_number, least=0),
    )
    json: bool = switch("print the result as JSON")
    verb: ClassVar[str] = "evaluate"

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        if not self.workdir:
            refuse("--workdir=DIR is required: the folder of a run")

    def run(self) -> int:
        result = self.result()
        if self.json:
            print(json.dumps(files.as_json(result), indent=2, allow_nan=False))
        else:
            numbers = "  ".join(f"{name} {x:.4g}" for name, x in result["eval"].items())
            print(f"eval  step {result['step']}  {numbers}")
        return 0

    def result(self) -> dict[str, Any]:
        """Step, metrics, and what they were computed with."""
        workdir = Path(self.workdir or "").expanduser()
        self.load(saved=str(saved_state.config_of(workdir)))
        jax_setup.set_up_devices(self.cpu_devices)
        jax_setup.set_up_compilation_cache()
        saved = saved_state.read(workdir, self.step)
        refuse_several_processes("evaluate", "Give --cpu_devices.", binding="")
        config, spec, data = configured()
        strategy = config.build(spec)
        saved_run.check_same_model(saved, strategy)
        like = strategy.abstract_state
        state = TrainState(
            step=saved_run.place(np.int32(saved.step), like.step),
            params=saved_run.place(saved.params, like.params),
            model_state=saved_run.place(saved.model_state, like.model_state),
            opt_state=(),  # which evaluation does not read
        )
        metrics = eval_metrics(strategy, state, data)
        return {
            "step": saved.step,
            "eval": metrics,
            "data": data.name,
            "strategy": strategy.name,
            "mesh": dict(strategy.mesh.shape),
        }


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
    command = python_calls.command_of(
        Evaluate, gin_files, bindings, imports=imports, cpu_devices=cpu_devices
    )
    command.workdir, command.step = os.fspath(workdir), step
    with python_calls.session(command):
        return command.result()
