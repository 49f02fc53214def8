"""A plan as one HTML file: memory and time by number of devices, the tables, what is how exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from research_dp.analysis.topologies import Topology
from research_dp.console import Table, table
from research_dp.html_page import Page
from research_dp.planning.extrapolation import FORMULAS, Curve, Point
from research_dp.planning.row import Row
from research_dp.planning.tables import format_number, scale, tables

_LEFT_OUT = (
    "Each device keeps its examples, so that the batch grows with the devices. Hosts are as large "
    "as the planned ones; of TPUs one slice as large as there are, or slices like the planned "
    "ones. No time has latency, stragglers or shared switches in it: with thousands of devices "
    "real steps are longer."
)
_HEIGHT = 300  # of a chart, in pixels


def page(
    rows: Sequence[Row], curves: Sequence[Curve], where: Topology, words: Sequence[str], run: str
) -> str:
    """The page of a plan for `run`, e.g. the command's gin files: one file that needs no other."""
    available = next((row.available_bytes for row in rows if row.available_bytes), None)
    timed = where.chip.platform != "cpu"
    lines = {", ".join(curve.strategy for curve in same): same[0] for same in _equal(curves)}
    shown = Page(f"Plan of {run} on {where.name}", lines)
    shown.bullets(words)
    shown.heading("By number of devices")
    _plot(shown, lines, available, where.chip.name, timed=timed)
    shown.prose(
        Text(
            "Filled points were compiled, and lines between them are solid. Hollow points and "
            "dashed lines are extrapolated:",
            "bold",
        )
    )
    shown.terms(FORMULAS)
    shown.prose(_LEFT_OUT)
    if checks := _error_table(curves):
        shown.table(checks)
    else:
        shown.prose("One size of each strategy was compiled: the formulas are not checked.")
    with shown.details("All points"):
        shown.table(_point_table(curves, available))
    shown.heading(f"On {where.name}")
    for each in tables(rows, where, verbose=True):
        shown.table(each)
    return shown.text()


