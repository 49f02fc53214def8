"""A plan as tables, as JSON, and in words: which strategy, why not the others, what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from research_dp.analysis.topologies import Topology
from research_dp.console import table
from research_dp.distributed.mesh import sizes_text
from research_dp.planning.row import Row, fastest_first

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_PARTS = ("compute", "memory", "network_inside", "network_across", "exposed")
_RATES = ("name", "memory_bytes", "memory_rate", "inside_rate", "across_rate", "flops", "sources")
_NEGLIGIBLE = 0.02  # a smaller part of a step is not worth a sentence
_BOUNDS = {
    "compute": "compute",
    "memory": "memory traffic",
    "network inside": "the network inside a host or slice",
    "network across": "the network between hosts or slices",
}


def tables(rows: Sequence[Row], where: Topology) -> list[Table]:
    """Memory, a step's time and traffic, and collectives, of all rows."""
    sent = scale(row.wire_total or row.min_wire_bytes for row in rows)
    return [_memory_table(rows, where), _step_table(rows, *sent), _collectives_table(rows, *sent)]


def _memory_table(rows: Sequence[Row], where: Topology) -> Table:
    unit, name = scale(row.needed_bytes or row.state_bytes for row in rows)
    shown = table(
        f"Memory of a device in {name}; it has to fit in: {where.memory_budget()[1]}",
        "strategy", "mesh", "parameters:", "optimizer:", "batch:", "temporary:", "needed:",
        "of:", "fits",
    )  # fmt: skip
    for row in rows:
        parts = ("params", "opt", "batch", "temp", "needed", "available")
        cells = (format_number(getattr(row, f"{part}_bytes"), unit, ",.3f") for part in parts)
        fits = "yes" if row.fits else (row.problem or "").partition(":")[0]
        shown.add_row(row.strategy, sizes_text(row.mesh or {}), *cells, fits)
    return shown


def _step_table(rows: Sequence[Row], unit: float, name: str) -> Table:
    measured = any(row.measured_seconds for row in rows)
    shown = table(
        f"A step: {name} that a device sends, and the least it must; ms predicted from vendors' "
        f"rates{', MFU and tokens/s as measured' if measured else ''}",
        "strategy", f"{name} sent:", "least:", "ratio:", "times:", "hidden:", "TFLOP:", "compute:",
        "memory:", "inside:", "across:", "waits:", "step ms:", "bound", "MFU:", "tokens/s:",
        *(("measured ms:", "error:") if measured else ()), "compiled in s:",
    )  # fmt: skip
    for row in rows:
        parts = row.predicted_parts or {}
        predicted = format_number(row.predicted_seconds, 1e-3, ".2f")
        shown.add_row(
            row.strategy,
            format_number(row.wire_total, unit, ",.3f"),
            format_number(row.min_wire_bytes, unit, ",.3f"),
            format_number(row.wire_ratio, 1, ".3f"),
            str(sum(total.count for total in row.collectives)) if row.collectives else "",
            format_number(row.hidden_fraction, 1, ".0%"),
            format_number(row.flops, 1e12, ".4g"),
            *(format_number(parts.get(part), 1e-3, ".2f") for part in _PARTS),
            f">= {predicted}" if row.is_lower_bound else predicted,
            row.bound or "",
            format_number(row.mfu, 1, ".1%"),
            format_number(row.tokens_per_second, 1, ",.0f"),
            *([format_number(row.measured_seconds, 1e-3, ".2f")] if measured else ()),
            *([format_number(prediction_error(row), 1, "+.0%")] if measured else ()),
            format_number(row.compile_seconds, 1, ".0f"),
        )
    return shown


