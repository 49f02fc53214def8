"""What differs between the configurations of runs, and whether it may."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, get_args

from research_dp.comparison.runs import Run
from research_dp.errors import some_of
from research_dp.types import DataIdentity

# 'other': not of the strategy, so that the runs cannot be compared as they are. 'version': of the
# code, which numbers may tell. 'varied': on purpose. 'strategy': of the strategy.
Role = Literal["other", "version", "varied", "strategy"]
_UNBOUND = "unbound"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Something that is not the same in all runs.

    Attributes:
        name: A parameter, e.g. 'train.seed', or a fact such as 'version of jax'.
        values: Its value by name of the run, of those for which it is known.
        places: Where the value was bound, e.g. 'runs/digits.gin:12', of those for which it is.
        role: Whether it may differ.
    """

    name: str
    values: Mapping[str, str]
    places: Mapping[str, str]
    role: Role

    def between(self, a: Run, b: Run) -> bool:
        """Whether it differs between two runs."""
        pair = [self.values.get(run.name) for run in (a, b)]
        return None not in pair and pair[0] != pair[1]


def differences(runs: Sequence[Run], varied: Collection[str] = ()) -> list[Setting]:
    """All that differs, what should not first; `varied` are names that differ on purpose."""
    found = [*_bindings(runs, varied), *_facts(runs), *_dtypes(runs)]
    return sorted(found, key=lambda setting: get_args(Role).index(setting.role))


def _bindings(runs: Sequence[Run], varied: Collection[str]) -> Iterator[Setting]:
    known = [run for run in runs if run.bindings]
    for name in dict.fromkeys(name for run in known for name in run.bindings):
        bound = {run.name: run.bindings[name] for run in known if name in run.bindings}
        values = {run.name: _UNBOUND for run in known} | {k: b.value for k, b in bound.items()}
        if len(set(values.values())) == 1:
            continue
        of_strategy = all(b.of_strategy for b in bound.values())
        role: Role = "varied" if name in varied else "strategy" if of_strategy else "other"
        places = {run: b.place for run, b in bound.items() if b.place}
        yield Setting(name, values, places, role)


def _facts(runs: Sequence[Run]) -> Iterator[Setting]:
    """Data, and the programs that made the numbers."""
    facts: dict[str, dict[str, str]] = {}
    for run in runs:
        versions = {f"version of {k}": v for k, v in (run.start.get("versions") or {}).items()}
        versions |= {name: run.start.get(name) for name in ("commit", "python")}
        for name, value in {**versions, **_data(run)}.items():
            if value:
                facts.setdefault(name, {})[run.name] = str(value)
    for name, values in facts.items():
        if len(set(values.values())) > 1:
            yield Setting(name, values, {}, "other" if name == "data" else "version")


def _data(run: Run) -> dict[str, str]:
    saved = run.newest.progress.data if run.newest else None
    if saved is None and run.summary.get("data"):
        with contextlib.suppress(TypeError, KeyError, AttributeError):  # it is damaged
            saved = DataIdentity.from_json(run.summary["data"])
    return {"data": str(saved)} if saved else {}


def _dtypes(runs: Sequence[Run]) -> Iterator[Setting]:
    """Dtypes of saved arrays, whatever chose them: a column may have another optimizer state."""
    by_path: dict[str, dict[str, str]] = {}
    for run in runs:
        for path, leaf in run.newest.leaves.items() if run.newest else ():
            by_path.setdefault(path, {})[run.name] = leaf.dtype
    # One line for all arrays of a part of the state that differ alike.
    alike: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for path, dtypes in by_path.items():
        if len(set(dtypes.values())) > 1:
            part = path.split("/")[0]
            alike.setdefault((part, tuple(sorted(dtypes.items()))), []).append(path)
    for (_, pairs), paths in alike.items():
        yield Setting(f"dtype of {some_of(paths, 1)}", dict(pairs), {}, "other")
