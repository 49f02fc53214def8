"""tools/generate.py: pages and tables are what the code and the gin files make of them."""

import re
import shutil

import pytest

from tests.support.pages import add_two_level
from tests.support.programs import python
from tests.support.repository import ROOT


def test_pages_are_current():
    done = python("tools/generate.py", "--check")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run python tools/generate.py"


def test_every_public_name_has_a_summary():
    page = (ROOT / "docs" / "api.md").read_text()
    assert not re.findall(r"^\| `\w+` \|  \|", page, re.MULTILINE)


@pytest.mark.slow
def test_what_mentions_a_new_strategy_is_generated(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*"))
    add_two_level(clone)
    assert python("tools/generate.py", "--check", folder=clone).returncode == 1
    done = python("tools/generate.py", "--tables", folder=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    row = "| `two_level` | replicated | by `two_level_average`, once a step | replicated |"
    assert f"{row} not known |" in (clone / "docs" / "strategies.md").read_text()
    assert "| `two_level` | nothing | not known |" in (clone / "README.md").read_text()
    tests = ["test_generate", "test_layers", "test_documentation"]
    tests = [*(f"repository/{name}" for name in tests), "certification/test_costs"]
    # A ceiling has no room for a strategy that is not there.
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not ceilings"]
    done = python(*words, *(f"tests/{name}.py" for name in tests), folder=clone)
    assert done.returncode == 0, done.stdout
