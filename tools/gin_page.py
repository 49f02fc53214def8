"""Writes docs/gin.md: everything that gin files can name, from signatures and docstrings.

python tools/gin_page.py [--check]
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from research_dp.commands import catalog

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gin.md"
HEAD = """# What gin files can name

Made by `python tools/gin_page.py`; `python -m research_dp.train --list` prints the same in short,
`--list NAME` one entry, `--list --json` all for programs. A package of your own adds to it:
`--import=my_pkg --list`.
"""
ALONE = "functions for code of your own"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in catalog.everything():
        parts.append(f"\n## {group['group'].capitalize()}\n")
        if group["group"] == ALONE:
            parts.append("\nThey are called from Python, and described in [api.md](api.md).\n")
        files = [entry for entry in group["entries"] if "text" in entry]
        functions = [entry for entry in group["entries"] if "text" not in entry]
        if files:
            parts.append("\n| file | what it is |\n|---|---|\n")
            parts += [f"| `{entry['name']}` | {entry['summary']} |\n" for entry in files]
        for entry in functions:
            parts.append(short(entry) if group["group"] == ALONE else in_full(entry))
    return "".join(parts)


def short(entry: dict) -> str:
    """A function's line."""
    return f"- `{entry['name']}`: {entry['summary']}\n"


def in_full(entry: dict) -> str:
    """A function with a row for each parameter."""
    parts = [f"\n### {entry['name']}\n\n{entry['summary']}\n"]
    if entry["parameters"]:
        parts.append("\n| parameter | type | default | must be |\n|---|---|---|---|\n")
    for name, known in entry["parameters"].items():
        cells = [f"`{name}`", f"`{known['type']}`".replace("|", "\\|")]
        default = f"`{known['default']}`" if known["default"] is not None else ""
        cells.append("required" if known["required"] else default)
        cells.append((known["expected"] or "").replace("|", "\\|"))
        parts.append(f"| {' | '.join(cells)} |\n")
    if entry["bound_in"]:
        parts.append(f"\nBound in {', '.join(f'`{file}`' for file in entry['bound_in'])}.\n")
    return "".join(parts)


def main() -> int:
    """Writes the page, or checks it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if the page is not current"
    )
    check = parser.parse_args().check
    if check:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
