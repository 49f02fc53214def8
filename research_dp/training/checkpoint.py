"""Checkpoints through Orbax: the global state by path, the same for every strategy and mesh."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax

from research_dp.distributed.multihost import first_problem, of_the_first, texts_of_all
from research_dp.errors import RunFailure, UsageError
from research_dp.strategies import TrainState
from research_dp.training import checkpoint_files, files, orbax_io
from research_dp.training.checkpoint_files import steps_in
from research_dp.training.manifest import Damaged, Manifest, Progress, leaves_of

T = TypeVar("T")


class Checkpoints:
    """Saves and restores a run's state; only complete checkpoints count (Orbax commits atomically).

    The `keep` newest are kept, and those of steps that `keep_period` divides. Orbax, which is slow
    to import, is imported at the first save or restore.
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
        # The step that is being saved, and what completes it: lines to print.
        self._pending: tuple[int, Future[list[str]]] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._failed = False

    def restore(
        self,
        abstract_state: TrainState,
        check: Callable[[Manifest], None] = lambda manifest: None,
        resize: Callable[[TrainState], TrainState] = lambda state: state,
    ) -> tuple[TrainState, Manifest] | None:
        """The newest intact state, on the shardings of `abstract_state`, and its manifest, or None.

        `resize` is given a state whose slots may be those of another number of devices.

        A damaged checkpoint is reported and moved aside, so that its step can be saved again.
        UsageError: it is of another model or optimizer, none can be read, or `check` raised it.
        """
        damaged: dict[int, str] = {}
        for step in steps_in(self._folder, checkpoint_files.HALF_WRITTEN):
            self._say(f"Step {step} was being saved when the run ended, and is not complete")
        # Those that process 0 sees, newest first.
        for step in reversed(json.loads(texts_of_all(json.dumps(steps_in(self._folder)))[0])):
            try:
                restored = self._restore(step, abstract_state, check, resize)
            except Damaged as error:
                damaged[step] = str(error)
                self._say(f"The checkpoint of step {step} is damaged: {error}")
                continue
            if damaged and jax.process_index() == 0:
                for path in (self._folder / str(step) for step in damaged):
                    aside = path.rename(files.free_name(path))
                    self._say(f"The files of step {path.name} were moved to {aside}")
            if damaged:
                of_the_first(0)  # the others wait until it is done
            self._newest = step
            return restored
        if damaged:
            newest, *older = damaged
            others = f" and so are {len(older)} older ones" if older else ""
            raise UsageError(
                f"no checkpoint in {self._folder} can be read: that of step {newest} is damaged "
                f"({damaged[newest]}){others}. Put back a copy, or use another --workdir."
            )
        return None

    def begin(self) -> None:
        """Marks the folder as one of a run that has not saved yet: no checkpoint was lost."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files.replace(self._folder / files.NOTHING_SAVED, "")

    def saved_nothing(self) -> bool:
        """Whether a run started here and ended before its first save."""
        return (self._folder / files.NOTHING_SAVED).is_file()

    def _restore(
        self,
        step: int,
        abstract_state: TrainState,
        check: Callable[[Manifest], None],
        resize: Callable[[TrainState], TrainState],
    ) -> tuple[TrainState, Manifest]:
        folder = self._folder / str(step)
        manifest = _in_all_processes(lambda: checkpoint_files.read_manifest(folder))
        if manifest.step != step:
            raise Damaged(f"its manifest is of step {manifest.step}")
        as_saved = manifest.with_saved_slots(abstract_state)
        if difference := manifest.difference(as_saved):
            raise UsageError(
                f"the checkpoint {folder} is of another model or optimizer: {difference}. "
                "Use another --workdir, or the configuration in its config.gin."
            )
        check(manifest)
        fields = _in_all_processes(lambda: orbax_io.read_state(folder, _fields(as_saved)))
        state = TrainState(**fields)
        if mismatch := manifest.mismatch(state):
            raise Damaged(mismatch)
        return resize(state), manifest

    def save(
        self, state: TrainState, step: int, progress: Progress, origin: Mapping[str, Any]
    ) -> None:
        """Saves in the background; returns as soon as the state may be changed.

        RunFailure: this save, or the one before it, failed.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if step == self._newest:
            return
        manifest = Manifest(step=step, progress=progress, leaves=leaves_of(state), origin=origin)
        with self._failing_as_run(step), contextlib.ExitStack() as writing:
            writing.enter_context(orbax_io.awaited_io())
            if self._checkpointer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._checkpointer = orbax_io.checkpointer()
            if jax.process_index() == 0:
                checkpoint_files.clear_temporary(self._folder, step)
            args = ocp.args.Composite(
                state=ocp.args.PyTreeSave(_fields(state)),
                manifest=ocp.args.JsonSave(manifest.as_json()),
            )
            self._checkpointer.save(orbax_io.literal(self._folder / str(step)), args=args)
            self._pending = step, self._thread.submit(self._complete, step, writing.pop_all())

    def check(self) -> None:
        """Raises RunFailure if a save in the background has failed."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save in the background; raises RunFailure if it fails."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        with self._failing_as_run(step):
            lines = future.result()
        self._newest = step
        for line in lines:
            self._say(line)

    def close(self) -> None:
        try:
            self.wait()
        finally:
            # After a failed save the others wait for this process, and Orbax here for them.
            abandon = self._failed and jax.process_count() > 1
            if self._checkpointer is not None and not abandon:
                checkpointer, self._checkpointer = self._checkpointer, None
                with contextlib.suppress(Exception):  # `wait` has raised it
                    checkpointer.close()
            self._thread.shutdown(wait=not abandon)

    def _complete(self, step: int, writing: contextlib.ExitStack) -> list[str]:
        """Waits until a checkpoint is on the disk, then prunes older ones; returns its lines."""
        with writing:
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return []
        checkpoint_files.fsync_checkpoint(self._folder / str(step))
        (self._folder / files.NOTHING_SAVED).unlink(missing_ok=True)
        return checkpoint_files.prune(self._folder, self._keep, self._keep_period)

    @contextlib.contextmanager
    def _failing_as_run(self, step: int) -> Iterator[None]:
        """Turns an error of a save into a RunFailure that says which step is saved."""
        try:
            yield
        except RunFailure:
            raise
        except Exception as error:
            self._failed = True
            left = "Nothing was saved before."
            if self._newest is not None:
                left = f"Step {self._newest} is saved; the same command continues from there."
            raise RunFailure(
                f"saving step {step} in {self._folder} failed: {orbax_io.reason(error)}. {left}"
            ) from error


def _fields(state: TrainState) -> dict[str, Any]:
    """A state by field; without slots if none carries state, as states had none at first."""
    return {name: x for name, x in state._asdict().items() if name != "slots" or x != ()}


def _in_all_processes(read: Callable[[], T]) -> T:
    """Calls `read`; an error in one process is raised in all, as Damaged or RunFailure."""
    result, damage, failure = None, None, None
    try:
        result = read()
    except Damaged as error:
        damage = str(error)
    except (OSError, MemoryError) as error:
        failure = orbax_io.reason(error)
    failure, damage = first_problem(failure), first_problem(damage)
    if failure:
        raise RunFailure(f"a checkpoint cannot be read: {failure}. Nothing was changed.")
    if damage:
        raise Damaged(damage)
    assert result is not None
    return result