def _equal(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Curves in groups whose points are equal to two digits: they share a line."""
    groups: dict[Any, list[Curve]] = {}
    for curve in curves:
        points = (
            (p.devices, p.compiled, p.needed_bytes, p.wire_bytes, p.seconds) for p in curve.points
        )
        rounded = (tuple(f"{x:.2g}" if isinstance(x, float) else x for x in p) for p in points)
        groups.setdefault(tuple(rounded), []).append(curve)
    return list(groups.values())


def _plot(
    shown: Page, lines: dict[str, Curve], available: int | None, chip: str, *, timed: bool
) -> None:
    """Memory beside time, or beside wire bytes where times are those of nominal rates."""
    points = [(name, point) for name, curve in lines.items() for point in curve.points]
    unit, memory = scale(point.needed_bytes for _, point in points)
    sent, traffic = scale(point.wire_bytes for _, point in points)
    columns: dict[str, list[Any]] = {
        "strategy": [name for name, _ in points],
        "devices": [point.devices for _, point in points],
        "source": [_source(point) for _, point in points],
        "joined": [joined for curve in lines.values() for joined in _joined(curve)],
        "needed": [_scaled(point.needed_bytes, unit) for _, point in points],
        "wire": [_scaled(point.wire_bytes, sent) for _, point in points],
        "step": [_scaled(point.seconds, 1e-3) for _, point in points],
    }
    titles = {
        "needed": f"Memory needed per device, {memory}",
        "wire": f"Wire bytes per device and step, {traffic}",
        "step": "A step, ms (predicted from vendors' rates)",
    }
    data, charts = shown.data("points", columns, series="strategy"), []
    for field in ("needed", "step" if timed else "wire"):
        if all(value is None for value in columns[field]):
            shown.prose(f"{titles[field]}: not known")  # nothing compiles
            continue
        limit = None
        if available and field == "needed":
            text = f"of {chip}: {available / unit:,.1f} {memory}"
            limit = shown.data("limit", {"limit": [available / unit], "text": [text]})
        ticks = sorted(set(columns["devices"]))
        charts.append(_chart(shown, data, field, titles[field], ticks, limit))
    if charts:
        shown.charts(*charts, y_scale="log")


def _chart(shown: Page, data: Any, field: str, title: str, ticks: Sequence[int], limit: Any) -> Any:
    """A field by devices: lines are solid between compiled points, and dashed beyond."""
    import altair as alt

    axis = alt.Axis(values=list(ticks), format=",d", grid=False)
    scale = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X("devices:Q", title="devices", scale=scale, axis=axis)
    y = alt.Y(f"{field}:Q", title=None, axis=alt.Axis(format=",.5~g"))
    value = alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")
    base = alt.Chart(data).encode(x, y, shown.color("strategy"))
    points = base.encode(
        shown.shape("strategy"),
        tooltip=["strategy:N", "source:N", alt.Tooltip("devices:Q", format=",d"), value],
    )
    hollow = points.mark_point(fill="var(--page)", opacity=1, size=55)
    filled = points.mark_point(filled=True, opacity=1, size=65)
    layers: list[Any] = [
        base.mark_line(strokeDash=[5, 4], strokeWidth=1.5),
        base.mark_line(strokeWidth=1.5).transform_filter("datum.joined"),
        hollow.transform_filter("datum.source != 'compiled'"),
        filled.transform_filter("datum.source == 'compiled'"),
    ]
    if limit is not None:
        line = alt.Chart(limit).encode(alt.Y("limit:Q"))
        text = line.encode(text="text:N", x=alt.value("width"))
        halo = text.mark_text(align="right", dy=-8, stroke="var(--page)", strokeWidth=4)
        label = text.mark_text(align="right", dy=-8, color="var(--red)")
        layers += [line.mark_rule(strokeDash=[2, 3], color="var(--red)"), halo, label]
    return alt.layer(*layers).properties(title=title, height=_HEIGHT)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _joined(curve: Curve) -> list[bool]:
    """Whether each point is compiled, or between two that are."""
    compiled = [point.devices for point in curve.points if point.compiled] or [0]
    return [min(compiled) <= point.devices <= max(compiled) for point in curve.points]


def _source(point: Point) -> str:
    return "compiled" if point.compiled else "extrapolated"


def _error_table(curves: Sequence[Curve]) -> Table | None:
    """How far the formulas are off where that is known."""
    title = "How far the formulas are off on each compiled size, had it not been compiled"
    shown = table(title, "strategy", "devices:", "needed:", "sent:", "step:", grouped=True)
    for curve in curves:
        for real, guess in curve.checks:
            cells = []
            for figure in ("needed_bytes", "wire_bytes", "seconds"):
                a, b = getattr(real, figure), getattr(guess, figure)
                cells.append(format_number(b / a - 1 if a and b is not None else None, 1, "+.1%"))
            shown.add_row(curve.strategy, f"{real.devices:,}", *cells)
    return shown if shown.rows else None


def _point_table(curves: Sequence[Curve], available: int | None) -> Table:
    """All points; those that were compiled are bold."""
    unit, name = scale(point.needed_bytes for curve in curves for point in curve.points)
    sent, sent_name = scale(p.wire_bytes for curve in curves for p in curve.points)
    columns = ("devices:", f"state {name}:", f"needed {name}:", f"wire {sent_name}:", "step ms:")
    shown = table("", "strategy", *columns, "fits", "source~", grouped=True)
    for curve in curves:
        for point in curve.points:
            fits = Text()
            if available and point.needed_bytes is not None:
                fits = Text(
                    *(("yes", "green") if point.needed_bytes <= available else ("no", "red"))
                )
            cells = (
                f"{point.devices:,}",
                format_number(point.state_bytes, unit, ",.3f"),
                format_number(point.needed_bytes, unit, ",.3f"),
                format_number(point.wire_bytes, sent, ",.3f"),
                format_number(point.seconds, 1e-3, ",.2f"),
            )
            style = "bold" if point.compiled else ""
            styled = (Text(cell, style) for cell in cells)
            shown.add_row(curve.strategy, *styled, fits, Text(_source(point), style))
        if curve.remark:
            shown.add_row(curve.strategy, *[""] * len(columns), "", curve.remark)
    return shown
