"""One HTML page of text, tables and charts: a file that opens from disk and loads nothing else.

Charts are Altair's, on data that the page has once. The scripts that draw them (Vega, 0.9 MB) are
in the page. Colours are the page's, so that light, dark and printed pages need no second chart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import importlib.util
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from research_dp.console import Table
from research_dp.errors import UsageError

if TYPE_CHECKING:  # an extra, and slow to import
    import altair

Cell = float | str | None

_COLORS = 10  # html_page.css has as many, --series-0 and so on
_DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))  # of the first ten series, the next ten, ...
_SHAPES = (  # paths from -1 to 1
    "M-1,0A1,1,0,1,0,1,0A1,1,0,1,0,-1,0Z",
    "M-.9,-.9H.9V.9H-.9Z",
    "M0,-1.2L1.2,0L0,1.2L-1.2,0Z",
    "M0,-1.1L1.1,.9H-1.1Z",
    "M0,1.1L1.1,-.9H-1.1Z",
    "M-.4,-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "M1.1,0L-.9,1.1V-1.1Z",
)
_DIGITS = 5  # of a number in a chart


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


@dataclasses.dataclass(frozen=True)
class Slider:
    """A control that sets the parameter `param` of a group's charts to one of some values.

    `texts` are the values as readers see them, e.g. '10 Gbit/s'; `start` is the first one's index.
    """

    param: str
    label: str
    values: Sequence[float]
    texts: Sequence[str]
    start: int = 0


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
        self._parts.append(f"<h{level}>{_inline(text)}</h{level}>")

    def prose(self, text: str | Text) -> None:
        """Adds a paragraph; a Text keeps its colours and bold parts."""
        self._parts.append(f"<p>{_inline(text)}</p>")

    def bullets(self, texts: Iterable[str | Text]) -> None:
        """Adds a list, unless it is empty."""
        if items := "".join(f"<li>{_inline(text)}</li>" for text in texts):
            self._parts.append(f"<ul>{items}</ul>")

    def terms(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Adds a list of terms, each with what it means."""
        items = (f"<dt>{_inline(term)}</dt><dd>{_inline(text)}</dd>" for term, text in pairs)
        self._parts.append(f"<dl>{''.join(items)}</dl>")

    def table(self, shown: Table) -> None:
        """Adds a table of a terminal; cells keep their colours."""
        self._parts.append(_table(shown))

    @contextlib.contextmanager
    def details(self, summary: str, *, is_open: bool = False) -> Iterator[None]:
        """What is added in this context is folded up under a line; it is open in print."""
        is_shown = " open" if is_open else ""
        self._parts.append(f"<details{is_shown}><summary>{_inline(summary)}</summary>")
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

        A chart's title is shown above it, and its height is kept.

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
        for spec in specs:
            spec.pop("config", None)
            spec.pop("$schema", None)
            spec.update(width="container", autosize={"type": "fit-x", "contains": "padding"})
        group: dict[str, Any] = {"charts": specs, "yScale": y_scale}
        if slider:
            group["slider"] = {"param": slider.param, "values": [*map(_number, slider.values)]}
            group["slider"]["texts"] = list(slider.texts)
        controls = _controls(y_scale, smoothing, slider) + self._legend(series)
        figures = "".join(
            f"<figure><figcaption>{_inline(title)}</figcaption>"
            f'<div class="chart" aria-label="{html.escape(title)}">'
            "This chart is drawn by the page's script.</div></figure>"
            for title in titles
        )
        self._parts.append(
            f'<section class="group" data-group="{len(self._groups)}">'
            f'<form class="controls" autocomplete="off" hidden>{controls}</form>'
            f'<div class="charts">{figures}</div></section>'
        )
        self._groups.append(group)

    def color(self, field: str) -> altair.Color:
        """The encoding of a series as colour, without a legend of its own."""
        import altair

        colors = [self._look(name)[0] for name in self.series]
        scale = altair.Scale(domain=list(self.series), range=colors)
        return altair.Color(field, type="nominal", scale=scale, legend=None)

    def dash(self, field: str) -> altair.StrokeDash:
        """The encoding of a series as a dash: more than ten series differ by colour and dash."""
        import altair

        dashes = [list(self._look(name)[1]) for name in self.series]
        scale = altair.Scale(domain=list(self.series), range=dashes)
        return altair.StrokeDash(field, type="nominal", scale=scale, legend=None)

    def shape(self, field: str) -> altair.Shape:
        """The encoding of a series as a marker."""
        import altair

        shapes = [self._look(name)[2] for name in self.series]
        scale = altair.Scale(domain=list(self.series), range=shapes)
        return altair.Shape(field, type="nominal", scale=scale, legend=None)

    def text(self) -> str:
        """The whole page."""
        title = _inline(self.title)
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
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{title}</title>'
            f"<style>{_file('css')}</style></head>\n<body><main>{body}</main></body></html>\n"
        )

    def _look(self, name: str) -> tuple[str, tuple[int, ...], str]:
        """The colour, dash and marker of a series."""
        number = self.series.index(name)
        dash = _DASHES[number // _COLORS % len(_DASHES)]
        return f"var(--series-{number % _COLORS})", dash, _SHAPES[number % len(_SHAPES)]

    def _legend(self, names: Sequence[str]) -> str:
        buttons = []
        for name in names:
            color, dash, shape = self._look(name)
            dashes = " ".join(map(str, dash))
            buttons.append(
                f'<button type="button" aria-pressed="true" value="{html.escape(name)}">'
                '<svg viewBox="-14 -7 28 14" width="28" height="14" aria-hidden="true">'
                f'<path d="M-14,0H14" stroke="{color}" stroke-dasharray="{dashes}"/>'
                f'<path d="{shape}" fill="{color}" transform="scale(4.2)"/></svg>'
                f"{_inline(name)}</button>"
            )
        label = "Lines; press one to hide or show it"
        return f'<div class="legend" role="group" aria-label="{label}">{"".join(buttons)}</div>'


def _controls(y_scale: str | None, smoothing: bool, slider: Slider | None) -> str:
    parts = []
    if slider:
        last = len(slider.values) - 1
        parts.append(
            f'<label class="main">{_inline(slider.label)} <input type="range" name="slider" min="0"'
            f' max="{last}" step="1" value="{slider.start}"><output></output></label>'
        )
    if y_scale:
        checked = " checked" * (y_scale == "log")
        parts.append(
            f'<label><input type="checkbox" name="log"{checked}> Logarithmic vertical axis</label>'
        )
    if smoothing:
        parts.append(
            '<label>Smoothing <input type="range" name="smoothing" min="0" max="0.99" step="0.01"'
            ' value="0"><output></output></label>'
        )
    return "".join(parts)


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


def _inline(text: str | Text) -> str:
    """Text as HTML, with classes for colours and bold parts."""
    if isinstance(text, str):
        return html.escape(text)
    parts = []
    for piece in Text.assemble(text).render(_plain_console()):  # its style is a span, too
        style, color = piece.style, piece.style.color if piece.style else None
        names = [color.name] if color else []
        names += ["bold"] if style and style.bold else []
        shown = html.escape(piece.text)
        parts.append(f'<span class="{" ".join(names)}">{shown}</span>' if names else shown)
    return "".join(parts)


@functools.cache
def _plain_console() -> Console:
    return Console()


def _table(shown: Table) -> str:
    """A table of a terminal as HTML; rows of one group are under one line."""
    named = {":": ' class="n"', "~": ' class="prose"'}
    kinds = [named.get(name[-1:], "") for name in shown.columns]

    def line(tag: str, cells: Sequence[str | Text]) -> str:
        pairs = zip(cells, kinds, strict=True)
        return "".join(f"<{tag}{kind}>{_inline(cell)}</{tag}>" for cell, kind in pairs)

    rows, before = [], None
    for first, *others in shown.rows:
        is_same = shown.grouped and str(first) == before
        style = ' class="first"' if shown.grouped and not is_same else ""
        rows.append(f"<tr{style}>{line('td', ['' if is_same else first, *others])}</tr>")
        before = str(first)
    caption = f"<caption>{_inline(shown.title)}</caption>" if shown.title else ""
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{line("th", shown.heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _file(kind: str) -> str:
    return Path(__file__).with_suffix(f".{kind}").read_text()


@functools.cache
def _vega() -> str:
    """The script that gives the page `vegaEmbed`, with all that it needs."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
