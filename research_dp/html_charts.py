"""Charts of a page: Altair's, on data that the page has once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

Cell = float | str | None

_BAR = 24  # height of a bar, in pixels
_LETTER, _SYMBOL = 7, 30  # widths in a legend
_COLORS = 10  # templates/page.css has as many, --series-0 and so on
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


class Charts:
    """Charts of one page, and the columns of their data by name.

    `series` are the names that have a colour, a dash and a marker, the same in all charts. They are
    in the column `field` of the charts' data.
    """

    def __init__(self, series: Iterable[str] = (), field: str = "series"):
        self.series, self.field = list(series), field
        self.columns: dict[str, dict[str, list[Cell]]] = {}

    def data(self, name: str, columns: Mapping[str, Sequence[Cell]]) -> alt.NamedData:
        """Adds data for charts; numbers keep five digits, what is not finite is left out.

        Args:
            name: What charts and other data do not share.
            columns: By field name, an identifier; all of one length.

        Returns:
            The data for `altair.Chart`.
        """
        odd = [field for field in columns if not field.isidentifier()]
        if odd or name in self.columns or len({len(column) for column in columns.values()}) > 1:
            raise ValueError(f"data {name!r}: known, of several lengths, or odd fields: {odd}")
        self.columns[name] = {field: list(map(_short, column)) for field, column in columns.items()}
        return alt.NamedData(name)

    def look(self, legend: Sequence[str] = ()) -> dict[str, Any]:
        """The encodings of a series, `color`, `strokeDash` and `shape`.

        More than ten series differ by colour and dash, and by colour and shape.

        Args:
            legend: The series in the chart's legend; without any it has none.
        """
        numbers = range(len(self.series))
        ranges: dict[str, list[Any]] = {
            "color": [f"var(--series-{number % _COLORS})" for number in numbers],
            "strokeDash": [_DASHES[number // _COLORS % len(_DASHES)] for number in numbers],
            "shape": [_SHAPES[number % len(_SHAPES)] for number in numbers],
        }
        kind = {"field": self.field, "type": "nominal"}
        shown = legend_of(legend) if legend else None
        return {
            channel: {**kind, "legend": shown, "scale": {"domain": self.series, "range": looks}}
            for channel, looks in ranges.items()
        }

    def lines(
        self,
        data: alt.NamedData,
        x: alt.X,
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
        columns, base, value = self.columns[data.name], alt.Chart(), f"datum.{y}"
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
        look = self.look([name for name in self.series if name in present])
        faded = alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.08))
        lines = base.encode(x, axis, opacity=faded, color=look["color"])
        layers = [lines.mark_line().encode(strokeDash=look["strokeDash"])]
        if markers:
            points = lines.mark_point(filled=True, size=45)
            layers.append(points.encode(tooltip=tooltip, shape=look["shape"]))
        if limit:
            one = alt.Data(values=[{y: limit[0], "text": limit[1]}])
            line = base.properties(data=one).encode(axis)
            label = line.mark_text(
                color="var(--red)", stroke="var(--page)", strokeWidth=4, align="right", dy=-8
            )
            layers += [
                line.mark_rule(strokeDash=[2, 3], color="var(--red)"),
                label.encode(text="text:N", x=alt.value("width")),
            ]
        return alt.layer(*layers, data=data).add_params(*params).properties(description=title)

    def bars(
        self,
        data: alt.NamedData,
        x: alt.X,
        title: str,
        tooltip: Sequence[Any],
        color: alt.Color | None = None,
    ) -> alt.Chart:
        """A bar of each series, in the order of the data; a `color` divides it into parts."""
        y = alt.Y(self.field, type="nominal", sort=None, title=None)
        height = _BAR * len(set(self.columns[data.name][self.field]))
        bars = alt.Chart(data, description=title, height=height).mark_bar()
        return bars.encode(x, y, color=color or self.look()["color"], tooltip=tooltip)


def as_columns(fields: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Rows of these fields as columns."""
    return {field: [row[place] for row in rows] for place, field in enumerate(fields)}


def legend_of(names: Sequence[str]) -> alt.Legend:
    """A legend of these names, in as many columns as a chart has room for."""
    columns = f"max(1, floor(width / {max(map(len, names)) * _LETTER + _SYMBOL}))"
    return alt.Legend(
        title=None,
        values=list(names),
        columns=alt.expr(columns),
        labelLimit=alt.expr(f"width - {_SYMBOL}"),
    )


def _short(cell: Cell) -> Cell:
    """A number to five digits, a whole one unchanged; None if it is not finite."""
    if not isinstance(cell, float):
        return cell
    return float(f"{cell:.5g}") if math.isfinite(cell) else None
