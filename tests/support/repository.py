"""Where the repository is, and what it ships."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def relative(path):
    """A path in the repository, as text."""
    return str(path.relative_to(ROOT))


def json_names(page):
    """The names that a page of docs/ describes below its heading 'For programs'."""
    text = (ROOT / "docs" / page).read_text().split("\n## For programs\n")[1].partition("\n## ")[0]
    return set(re.findall(r"`(\w+)`", text))


def stems():
    """Names of the shipped strategies."""
    return sorted(path.stem for path in (ROOT / "gin" / "strategies").glob("*.gin"))
