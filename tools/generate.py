"""Writes all pages, tables and records that are made from the code and the gin files.

python tools/generate.py [--check | --tables]

- docs/gin.md: what gin files can name;
- docs/api.md: the table of public names;
- README.md, docs/strategies.md: the tables of strategies;
- research_dp/certification/costs.toml: what each may cost;
- README.md, docs/: what the commands on these pages print; tests/golden/: the shipped
  configurations, and the names that users depend on.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import api_page
import gin_page
import strategy_table

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["config/test_gin_files.py", "repository/test_pages.py", "repository/test_interface.py"]


def main() -> int:
    """Writes everything, or checks the pages and tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not current")
    only = "write pages and tables, but not what commands print, which takes minutes"
    parser.add_argument("--tables", action="store_true", help=only)
    given = parser.parse_args()
    check = given.check
    pages = strategy_table.pages() | gin_page.pages() | api_page.pages()
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'not current' if check else 'written'}")
        if not check:
            path.write_text(pages[path])
    if check:
        return int(bool(stale))
    if given.tables:
        return 0
    # These tests run commands, and record what they print.
    words = [sys.executable, "-m", "pytest", "-q", "-m", "", *(f"tests/{name}" for name in TESTS)]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, "UPDATE_GOLDEN": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
