"""A plan as JSON and in words: which strategy, why not the others, what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from research_dp.analysis.topologies import Topology
from research_dp.planning.row import Curves, Row, fastest_first
from research_dp.planning.tables import scale

_RATES = (
    *("name", "memory_bytes", "memory_rate", "inside_rate", "across_rate", "flops", "latency"),
    "sources",
)
_SHOWN_PADDING = 1e-3  # of the state
_NEGLIGIBLE = 0.02  # a smaller part of a step is not worth a sentence
_BOUNDS = {
    "compute": "compute",
    "memory": "memory traffic",
    "network inside": "the intra-node network",
    "network across": "the inter-node network",
}
_UNRANKED = (
    "No ranking by time: a CPU's rates are nominal. With --measure each step is run and ranked."
)
_NOT_JUDGED = "Not judged: whether the loss mixes examples; a run tries it before its first step."


def as_json(
    rows: Sequence[Row],
    others: Sequence[Row],
    curves: Curves,
    where: Topology,
    words: Sequence[str],
) -> dict[str, Any]:
    """A plan, variants of its fastest, sizes, and the advice; units have no prefixes."""
    return {
        "topology": {"name": where.name, "devices": len(where.devices), "hosts": where.hosts},
        "device": {name: getattr(where.chip, name) for name in _RATES},
        "available_bytes": where.memory_budget()[0],
        "strategies": {row.strategy: row.as_json() for row in rows},
        "variants": {row.strategy: row.as_json() for row in others},
        "sizes": {
            strategy: {str(devices): row.as_json() for devices, row in curve.items()}
            for strategy, curve in curves.items()
        },
        "advice": list(words),
    }


def ranked(rows: Sequence[Row], where: Topology) -> list[Row]:
    """The rows that fit, the fastest first; none where times would be those of nominal rates."""
    fitting = fastest_first(rows)
    if where.chip.platform == "cpu" and not all(row.measured_seconds for row in fitting):
        return []
    return fitting


def words(rows: Sequence[Row], where: Topology) -> list[str]:
    """What follows from a plan, the recommendation first."""
    fastest, platform = ranked(rows, where), where.chip.platform
    if fastest:
        lines = [f"Fastest that fits: {_strengths(fastest[0])}"]
        lines += [_comparison(row, fastest[0]) for row in fastest[1:]]
    elif fastest_first(rows):
        lines = [_smallest([row for row in rows if row.fits]), _UNRANKED]
    else:
        lines = ["Nothing of this fits, or its time is not known."]
    wide = [row for row in fastest if row.is_wide and platform != "cpu"]
    for file in dict.fromkeys(row.narrow_file for row in wide):
        sizes = ", ".join(
            f"{row.strategy} {_size(row.narrow_wire_bytes)} instead of {_size(row.min_wire_bytes)}"
            for row in wide
            if row.narrow_file == file
        )
        lines.append(f"With {file} fewer bytes are possible: {sizes}.")
    lines += [_obstacle(row) for row in rows if not row.fits]
    problems = [row for row in rows if row.fits and row.problem]
    lines += [f"{row.strategy} fits, but {row.problem}." for row in problems]
    padded = [(row, (row.padding_bytes or 0) / (row.state_bytes or 1)) for row in rows]
    if shown := [f"{row.strategy} {part:.1%}" for row, part in padded if part > _SHOWN_PADDING]:
        lines.append(f"Padding, where the devices do not divide a parameter: {', '.join(shown)}.")
    if fastest and platform == "gpu" and not where.are_present:
        share = (fastest[0].needed_bytes or 0) / where.chip.memory_bytes
        if share > 0.75:
            lines.append(
                f"{fastest[0].strategy} needs {share:.0%} of the memory, and JAX takes 75 % by "
                "default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92."
            )
    lines += [
        f"{row.strategy}: its time is a lower bound: of a loop of unknown length, one iteration "
        "is counted."
        for row in rows
        if row.is_lower_bound
    ]
    if len(where.devices) > 1:
        lines.append(_NOT_JUDGED)
    if platform != "cpu":
        lines += [
            "Bytes, counts and FLOPs are exact (FLOPs without those of custom kernels). "
            f"{_times(where)}"
        ]
    times = [(row.predicted_seconds, row.measured_seconds) for row in rows]
    if ratios := [predicted / real for predicted, real in times if predicted is not None and real]:
        size = f"{min(ratios):.2f} to {max(ratios):.2f} times the step's real time"
        lines.append(f"Measured here: predictions are {size}.")
    return lines


def changes(others: Sequence[Row], rows: Sequence[Row], where: Topology) -> list[str]:
    """What each variant would change beside the fastest of the rows, if there is one."""
    fastest, is_timed, lines = fastest_first(rows), bool(ranked(rows, where)), []
    for row in others:
        if not row.fits:
            lines.append(f"{row.strategy} {row.problem}.")
        elif fastest:
            lines.append(_difference(row, fastest[0], is_timed))
        else:
            lines.append(f"This fits: {_strengths(row)}")
    return lines


def summary(rows: Sequence[Row], where: Topology) -> list[str]:
    """Three lines: the fastest strategy, the others' times, and those that do not fit."""
    best, *others = fastest_first(rows)
    slower = [
        f"{row.strategy} {row.seconds / best.seconds - 1:+.0%}{_equal(row, best)}" for row in others
    ]
    refused = [f"{row.strategy} {row.problem}" for row in rows if not row.fits]
    return [
        f"Fastest of {len(rows)} strategies on {where.name}: {best.strategy}, {_ms(best)} ms a "
        f"step predicted, {_memory(best)}. {_bound(best)}",
        f"Others: {', '.join(slower) or 'none fits'}.",
        f"Not possible: {'; '.join(refused) or 'none'}.",
    ]


