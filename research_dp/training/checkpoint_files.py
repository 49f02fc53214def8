"""Checkpoints on disk: which there are, whether they are intact, which are removed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from research_dp.distributed.checksum import array_checksum
from research_dp.distributed.mesh import sizes_text
from research_dp.distributed.sharding import by_path
from research_dp.training import files, orbax_io
from research_dp.training.manifest import Damaged, Manifest, mismatch_message

_STEP = r"(0|[1-9][0-9]{0,17})"  # no other digits, no leading zeros
COMPLETE = re.compile(_STEP)
HALF_WRITTEN = re.compile(_STEP + r"\.orbax-checkpoint-tmp.*")
_SET_ASIDE = re.compile(_STEP + r"\.damaged[0-9]*")
_STATES = {COMPLETE: "", HALF_WRITTEN: "not complete", _SET_ASIDE: "damaged, was moved aside"}


def steps_in(folder: Path, pattern: re.Pattern[str] = COMPLETE) -> Sequence[int]:
    """Steps whose checkpoints are complete: Orbax renames a folder once all is in it."""
    if not folder.is_dir():
        return []
    matches = [pattern.fullmatch(path.name) for path in folder.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def fsync_checkpoint(folder: Path) -> None:
    """Flushes metadata and directory entries, so that the checkpoint survives a power failure.

    TensorStore does so for the arrays, Orbax not for the files that mark them as complete.
    """
    for path in (*folder.glob("*"), *folder.glob("*/*"), folder, folder.parent):
        with contextlib.suppress(FileNotFoundError):
            files.fsync(path)


def prune(folder: Path, keep: int, keep_period: int | None) -> list[str]:
    """Removes old checkpoints as `Checkpoints` says; returns a line for each failure.

    A checkpoint that is a link is not the run's to remove.
    """
    problems = []
    for step in steps_in(folder)[:-keep]:
        path = folder / str(step)
        if (keep_period and step % keep_period == 0) or path.is_symlink() or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            problems.append(f"The checkpoint {path} cannot be removed: {orbax_io.reason(error)}")
    return problems


def clear_temporary(folder: Path, step: int) -> None:
    """Removes links and FIFOs with the name of a step's temporary folder, which block Orbax.

    Folders, which a killed save leaves, are removed by Orbax itself.
    """
    for path in list(folder.iterdir()):
        match = HALF_WRITTEN.fullmatch(path.name)
        if match and int(match[1]) == step and (path.is_symlink() or not path.is_dir()):
            path.unlink()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, by `Manifest.read`; Damaged also if a FIFO is in the folder."""
    if problem := files.unreadable_entry(folder):
        raise Damaged(problem)
    return Manifest.read(folder / orbax_io.MANIFEST)


def verify(folder: Path) -> Manifest:
    """Reads a checkpoint array by array, on the host; raises Damaged, or returns its manifest."""
    import orbax.checkpoint as ocp

    manifest = read_manifest(folder)
    tree = orbax_io.read_metadata(folder)
    leaves = by_path(tree)
    if unmatched := sorted(leaves.keys() ^ manifest.leaves.keys()):
        raise Damaged(f"{unmatched[0]} is not both in its manifest and in its arrays")
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    changed = []
    for path, leaf in manifest.leaves.items():
        chosen = leaves[path]
        one = jax.tree.map(lambda x, chosen=chosen: x if x is chosen else ocp.PLACEHOLDER, tree)
        restored = jax.tree.leaves(orbax_io.read_state(folder, one, on_host))
        (x,) = (x for x in restored if x is not ocp.PLACEHOLDER)
        if array_checksum(x) != leaf.checksum:
            changed.append(path)
    if problem := mismatch_message(changed):
        raise Damaged(problem)
    return manifest


class Row(NamedTuple):
    """One checkpoint of a listing."""

    step: int
    nbytes: int
    status: str  # whether it is intact, or what is wrong
    damaged: bool = False  # complete but unusable, or unreadable
    manifest: Manifest | None = None

    def cells(self) -> tuple[str, ...]:
        """Step, examples seen, time, bytes, strategy, mesh and status, as text."""
        step, nbytes = str(self.step), f"{self.nbytes:,}"
        if self.manifest is None:
            return step, "", "", nbytes, "", "", self.status
        origin = self.manifest.origin
        strategy, mesh = origin.get("strategy", ""), sizes_text(origin.get("mesh", {}))
        examples = f"{self.manifest.examples_seen:,}"
        return step, examples, origin["time"], nbytes, strategy, mesh, self.status


def overview(folder: Path, *, verified: bool) -> Iterator[Row]:
    """The checkpoints in a folder, complete or not, by step; arrays are read if `verified`."""
    matches = [
        (int(match[1]), path.name, incomplete)
        for path in (folder.iterdir() if folder.is_dir() else ())
        for pattern, incomplete in _STATES.items()
        if (match := pattern.fullmatch(path.name))
    ]
    for step, name, incomplete in sorted(matches):
        path = folder / name
        nbytes = 0
        for file in path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a run may be removing it
                nbytes += file.stat().st_size if file.is_file() else 0
        if incomplete:
            yield Row(step, nbytes, incomplete)
            continue
        try:
            manifest = verify(path) if verified else read_manifest(path)
        except Damaged as error:
            if os.path.lexists(path):  # a run may have removed it meanwhile
                yield Row(step, nbytes, f"damaged: {error}", damaged=True)
        except (OSError, MemoryError) as error:
            yield Row(step, nbytes, f"cannot be read: {orbax_io.reason(error)}", damaged=True)
        else:
            intact = f"intact: {len(manifest.leaves)} arrays"
            yield Row(step, nbytes, intact if verified else "not verified", manifest=manifest)
