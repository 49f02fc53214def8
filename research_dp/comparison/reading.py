"""Reads the folders of runs, which may be damaged, of another version, or written to meanwhile."""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.analysis import program_cost
from research_dp.comparison.runs import Columns, Run, Wire
from research_dp.errors import UsageError, first_line
from research_dp.runs import files
from research_dp.runs.facts import FORMAT
from research_dp.runs.status import status_of
from research_dp.types import Bound

_MOST_TEXT = 2**30  # bytes of a program's text
# What a comparison uses of `summary.json`; what has another type is not read.
_SUMMARY: dict[str, type] = {
    **{"step": int, "devices": int, "strategy": str, "params_fingerprint": str},
    **{"steps_per_second": float, "seconds": dict, "warnings": list, "data": dict},
}


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders, named by the parts of their paths that tell them apart.

    UsageError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"{folder} is given twice.")
    return [read_run(*pair) for pair in zip(names(folders), folders, strict=True)]


def names(folders: Sequence[Path]) -> list[str]:
    """A unique name of each folder: its last part, or as many as it takes."""
    paths = [folder.absolute().parts for folder in folders]
    found: list[str] = []
    for length in range(1, max(map(len, paths), default=0) + 1):
        found = [_printable(str(Path(*path[-length:]))) for path in paths]
        if len(set(found)) == len(found):
            break
    return found


def _printable(name: str) -> str:
    """A name without what would move a terminal's cursor, or end a line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def read_run(name: str, folder: Path) -> Run:
    """Reads one folder, which a run may be writing to."""
    status = status_of(folder)
    if status.state == "no run":
        return Run(name, folder, status)
    written, summary = (_read_json(folder / file) for file in (files.FACTS, files.SUMMARY))
    facts, unknown = (written, []) if _are_facts(written) else ({}, [])
    if written and not facts:
        unknown.append(f"{name}: its {files.FACTS} is damaged, or of another version; not read.")
    elif not written:
        unknown.append(f"{name}: it has no {files.FACTS}, as runs of earlier versions.")
    # That of an earlier end is not of a run that was continued.
    summary = _summary(summary) if status.state == "done" else {}
    wire = None
    try:
        wire = _wire(folder / files.PROGRAM, facts["mesh"]) if facts else None
    except FileNotFoundError:
        why = (facts["program"] or {}).get("problem") or "its program is not in its folder"
        unknown.append(f"{name}: the bytes that it sends are not known: {why}.")
    except _UNREADABLE as error:
        unknown.append(f"{name}: the bytes that it sends are not known: {first_line(error)}.")
    bindings = {
        key: Bound(*(fields[field] for field in Bound._fields))
        for key, fields in facts.get("bindings", {}).items()
    }
    records = _records(folder / files.RECORDS)
    return Run(name, folder, status, facts, summary, records, bindings, wire, unknown)


# Of a damaged program, or one that does not fit its mesh.
_UNREADABLE = (OSError, EOFError, LookupError, NotImplementedError, ValueError, zlib.error)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return files.read_json(file.read_bytes())
    except OSError:
        return {}


def _are_facts(facts: Mapping[str, Any]) -> bool:
    """Whether these are facts as `RunFacts` writes them."""
    bindings, starts = facts.get("bindings"), facts.get("starts")
    return (
        facts.get("format") == FORMAT
        and isinstance(facts.get("strategy"), str)
        and isinstance(facts.get("algorithm"), str | None)
        and all(_are_sizes(facts.get(key)) for key in ("mesh", "bytes_per_device"))
        and isinstance(facts.get("program"), dict | None)
        and isinstance(bindings, dict)
        and all(map(_is_bound, bindings.values()))
        and isinstance(starts, list)
        and all(isinstance(x, dict) and _are_versions(x.get("versions")) for x in starts)
    )


def _is_bound(fields: Any) -> bool:
    types = {"value": str, "place": str | None, "of_strategy": bool | None}
    has_all = isinstance(fields, dict) and fields.keys() >= types.keys()
    return has_all and all(isinstance(fields[name], kind) for name, kind in types.items())


def _are_sizes(value: Any) -> bool:
    return isinstance(value, dict) and all(type(x) is int for x in value.values())


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(x, str | None) for x in value.values())


def _summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a comparison uses, where it has its type."""
    known: dict[str, Any] = {
        k: x for k, x in summary.items() if k in _SUMMARY and isinstance(x, _SUMMARY[k])
    }
    if not all(type(x) in (int, float) for x in known.get("seconds", {}).values()):
        del known["seconds"]
    return known


def _wire(file: Path, mesh: Mapping[str, int]) -> Wire:
    content = file.read_bytes()
    return _wire_of(content, tuple(mesh.items()))


@functools.lru_cache(maxsize=64)  # the runs of a sweep share programs
def _wire_of(content: bytes, mesh: tuple[tuple[str, int], ...]) -> Wire:
    with gzip.open(io.BytesIO(content)) as inflated:
        text = inflated.read(_MOST_TEXT + 1)
    if len(text) > _MOST_TEXT:
        raise ValueError(f"{files.PROGRAM} inflates to more than {_MOST_TEXT / 2**30:g} GiB")
    totals = program_cost.wire_totals(program_cost.collectives_of(text.decode(), dict(mesh)))
    return Wire(totals["total"], totals["by_kind"], totals["by_axis"])


def _records(file: Path) -> dict[str, Columns]:
    """The records of each split as columns."""
    content = file.read_bytes() if file.is_file() else b""
    records: dict[str, list[dict[str, Any]]] = {split: [] for split in files.SPLITS}
    for record in _objects(content):
        split, step = record.get("split"), record.get("step")
        if isinstance(split, str) and split in records and type(step) is int and 0 <= step < 2**63:
            records[split].append(record)
    return {split: _columns(found) for split, found in records.items() if found}


def _objects(content: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects of lines; a line that a run is writing, or a damaged one, is left out."""
    lines = content.splitlines()
    try:  # all at once, which is several times faster
        objects = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        objects = map(files.read_json, lines)
    yield from (one for one in objects if isinstance(one, dict))


def _columns(records: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for record in records for name in record if name != "split")
    columns = {name: np.array([_number(r.get(name)) for r in records]) for name in names}
    order = np.argsort(columns["step"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def _number(value: Any) -> float:
    # An integer may be too large for a float.
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else math.nan
