"""The controls of a page's charts as HTML: html_page.js makes them work."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence

from research_dp.html_text import inline

_COLORS = 10  # html_page.css has as many, --series-0 and so on
# A dash without gaps, (1, 0), would be thousands of strokes in a PDF.
_DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))  # of the first ten series, the next ten, ...
_SHAPES = (  # paths from -1 to 1
    "M-1,0A1,1,0,1,0,1,0A1,1,0,1,0,-1,0Z",
    "M-.9,-.9H.9V.9H-.9Z",
    "M0,-1.2L1.2,0L0,1.2L-1.2,0Z",
    "M0,-1.1L1.1,.9H-1.1Z",
    "M0,1.1L1.1,-.9H-1.1Z",
    "M-.4,-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "M1.1,0L-.9,1.1V-1.1Z",
)

Look = tuple[str, tuple[int, ...], str]  # colour, dash, marker


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


def look(number: int) -> Look:
    """How the series of this number looks."""
    dash = _DASHES[number // _COLORS % len(_DASHES)]
    return f"var(--series-{number % _COLORS})", dash, _SHAPES[number % len(_SHAPES)]


def legend_of(looks: Mapping[str, Look]) -> str:
    """Series by name, each a switch; '' without any."""
    buttons = []
    for name, (color, dash, shape) in looks.items():
        dashes = " ".join(map(str, dash))
        buttons.append(
            f'<button type="button" aria-pressed="true" value="{html.escape(name)}">'
            '<svg viewBox="-14 -7 28 14" width="28" height="14" aria-hidden="true">'
            f'<path d="M-14,0H14" stroke="{color}" stroke-dasharray="{dashes}"/>'
            f'<path d="{shape}" fill="{color}" transform="scale(4.2)"/></svg>'
            f"{inline(name)}</button>"
        )
    label = "Lines: a press hides or shows one, with Shift it alone"
    marks = f'class="legend" role="group" aria-label="{label}" title="{label}"'
    group = f"<div {marks}>{''.join(buttons)}</div>"
    return group if buttons else ""


def controls(y_scale: str | None, smoothing: bool, slider: Slider | None) -> str:
    """The slider, the switch of the vertical scale, and the smoothing, of those that there are."""
    parts = []
    if slider:
        last = len(slider.values) - 1
        parts.append(
            f'<label class="main">{inline(slider.label)} <input type="range" name="slider" min="0"'
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
