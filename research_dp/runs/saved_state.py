"""The parameters that a run saved, read without its strategy, its devices or its optimizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from research_dp.errors import UsageError
from research_dp.runs import checkpoint_files, files
from research_dp.runs.checkpoint_files import steps_in
from research_dp.runs.manifest import Damaged, Manifest
from research_dp.types import PyTree

_LISTING = "python -m research_dp.checkpoints"


@dataclasses.dataclass(frozen=True)
class SavedState:
    """Verified host arrays of a checkpoint, unsharded."""

    params: PyTree
    model_state: PyTree
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def config_of(workdir: Path) -> Path:
    """The configuration file of a run; UsageError if the folder has none."""
    if not workdir.is_dir():
        raise UsageError(f"--workdir={workdir}: there is no such folder.")
    path = workdir / files.CONFIG
    if not path.is_file():
        raise UsageError(f"--workdir={workdir} has no {files.CONFIG}: give the folder of a run.")
    return path


def read(workdir: Path, step: int | None = None) -> SavedState:
    """The newest checkpoint of a run, or that of a step; the run may be going on.

    UsageError: there is none, or it is damaged.
    """
    folder = workdir / files.CHECKPOINTS
    while True:
        steps = steps_in(folder)
        chosen = _chosen(folder, steps, step)
        try:
            manifest, fields = checkpoint_files.read_fields(
                folder / str(chosen), "params", "model_state"
            )
        except Damaged as error:
            if step is None and steps_in(folder)[-1:] != [chosen]:
                continue  # the run that is going on has replaced it by a newer one
            others = ", ".join(str(x) for x in steps if x != chosen)
            advice = f"Others are of steps {others}: give --step." if others else "Put back a copy."
            raise UsageError(
                f"the checkpoint of step {chosen} in {folder} is damaged: {error}.\n  {advice} "
                f"`{_LISTING} {workdir} --verify` says which are intact."
            ) from error
        except (OSError, MemoryError) as error:
            reason = checkpoint_files.reason(error)
            raise UsageError(
                f"the checkpoint of step {chosen} in {folder} cannot be read: {reason}."
            ) from error
        return SavedState(fields["params"], fields["model_state"], manifest)


def _chosen(folder: Path, steps: list[int], step: int | None) -> int:
    """The step to read; UsageError if it was not saved."""
    if step in steps:
        return step
    if steps and step is not None:
        raise UsageError(
            f"--step={step}: {folder} has checkpoints of steps {', '.join(map(str, steps))}."
        )
    if steps:
        return steps[-1]
    if (folder / files.NOTHING_SAVED).exists():
        raise UsageError(
            f"the run in {folder.parent} has saved no checkpoint yet. A run saves at its end, and "
            "every train.checkpoint_every steps if that is bound."
        )
    raise UsageError(f"{folder} has no checkpoint: give the folder of a run that has saved one.")
