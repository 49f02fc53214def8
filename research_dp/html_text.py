"""Text and tables of a terminal as HTML; html_page.css has the looks of their classes."""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from research_dp.console import Table


def inline(text: str | Text) -> str:
    """Text as HTML: what is in it is shown, never read as HTML. Colours, bold parts are classes."""
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


def table_html(shown: Table) -> str:
    """A table of a terminal as HTML; rows of one group are under one line."""
    named = {":": ' class="n"', "~": ' class="prose"'}
    kinds = [named.get(name[-1:], "") for name in shown.columns]
    # Where a row has no room for its cells, each has the name of its column beside it.
    heads = ["", *(f' data-head="{html.escape(head)}"' for head in shown.heads[1:])]

    def line(tag: str, cells: Sequence[str | Text]) -> str:
        marks = map(str.__add__, kinds, heads) if tag == "td" else kinds
        pairs = zip(cells, marks, strict=True)
        return "".join(f"<{tag}{mark}>{inline(cell)}</{tag}>" for cell, mark in pairs)

    rows, before = [], None
    for first, *others in shown.rows:
        is_same = shown.grouped and str(first) == before
        style = ' class="first"' if shown.grouped and not is_same else ""
        rows.append(f"<tr{style}>{line('td', ['' if is_same else first, *others])}</tr>")
        before = str(first)
    caption = f"<caption>{inline(shown.title)}</caption>" if shown.title else ""
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{line("th", shown.heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