def _collectives_table(rows: Sequence[Row], unit: float, name: str) -> Table:
    columns = ("strategy", "kind", "over", "dtype", "times:", f"{name} sent:")
    shown = table("Collectives a step", *columns)
    for row in rows:
        for number, total in enumerate(row.collectives or ()):
            purpose = f" (for {total.purpose})" if total.purpose != total.kind else ""
            strategy, kind = "" if number else row.strategy, total.kind + purpose
            sent = format_number(total.wire_bytes, unit, ",.4f")
            shown.add_row(strategy, kind, total.axes, total.dtype, f"{total.count}", sent)
    return shown


def prediction_error(row: Row) -> float | None:
    """By what part of the measured time the prediction is above it (below: negative)."""
    if not row.measured_seconds or row.predicted_seconds is None:
        return None
    return row.predicted_seconds / row.measured_seconds - 1


def as_json(
    rows: Sequence[Row], others: Sequence[Row], where: Topology, words: Sequence[str]
) -> dict[str, Any]:
    """A plan, variants of its fastest, and the advice; numbers are in units without prefixes."""
    return {
        "topology": {"name": where.name, "devices": len(where.devices), "hosts": where.hosts},
        "device": {name: getattr(where.chip, name) for name in _RATES},
        "available_bytes": where.memory_budget()[0],
        "strategies": {row.strategy: row.as_json() for row in rows},
        "variants": {row.strategy: row.as_json() for row in others},
        "advice": list(words),
    }


def scale(sizes: Iterable[int | float | None]) -> tuple[float, str]:
    """The unit in which the largest of these bytes is at least 0.1: (bytes, name)."""
    largest = max((size or 0 for size in sizes), default=0)
    return next((unit for unit in _UNITS if largest >= 0.1 * unit[0]), _UNITS[-1])


def format_number(value: float | None, unit: float, form: str) -> str:
    """A number in a unit; '' where it is unknown."""
    return "" if value is None else f"{value / unit:{form}}"


def words(rows: Sequence[Row], where: Topology) -> list[str]:
    """What follows from a plan, the most important first."""
    ranked, platform = fastest_first(rows), where.chip.platform
    lines = ["Nothing of this fits, or its time is not known."]
    if ranked:
        lines = [f"Fastest that fits: {_strengths(ranked[0])}"]
        lines += [_comparison(row, ranked[0]) for row in ranked[1:]]
    lines += [_obstacle(row) for row in rows if not row.fits]
    problems = [row for row in rows if row.fits and row.problem]
    lines += [f"{row.strategy} fits, but {row.problem}." for row in problems]
    if ranked and platform == "gpu" and not where.are_present:
        share = (ranked[0].needed_bytes or 0) / where.chip.memory_bytes
        if share > 0.75:
            lines.append(
                f"{ranked[0].strategy} needs {share:.0%} of the memory, and JAX takes 75 % by "
                "default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92."
            )
    lines += [
        f"{row.strategy}: its time is a lower bound: of a loop of unknown length, one iteration "
        "is counted."
        for row in rows
        if row.is_lower_bound
    ]
    if platform == "cpu":
        lines += ["Rates of CPUs are nominal, of no machine in particular: compare times, no more."]
    else:
        lines += [
            "Bytes and counts are exact, and FLOPs but for those of custom kernels, which are left "
            "out; times are estimates from vendors' rates."
        ]
    times = [(row.predicted_seconds, row.measured_seconds) for row in rows]
    if ratios := [predicted / real for predicted, real in times if predicted is not None and real]:
        size = f"{min(ratios):.2f} to {max(ratios):.2f} times the step's real time"
        lines.append(f"Measured here: predictions are {size}.")
    return lines


def changes(others: Sequence[Row], ranked: Sequence[Row]) -> list[str]:
    """What each variant would change beside the first of the ranked strategies, if there is one."""
    lines = []
    for row in others:
        if not row.fits:
            lines.append(f"{row.strategy} {row.problem}.")
        elif ranked:
            lines.append(_difference(row, ranked[0]))
        else:
            lines.append(f"This fits: {_strengths(row)}")
    return lines


