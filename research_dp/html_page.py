"""One HTML page of text, tables and charts: a file that opens from disk and loads nothing else.

Charts are Altair's, on data that the page has once. The scripts that draw them (Vega, 0.9 MB) are
in the page. Colours are the page's, so that light, dark and printed pages need no second chart.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.text import Text

from research_dp.console import Table
from research_dp.errors import UsageError
from research_dp.html_controls import Slider, controls, legend_of, look
from research_dp.html_text import inline, table_html

if TYPE_CHECKING:  # an extra, and slow to import
    import altair

Cell = float | str | None

_HEIGHT = 260  # of a chart that has none, in pixels
_DIGITS = 5  # of a number in a chart
# Browsers refuse whatever is not in the page itself.
_NOTHING_ELSE = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'"
)


def check_installed(what: str) -> None:
    """Raises UsageError if the packages that make a page are missing.

    Args:
        what: The page, e.g. "a plan's page".
    """
    modules = {"altair": "altair", "vl_convert": "vl-convert-python"}
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(
            f"{what} needs {' and '.join(missing)}, not installed: "
            "pip install -c constraints.txt -e '.[plots]'"
        )


class Page:
    """A page under construction: what is added is shown in that order.

    `series` are the names that have a colour, a dash and a marker, the same in all charts.
    """

    def __init__(self, title: str, series: Iterable[str] = ()):
        self.title, self.series = title, tuple(dict.fromkeys(series))
        self._parts: list[str] = []
        self._data: dict[str, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []

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

    def terms(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Adds a list of terms, each with what it means."""
        items = (f"<dt>{inline(term)}</dt><dd>{inline(text)}</dd>" for term, text in pairs)
        self._parts.append(f"<dl>{''.join(items)}</dl>")

    def table(self, shown: Table) -> None:
        """Adds a table of a terminal; cells keep their colours."""
        self._parts.append(table_html(shown))

    @contextlib.contextmanager
    def details(self, summary: str, *, is_open: bool = False) -> Iterator[None]:
        """What is added in this context is folded up under a line; it is open in print."""
        is_shown = " open" if is_open else ""
        self._parts.append(f"<details{is_shown}><summary>{inline(summary)}</summary>")
        yield
        self._parts.append("</details>")

    def data(
        self,
        name: str,
        columns: Mapping[str, Sequence[Cell]],
        *,
        series: str = "",
        smoothed: Sequence[str] = (),
    ) -> altair.NamedData:
        """Adds data for charts; numbers keep five digits, what is not finite is left out.

        Args:
            name: What charts and other data do not share.
            columns: By field name, an identifier; all of one length.
            series: The column with names of `Page.series`; its legend hides rows.
            smoothed: The columns that a group's smoothing replaces by their moving average within
                a series, in the order of rows; `raw_NAME` stays as it was.

        Returns:
            The data for `altair.Chart`.
        """
        import altair

        odd = [field for field in columns if not field.isidentifier()]
        if odd or name in self._data or len({len(column) for column in columns.values()}) > 1:
            raise ValueError(f"data {name!r}: known, of several lengths, or odd fields: {odd}")
        self._data[name] = {
            "columns": {field: _packed(column) for field, column in columns.items()},
            "series": series,
            "smoothed": list(smoothed),
        }
        return altair.NamedData(name)

    def charts(
        self,
        *charts: altair.Chart | altair.LayerChart,
        legend: bool = True,
        y_scale: Literal["linear", "log"] | None = None,
        smoothing: bool = False,
        slider: Slider | None = None,
    ) -> None:
        """Adds charts side by side, as wide as there is room, under controls that all obey.

        A chart's title is shown above it; its height stays, e.g. that of bars by their number.

        Args:
            *charts: Single or layered charts on data of this page.
            legend: Whether to show the series in these charts' data, each a switch.
            y_scale: The scale that all vertical axes begin with, and a switch to the other; None
                for the charts' own and no switch.
            smoothing: Whether there is a control of the moving average.
            slider: A control of a parameter of the charts.
        """
        specs = [chart.to_dict() for chart in charts]
        names = list(dict.fromkeys(itertools.chain.from_iterable(map(_data_names, specs))))
        used = [self._data[name] for name in names]
        here = {
            text
            for data in used
            if data["series"]
            for text in data["columns"][data["series"]]["texts"]
        }
        series = [name for name in self.series if name in here] if legend else []
        titles = [str(spec.pop("title", "")) for spec in specs]
        for spec, title in zip(specs, titles, strict=True):
            del spec["config"], spec["$schema"]
            spec.update(width="container", description=title)  # which a screen reader says
            spec.setdefault("height", _HEIGHT)
        group: dict[str, Any] = {"charts": specs, "yScale": y_scale}
        if slider:
            group["slider"] = {"param": slider.param, "values": [*map(_number, slider.values)]}
            group["slider"]["texts"] = list(slider.texts)
        looks = {name: look(self.series.index(name)) for name in series}
        shown = controls(y_scale, smoothing, slider) + legend_of(looks)
        figures = "".join(
            f"<figure><figcaption>{inline(title)}</figcaption>"
            '<div class="chart">This chart is drawn by the page\'s script.</div></figure>'
            for title in titles
        )
        self._parts.append(
            f'<section class="group" data-group="{len(self._groups)}">'
            f'<form class="controls" autocomplete="off" hidden>{shown}</form>'
            f'<div class="charts">{figures}</div></section>'
        )
        self._groups.append(group)

    def color(self, field: str) -> altair.Color:
        """The encoding of a series as colour, without a legend of its own."""
        import altair

        colors = [look(self.series.index(name))[0] for name in self.series]
        scale = altair.Scale(domain=list(self.series), range=colors)
        return altair.Color(field, type="nominal", scale=scale, legend=None)

    def dash(self, field: str) -> altair.StrokeDash:
        """The encoding of a series as a dash: more than ten series differ by colour and dash."""
        import altair

        dashes = [list(look(self.series.index(name))[1]) for name in self.series]
        scale = altair.Scale(domain=list(self.series), range=dashes)
        return altair.StrokeDash(field, type="nominal", scale=scale, legend=None)

    def shape(self, field: str) -> altair.Shape:
        """The encoding of a series as a marker."""
        import altair

        shapes = [look(self.series.index(name))[2] for name in self.series]
        scale = altair.Scale(domain=list(self.series), range=shapes)
        return altair.Shape(field, type="nominal", scale=scale, legend=None)

    def text(self) -> str:
        """The whole page."""
        title = inline(self.title)
        body = f"<h1>{title}</h1>{''.join(self._parts)}"
        if self._groups:
            # What is in the page as JSON cannot end the element that it is in.
            told = json.dumps({"data": self._data, "groups": self._groups}, separators=(",", ":"))
            safe = told.replace("<", "\\u003c").replace("&", "\\u0026")
            body = (
                "<noscript><p>The charts are drawn by the page's script, which is switched off; "
                f"the tables need none.</p></noscript>{body}"
                f'<script type="application/json" id="page-data">{safe}</script>'
                f"<script>(() => {{{_vega()}}})()</script><script>{_file('js')}</script>"
            )
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{_NOTHING_ELSE}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{title}</title>'
            f"<style>{_file('css')}</style></head>\n<body><main>{body}</main></body></html>\n"
        )


