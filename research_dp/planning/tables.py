"""A plan as tables, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from research_dp.analysis.topologies import Topology
from research_dp.console import table
from research_dp.distributed.mesh import sizes_text
from research_dp.planning import memory_budget
from research_dp.planning.estimate import Row


def tables(rows: Sequence[Row], where: Topology) -> list[Any]:
    """Memory, a step's time and traffic, and collectives, of all rows."""
    return [memory(rows, where), step(rows), collectives(rows)]


def memory(rows: Sequence[Row], where: Topology) -> Table:
    """What each strategy keeps on a device."""
    unit, name = scale(row.needed_bytes or row.state_bytes for row in rows)
    shown = table(
        f"Memory of a device in {name}; it has to fit in: {memory_budget.told(where)}",
        "strategy", "mesh", "parameters:", "optimizer:", "batch:", "temporary:", "needed:",
        "of:", "fits",
    )  # fmt: skip
    for row in rows:
        mesh = sizes_text(row.mesh or {})
        held = (row.params_bytes, row.opt_bytes, row.batch_bytes, row.temp_bytes, row.needed_bytes)
        sizes = (_number(nbytes, unit, ",.3f") for nbytes in (*held, row.available_bytes))
        fits = "yes" if row.fits else (row.problem or "").partition(":")[0]
        shown.add_row(row.strategy, mesh, *sizes, fits)
    return shown


def step(rows: Sequence[Row]) -> Table:
    """What each strategy sends, and how long its step takes."""
    measured = any(row.measured_seconds for row in rows)
    more = ("measured ms:", "error:") if measured else ()
    unit, name = _sent(rows)
    shown = table(
        f"A step: {name} that a device sends, and the least it must; ms predicted from vendors' "
        f"rates{', MFU and tokens/s as measured' if measured else ''}",
        "strategy", f"{name} sent:", "least:", "ratio:", "times:", "hidden:", "TFLOP:", "compute:",
        "memory:", "inside:", "across:", "waits:", "step ms:", "bound", "MFU:", "tokens/s:",
        *more, "compiled in s:",
    )  # fmt: skip
    for row in rows:
        sent = row.wire_bytes["total"] if row.wire_bytes else None
        times = sum(one["count"] for one in row.collectives) if row.collectives else None
        parts = row.predicted_parts or {}
        measures = (_number(row.measured_seconds, 1e-3, ".2f"), _number(error(row), 1, "+.0%"))
        shown.add_row(
            row.strategy,
            _number(sent, unit, ",.3f"),
            _number(row.min_wire_bytes, unit, ",.3f"),
            _number(row.wire_ratio, 1, ".3f"),
            _number(times, 1, ".0f"),
            _number(row.hidden_fraction, 1, ".0%"),
            _number(row.flops, 1e12, ".4g"),
            *(_number(parts.get(part), 1e-3, ".2f") for part in _PARTS),
            (">= " if row.is_lower_bound else "") + _number(row.predicted_seconds, 1e-3, ".2f"),
            row.bound or "",
            _number(row.mfu, 1, ".1%"),
            _number(row.tokens_per_second, 1, ",.0f"),
            *(measures if measured else ()),
            _number(row.compile_seconds, 1, ".0f"),
        )
    return shown


_PARTS = ("compute", "memory", "network_inside", "network_across", "exposed")


def collectives(rows: Sequence[Row]) -> Table:
    """What each strategy sends, by kind, axis and dtype."""
    unit, name = _sent(rows)
    columns = ("strategy", "kind", "over", "dtype", "times:", f"{name} sent:")
    shown = table("Collectives a step", *columns)
    for row in rows:
        first = row.strategy
        for one in row.collectives or ():
            instead = f" (for {one['purpose']})" if one["purpose"] != one["kind"] else ""
            cells = (one["kind"] + instead, one["axes"], one["dtype"], f"{one['count']}")
            shown.add_row(first, *cells, _number(one["wire_bytes"], unit, ",.4f"))
            first = ""
    return shown


def error(row: Row) -> float | None:
    """How much the prediction is above (below: negative) what was measured, as a part of it."""
    if not row.measured_seconds or row.predicted_seconds is None:
        return None
    return row.predicted_seconds / row.measured_seconds - 1


def as_json(
    rows: Sequence[Row], others: Sequence[Row], where: Topology, words: Sequence[str]
) -> dict[str, Any]:
    """A plan as JSON; bytes, seconds, and rates are in their units, without prefixes.

    Args:
        rows: The strategies.
        others: Variants of the fastest.
        where: The devices.
        words: The advice.
    """
    chip = dataclasses.asdict(where.chip)
    return {
        "topology": {"name": where.name, "devices": len(where.devices), "hosts": where.hosts},
        "device": {name: chip[name] for name in _RATES},
        "available_bytes": memory_budget.available_bytes(where),
        "strategies": {row.strategy: row.as_json() for row in rows},
        "variants": {row.strategy: row.as_json() for row in others},
        "advice": list(words),
    }


_RATES = ("name", "memory_bytes", "memory_rate", "inside_rate", "across_rate", "flops", "sources")


def scale(sizes: Iterable[int | float | None]) -> tuple[float, str]:
    """The unit in which the largest of these bytes is at least 0.1: (bytes, name)."""
    largest = max((size or 0 for size in sizes), default=0)
    return next((unit for unit in _UNITS if largest >= 0.1 * unit[0]), _UNITS[-1])


_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def _sent(rows: Sequence[Row]) -> tuple[float, str]:
    return scale(row.wire_total or row.min_wire_bytes for row in rows)


def _number(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else f"{value / unit:{form}}"
