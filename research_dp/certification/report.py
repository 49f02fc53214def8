"""A certificate as text and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from research_dp.certification.certificate import Certificate
from research_dp.console import table

_STEPS, _LEAVES = 8, 12
_WIDTH = 120
_VERDICTS = {True: "holds", False: "FAILS", None: "-"}


def parts(certificate: Certificate) -> Iterator[Any]:
    """Text and tables, in order."""
    if certificate.steps:
        yield _steps(certificate)
        yield _leaves(certificate)
    checks = table(certificate.title, "check", "", "found")
    for check in certificate.checks:
        checks.add_row(check.name, _VERDICTS[check.passed], check.message)
    yield checks
    yield textwrap.fill(certificate.bound, _WIDTH)
    if certificate.not_judged:
        leaves = ", ".join(certificate.not_judged)
        yield textwrap.fill(f"Not judged, because noise could hide a bug: {leaves}.", _WIDTH)
    if certificate.certified:
        yield f"CERTIFIED: {certificate.title}."
        return
    yield f"NOT CERTIFIED: {certificate.title}."
    yield f"First difference: {certificate.first_difference}."
    yield f"Cause: {certificate.cause or 'not found; only the first difference is known'}."


def _steps(certificate: Certificate) -> Table:
    """Some of the steps, the first and the last among them."""
    shown = table(
        "Steps from the oracle's state; differences in ULPs",
        *("step:", "loss:", "oracle's:", "apart:", "in a row:", "gradient norm:", "apart:"),
        *("worst gradient:", "relative:", "at"),
    )
    last = len(certificate.steps) - 1
    for i in sorted({round(i * last / (_STEPS - 1)) for i in range(_STEPS)}):
        record = certificate.steps[i]
        worst = record.worst("gradient")
        shown.add_row(
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
    return shown


def _leaves(certificate: Certificate) -> Table:
    """The arrays nearest to their bounds, each at its worst step."""
    worst = sorted(certificate.worst().values(), key=lambda d: -d.excess)
    shown = table(
        f"Arrays nearest to their bounds, of {len(worst)}, each at its worst step",
        *("array", "step:", "ULPs:", "bound:", "relative:"),
    )
    for d in (d for d in worst[:_LEAVES] if d.excess):
        numbers = (f"{d.gap.ulps:.3g}", f"{d.bound:.3g}", f"{d.gap.relative:.1e}")
        shown.add_row(d.name, str(d.step), *numbers)
    return shown
