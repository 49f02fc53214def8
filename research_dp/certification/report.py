"""A certificate as it is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from research_dp.certification.certificate import BOUND, Certificate, StepRecord
from research_dp.console import table

_STEPS, _LEAVES = 8, 12
_WIDTH = 120
_VERDICTS = {True: "holds", False: "FAILS", None: "-"}


def parts(done: Certificate) -> Iterator[Any]:
    """Text and tables, in order."""
    if done.steps:
        yield _steps(done)
        yield _leaves(done)
    shown = table(done.title, "check", "", "found")
    for check in done.checks:
        shown.add_row(check.what, _VERDICTS[check.right], check.told)
    yield shown
    yield textwrap.fill(BOUND, _WIDTH)
    if done.unjudged:
        told = f"Not judged, for a bug could hide in their noise: {', '.join(done.unjudged)}."
        yield textwrap.fill(told, _WIDTH)
    if done.certified:
        yield f"CERTIFIED: {done.title}."
        return
    yield f"NOT CERTIFIED: {done.title}."
    yield f"First difference: {done.first}."
    yield f"Cause: {done.cause or 'not found; what differs first is all that is known'}."


def _steps(done: Certificate) -> Table:
    """A few of the steps, the first and the last among them."""
    shown = table(
        "Steps from the oracle's state; differences in ULPs",
        *("step:", "loss:", "oracle's:", "apart:", "in a row:", "gradient norm:", "apart:"),
        *("worst gradient:", "relative:", "at"),
    )
    last = len(done.steps) - 1
    chosen = sorted({round(i * last / (_STEPS - 1)) for i in range(_STEPS)})
    for record in (done.steps[i] for i in chosen):
        shown.add_row(*_row(record))
    return shown


def _row(record: StepRecord) -> tuple[str, ...]:
    worst = record.worst("gradient")
    return (
        str(record.step),
        f"{record.loss:.6f}",
        f"{record.expected_loss:.6f}",
        f"{record.worst('loss').gap.ulps:.3g}",
        f"{record.worst('loss, in a row').gap.ulps:.3g}",
        f"{record.norm:.6f}",
        f"{record.worst('gradient norm').gap.ulps:.3g}",
        f"{worst.gap.ulps:.3g}",
        f"{worst.gap.relative:.1e}",
        worst.leaf,
    )


def _leaves(done: Certificate) -> Table:
    """The arrays nearest to their bounds, each at its worst step."""
    worst = sorted(done.worst().values(), key=lambda d: -d.excess)
    shown = table(
        f"Arrays nearest to their bounds, of {len(worst)}, each at its worst step",
        *("array", "step:", "ULPs:", "bound:", "relative:"),
    )
    for d in (d for d in worst[:_LEAVES] if d.excess):
        shown.add_row(
            d.name, str(d.step), f"{d.gap.ulps:.3g}", f"{d.bound:.3g}", f"{d.gap.relative:.1e}"
        )
    return shown
