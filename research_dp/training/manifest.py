"""What a checkpoint says of itself: where the run stood, and what its arrays must be."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from research_dp.distributed.checksum import tree_checksums
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError, some_of
from research_dp.training.metrics import Sums
from research_dp.types import DataIdentity

FORMAT = 1
_PACKAGES = ("research_dp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Damaged(Exception):
    """A checkpoint cannot be read, or is not what was written; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands besides its arrays.

    Attributes:
        batch_size: Examples a step.
        seed: Seed of the order of examples and of random keys.
        order: What else the order of examples depends on; see `DataSet.order`.
        window: Sums of the metrics that were not recorded yet.
        data: Which data the run reads; None: not known, as in checkpoints of earlier versions.
        records: How many records of training were written; 0: not known.
    """

    batch_size: int
    seed: int
    order: str
    window: Sums
    data: DataIdentity | None = None
    records: int = 0


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array: what it must be when it is read back.

    Attributes:
        shape: Its global shape.
        dtype: Name of its dtype.
        checksum: See `distributed.checksum`.
    """

    shape: tuple[int, ...]
    dtype: str
    checksum: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: Steps done.
        progress: What a continued run needs to know.
        leaves: The arrays by path.
        origin: Who wrote it, for people: time, strategy, mesh, versions, configuration.
    """

    step: int
    progress: Progress
    leaves: Mapping[str, Leaf]
    origin: Mapping[str, Any]

    @property
    def examples_seen(self) -> int:
        """The data position: how many examples the run had taken from its stream."""
        return self.step * self.progress.batch_size

    def as_json(self) -> dict[str, Any]:
        """What is written: the content, and a checksum of it."""
        progress = dataclasses.asdict(self.progress)
        content = {
            "format": FORMAT,
            "step": self.step,
            "examples_seen": self.examples_seen,
            # Beside `progress`, all of whose fields earlier versions know.
            "data": progress.pop("data"),
            "records": progress.pop("records"),
            "progress": progress,
            "leaves": {
                path: [list(leaf.shape), leaf.dtype, leaf.checksum]
                for path, leaf in self.leaves.items()
            },
            "origin": dict(self.origin),
        }
        return {"content": content, "sha256": _digest(content)}

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Reads what `as_json` made.

        Raises:
            Damaged: It is not there, or not as it was written.
            UsageError: A newer version wrote it.
            OSError: It cannot be read here and now.
        """
        try:
            text = file.read_text()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as error:
            raise Damaged(f"{file.name} of {file.parent.name} cannot be read: {error}") from error
        try:
            written = json.loads(text)
            content, digest = written["content"], written["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"its {file.parent.name} is not whole") from error
        if _digest(content) != digest:
            raise Damaged(f"its {file.parent.name} is not what was written")
        if content["format"] != FORMAT:
            raise UsageError(
                f"the checkpoint {file.parent.parent} is of format {content['format']}, and this "
                f"version of research_dp reads {FORMAT}: {content['origin'].get('versions')} wrote "
                "it. Use that version, or another --workdir."
            )
        more = {
            "window": {name: (s, n) for name, (s, n) in content["progress"]["window"].items()},
            "data": content.get("data") and DataIdentity.from_json(content["data"]),
            "records": content.get("records", 0),
        }
        return cls(
            step=content["step"],
            progress=Progress(**{**content["progress"], **more}),
            leaves={
                path: Leaf(tuple(shape), dtype, checksum)
                for path, (shape, dtype, checksum) in content["leaves"].items()
            },
            origin=content["origin"],
        )

    def difference(self, abstract: Any) -> str | None:
        """The first array, parameters first, that a run's state has otherwise; None: none.

        Args:
            abstract: The run's state; shapes and dtypes suffice.
        """
        wanted = {
            path: Leaf(tuple(x.shape), str(x.dtype), "") for path, x in by_path(abstract).items()
        }
        paths = sorted(wanted.keys() | self.leaves.keys(), key=lambda p: (p[:6] != "params", p))
        for path in paths:
            there, here = self.leaves.get(path), wanted.get(path)
            if there is None:
                return f"{path}, {here}, is not in it"
            if here is None:
                return f"{path}, {there}, is only in it"
            if (there.shape, there.dtype) != (here.shape, here.dtype):
                return f"{path} is {here} here and {there} there"
        return None

    def changed(self, state: Any) -> str | None:
        """The arrays that are not what was written, in words; None if all are."""
        found = tree_checksums(state)
        return told_changes([p for p, leaf in self.leaves.items() if found[p] != leaf.checksum])


def told_changes(paths: list[str]) -> str | None:
    """Says that arrays are not what was written; None if there are none."""
    told = some_of(paths, 1)
    return f"{told} has not the checksum that was written with it" if paths else None


def leaves_of(state: Any) -> dict[str, Leaf]:
    """The arrays of a state, by path."""
    sums = tree_checksums(state)
    return {
        path: Leaf(tuple(x.shape), str(x.dtype), sums[path]) for path, x in by_path(state).items()
    }


def origin(**more: Any) -> dict[str, Any]:
    """Who writes a checkpoint.

    Args:
        **more: What else to tell.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "versions": versions,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        **more,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
