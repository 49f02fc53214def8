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
    " No time has latency, stragglers or shared switches in it: with thousands of devices real "
    "steps are longer."
)
_HEIGHT = 260  # of a chart, in pixels
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
    timed = where.chip.platform != "cpu"
    lines = _lines(curves)
    shown = Page(f"Plan of {run} on {where.name}", lines)
    shown.bullets(words)
    shown.heading("By number of devices")
    _plot(shown, lines, where, timed=timed)
    shown.prose(_HOW + _TIMES * timed)
    if any(len(curve) > 1 for curve in curves.values()):
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
        "step": "A step, ms (predicted from vendors' rates)",
        "exposed": "Exposed communication of a step, ms (predicted)",
    }
    available, limit = where.memory_budget()[0], None
    if available:
        text = f"of {where.chip.name}: {available / unit:,.1f} {memory}"
        limit = shown.data("limit", {"limit": [available / unit], "text": [text]})
    data, charts = shown.data("points", columns, series="strategy"), []
    for field in _FIGURES if timed else ("needed", "wire"):
        if all(value is None for value in columns[field]):
            shown.prose(f"{titles[field]}: not known")  # nothing compiles
            continue
        ticks = sorted(set(columns["devices"]))
        of_limit = limit if field == "needed" else None
        charts.append(_chart(shown, data, field, titles[field], ticks, of_limit))
    if charts:
        shown.charts(*charts, y_scale="log")


def _chart(shown: Page, data: Any, field: str, title: str, ticks: Sequence[int], limit: Any) -> Any:
    """A field by devices."""
    import altair as alt

    axis = alt.Axis(values=list(ticks), format=",d", grid=False)
    scale = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X("devices:Q", title="devices", scale=scale, axis=axis)
    y = alt.Y(f"{field}:Q", title=None, axis=alt.Axis(format=",.5~g"))
    value = alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")
    base = alt.Chart(data).encode(x, y, shown.color("strategy"))
    points = base.mark_point(filled=True, opacity=1, size=65).encode(
        shown.shape("strategy"),
        tooltip=["strategy:N", alt.Tooltip("devices:Q", format=",d"), value],
    )
    layers: list[Any] = [base.mark_line(strokeWidth=1.5), points]
    if limit is not None:
        line = alt.Chart(limit).encode(alt.Y("limit:Q"))
        text = line.encode(text="text:N", x=alt.value("width"))
        halo = text.mark_text(align="right", dy=-8, stroke="var(--page)", strokeWidth=4)
        label = text.mark_text(align="right", dy=-8, color="var(--red)")
        layers += [line.mark_rule(strokeDash=[2, 3], color="var(--red)"), halo, label]
    return alt.layer(*layers).properties(title=title, height=_HEIGHT)
