"""The table of all public names in docs/api.md, from their signatures and docstrings."""

import inspect
import re
from pathlib import Path

import research_dp

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "api.md"
BEGIN, END = "<!-- names: python tools/generate.py -->\n", "<!-- end of names -->\n"


def row(name: str) -> str:
    """Returns the row of a public name: summary, and the pages that document it."""
    value = getattr(research_dp, name)
    summary = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    if not callable(value):
        summary = f"the default `{type(value).__name__}`"
    own_pages = [page for page in sorted(DOCS.glob("*.md")) if documents(page, name)]
    links = ", ".join(f"[{p.stem.removeprefix('api_')}]({p.name})" for p in own_pages)
    return f"| `{name}` | {summary} | {links} |\n"


def documents(page: Path, name: str) -> bool:
    """Returns whether a page shows how a name is used, not a word that looks like it.

    Pages about the API have its signature as code in prose or in a table; guides call it.
    """
    text = page.read_text()
    if page.stem.startswith("api_"):
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        return bool(re.search(rf"`{name}[(`]", prose))
    return page != PAGE and bool(re.search(rf"(?<!-m )\bresearch_dp\.{name}\b", text))


def pages() -> dict[Path, str]:
    """Returns the text of the page, with a new table."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    table = "| name | what it is | page |\n|---|---|---|\n"
    return {PAGE: before + BEGIN + table + "".join(map(row, research_dp.__all__)) + END + after}
