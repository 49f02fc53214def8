"""HTML from the files of templates/: pages that open from disk, and tables for notebooks.

What a template prints is shown as text, never read as HTML. The script that draws a page's charts
(Vega, 0.9 MB) is in the page. Colours are the page's, so that light, dark and printed pages need
no second chart.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from rich.console import Console
from rich.text import Text

from research_dp.console import Table
from research_dp.errors import UsageError

_STYLES = Console()  # the names of styles, as rich has them


def check_installed() -> None:
    """Raises UsageError if the packages that make a page are missing."""
    modules = {"altair": "altair", "vl_convert": "vl-convert-python"}
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(
            f"a page needs {' and '.join(missing)}, not installed: "
            "pip install -c constraints.txt -e '.[plots]'"
        )


def render(template: str | jinja2.Template, **values: Any) -> str:
    """A template, with these values in it."""
    return environment().get_template(template).render(values)


def table_html(shown: Table) -> str:
    """A table of a terminal as HTML."""
    return str(environment().get_template("parts.html").module.table(shown))  # type: ignore[attr-defined]


def inline(text: Any) -> Markup:
    """Text as HTML: what is in it is shown, never read as HTML. Colours, bold parts are classes."""
    if not isinstance(text, Text):
        return escape(text)
    shown = Markup()
    for piece in Text.assemble(text).render(_STYLES):  # its style is a span, too
        style = piece.style
        names = [style.color.name] if style and style.color else []
        names += ["bold"] if style and style.bold else []
        words = escape(piece.text)
        span = Markup('<span class="{}">{}</span>').format(" ".join(names), words)
        shown += span if names else words
    return shown


@functools.cache
def environment() -> jinja2.Environment:
    """What templates are read and filled in with."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        finalize=inline,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.globals["script"] = _script
    return made


@functools.cache
def _script() -> Markup:
    """The script that draws the charts, with Vega."""
    import vl_convert  # an extra, and slow to import

    return Markup(vl_convert.javascript_bundle(render("page.js")))
