"""Writes the table of all public names in docs/api.md, from their signatures and docstrings.

python tools/api_page.py [--check]
"""

import argparse
import inspect
import re
import sys
from pathlib import Path

import research_dp

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "api.md"
BEGIN, END = "<!-- names: python tools/api_page.py -->\n", "<!-- end of names -->\n"


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


def filled(text: str) -> str:
    """Returns the page with a new table."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    table = "| name | what it is | page |\n|---|---|---|\n"
    return before + BEGIN + table + "".join(map(row, research_dp.__all__)) + END + after


def main() -> int:
    """Writes the page, or checks it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if the page is not current"
    )
    check = parser.parse_args().check
    text = PAGE.read_text()
    if check:
        return int(filled(text) != text)
    PAGE.write_text(filled(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
