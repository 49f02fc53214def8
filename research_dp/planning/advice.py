"""A plan in words: which strategy, why not the others, what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from research_dp.analysis.topologies import Topology
from research_dp.planning.row import Row, fastest_first
from research_dp.planning.tables import scale

_NEGLIGIBLE = 0.02  # a smaller part of a step is not worth a sentence
_BOUNDS = {
    "compute": "compute",
    "memory": "memory traffic",
    "network inside": "the network inside a host or slice",
    "network across": "the network between hosts or slices",
}


def words(rows: Sequence[Row], where: Topology) -> list[str]:
    """What follows from a plan, the most important first."""
    ranked = fastest_first(rows)
    if ranked:
        lines = [f"Fastest that fits: {_strengths(ranked[0])}"]
        lines += [_comparison(row, ranked[0]) for row in ranked[1:]]
    else:
        lines = ["Nothing of this fits, or its time is not known."]
    lines += [_obstacle(row) for row in rows if not row.fits]
    problems = [row for row in rows if row.fits and row.problem]
    lines += [f"{row.strategy} fits, but {row.problem}." for row in problems]
    if ranked and where.chip.platform == "gpu" and not where.are_present:
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
        if row.timing and row.timing.is_lower_bound
    ]
    return [*lines, *_accuracy(rows, where)]


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
    assert row.setup and best.setup
    if row.setup.batch_size != best.setup.batch_size:
        rates = [r.timing and r.timing.examples_per_second for r in (row, best)]
        speedup = (rates[0] or 0.0) / (rates[1] or 1.0)
        mfu = f", MFU {row.timing.mfu:.1%}" if row.timing and row.timing.mfu else ""
        return (
            f"Largest batch found to fit: {row.setup.batch_size:,} a step, "
            f"{_memory(row)} a device; {speedup:.2f} "
            f"times the examples/s{mfu}. Larger ones with train.accumulation_steps."
        )
    costs, best_costs = (
        (r.timing and r.timing.predicted_seconds, r.needed_bytes, r.wire_total) for r in (row, best)
    )
    if costs == best_costs:
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
    rate, timing = "", row.timing
    if timing and timing.tokens_per_second and timing.mfu:
        rate = f" ({timing.tokens_per_second:,.0f} tokens/s, MFU {timing.mfu:.1%})"
    return f"{row.strategy}, {_ms(row)} ms a step{rate}, {_memory(row)} a device. {_bound(row)}"


def _comparison(row: Row, best: Row) -> str:
    excess = row.seconds / best.seconds - 1
    if excess < _NEGLIGIBLE:
        slower = "as fast"
    elif excess < 1:
        slower = f"{excess:.0%} slower"
    else:
        slower = f"{excess + 1:.1f} times as long"
    return f"{row.strategy}: {slower}, {_ms(row)} ms, {_size(row.needed_bytes)}. {_bound(row)}"


def _bound(row: Row) -> str:
    """What bounds a step, and whether it waits for the network."""
    if row.timing is None:
        return "Bound by nothing that is known."
    text = f"Bound by {_BOUNDS[row.timing.bound]}"
    exposed, predicted = row.timing.predicted_parts["exposed"], row.timing.predicted_seconds
    if predicted and exposed / predicted > _NEGLIGIBLE:
        text += f"; waits {exposed * 1e3:.1f} ms for the network"
    return text + "."


def _obstacle(row: Row) -> str:
    """Why a strategy cannot be run so, and what would help."""
    reason = f"{row.strategy} {row.problem}".rstrip(".") + "."
    if row.memory is None or row.needed_bytes is None or row.available_bytes is None:
        return reason  # it was refused, or does not compile
    if row.memory.state_fits:
        return (
            f"{reason} Its state would by itself; whether it does with fewer examples at a time, "
            "--advise tries."
        )
    return f"{reason} No batch is small enough: its state must be sharded, or over more devices."


def _accuracy(rows: Sequence[Row], where: Topology) -> list[str]:
    """How far to trust the times."""
    if where.chip.platform == "cpu":
        trust = "Rates of CPUs are nominal, of no machine in particular: compare times, no more."
    else:
        trust = (
            "Bytes and counts are exact, and FLOPs but for those of custom kernels, which are left "
            "out; times are estimates from vendors' rates."
        )
    measured = [(row.timing, row.measured_seconds) for row in rows]
    ratios = [timing.predicted_seconds / real for timing, real in measured if timing and real]
    if not ratios:
        return [trust]
    low, high = min(ratios), max(ratios)
    times = f"{low:.2f} to {high:.2f} times the step's real time"
    return [trust, f"Measured here: predictions are {times}."]


def _ms(row: Row) -> str:
    return f"{row.seconds * 1e3:.1f}"


def _memory(row: Row) -> str:
    """The bytes that a row needs, and those that are available."""
    limit = row.available_bytes
    return _size(row.needed_bytes) + ("" if limit is None else f" of {_size(limit)}")


def _size(nbytes: float | None) -> str:
    unit, name = scale([nbytes])
    return f"{(nbytes or 0) / unit:.2f} {name}"
