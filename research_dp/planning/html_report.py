"""A plan as one HTML file: memory, wire bytes and time by number of devices, and the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from research_dp import html_page
from research_dp.analysis.topologies import Topology
from research_dp.html_charts import Charts
from research_dp.planning.row import Curves, Row
from research_dp.planning.tables import scale, size_table, tables

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
    is_timed, has_sizes = where.chip.platform != "cpu", any(len(c) > 1 for c in curves.values())
    lines = _lines(curves) if has_sizes else curves
    charts = Charts(lines, "strategy")
    drawn, unknown = _drawn(charts, lines, where, is_timed)
    return html_page.render(
        "plan.html",
        title=f"Plan of {run} on {where.name}",
        where=where.name,
        words=words,
        is_timed=is_timed,
        data=charts.columns,
        charts=drawn,
        unknown=unknown,
        sizes=size_table(curves, where) if has_sizes else None,
        tables=tables(rows, where, verbose=True),
    )


def _lines(curves: Curves) -> Curves:
    """Curves that are equal to two digits share a line, whose name has those of all."""
    groups: dict[Any, list[str]] = {}
    for strategy, curve in curves.items():
        figures = ((n, *(of(row) for of in _FIGURES.values())) for n, row in curve.items())
        alike = tuple(tuple(f"{x:.2g}" if x else x for x in point) for point in figures)
        groups.setdefault(alike, []).append(strategy)
    return {", ".join(same): curves[same[0]] for same in groups.values()}


def _drawn(
    charts: Charts, lines: Curves, where: Topology, is_timed: bool
) -> tuple[list[Any], list[str]]:
    """Charts of memory and wire bytes, and of times unless they are those of nominal rates.

    Returns:
        The charts, and the titles of those whose figures are not known: nothing compiles.
    """
    points = [(strategy, n, row) for strategy, curve in lines.items() for n, row in curve.items()]
    unit, memory = scale(row.needed_bytes for *_, row in points)
    sent, traffic = scale(row.wire_total for *_, row in points)
    units = {"needed": unit, "wire": sent, "step": 1e-3, "exposed": 1e-3}
    titles = {
        "needed": f"Memory needed per device, {memory}",
        "wire": f"Wire bytes per device and step, {traffic}",
        "step": "A step, ms (predicted)",
        "exposed": "Exposed communication of a step, ms (predicted)",
    }
    names = list(_FIGURES) if is_timed else ["needed", "wire"]
    figures = {name: [_FIGURES[name](row) for *_, row in points] for name in names}
    known = [name for name in names if any(x is not None for x in figures[name])]
    unknown = [titles[name] for name in names if name not in known]
    if not known:
        return [], unknown
    columns: dict[str, list[Any]] = {
        "strategy": [strategy for strategy, *_ in points],
        "devices": [n for _, n, _ in points],
        **{name: [x if x is None else x / units[name] for x in figures[name]] for name in known},
    }
    data, drawn = charts.data("points", columns), []
    limit, available = None, where.memory_budget()[0]
    if available:
        limit = available / unit, f"of {where.chip.name}: {available / unit:,.1f} {memory}"
    has_bars = all(len(curve) == 1 for curve in lines.values())
    ticks = alt.Axis(values=sorted(set(columns["devices"])), format=",d")
    scale_x = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X("devices:Q", title="devices", scale=scale_x, axis=ticks)
    for name in known:
        value = alt.Tooltip(f"{name}:Q", title=titles[name], format=",.4~g")
        tooltip = ["strategy:N", alt.Tooltip("devices:Q", format=",d"), value]
        of_limit = limit if name == "needed" else None
        if has_bars:
            title = titles[name] + (f" ({of_limit[1]})" if of_limit else "")
            drawn.append(charts.bars(data, alt.X(f"{name}:Q", title=None), title, tooltip))
        else:
            is_log = min(value for value in columns[name] if value is not None) > 0
            options: dict[str, Any] = {"tooltip": tooltip, "log": is_log, "limit": of_limit}
            drawn.append(charts.lines(data, x, name, titles[name], **options))
    return drawn, unknown
