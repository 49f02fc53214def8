"""A plan as tables, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from research_dp.analysis.topologies import Topology
from research_dp.console import table
from research_dp.distributed.mesh import sizes_text
from research_dp.planning.memory_budget import memory_budget
from research_dp.planning.row import Row

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_PARTS = ("compute", "memory", "network_inside", "network_across", "exposed")
_RATES = ("name", "memory_bytes", "memory_rate", "inside_rate", "across_rate", "flops", "sources")


def tables(rows: Sequence[Row], where: Topology) -> list[Table]:
    """Memory, a step's time and traffic, and collectives, of all rows."""
    return [_memory(rows, where), _step(rows), _collectives(rows)]


def _memory(rows: Sequence[Row], where: Topology) -> Table:
    unit, name = scale(row.needed_bytes or row.memory.state_bytes for row in rows if row.memory)
    shown = table(
        f"Memory of a device in {name}; it has to fit in: {memory_budget(where)[1]}",
        "strategy", "mesh", "parameters:", "optimizer:", "batch:", "temporary:", "needed:",
        "of:", "fits",
    )  # fmt: skip
    parts = ("params", "opt", "batch", "temp", "needed", "available")
    for row in rows:
        figures = row.as_json()
        cells = (format_number(figures[f"{part}_bytes"], unit, ",.3f") for part in parts)
        fits = "yes" if row.fits else (row.problem or "").partition(":")[0]
        shown.add_row(row.strategy, sizes_text(figures["mesh"] or {}), *cells, fits)
    return shown


def _step(rows: Sequence[Row]) -> Table:
    measured = any(row.measured_seconds for row in rows)
    unit, name = _wire_scale(rows)
    shown = table(
        f"A step: {name} that a device sends, and the least it must; ms predicted from vendors' "
        f"rates{', MFU and tokens/s as measured' if measured else ''}",
        "strategy", f"{name} sent:", "least:", "ratio:", "times:", "hidden:", "TFLOP:", "compute:",
        "memory:", "inside:", "across:", "waits:", "step ms:", "bound", "MFU:", "tokens/s:",
        *(("measured ms:", "error:") if measured else ()), "compiled in s:",
    )  # fmt: skip
    for row in rows:
        figures = row.as_json()
        collectives, parts = figures["collectives"], figures["predicted_parts"] or {}
        predicted = format_number(figures["predicted_seconds"], 1e-3, ".2f")
        measures = (
            format_number(row.measured_seconds, 1e-3, ".2f"),
            format_number(prediction_error(row), 1, "+.0%"),
        )
        shown.add_row(
            row.strategy,
            format_number(row.wire_total, unit, ",.3f"),
            format_number(row.min_wire_bytes, unit, ",.3f"),
            format_number(row.wire_ratio, 1, ".3f"),
            str(sum(one["count"] for one in collectives)) if collectives else "",
            format_number(figures["hidden_fraction"], 1, ".0%"),
            format_number(figures["flops"], 1e12, ".4g"),
            *(format_number(parts.get(part), 1e-3, ".2f") for part in _PARTS),
            f">= {predicted}" if figures["is_lower_bound"] else predicted,
            figures["bound"] or "",
            format_number(figures["mfu"], 1, ".1%"),
            format_number(figures["tokens_per_second"], 1, ",.0f"),
            *(measures if measured else ()),
            format_number(row.compile_seconds, 1, ".0f"),
        )
    return shown


def _collectives(rows: Sequence[Row]) -> Table:
    unit, name = _wire_scale(rows)
    columns = ("strategy", "kind", "over", "dtype", "times:", f"{name} sent:")
    shown = table("Collectives a step", *columns)
    for row in rows:
        for number, total in enumerate(row.traffic.collectives if row.traffic else ()):
            purpose = f" (for {total.purpose})" if total.purpose != total.kind else ""
            shown.add_row(
                "" if number else row.strategy,
                total.kind + purpose,
                total.axes,
                total.dtype,
                f"{total.count}",
                format_number(total.wire_bytes, unit, ",.4f"),
            )
    return shown


def prediction_error(row: Row) -> float | None:
    """By what part of the measured time the prediction is above it (below: negative)."""
    if not row.measured_seconds or row.timing is None:
        return None
    return row.timing.predicted_seconds / row.measured_seconds - 1


def as_json(
    rows: Sequence[Row], others: Sequence[Row], where: Topology, words: Sequence[str]
) -> dict[str, Any]:
    """A plan, variants of its fastest, and the advice; numbers are in units without prefixes."""
    chip = dataclasses.asdict(where.chip)
    return {
        "topology": {"name": where.name, "devices": len(where.devices), "hosts": where.hosts},
        "device": {name: chip[name] for name in _RATES},
        "available_bytes": memory_budget(where)[0],
        "strategies": {row.strategy: row.as_json() for row in rows},
        "variants": {row.strategy: row.as_json() for row in others},
        "advice": list(words),
    }


def scale(sizes: Iterable[int | float | None]) -> tuple[float, str]:
    """The unit in which the largest of these bytes is at least 0.1: (bytes, name)."""
    largest = max((size or 0 for size in sizes), default=0)
    return next((unit for unit in _UNITS if largest >= 0.1 * unit[0]), _UNITS[-1])


def _wire_scale(rows: Sequence[Row]) -> tuple[float, str]:
    return scale(row.wire_total or row.min_wire_bytes for row in rows)


def format_number(value: float | None, unit: float, form: str) -> str:
    """A number in a unit; '' where it is unknown."""
    return "" if value is None else f"{value / unit:{form}}"
