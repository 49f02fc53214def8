"""One HTML page of text, tables and charts: a file that opens from disk and loads nothing else.

Charts are Altair's, on data that the page has once. The script that draws them (Vega, 0.9 MB) is in
the page. Colours are the page's, so that light, dark and printed pages need no second chart.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from research_dp.console import Table
from research_dp.errors import UsageError
from research_dp.html_text import inline, table_html

if TYPE_CHECKING:  # an extra, and slow to import
    import altair

Cell = float | str | None

BAR = 24  # height of a bar, in pixels
_HEIGHT = 260  # of a chart that has none
_LETTER, _SYMBOL = 7, 30  # widths in a legend
_COLORS = 10  # html_page.css has as many, --series-0 and so on
# Of the first ten series, the next ten, ... Without gaps, [1, 0] would be thousands of strokes in a
# PDF.
_DASHES: tuple[list[int], ...] = ([], [6, 3], [2, 2], [8, 3, 2, 3])
_SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-left")
# Labels of a vertical axis whose values are logarithms if `is_log`: as many digits as tell ticks
# apart. Where all values are equal, linear ticks have no distance that tells how many they need.
_SPAN = "(domain('y')[1] - domain('y')[0])"
_LINEAR_OR_LOG = (
    "is_log ? format(pow(10, datum.value), abs(datum.value) > 5 ? '.2~e' : "
    f"',.' + clamp(ceil(1.5 - log({_SPAN}) / LN10), 2, 9) + '~r') : "
    f"{_SPAN} ? datum.label : format(datum.value, ',.5~g')"
)
# Browsers refuse whatever is not in the page itself.
_NOTHING_ELSE = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'"
)


def check_installed() -> None:
    """Raises UsageError if the packages that make a page are missing."""
    modules = {"altair": "altair", "vl_convert": "vl-convert-python"}
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(
            f"a page needs {' and '.join(missing)}, not installed: "
            "pip install -c constraints.txt -e '.[plots]'"
        )


class Page:
    """A page under construction: what is added is shown in that order.

    `series` are the names that have a colour, a dash and a marker, the same in all charts. They are
    in the column `field` of the charts' data.
    """

    def __init__(self, title: str, series: Iterable[str] = (), field: str = "series"):
        self.title, self.series, self.field = title, tuple(dict.fromkeys(series)), field
        self._parts: list[str] = []
        self._data: dict[str, dict[str, list[Cell]]] = {}
        self._charts: list[dict[str, Any]] = []

    def heading(self, text: str, level: int = 2) -> None:
        """Adds a heading."""
        self._parts.append(f"<h{level}>{inline(text)}</h{level}>")

    def prose(self, text: str | Text) -> None:
        """Adds a paragraph; a Text keeps its colours and bold parts."""
        self._parts.append(f"<p>{inline(text)}</p>")

    def bullets(self, texts: Iterable[str | Text]) -> None:
        """Adds a list, unless it is empty."""
        if items := "".join(f"<li>{inline(text)}</li>" for text in texts):
            self._parts.append(f"<ul>{items}</ul>")

    def table(self, shown: Table) -> None:
        """Adds a table of a terminal; cells keep their colours."""
        self._parts.append(table_html(shown))

    @contextlib.contextmanager
    def details(self, summary: str) -> Iterator[None]:
        """Text and tables added in this context are folded up under a line; open in print."""
        self._parts.append(f"<details><summary>{inline(summary)}</summary>")
        yield
        self._parts.append("</details>")

    def data(self, name: str, columns: Mapping[str, Sequence[Cell]]) -> altair.NamedData:
        """Adds data for charts; numbers keep five digits, what is not finite is left out.

        Args:
            name: What charts and other data do not share.
            columns: By field name, an identifier; all of one length.

        Returns:
            The data for `altair.Chart`.
        """
        import altair

        odd = [field for field in columns if not field.isidentifier()]
        if odd or name in self._data or len({len(column) for column in columns.values()}) > 1:
            raise ValueError(f"data {name!r}: known, of several lengths, or odd fields: {odd}")
        self._data[name] = {field: list(map(_short, column)) for field, column in columns.items()}
        return altair.NamedData(name)

    def charts(self, *charts: altair.TopLevelMixin) -> None:
        """Adds charts side by side, each on one `data` of this page, as wide as there is room.

        A chart's title is shown above it; its height stays, e.g. that of bars by their number.
        """
        figures = []
        for chart in charts:
            spec = chart.to_dict()
            del spec["config"], spec["$schema"]
            title = spec.pop("title") if isinstance(spec.get("title"), str) else ""
            # The description is what a screen reader says.
            self._charts.append(
                {"height": _HEIGHT, **spec, "width": "container", "description": title}
            )
            figures.append(
                f"<figure><figcaption>{inline(title)}</figcaption>"
                '<div class="chart">This chart is drawn by the page\'s script.</div></figure>'
            )
        self._parts.append(f'<div class="charts">{"".join(figures)}</div>')

    def look(self, *channels: str, legend: Sequence[str] = ()) -> dict[str, Any]:
        """The encodings of a series in `color`, `strokeDash` and `shape`: those that are asked for.

        Args:
            *channels: More than ten series differ by colour and dash, or by colour and shape.
            legend: The series in the chart's legend; without any it has none.
        """
        import altair

        kinds = {"color": altair.Color, "strokeDash": altair.StrokeDash, "shape": altair.Shape}
        numbers = range(len(self.series))
        looks: dict[str, list[Any]] = {
            "color": [f"var(--series-{number % _COLORS})" for number in numbers],
            "strokeDash": [_DASHES[number // _COLORS % len(_DASHES)] for number in numbers],
            "shape": [_SHAPES[number % len(_SHAPES)] for number in numbers],
        }
        shown = legend_of(legend) if legend else None
        return {
            channel: kinds[channel](
                self.field,
                type="nominal",
                scale=altair.Scale(domain=list(self.series), range=looks[channel]),
                legend=shown,
            )
            for channel in channels
        }

    def lines(
        self,
        data: altair.NamedData,
        x: altair.X,
        y: str,
        title: str,
        *,
        tooltip: Sequence[Any],
        log: bool | None = None,
        smoothed: int = 0,
        markers: bool = True,
        limit: tuple[float, str] | None = None,
        **y_options: Any,
    ) -> Any:
        """A line of each series, with Altair's own controls.

        A press on a name in the legend shows that line alone, with Shift it too. Dragging moves the
        chart, Ctrl and the wheel zoom, a double click undoes it.

        Args:
            data: What `data` returned.
            x: The horizontal axis.
            y: The field of the vertical axis.
            title: The chart's.
            tooltip: What a marker says under the pointer.
            log: Whether the vertical axis is logarithmic at first, which can be switched; None for
                a linear one without a switch.
            smoothed: How many records on each side a switch includes in a moving average; 0: there
                is no switch.
            markers: Whether records have markers; a line alone has no tooltip.
            limit: A value that no line should exceed, and its text.
            y_options: Of `altair.Y`.
        """
        import altair as alt

        columns, base, value = self._data[data.name], alt.Chart(), f"datum.{y}"
        chosen = alt.selection_point(name="chosen", fields=[self.field], bind="legend")
        zoom = alt.selection_interval(name="zoom", bind="scales", zoom="wheel![event.ctrlKey]")
        params: list[Any] = [chosen, zoom]
        y_options = {"title": None, "scale": alt.Scale(zero=False, padding=8), **y_options}
        if smoothed:
            switch = alt.binding_checkbox(name="smoothed")
            params.append(alt.param(name="is_smooth", value=False, bind=switch))
            frame: list[int | None] = [-smoothed, smoothed]
            base = base.transform_window(_mean=f"mean({y})", frame=frame, groupby=[self.field])
            value = f"(is_smooth ? datum._mean : {value})"
        if log is not None and any(isinstance(z, float | int) and z > 0 for z in columns[y]):
            switch = alt.binding_checkbox(name="logarithmic")
            params.append(alt.param(name="is_log", value=log, bind=switch))
            value = f"is_log ? ({value} > 0 ? log({value}) / LN10 : null) : {value}"
            y_options["axis"] = alt.Axis(labelExpr=_LINEAR_OR_LOG)
        base = base.transform_calculate(_shown=value)
        axis = alt.Y("_shown", type="quantitative", **y_options)
        present = set(columns[self.field])
        names = [name for name in self.series if name in present]
        faded = alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.08))
        lines = base.encode(x, axis, opacity=faded, **self.look("color", legend=names))
        layers = [lines.mark_line().encode(**self.look("strokeDash", legend=names))]
        if markers:
            points = lines.mark_point(filled=True, size=45)
            layers.append(points.encode(tooltip=tooltip, **self.look("shape", legend=names)))
        if limit:
            one = alt.Data(values=[{y: limit[0], "text": limit[1]}])
            line = base.properties(data=one).encode(axis)
            label = line.encode(text="text:N", x=alt.value("width"))
            at_right: dict[str, Any] = {"align": "right", "dy": -8}
            layers += [
                line.mark_rule(strokeDash=[2, 3], color="var(--red)"),
                label.mark_text(stroke="var(--page)", strokeWidth=4, **at_right),
                label.mark_text(color="var(--red)", **at_right),
            ]
        return alt.layer(*layers, data=data).add_params(*params).properties(title=title)

    def bars(
        self, data: altair.NamedData, x: altair.X, title: str | altair.Title, tooltip: Sequence[Any]
    ) -> altair.Chart:
        """A bar of each series, in the order of the data."""
        import altair as alt

        y = alt.Y(self.field, type="nominal", sort=None, title=None)
        height = BAR * len(set(self._data[data.name][self.field]))
        bars = alt.Chart(data).mark_bar().encode(x, y, tooltip=tooltip, **self.look("color"))
        return bars.properties(title=title, height=height)

    def text(self) -> str:
        """The whole page."""
        title = inline(self.title)
        body = f"<h1>{title}</h1>{''.join(self._parts)}"
        if self._charts:
            # What is in the page as JSON cannot end the element that it is in.
            told = json.dumps({"data": self._data, "charts": self._charts}, separators=(",", ":"))
            safe = told.replace("<", "\\u003c").replace("&", "\\u0026")
            body = (
                "<noscript><p>The charts are drawn by the page's script, which is switched off; "
                f"the tables need none.</p></noscript>{body}"
                f'<script type="application/json" id="page-data">{safe}</script>'
                f"<script>{_script()}</script>"
            )
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_ELSE}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{title}</title>'
            f"<style>{_file('css')}</style></head>\n<body><main>{body}</main></body></html>\n"
        )


def legend_of(names: Sequence[str]) -> altair.Legend:
    """A legend of these names, in as many columns as a chart has room for."""
    import altair

    columns = f"max(1, floor(width / {max(map(len, names)) * _LETTER + _SYMBOL}))"
    return altair.Legend(
        title=None,
        values=list(names),
        columns=altair.expr(columns),
        labelLimit=altair.expr(f"width - {_SYMBOL}"),
    )


def _short(cell: Cell) -> Cell:
    """A number to five digits, a whole one unchanged; None if it is not finite."""
    if not isinstance(cell, float):
        return cell
    return float(f"{cell:.5g}") if math.isfinite(cell) else None


def _file(kind: str) -> str:
    return Path(__file__).with_suffix(f".{kind}").read_text()


@functools.cache
def _script() -> str:
    """The script that draws the charts, with Vega."""
    import vl_convert

    return str(vl_convert.javascript_bundle(_file("js")))
