"""A plan as one HTML file: memory, wire bytes and time by number of devices, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from research_dp.analysis.topologies import Topology
from research_dp.html_page import Page
from research_dp.planning.row import Curves, Row
from research_dp.planning.tables import scale, size_table, tables

_HOW = (
    "Each point was compiled. Each device keeps its examples, so that the batch grows with the "
    "devices. Hosts and slices are as large as the planned ones."
)
_TIMES = (
    "No time has stragglers or shared switches in it: with thousands of devices real "
    "steps are longer."
)
# Field of the charts' data -> the figure of a row.
_FIGURES: dict[str, Callable[[Row], float | None]] = {
    "needed": lambda row: row.needed_bytes,
    "wire": lambda row: row.wire_total,
    "step": lambda row: row.predicted_seconds,
    "exposed": lambda row: (row.predicted_parts or {}).get("exposed"),
}


def page(
    rows: Sequence[Row], curves: Curves, where: Topology, words: Sequence[str], run: str
) -> str:
    """The page of a plan for `run`, e.g. the command's gin files: one file that needs no other."""
    timed, has_sizes = where.chip.platform != "cpu", any(len(c) > 1 for c in curves.values())
    lines = _lines(curves) if has_sizes else curves
    shown = Page(f"Plan of {run} on {where.name}", lines, "strategy")
    shown.bullets(words)
    shown.heading("By number of devices" if has_sizes else "By strategy")
    _plot(shown, lines, where, timed=timed)
    if timed:
        shown.prose(_TIMES)
    if has_sizes:
        shown.prose(_HOW)
        shown.table(size_table(curves, where))
    shown.heading(f"On {where.name}")
    for each in tables(rows, where, verbose=True):
        shown.table(each)
    return shown.text()


def _lines(curves: Curves) -> Curves:
    """Curves that are equal to two digits share a line, whose name has those of all."""
    groups: dict[Any, list[str]] = {}
    for strategy, curve in curves.items():
        figures = ((n, *(of(row) for of in _FIGURES.values())) for n, row in curve.items())
        alike = tuple(tuple(f"{x:.2g}" if x else x for x in point) for point in figures)
        groups.setdefault(alike, []).append(strategy)
    return {", ".join(same): curves[same[0]] for same in groups.values()}


def _plot(shown: Page, lines: Curves, where: Topology, *, timed: bool) -> None:
    """Memory and wire bytes, and times unless they are those of nominal rates."""
    import altair as alt

    points = [(name, n, row) for name, curve in lines.items() for n, row in curve.items()]
    unit, memory = scale(row.needed_bytes for *_, row in points)
    sent, traffic = scale(row.wire_total for *_, row in points)
    units = {"needed": unit, "wire": sent, "step": 1e-3, "exposed": 1e-3}
    columns: dict[str, list[Any]] = {
        "strategy": [name for name, *_ in points],
        "devices": [n for _, n, _ in points],
    }
    for field, of in _FIGURES.items():
        figures = [of(row) for *_, row in points]
        columns[field] = [None if x is None else x / units[field] for x in figures]
    titles = {
        "needed": f"Memory needed per device, {memory}",
        "wire": f"Wire bytes per device and step, {traffic}",
        "step": "A step, ms (predicted)",
        "exposed": "Exposed communication of a step, ms (predicted)",
    }
    available = where.memory_budget()[0]
    limit = None
    if available:
        limit = available / unit, f"of {where.chip.name}: {available / unit:,.1f} {memory}"
    ticks = alt.Axis(values=sorted(set(columns["devices"])), format=",d")
    scale_x = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X("devices:Q", title="devices", scale=scale_x, axis=ticks)
    data, charts = shown.data("points", columns), []
    for field in _FIGURES if timed else ("needed", "wire"):
        known = [value for value in columns[field] if value is not None]
        if not known:
            shown.prose(f"{titles[field]}: not known")  # nothing compiles
            continue
        value = alt.Tooltip(f"{field}:Q", title=titles[field], format=",.4~g")
        tooltip = ["strategy:N", alt.Tooltip("devices:Q", format=",d"), value]
        of_limit = limit if field == "needed" else None
        if all(len(curve) == 1 for curve in lines.values()):
            title = titles[field] + (f" ({of_limit[1]})" if of_limit else "")
            charts.append(shown.bars(data, alt.X(f"{field}:Q", title=None), title, tooltip))
            continue
        options: dict[str, Any] = {"tooltip": tooltip, "log": min(known) > 0, "limit": of_limit}
        charts.append(shown.lines(data, x, field, titles[field], **options))
    shown.charts(*charts)
