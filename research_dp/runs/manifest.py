"""The manifest of a checkpoint: the run's position, and shape and checksum of each array."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.argument_checks import annotation_of, fits
from research_dp.distributed.sharding import by_path, path_name
from research_dp.errors import UsageError, printable, some_of
from research_dp.types import DataIdentity, HostSums

FORMAT = 1
_PACKAGES = ("research_dp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Damaged(Exception):
    """A checkpoint is unreadable or not what was written; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run besides its arrays."""

    batch_size: int
    seed: int
    order: str  # what else the order of examples depends on: `DataSet.order`
    window: HostSums  # of the metrics that are not recorded yet
    data: DataIdentity | None = None  # None: unknown, as in checkpoints of earlier versions
    records: int = 0  # training records written so far; 0: unknown
    positions: tuple[str, ...] = ()  # of the stream in each process, if it has a state


class Leaf(NamedTuple):
    """Global shape, dtype and checksum (`runs.checksum`) of one array."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @classmethod
    def of(cls, x: Any, checksum: str = "") -> Leaf:
        return cls(tuple(x.shape), str(x.dtype), checksum)

    def __str__(self) -> str:
        return printable(f"{self.dtype}{list(self.shape)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int
    progress: Progress
    leaves: Mapping[str, Leaf]  # by path
    origin: Mapping[str, Any]  # for people: time, strategy, mesh, versions, configuration

    @property
    def examples_seen(self) -> int:
        return self.step * self.progress.batch_size

    def as_json(self) -> dict[str, Any]:
        """The content with its SHA-256."""
        progress = dataclasses.asdict(self.progress)
        content = {
            "format": FORMAT,
            "step": self.step,
            "examples_seen": self.examples_seen,
            # Beside `progress`, all of whose fields earlier versions know.
            "data": progress.pop("data"),
            "records": progress.pop("records"),
            "positions": progress.pop("positions"),
            "progress": progress,
            "leaves": dict(self.leaves),
            "origin": dict(self.origin),
        }
        return {"content": content, "sha256": _digest(content)}

    @classmethod
    def read(cls, file: Path) -> Manifest:
        """Reads what `as_json` made; raises Damaged, or UsageError if a newer version wrote it."""
        name = file.parent.name
        try:
            written = json.loads(file.read_text())
            content, digest = written["content"], written["sha256"]
            if _digest(content) != digest:
                raise Damaged(f"its {name} is not what was written")
            if content["format"] != FORMAT:
                versions = printable(str(content["origin"].get("versions")))
                raise UsageError(
                    f"the checkpoint {file.parent.parent} is of format {content['format']}, and "
                    f"this version of research_dp reads {FORMAT}: {versions} wrote it. Use that "
                    "version, or another --workdir."
                )
            fields = content["progress"]
            fields["window"] = {name: (s, n) for name, (s, n) in fields["window"].items()}
            data = content.get("data") and DataIdentity.from_json(content["data"])
            fields["positions"] = tuple(content.get("positions", ()))
            progress = Progress(**fields, data=data, records=content.get("records", 0))
            leaves = {path: Leaf(tuple(x[0]), *x[1:]) for path, x in content["leaves"].items()}
            step, origin = content["step"], content["origin"]
            read = cls(step=step, progress=progress, leaves=leaves, origin=origin)
            for one in (progress, read):
                if not all(fits(x, annotation_of(type(one), k)) for k, x in vars(one).items()):
                    raise TypeError(one)
            if (named := file.parent.parent.name).isdecimal() and int(named) != read.step:
                raise Damaged(f"its {name} is of step {read.step}")
            return read
        except UsageError:
            raise
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as error:
            raise Damaged(f"{file.name} of {name} cannot be read: {error}") from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"its {name} is incomplete") from error

    def with_saved_shapes(self, state: Any, logical: Any, names: Sequence[str]) -> Any:
        """The abstract state with arrays of these fields as saved, where `logical` differs.

        Slots may have any shapes, other fields, and replicas, another first dim, which is not
        sharded then.
        """

        def as_saved(keys: Any, x: jax.ShapeDtypeStruct, meant: Any) -> jax.ShapeDtypeStruct:
            name = path_name(keys)
            saved = self.leaves.get(name)
            if saved is None or saved.shape == meant.shape:
                return x
            is_of_slot = name.startswith("slots/") and not name.startswith("slots/outer/")
            if not is_of_slot and saved.shape[1:] != meant.shape[1:]:
                return x
            spec = x.sharding.spec[1:] if x.shape[1:] == saved.shape[1:] else ()
            sharding = NamedSharding(x.sharding.mesh, PartitionSpec(None, *spec))
            return jax.ShapeDtypeStruct(saved.shape, x.dtype, sharding=sharding)

        some = ({name: getattr(x, name) for name in names} for x in (state, logical))
        return state._replace(**jax.tree_util.tree_map_with_path(as_saved, *some))

    def difference(self, abstract_state: Any) -> str | None:
        """The first array, parameters first, whose shape or dtype differs; None: all agree."""
        expected = {path: Leaf.of(x) for path, x in by_path(abstract_state).items()}
        names = sorted(expected.keys() | self.leaves.keys(), key=lambda p: (p[:6] != "params", p))
        for name in names:
            there, here, path = self.leaves.get(name), expected.get(name), printable(name)
            if there is None:
                return f"{path}, {here}, is not in it"
            if here is None:
                return f"{path}, {there}, is only in it"
            if there[:2] != here[:2]:
                return f"{path} is {here} here and {there} there"
        return None

    def mismatch(self, checksums: Mapping[str, str]) -> str | None:
        """Names the arrays that have another checksum, by path; None: all agree."""
        paths = [p for p, x in checksums.items() if getattr(self.leaves.get(p), "checksum", 0) != x]
        return f"{some_of(paths, 1)} does not match its checksum" if paths else None


def origin(**more: Any) -> dict[str, Any]:
    """Describes the writer of a checkpoint, with further facts from the caller."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a source tree
            versions[name] = importlib.metadata.version(name)
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "versions": versions,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        **more,
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
