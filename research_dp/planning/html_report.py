"""A plan as one HTML file: memory and time by number of devices, the tables, what is how exact."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Sequence
from typing import Any

from research_dp.analysis.topologies import Topology
from research_dp.console import Table
from research_dp.errors import UsageError
from research_dp.planning.extrapolation import FORMULAS, Curve
from research_dp.planning.row import Row
from research_dp.planning.tables import format_number, scale, tables

_LEFT_OUT = (
    "Each device keeps its examples, so that the batch grows with the devices. Hosts are as large "
    "as the planned ones; of TPUs one slice as large as there are, or slices like the planned "
    "ones. No time has latency, stragglers or shared switches in it: with thousands of devices "
    "real steps are longer."
)
_STYLE = """
:root { color-scheme: light dark; --line: #bbb }
@media (prefers-color-scheme: dark) {
  :root { --line: #555 } svg { filter: invert(.88) hue-rotate(180deg) }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
svg { width: 100%; height: auto }
table { border-collapse: collapse; font-size: 13px } th { text-align: left; vertical-align: bottom }
td, th { padding: .1rem .9rem .1rem 0 } td.n, th.n { text-align: right }
tr.c td { font-weight: 600 } tr.first td { border-top: 1px solid var(--line) }
caption { text-align: left; padding: 1rem 0 .3rem; font-size: 15px } .wide { overflow-x: auto }
dt { float: left; clear: left; width: 7rem; font-weight: 600 } dd { margin-left: 7.5rem }
"""
_MARKERS = "osD^vP*Xh<>p"
_TICKS = 3  # the least on an axis


def check_matplotlib() -> None:
    """Raises UsageError if there is nothing to plot with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "a plan's page needs matplotlib, which is not installed: "
            "pip install -c constraints.txt -e '.[plots]'"
        )


def page(
    rows: Sequence[Row], curves: Sequence[Curve], where: Topology, words: Sequence[str], run: str
) -> str:
    """The page of a plan for `run`, e.g. the command's gin files: one file that needs no other."""
    available = next((row.available_bytes for row in rows if row.available_bytes), None)
    advice = "".join(f"<li>{html.escape(word)}</li>" for word in words)
    formulas = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in FORMULAS)
    title = html.escape(f"Plan of {run} on {where.name}")
    figures = "".join(map(_table, tables(rows, where, verbose=True)))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
<ul>{advice}</ul>
<h2>By number of devices</h2>
{plot(curves, available, where.chip.name, timed=where.chip.platform != "cpu")}
<p><b>Filled points were compiled; hollow ones, on dashed lines, are extrapolated:</b></p>
<dl>{formulas}</dl>
<p>{html.escape(_LEFT_OUT)}</p>
{_error_table(curves)}
{_point_table(curves, available)}
<h2>On {html.escape(where.name)}</h2>
{figures}
</body></html>
"""


def plot(curves: Sequence[Curve], available: int | None, chip: str, *, timed: bool = True) -> str:
    """Memory beside time, or beside wire bytes where times are those of nominal rates, as SVG."""
    svg = io.StringIO()
    figure = draw(curves, available, chip, timed=timed)
    options: dict[str, Any] = {"bbox_inches": "tight", "transparent": True}
    figure.savefig(svg, format="svg", metadata={"Date": None}, **options)
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def draw(curves: Sequence[Curve], available: int | None, chip: str, *, timed: bool = True) -> Any:
    """The figure of matplotlib that `plot` prints; strategies with equal points share a line."""
    from matplotlib.figure import Figure  # pyplot would open windows and share state

    figure = Figure(figsize=(12.5, 5.2), layout="constrained")
    memory, other = figure.subplots(1, 2)
    unit, name = scale(point.needed_bytes for curve in curves for point in curve.points)
    sent, sent_name = scale(point.wire_bytes for curve in curves for point in curve.points)
    field, scaled_by = ("seconds", 1e-3) if timed else ("wire_bytes", sent)
    groups: dict[Any, list[Curve]] = {}
    for curve in curves:
        points = ((p.devices, p.compiled, p.needed_bytes, getattr(p, field)) for p in curve.points)
        rounded = (tuple(f"{x:.2g}" if isinstance(x, float) else x for x in p) for p in points)
        groups.setdefault(tuple(rounded), []).append(curve)
    for number, same in enumerate(groups.values()):
        style = {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)]}
        style["label"] = ", ".join(curve.strategy for curve in same)
        _draw_line(memory, same[0], "needed_bytes", unit, style)
        _draw_line(other, same[0], field, scaled_by, style)
    if available:
        memory.axhline(available / unit, color="0.3", linestyle=":", linewidth=1)
        text, place = f"of {chip}: {available / unit:,.1f} {name}", (0.01, available / unit)
        offset = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 9}
        memory.annotate(text, place, xycoords=("axes fraction", "data"), **offset)
    _set_axes(memory, f"Memory needed per device, {name}", curves)
    wire = f"Wire bytes per device and step, {sent_name}"
    _set_axes(other, "A step, ms (predicted from vendors' rates)" if timed else wire, curves)
    handles, labels = memory.get_legend_handles_labels()
    labels += ["compiled", "extrapolated"]
    for face in ("0.3", "white"):
        handles += memory.plot([], [], "o", color="0.3", markerfacecolor=face)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)))
    return figure


def _draw_line(axes: Any, curve: Curve, field: str, unit: float, style: dict[str, str]) -> None:
    """A dashed line through all points where a field is known; compiled ones are filled."""
    line = {"linestyle": "--", "linewidth": 1.2, "markersize": 6, "markerfacecolor": "white"}
    filled = {"linestyle": "", "markersize": 7, "label": None}
    known = [p for p in curve.points if getattr(p, field) is not None]
    for points, options in ((known, line), ([p for p in known if p.compiled], filled)):
        values = [getattr(p, field) / unit for p in points]
        axes.plot([p.devices for p in points], values, **{**style, **options})


def _set_axes(axes: Any, title: str, curves: Sequence[Curve]) -> None:
    from matplotlib import ticker

    devices = sorted({point.devices for curve in curves for point in curve.points})
    if not any(len(line.get_xdata()) for line in axes.lines):
        axes.set_axis_off()
        axes.set_title(f"{title}: not known")  # nothing compiles
        return
    is_positive = any(y > 0 for line in axes.lines for y in line.get_ydata())
    axes.set(xscale="log", title=title, xlabel="devices")
    axes.set_xticks(devices, [f"{n:,}" for n in devices], rotation=45, fontsize=9)
    axes.minorticks_off()
    if is_positive:  # on one device nothing is communicated
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_ticks(*axes.get_ylim()))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _ticks(least: float, most: float) -> Any:
    """Ticks of a log axis: 1, 2 and 5 of each decade; even ones where these are too few."""
    from matplotlib import ticker

    coarse = ticker.LogLocator(subs=(1, 2, 5), numticks=50)
    seen = [y for y in coarse.tick_values(least, most) if least <= y <= most]
    return coarse if len(seen) >= _TICKS else ticker.MaxNLocator(2 * _TICKS)


def _table(shown: Table) -> str:
    """A table of a terminal as HTML."""
    numbers = [' class="n"' if name.endswith(":") else "" for name in shown.columns]

    def line(tag: str, cells: Sequence[Any]) -> str:
        pairs = zip(cells, numbers, strict=True)
        return "".join(f"<{tag}{kind}>{html.escape(str(x))}</{tag}>" for x, kind in pairs)

    rows = "".join(f"<tr>{line('td', row)}</tr>" for row in shown.rows)
    return (
        f'<div class="wide"><table><caption>{html.escape(shown.title)}</caption>'
        f"<tr>{line('th', shown.heads)}</tr>{rows}</table></div>"
    )


def _error_table(curves: Sequence[Curve]) -> str:
    """How far the formulas are off where that is known."""
    lines = []
    for curve in curves:
        for real, guess in curve.checks:
            cells = [f"<td>{html.escape(curve.strategy)}</td>", _cell(real.devices, 1, ",.0f")]
            for figure in ("needed_bytes", "wire_bytes", "seconds"):
                a, b = getattr(real, figure), getattr(guess, figure)
                cells.append(_cell(b / a - 1 if a and b is not None else None, 1, "+.1%"))
            lines.append(f"<tr>{''.join(cells)}</tr>")
    if not lines:
        return "<p>One size of each strategy was compiled: the formulas are not checked.</p>"
    return (
        "<p>How far the formulas are off on each compiled size, had it not been compiled:</p>"
        f"<table><tr>{_headers('devices', 'needed', 'sent', 'step')}</tr>{''.join(lines)}</table>"
    )


def _point_table(curves: Sequence[Curve], available: int | None) -> str:
    unit, name = scale(point.needed_bytes for curve in curves for point in curve.points)
    sent, sent_name = scale(p.wire_bytes for curve in curves for p in curve.points)
    heads = _headers("devices", f"state {name}", f"needed {name}", f"wire {sent_name}", "step ms")
    lines = [f"<tr>{heads}<th>fits</th><th></th></tr>"]
    for curve in curves:
        for number, point in enumerate(curve.points):
            fits = ""
            if available and point.needed_bytes is not None:
                fits = "yes" if point.needed_bytes <= available else "no"
            style = "c" * point.compiled + " first" * (number == 0)
            source = "compiled" if point.compiled else "extrapolated"
            lines.append(
                f'<tr class="{style}"><td>{"" if number else html.escape(curve.strategy)}</td>'
                f"{_cell(point.devices, 1, ',.0f')}{_cell(point.state_bytes, unit, ',.3f')}"
                f"{_cell(point.needed_bytes, unit, ',.3f')}{_cell(point.wire_bytes, sent, ',.3f')}"
                f"{_cell(point.seconds, 1e-3, ',.2f')}<td>{fits}</td><td>{source}</td></tr>"
            )
        if curve.remark:
            lines.append(f'<tr><td></td><td colspan="7">{html.escape(curve.remark)}</td></tr>')
    return f"<table>{''.join(lines)}</table>"


def _headers(*names: str) -> str:
    return "<th>strategy</th>" + "".join(f'<th class="n">{name}</th>' for name in names)


def _cell(value: float | None, unit: float, form: str) -> str:
    return f'<td class="n">{format_number(value, unit, form)}</td>'
