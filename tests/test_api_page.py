"""docs/api.md: its table has every public name as it is."""

import re
import subprocess
import sys

from conftest import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()


def test_the_table_is_current_and_every_name_has_a_summary():
    done = subprocess.run([sys.executable, "tools/api_page.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run python tools/api_page.py"
    assert not re.findall(r"^\| `\w+` \|  \|", PAGE, re.MULTILINE)
