"""Checkpoints through Orbax: the global state by path, the same whatever the strategy and mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from research_dp.distributed.errors import UsageError
from research_dp.strategies import TrainState


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

    def restore(self, abstract_state: TrainState) -> TrainState | None:
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
        try:
            return manager.restore(step, args=ocp.args.StandardRestore(abstract_state))
        except ValueError as error:
            raise UsageError(
                f"the checkpoint {self._folder / str(step)} does not fit this model or optimizer "
                f"({_difference(manager, step, abstract_state, error)}). "
                "Use another --workdir, or the configuration in its config.gin."
            ) from error

    def save(self, state: TrainState, step: int) -> None:
        """Saves in the background; returns as soon as the state may be changed."""
        import orbax.checkpoint as ocp

        manager = self._open()
        if manager.latest_step() != step:
            manager.save(step, args=ocp.args.StandardSave(state))

    def close(self) -> None:
        """Waits for what is being saved."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.close()

    def _open(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp

            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep)
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        return self._manager


def _difference(manager: Any, step: int, wanted: TrainState, error: Exception) -> str:
    """The first parameter that differs, or the first line of the error."""
    saved = _shapes(manager.item_metadata(step).tree["params"])
    for path, shape in _shapes(wanted.params).items():
        if saved.get(path) != shape:
            there = f"has shape {saved[path]} there" if path in saved else "is not in it"
            return f"parameter {path} {shape} {there}"
    return str(error).split("\n", 1)[0]


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }
