"""Checkpoints through Orbax: the global state by path, the same whatever the strategy and mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import path_name
from research_dp.strategies import TrainState
from research_dp.training.metrics import Sums


class Progress(NamedTuple):
    """What a checkpoint holds besides the state.

    Attributes:
        batch_size: Examples a step.
        seed: Seed of the order of examples and of random keys.
        window: Sums of the metrics that were not recorded yet.
    """

    batch_size: int
    seed: int
    window: Sums


class Restored(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        state: The state, on its shardings.
        progress: What else there is.
    """

    state: TrainState
    progress: Progress


class Checkpoints:
    """Saves and restores a run's state; complete checkpoints only (Orbax commits atomically).

    Orbax is imported when there is something to save or to restore.

    Args:
        folder: Folder of the checkpoints, one subfolder a step.
        keep: How many of the newest are kept.
    """

    def __init__(self, folder: Path, keep: int = 3):
        self._folder, self._keep = folder.absolute(), keep
        self._manager: Any = None

    def restore(self, abstract_state: TrainState) -> Restored | None:
        """The newest complete state, on the shardings of `abstract_state`; None if there is none.

        Raises:
            UsageError: The checkpoint is of another model or optimizer.
        """
        if not self._folder.exists() or not any(self._folder.iterdir()):
            return None
        import orbax.checkpoint as ocp

        manager = self._open()
        step = manager.latest_step()
        if step is None:
            return None
        difference = _difference(manager.item_metadata(step)["state"].tree, abstract_state)
        if difference:
            raise UsageError(
                f"the checkpoint {self._folder / str(step)} is of another model or optimizer: "
                f"{difference}. Use another --workdir, or the configuration in its config.gin."
            )
        wanted = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), progress=ocp.args.JsonRestore()
        )
        found = manager.restore(step, args=wanted)
        sums = {k: (s, n) for k, (s, n) in found["progress"]["window"].items()}
        return Restored(found["state"], Progress(**{**found["progress"], "window": sums}))

    def save(self, state: TrainState, step: int, progress: Progress) -> None:
        """Saves in the background; returns as soon as the state may be changed."""
        import orbax.checkpoint as ocp

        manager = self._open()
        if manager.latest_step() != step:
            saved = ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                progress=ocp.args.JsonSave(progress._asdict()),
            )
            manager.save(step, args=saved)

    def wait(self) -> None:
        """Waits for what is being saved; raises what went wrong with it."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and releases what saving needed."""
        if self._manager is not None:
            self._manager.close()

    def _open(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            self._manager = ocp.CheckpointManager(
                self._folder,
                options=ocp.CheckpointManagerOptions(max_to_keep=self._keep),
                item_handlers={
                    "state": ocp.StandardCheckpointHandler(),
                    "progress": ocp.JsonCheckpointHandler(),
                },
            )
        return self._manager


def _difference(saved_tree: Any, wanted_state: TrainState) -> str | None:
    """The first array, parameters first, that is not there or has another shape; None: none."""
    for part in ("params", "model_state", "opt_state"):
        saved = _shapes(saved_tree[part])
        wanted = _shapes(getattr(wanted_state, part))
        for path in sorted(wanted.keys() | saved.keys()):
            if path not in saved:
                return f"{part} {path} {wanted[path]} is not in it"
            if path not in wanted:
                return f"{part} {path} {saved[path]} is only in it"
            if saved[path] != wanted[path]:
                return f"{part} {path} {wanted[path]} has shape {saved[path]} there"
    return None


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves}
