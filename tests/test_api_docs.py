"""docs/api*.md: each is one program that runs as printed, with an example of each name."""

import os
import re
import subprocess
import sys

import pytest
from conftest import COMPILES_FAST, ROOT

import research_dp


def blocks(page):
    """The code of a page, from top to bottom."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


# Page -> what holds at its end.
PAGES = {
    "api.md": "",
    "api_linen.md": "assert float(step(params, state, x, y)[2]) < float(loss)",
    "api_nnx.md": "assert np.isfinite(loss)",
    "api_updates.md": "assert on_disk[0].mu['scale'].shape == () and float(norm) > 0",
}


def test_every_page_is_run():
    assert set(PAGES) == {path.name for path in (ROOT / "docs").glob("api*.md")}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_as_printed_in_a_process_of_its_own(page, tmp_path):
    ours = ("XLA_FLAGS", "JAX_")
    quick = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": COMPILES_FAST}
    bare = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    program = tmp_path / "page.py"
    program.write_text(f"{blocks(page)}\n{PAGES[page]}\n")
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**bare, **quick, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("page", ["api_linen.md", "api_updates.md"])
def test_every_name_of_the_first_table_has_an_example(page):
    first_table = re.search(r"(^\|.*\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE)[0]
    names = set(re.findall(r"\w+", first_table)) & set(research_dp.__all__)
    code = "".join(map(blocks, ("api.md", page)))
    assert names
    assert not [name for name in names if not re.search(rf"\b{name}\b", code)]