def _packed(column: Sequence[Cell]) -> dict[str, Any]:
    """A column as JSON: texts once, with their places; numbers short."""
    if any(isinstance(cell, str) for cell in column):
        texts = list(dict.fromkeys(cell for cell in column if cell is not None))
        places: dict[Cell, int] = {text: place for place, text in enumerate(texts)}
        return {"texts": texts, "at": [places.get(cell, -1) for cell in column]}
    return {"numbers": [_number(cell) for cell in column]}


def _number(cell: Any) -> float | None:
    """A number to five digits, a whole one unchanged; None if it is none."""
    if cell is None or not math.isfinite(cell):
        return None
    if isinstance(cell, int):  # steps, devices
        return cell
    short = float(f"{cell:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 10**_DIGITS else short


def _data_names(spec: Any) -> Iterator[str]:
    """The names of all data in a chart's specification."""
    if isinstance(spec, list):
        for part in spec:
            yield from _data_names(part)
    elif isinstance(spec, dict):
        if "name" in (spec.get("data") or {}):
            yield spec["data"]["name"]
        for part in spec.values():
            yield from _data_names(part)


def _file(kind: str) -> str:
    return Path(__file__).with_suffix(f".{kind}").read_text()


@functools.cache
def _vega() -> str:
    """The script that gives the page `vegaEmbed`, with all that it needs."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