def _difference(row: Row, best: Row, is_timed: bool) -> str:
    if row.batch_size != best.batch_size:
        speedup = (row.examples_per_second or 0.0) / (best.examples_per_second or 1.0)
        mfu = f", MFU {row.mfu:.1%}" if row.mfu else ""
        rate = f"; {speedup:.2f} times the examples/s{mfu}" if is_timed else ""
        return (
            f"Largest batch found to fit: {row.batch_size:,} per step, {_memory(row)}{rate}. "
            "For larger ones set train.accumulation_steps."
        )
    costs, others = ((r.predicted_seconds, r.needed_bytes, r.wire_total) for r in (row, best))
    if costs == others:
        return (
            f"{row.strategy} costs what {best.strategy} does: is what it binds bound otherwise "
            "by a later file or on the command line?"
        )
    steps = f"a step of {_ms(row)} ms instead of {_ms(best)}{_equal(row, best)}, "
    time = steps if is_timed else ""
    return (
        f"{row.strategy} instead of {best.strategy}: {time}"
        f"{_size(row.needed_bytes)} instead of {_size(best.needed_bytes)}, wire bytes "
        f"{_size(row.wire_total)} instead of {_size(best.wire_total)}."
    )


def _smallest(rows: Sequence[Row]) -> str:
    """The rows with the least memory and the fewest wire bytes."""
    memory = min(row.needed_bytes or 0 for row in rows)
    leanest = ", ".join(row.strategy for row in rows if (row.needed_bytes or 0) == memory)
    text = f"Least memory: {leanest}, {_size(memory)} per device."
    if sent := [row.wire_total for row in rows if row.devices > 1 and row.wire_total is not None]:
        most = min(sent) * 1.001
        fewest = (row for row in rows if row.devices > 1 and (row.wire_total or 0.0) <= most)
        names = ", ".join(row.strategy for row in fewest)
        text += f" Fewest wire bytes: {names}, {_size(min(sent))} per device and step."
    return text


def _equal(row: Row, best: Row) -> str:
    return " (equal within the range)" if row.is_as_fast_as(best) else ""


def _times(where: Topology) -> str:
    """What the predicted times are worth."""
    if known := where.chip.calibration:
        return f"Times are estimates, {known.by}; eight of ten are within {known.spread:.0%}."
    name = where.chip.name
    return (
        f"Times are estimates from vendors' rates: {name} is not calibrated, a step takes longer."
    )


def _strengths(row: Row) -> str:
    rate = ""
    if row.tokens_per_second and row.mfu:
        rate = f" ({row.tokens_per_second:,.0f} tokens/s, MFU {row.mfu:.1%})"
    return f"{row.strategy}, {_ms(row)} ms per step{rate}, {_memory(row)}. {_bound(row)}"


def _comparison(row: Row, best: Row) -> str:
    excess = row.seconds / best.seconds - 1
    slower = f"{excess:.0%} slower" if excess < 1 else f"{excess + 1:.1f} times as long"
    slower = "as fast" if excess < _NEGLIGIBLE else slower
    if row.is_as_fast_as(best):
        slower = f"equal within the range ({excess:+.0%})"
    return f"{row.strategy}: {slower}, {_ms(row)} ms, {_size(row.needed_bytes)}. {_bound(row)}"


def _bound(row: Row) -> str:
    """What bounds a step, and its exposed communication."""
    if row.bound is None or row.predicted_parts is None:
        return "Its bound is not known."
    exposed = row.predicted_parts["exposed"]
    waits = row.predicted_seconds and exposed / row.predicted_seconds > _NEGLIGIBLE
    wait = f"; {exposed * 1e3:.1f} ms of communication are exposed" if waits else ""
    latency = row.predicted_parts.get("latency", 0.0)
    if waits and latency > 0.1 * exposed:
        group = max(row.collectives or (), key=lambda c: c.count * c.devices).devices  # most hops
        wait += f", {latency * 1e3:.1f} of them for latency in groups of {group:,} devices"
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
    """The peak memory of a row, and its limit."""
    limit = row.available_bytes
    return f"{_size(row.needed_bytes)} per device{f' (limit {_size(limit)})' if limit else ''}"


def _size(nbytes: float | None) -> str:
    unit, name = scale([nbytes])
    return f"{(nbytes or 0) / unit:.2f} {name}"
