"""The table of all public names in docs/api.md, from their signatures and docstrings."""

import inspect
import re
from pathlib import Path

import research_dp

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "api.md"
BEGIN, END = "<!-- names: python tools/generate.py -->\n", "<!-- end of names -->\n"


def row(name: str) -> str:
    """Returns the row of a public name: summary, and the pages that mention it."""
    value = getattr(research_dp, name)
    summary = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    if not callable(value):
        summary = f"the default `{type(value).__name__}`"
    own_page = [
        p for p in sorted(DOCS.glob("api_*.md")) if re.search(rf"\b{name}\b", p.read_text())
    ]
    pages = ", ".join(f"[{p.stem.removeprefix('api_')}]({p.name})" for p in own_page)
    return f"| `{name}` | {summary} | {pages} |\n"


def pages() -> dict[Path, str]:
    """Returns the text of the page, with a new table."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    table = "| name | what it is | page |\n|---|---|---|\n"
    return {PAGE: before + BEGIN + table + "".join(map(row, research_dp.__all__)) + END + after}
