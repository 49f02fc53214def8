"""A plan in words: which strategy, why not the others, what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from research_dp.analysis.topologies import Topology
from research_dp.planning.estimate import Row, fastest_first
from research_dp.planning.tables import scale

_MUCH = 0.02  # a smaller part of a step is not worth a sentence


def words(rows: Sequence[Row], where: Topology) -> list[str]:
    """What follows from a plan, the most important first.

    Args:
        rows: The plan.
        where: The devices.
    """
    ranked = fastest_first(rows)
    said = [_winner(ranked[0])] if ranked else ["Nothing of this fits, or its time is not known."]
    said += [_slower(row, ranked[0]) for row in ranked[1:]]
    said += [_obstacle(row) for row in rows if not row.fits]
    said += [f"{row.strategy} fits, but {row.problem}." for row in rows if row.fits and row.problem]
    if ranked and where.chip.platform == "gpu" and not where.are_present:
        share = (ranked[0].needed_bytes or 0) / where.chip.memory_bytes
        if share > 0.75:
            said.append(
                f"{ranked[0].strategy} needs {share:.0%} of the memory, and JAX takes 75 % unless "
                "told otherwise: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92."
            )
    said += [
        f"{row.strategy}: its time is a lower bound, for one turn is counted of a loop of unknown "
        "length."
        for row in rows
        if row.is_lower_bound
    ]
    return [*said, *_truth(rows, where)]


def changes(others: Sequence[Row], ranked: Sequence[Row]) -> list[str]:
    """What variants would change, each beside the fastest of a plan.

    Args:
        others: The variants.
        ranked: The plan's strategies that fit, the fastest first.
    """
    if not ranked:
        return [
            _winner(row).replace("Fastest that fits", "This fits")
            if row.fits
            else f"{row.strategy} {row.problem}."
            for row in others
        ]
    said, best = [], ranked[0]
    for row in others:
        if not row.fits:
            said.append(f"{row.strategy} {row.problem}.")
        elif row.batch_size != best.batch_size:
            rates = (row.examples_per_second or 0.0) / (best.examples_per_second or 1.0)
            mfu = f", MFU {row.mfu:.1%}" if row.mfu else ""
            said.append(
                f"Largest batch found to fit: {row.batch_size:,} a step, "
                f"{_room(row)} a device; {rates:.2f} "
                f"times the examples/s{mfu}. Larger ones with train.accumulation_steps."
            )
        elif _costs(row) == _costs(best):
            said.append(
                f"{row.strategy} costs what {best.strategy} does: is what it binds bound otherwise "
                "by a later file or on the command line?"
            )
        else:
            said.append(
                f"{row.strategy} instead of {best.strategy}: a step of {_ms(row)} ms instead of "
                f"{_ms(best)}, {_size(row.needed_bytes)} instead of {_size(best.needed_bytes)}, "
                f"{_size(row.wire_total)} sent instead of {_size(best.wire_total)}."
            )
    return said


def _costs(row: Row) -> tuple[float | None, ...]:
    return row.predicted_seconds, row.needed_bytes, row.wire_total


def _winner(row: Row) -> str:
    rate = ""
    if row.tokens_per_second and row.mfu:
        rate = f" ({row.tokens_per_second:,.0f} tokens/s, MFU {row.mfu:.1%})"
    return (
        f"Fastest that fits: {row.strategy}, {_ms(row)} ms a step{rate}, "
        f"{_room(row)} a device. {_why(row)}"
    )


def _slower(row: Row, best: Row) -> str:
    more = _seconds(row) / _seconds(best) - 1
    if more < _MUCH:
        much = "as fast"
    elif more < 1:
        much = f"{more:.0%} slower"
    else:
        much = f"{more + 1:.1f} times as long"
    return f"{row.strategy}: {much}, {_ms(row)} ms, {_size(row.needed_bytes)}. {_why(row)}"


def _why(row: Row) -> str:
    """What bounds a step, and what else it waits for."""
    parts = row.predicted_parts or {}
    text = f"Bound by {_BOUNDS[row.bound or '']}"
    waits = parts.get("exposed", 0.0)
    if row.predicted_seconds and waits / row.predicted_seconds > _MUCH:
        text += f"; waits {waits * 1e3:.1f} ms for the network"
    return text + "."


_BOUNDS = {
    "": "nothing that is known",
    "compute": "compute",
    "memory": "memory traffic",
    "network inside": "the network inside a host or slice",
    "network across": "the network between hosts or slices",
}


def _obstacle(row: Row) -> str:
    """Why a strategy cannot be run so, and what would help."""
    told = f"{row.strategy} {row.problem}".rstrip(".") + "."
    if row.needed_bytes is None or row.state_bytes is None or row.available_bytes is None:
        return told  # it was refused, or does not compile
    if row.state_bytes <= row.available_bytes:
        return (
            f"{told} Its state would by itself; whether it does with fewer examples at a time, "
            "--advise tries."
        )
    return f"{told} No batch is small enough: its state must be sharded, or over more devices."


def _truth(rows: Sequence[Row], where: Topology) -> list[str]:
    """How far to trust the times."""
    if where.chip.platform == "cpu":
        said = ["Rates of CPUs are nominal, of no machine in particular: compare times, no more."]
    else:
        said = [
            "Bytes and counts are exact, and FLOPs but for those of custom kernels, which are left "
            "out; times are estimates from vendors' rates."
        ]
    errors = [
        row.predicted_seconds / row.measured_seconds
        for row in rows
        if row.measured_seconds and row.predicted_seconds
    ]
    if errors:
        said.append(
            f"Measured here: predictions are {min(errors):.2f} to {max(errors):.2f} times the "
            "step's real time."
        )
    return said


def _seconds(row: Row) -> float:
    """A step's time: measured, if it was."""
    return row.measured_seconds or row.predicted_seconds or 0.0


def _ms(row: Row) -> str:
    return f"{_seconds(row) * 1e3:.1f}"


def _room(row: Row) -> str:
    """What it needs, and of how much."""
    limit = "" if row.available_bytes is None else f" of {_size(row.available_bytes)}"
    return f"{_size(row.needed_bytes)}{limit}"


def _size(nbytes: float | None) -> str:
    unit, name = scale([nbytes])
    return f"{(nbytes or 0) / unit:.2f} {name}"


def in_three_lines(rows: Sequence[Row], where: Topology) -> list[str]:
    """Which strategy, what the others would take, and which of them cannot be taken.

    Args:
        rows: At least one of them fits.
        where: The devices.
    """
    best, *others = fastest_first(rows)
    slower = [f"{row.strategy} {_seconds(row) / _seconds(best) - 1:+.0%}" for row in others]
    stopped = [f"{row.strategy} {row.problem}" for row in rows if not row.fits]
    return [
        f"Of {len(rows)} strategies on {where.name}: {best.strategy}, {_ms(best)} ms a step "
        f"predicted, {_room(best)}. {_why(best)}",
        f"Others: {', '.join(slower) or 'none fits'}.",
        f"Not possible: {'; '.join(stopped) or 'none'}.",
    ]
