"""Checkpoints through Orbax: the global state by path, the same for every strategy and mesh.

`read_saved` reads the parameters alone, without the run's strategy, devices or optimizer.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from research_dp.distributed.mesh import first_problem, of_the_first, texts_of_all
from research_dp.distributed.optimizer import MasterState
from research_dp.distributed.placement import refuse_deleted
from research_dp.distributed.sharding import (
    as_stored,
    by_path,
    cut_shapes,
    fitted,
    fitted_tree,
    from_stored,
    path_name,
)
from research_dp.errors import RunFailure, UsageError
from research_dp.runs import checkpoint_files, files
from research_dp.runs.checkpoint_files import STATE, read_arrays, steps_in
from research_dp.runs.checksum import tree_checksums
from research_dp.runs.manifest import Damaged, Leaf, Manifest, Progress
from research_dp.strategies import Strategy, TrainState
from research_dp.strategies.frozen import with_frozen
from research_dp.strategies.state import resize_slots
from research_dp.types import PyTree

_LISTING = "python -m research_dp.checkpoints"


def _masters_as_saved(
    abstract: TrainState, saved: Mapping[str, Leaf]
) -> tuple[TrainState, Callable[[TrainState], TrainState]]:
    """The state with master weights where it was saved with them, and what makes it this one."""
    has, had = (
        isinstance(abstract.opt_state, MasterState),
        any(name.startswith("opt_state/master/") for name in saved),
    )
    if has == had:
        return abstract, lambda state: state
    if had:

        def narrow(keys: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            leaf = saved.get(f"params/{path_name(keys)}")
            return x if leaf is None else x.update(dtype=leaf.dtype)

        params = jax.tree_util.tree_map_with_path(narrow, abstract.params)
        opt_state = MasterState(abstract.params, abstract.opt_state)
        return abstract._replace(params=params, opt_state=opt_state), lambda state: state._replace(
            params=state.opt_state.master, opt_state=state.opt_state.inner
        )
    master, inner = abstract.opt_state
    wide = jax.tree.map(lambda x, m: x.update(dtype=m.dtype), abstract.params, master)

    def with_masters(state: TrainState) -> TrainState:
        placed = jax.device_put(
            fitted_tree(state.params, master), jax.tree.map(lambda x: x.sharding, master)
        )
        params = jax.tree.map(lambda x, p: x.astype(p.dtype), state.params, abstract.params)
        return state._replace(params=params, opt_state=MasterState(placed, state.opt_state))

    return abstract._replace(params=wide, opt_state=inner), with_masters


def _reshaped(tree: PyTree, like: PyTree) -> PyTree:
    """The tree with arrays that are stored in parts as `like` has them, or back; nothing moves."""

    def one(x: Any, to: Any) -> Any:
        if x.shape == to.shape or x.size != to.size:
            return x
        return jax.jit(fitted, static_argnums=1, out_shardings=to.sharding)(x, to.shape)

    return jax.tree.map(one, tree, like)


class Checkpoints:
    """Saves and restores a run's state; keeps the newest, and steps that `keep_period` divides."""

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
        self._threads: set[threading.Thread] = set()  # of the last save

    def restore(
        self, strategy: Strategy, check: Callable[[Manifest], None] = lambda manifest: None
    ) -> tuple[TrainState, Manifest] | None:
        """The newest intact state, on the shardings of a strategy, and its manifest, or None.

        A damaged checkpoint is reported and moved aside, so that its step can be saved again.
        Of parameters with and without master weights either continues as the other. Slots may be
        those of another number of devices. UsageError: it is of another model, optimizer or
        `frozen`, none can be read, or `check` raised it.
        """
        abstract_state = strategy.abstract_state

        def restored_at(step: int) -> tuple[TrainState, Manifest]:
            folder = self._folder / str(step)
            manifest: Manifest = in_all_processes(lambda: checkpoint_files.read_manifest(folder))
            check(manifest)
            as_saved, adapted = _masters_as_saved(abstract_state, manifest.leaves)
            meant, _ = _masters_as_saved(strategy.logical_state, manifest.leaves)
            names = ("slots", *(("opt_state", "loss_scale") if strategy.config.outer else ()))
            as_saved, meant = (
                manifest.with_saved_shapes(x, meant, names) for x in (as_saved, meant)
            )
            if difference := manifest.difference(meant):
                raise UsageError(
                    f"the checkpoint {files.shown(folder)} is of another model, optimizer or "
                    f"train.frozen: {difference}. Use another --workdir, where train.initial may "
                    "take its parameters, or the configuration in its config.gin."
                )
            # In files what is stored in parts is whole.
            fields = _fields(
                jax.tree.map(lambda x, y: y if x.size == y.size else x, as_saved, meant)
            )
            wanted = jax.eval_shape(as_stored, fields)
            wanted = jax.tree.map(lambda x, y: x.update(sharding=y.sharding), wanted, fields)
            shapes = cut_shapes(as_saved, meant)
            read = in_all_processes(lambda: read_arrays(folder / STATE, wanted))
            state = TrainState(**jax.tree.map(from_stored, read, fields))
            state = _reshaped(state, as_saved)
            if mismatch := manifest.mismatch(tree_checksums(state, shapes)):
                raise Damaged(mismatch)
            return resize_slots(strategy, adapted(state), self._say), manifest

        damaged: dict[int, str] = {}
        for step in steps_in(self._folder, checkpoint_files.HALF_WRITTEN):
            self._say(f"Step {step} was being saved when the run ended, and is not complete")
        # Those that process 0 sees, newest first.
        for step in reversed(json.loads(texts_of_all(json.dumps(steps_in(self._folder)))[0])):
            try:
                restored = restored_at(step)
            except Damaged as error:
                damaged[step] = str(error)
                self._say(f"The checkpoint of step {step} is damaged: {error}")
                continue
            if damaged and jax.process_index() == 0:
                for path in (self._folder / str(step) for step in damaged):
                    aside = path.rename(files.free_name(path))
                    self._say(f"The files of step {path.name} were moved to {files.shown(aside)}")
            if damaged:
                of_the_first(0)  # the others wait until it is done
            self._newest = step
            return restored
        if damaged:
            newest, *older = damaged
            others = f" and so are {len(older)} older ones" if older else ""
            raise UsageError(
                f"no checkpoint in {files.shown(self._folder)} can be read: that of step "
                f"{newest} is damaged ({damaged[newest]}){others}. Put back a copy, or use "
                "another --workdir."
            )
        return None

    def begin(self) -> None:
        """Marks the folder as one of a run that has not saved yet: no checkpoint was lost."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files.replace(self._folder / files.NOTHING_SAVED, "")

    def save(
        self,
        state: TrainState,
        step: int,
        progress: Progress,
        origin: Mapping[str, Any],
        logical: TrainState | None = None,
    ) -> None:
        """Starts a save; the state may change then. RunFailure: it, or the last, failed.

        `logical` is as in `restore`: files have no padding.
        """
        import orbax.checkpoint as ocp  # slow

        self.wait()
        if step == self._newest:
            return
        refuse_deleted("save: the state", state)
        meant = logical or state
        shapes = cut_shapes(state, meant)
        sums = tree_checksums(state, shapes)
        leaves = {path: Leaf.of(x, sums[path]) for path, x in by_path(meant).items()}
        manifest = Manifest(step=step, progress=progress, leaves=leaves, origin=origin)
        with self._failing_as_run(step), contextlib.ExitStack() as writing:
            writing.enter_context(checkpoint_files.awaited_io())
            writing.push(self._end_threads)
            if self._checkpointer is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._checkpointer = checkpoint_files.checkpointer()
            if jax.process_index() == 0:
                checkpoint_files.clear_temporary(self._folder, step)
            args = ocp.args.Composite(
                state=ocp.args.PyTreeSave(as_stored(_fields(_reshaped(state, meant)))),
                manifest=ocp.args.JsonSave(manifest.as_json()),
            )
            before = set(threading.enumerate())
            try:
                path = checkpoint_files.literal(self._folder / str(step))
                self._checkpointer.save(path, args=args)
            finally:
                self._threads = set(threading.enumerate()) - before
            future = self._thread.submit(self._complete, step, writing.pop_all(), shapes)
            self._pending = step, future

    def _complete(
        self, step: int, writing: contextlib.ExitStack, shapes: Mapping[str, tuple[int, ...]]
    ) -> list[str]:
        """Waits until a checkpoint is on the disk, then prunes older ones; returns its lines."""
        with writing:
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return []
        checkpoint_files.cut_arrays(self._folder / str(step) / STATE, shapes)
        checkpoint_files.fsync_checkpoint(self._folder / str(step))
        (self._folder / files.NOTHING_SAVED).unlink(missing_ok=True)
        return checkpoint_files.prune(self._folder, self._keep, self._keep_period)

    def _end_threads(self, failure: type[BaseException] | None, *_: Any) -> None:
        """Ends the threads of a save that failed; with several processes, others wait for them."""
        if failure and jax.process_count() == 1:
            with contextlib.suppress(Exception):  # the failure itself is reported
                checkpoint_files.end_waiting_threads(self._threads)

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

    @contextlib.contextmanager
    def _failing_as_run(self, step: int) -> Iterator[None]:
        """Turns an error of a save into a RunFailure that says which step is saved."""
        try:
            yield
        except RunFailure:
            raise
        except Exception as error:
            self._failed, reason = True, checkpoint_files.reason(error)
            left = "Nothing was saved before."
            if self._newest is not None and not (self._folder / str(self._newest)).is_dir():
                left = (
                    f"Step {self._newest} was saved, and was moved or removed: put it back, and "
                    "the same command continues."
                )
            elif self._newest is not None:
                left = f"Step {self._newest} is saved; the same command continues from there."
            raise RunFailure(
                f"saving step {step} in {files.shown(self._folder)} failed: {reason}. {left}"
            ) from error


def _fields(state: TrainState) -> dict[str, Any]:
    """A state by field; without slots if none carries state, as states had none at first."""
    return {name: x for name, x in state._asdict().items() if name != "slots" or x != ()}


def in_all_processes(read: Callable[[], Any]) -> Any:
    """Calls `read`; an error in one process is raised in all, as Damaged or RunFailure."""
    result = damage = failure = None
    try:
        result = read()
    except Damaged as error:
        damage = str(error)
    except (OSError, MemoryError) as error:
        failure = checkpoint_files.reason(error)
    if failure := first_problem(failure):
        raise RunFailure(f"a checkpoint cannot be read: {failure}. Nothing was changed.")
    if damage := first_problem(damage):
        raise Damaged(damage)
    return result


class SavedState(NamedTuple):
    """Verified host arrays of a checkpoint, unsharded."""

    step: int
    params: PyTree
    model_state: PyTree


def read_saved(workdir: Path, step: int | None = None) -> SavedState:
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
        return SavedState(manifest.step, *with_frozen(fields["params"], fields["model_state"]))


def newest(workdir: Path) -> Path:
    """The newest checkpoint of a run; UsageError if it has none."""
    folder = workdir / files.CHECKPOINTS
    return folder / str(_chosen(folder, steps_in(folder), None))


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
