"""Checkpoints through Orbax: the global state by path, the same whatever the strategy and mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from research_dp.distributed.multihost import first_problem, of_the_first
from research_dp.errors import RunFailure, UsageError
from research_dp.strategies import TrainState
from research_dp.training import files
from research_dp.training.checkpoint_files import (
    HALF_WRITTEN,
    MANIFEST,
    STATE,
    clear_temporary,
    drained,
    literal,
    move_aside,
    prune,
    quieten_orbax,
    read_manifest,
    read_state,
    reason,
    steps_in,
    sync,
)
from research_dp.training.manifest import Damaged, Manifest, Progress, leaves_of

T = TypeVar("T")


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
        keep_period: Those of steps that it divides are kept too; None: no others.
        say: Told, in a line, what a person should know.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 3,
        keep_period: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._folder, self._keep, self._keep_period = folder.absolute(), keep, keep_period
        self._say = say
        self._checkpointer: Any = None
        self._newest: int | None = None
        self._saving: int | None = None  # the step that is being saved in the background
        self._saved: Future[list[str]] | None = None  # what ends it, and what to say then
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._failed = False

    # ---- Restoring ----

    def restore(
        self, abstract_state: TrainState, check: Callable[[Manifest], None] = lambda found: None
    ) -> Restored | None:
        """The newest state that is whole, on the shardings of `abstract_state`; None: none saved.

        What is damaged is told and moved aside, so that its step can be saved again.

        Args:
            abstract_state: Shapes, dtypes and shardings.
            check: Raises UsageError if the run may not go on from a checkpoint.

        Raises:
            UsageError: The checkpoint is of another model or optimizer, or none can be read.
        """
        damaged: dict[int, str] = {}
        for step in steps_in(self._folder, HALF_WRITTEN):
            self._say(f"Step {step} was being saved when the run ended, and is not complete")
        for step in self._agreed_steps():
            try:
                restored = self._restore(step, abstract_state, check)
            except Damaged as error:
                damaged[step] = str(error)
                self._say(f"The checkpoint of step {step} is damaged: {error}")
                continue
            self._set_aside(damaged)
            self._newest = step
            return restored
        if damaged:
            newest = max(damaged)
            raise UsageError(
                f"no checkpoint in {self._folder} can be read: that of step {newest} is damaged "
                f"({damaged[newest]}){_and_more(damaged)}. Put back a copy, or use another "
                "--workdir."
            )
        return None

    def begin(self) -> None:
        """Notes, before the first save of a run, that there is nothing to restore yet.

        Whoever finds records and no checkpoints knows by it that none was lost.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        files.replace(self._folder / files.NOTHING_SAVED, "")

    def saved_nothing(self) -> bool:
        """Whether a run began here that ended before its first save."""
        return (self._folder / files.NOTHING_SAVED).is_file()

    def _agreed_steps(self) -> Iterator[int]:
        """Steps of complete checkpoints as process 0 sees them, newest first."""
        seen = sorted(steps_in(self._folder), reverse=True)
        for index in range(of_the_first(len(seen))):
            yield of_the_first(seen[index] if index < len(seen) else 0)

    def _restore(
        self, step: int, abstract_state: TrainState, check: Callable[[Manifest], None]
    ) -> Restored:
        folder = self._folder / str(step)
        manifest = _together(lambda: read_manifest(folder))
        if manifest.step != step:
            raise Damaged(f"its manifest is of step {manifest.step}")
        difference = manifest.difference(abstract_state)
        if difference:
            raise UsageError(
                f"the checkpoint {folder} is of another model or optimizer: {difference}. "
                "Use another --workdir, or the configuration in its config.gin."
            )
        check(manifest)
        state = _together(lambda: read_state(folder, abstract_state))
        changed = manifest.changed(state)
        if changed:
            raise Damaged(changed)
        return Restored(state, manifest.progress)

    def _set_aside(self, damaged: Mapping[int, str]) -> None:
        """Renames damaged checkpoints; nothing is deleted."""
        if damaged and jax.process_index() == 0:
            for step in damaged:
                aside = move_aside(self._folder / str(step))
                self._say(f"What there is of step {step} was moved to {aside}")
        if damaged:
            of_the_first(0)  # the others wait until it is done

    # ---- Saving ----

    def save(
        self, state: TrainState, step: int, progress: Progress, origin: Mapping[str, Any]
    ) -> None:
        """Saves in the background; returns as soon as the state may be changed.

        Raises:
            RunFailure: This, or the save before it, went wrong.
        """
        self.wait()
        if step == self._newest:
            return
        import orbax.checkpoint as ocp

        manifest = Manifest(step=step, progress=progress, leaves=leaves_of(state), origin=origin)
        saved = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), manifest=ocp.args.JsonSave(manifest.as_json())
        )
        with self._telling(step), contextlib.ExitStack() as writing:
            writing.enter_context(drained())
            checkpointer = self._open()
            if jax.process_index() == 0:
                clear_temporary(self._folder, step)
            checkpointer.save(literal(self._folder / str(step)), args=saved)
            self._saving = step
            self._saved = self._thread.submit(self._complete, step, writing.pop_all())

    def check(self) -> None:
        """Raises RunFailure if what was saved in the background went wrong."""
        if self._saved is not None and self._saved.done():
            self.wait()

    def wait(self) -> None:
        """Waits for what is being saved; raises RunFailure if it goes wrong."""
        if self._saving is not None and self._saved is not None:
            step, self._saving = self._saving, None
            with self._telling(step):
                lines = self._saved.result()
            self._saved, self._newest = None, step
            for line in lines:
                self._say(line)

    def close(self) -> None:
        """Waits, and releases what saving needed."""
        try:
            self.wait()
        finally:
            # A save that failed here is waited for by the others, and they by Orbax here.
            alone = self._failed and jax.process_count() > 1
            if self._checkpointer is not None and not alone:
                checkpointer, self._checkpointer = self._checkpointer, None
                with contextlib.suppress(Exception):  # raised by `wait`, once
                    checkpointer.close()
            self._thread.shutdown(wait=not alone)

    def _complete(self, step: int, writing: contextlib.ExitStack) -> list[str]:
        """Ends a save: the checkpoint is on the disk, and older ones are removed.

        Args:
            step: The step that is being saved.
            writing: Closed once its arrays are written.

        Returns:
            Lines to say: older ones that cannot be removed.
        """
        with writing:
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return []
        sync(self._folder / str(step))
        (self._folder / files.NOTHING_SAVED).unlink(missing_ok=True)
        return prune(self._folder, self._keep, self._keep_period)

    @contextlib.contextmanager
    def _telling(self, step: int) -> Iterator[None]:
        """Turns what goes wrong with saving a step into a RunFailure that says what is left."""
        try:
            yield
        except RunFailure:
            raise
        except Exception as error:
            self._saving, self._failed = None, True
            left = "Nothing was saved before."
            if self._newest is not None:
                left = f"Step {self._newest} is saved; the same command continues from there."
            raise RunFailure(
                f"saving step {step} in {self._folder} failed: {reason(error)}. {left}"
            ) from error

    def _open(self) -> Any:
        if self._checkpointer is None:
            import orbax.checkpoint as ocp

            quieten_orbax()
            self._folder.mkdir(parents=True, exist_ok=True)
            handler = ocp.CompositeCheckpointHandler(
                **{
                    # Weights hardly get smaller, and what compresses them takes the loop's cores.
                    STATE: ocp.PyTreeCheckpointHandler(use_compression=False),
                    "manifest": ocp.JsonCheckpointHandler(filename=MANIFEST.name),
                }
            )
            self._checkpointer = ocp.AsyncCheckpointer(handler)
        return self._checkpointer


def _together(read: Callable[[], T]) -> T:
    """What `read` returns; what is raised in one process is raised in all.

    Raises:
        Damaged: What was read is not what was written.
        RunFailure: It could not be read here and now, whatever it is.
    """
    result, damage, failure = None, None, None
    try:
        result = read()
    except Damaged as error:
        damage = str(error)
    except (OSError, MemoryError) as error:
        failure = reason(error)
    failure, damage = first_problem(failure), first_problem(damage)
    if failure:
        raise RunFailure(f"a checkpoint cannot be read: {failure}. Nothing was changed.")
    if damage:
        raise Damaged(damage)
    assert result is not None
    return result


def _and_more(damaged: Mapping[int, str]) -> str:
    return f" and so are {len(damaged) - 1} older ones" if len(damaged) > 1 else ""