def summary(rows: Sequence[Row], where: Topology) -> list[str]:
    """Three lines: the fastest strategy, the others' times, and those that do not fit."""
    best, *others = fastest_first(rows)
    slower = [f"{row.strategy} {row.seconds / best.seconds - 1:+.0%}" for row in others]
    refused = [f"{row.strategy} {row.problem}" for row in rows if not row.fits]
    return [
        f"Fastest of {len(rows)} strategies on {where.name}: {best.strategy}, {_ms(best)} ms a "
        f"step predicted, {_memory(best)}. {_bound(best)}",
        f"Others: {', '.join(slower) or 'none fits'}.",
        f"Not possible: {'; '.join(refused) or 'none'}.",
    ]


def _difference(row: Row, best: Row) -> str:
    if row.batch_size != best.batch_size:
        speedup = (row.examples_per_second or 0.0) / (best.examples_per_second or 1.0)
        mfu = f", MFU {row.mfu:.1%}" if row.mfu else ""
        return (
            f"Largest batch found to fit: {row.batch_size:,} a step, {_memory(row)} a device; "
            f"{speedup:.2f} times the examples/s{mfu}. Larger ones with train.accumulation_steps."
        )
    costs, others = ((r.predicted_seconds, r.needed_bytes, r.wire_total) for r in (row, best))
    if costs == others:
        return (
            f"{row.strategy} costs what {best.strategy} does: is what it binds bound otherwise "
            "by a later file or on the command line?"
        )
    return (
        f"{row.strategy} instead of {best.strategy}: a step of {_ms(row)} ms instead of "
        f"{_ms(best)}, {_size(row.needed_bytes)} instead of {_size(best.needed_bytes)}, "
        f"{_size(row.wire_total)} sent instead of {_size(best.wire_total)}."
    )


def _strengths(row: Row) -> str:
    rate = ""
    if row.tokens_per_second and row.mfu:
        rate = f" ({row.tokens_per_second:,.0f} tokens/s, MFU {row.mfu:.1%})"
    return f"{row.strategy}, {_ms(row)} ms a step{rate}, {_memory(row)} a device. {_bound(row)}"


def _comparison(row: Row, best: Row) -> str:
    excess = row.seconds / best.seconds - 1
    slower = f"{excess:.0%} slower" if excess < 1 else f"{excess + 1:.1f} times as long"
    slower = "as fast" if excess < _NEGLIGIBLE else slower
    return f"{row.strategy}: {slower}, {_ms(row)} ms, {_size(row.needed_bytes)}. {_bound(row)}"


def _bound(row: Row) -> str:
    """What bounds a step, and whether it waits for the network."""
    if row.bound is None or row.predicted_parts is None:
        return "Bound by nothing that is known."
    exposed = row.predicted_parts["exposed"]
    waits = row.predicted_seconds and exposed / row.predicted_seconds > _NEGLIGIBLE
    wait = f"; waits {exposed * 1e3:.1f} ms for the network" if waits else ""
    return f"Bound by {_BOUNDS[row.bound]}{wait}."


def _obstacle(row: Row) -> str:
    """Why a strategy cannot be run so, and what would help."""
    reason = f"{row.strategy} {row.problem}".rstrip(".") + "."
    if row.needed_bytes is None or row.available_bytes is None:
        return reason  # it was refused, or does not compile
    if row.state_fits:
        return (
            f"{reason} Its state would by itself; whether it does with fewer examples at a time, "
            "a plan with `advise` tries."
        )
    return f"{reason} No batch is small enough: its state must be sharded, or over more devices."


def _ms(row: Row) -> str:
    return f"{row.seconds * 1e3:.1f}"


def _memory(row: Row) -> str:
    """The bytes that a row needs, and those that are available."""
    limit = row.available_bytes
    return _size(row.needed_bytes) + ("" if limit is None else f" of {_size(limit)}")


def _size(nbytes: float | None) -> str:
    unit, name = scale([nbytes])
    return f"{(nbytes or 0) / unit:.2f} {name}"
