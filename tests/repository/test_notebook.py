"""docs/notebook/first_hour.ipynb runs from its first cell to its last, and has what it prints."""

import re
import subprocess
import sys

import nbclient
import nbformat
import pytest

from tests.support import pages
from tests.support.golden import updates
from tests.support.repository import ROOT

FILE = ROOT / "docs" / "notebook" / "first_hour.ipynb"


@pytest.fixture
def notebook():
    found = nbformat.read(FILE, as_version=4)
    nbformat.validate(found)
    return found


def text_of(cell):
    """What a cell prints, and its result, as one text."""
    outputs = cell.get("outputs", ())
    return "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


def stored(executed):
    """The notebook as it is stored: without progress, folders and times of this machine."""
    for cell in executed.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        printed = [o for o in cell.outputs if o.get("name") == "stdout"]
        text = re.sub(r"/tmp/\w+/", "runs/", "".join(o.text for o in printed))
        others = [o for o in cell.outputs if o.output_type != "stream"]
        stream = nbformat.v4.new_output("stream", name="stdout", text=text)
        cell.outputs = [*([stream] if text else []), *others]
    return executed


def test_it_has_its_outputs_and_is_small(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs for cell in code)
    kinds = {(o.output_type, o.get("name", "stdout")) for cell in code for o in cell.outputs}
    assert kinds <= {(k, "stdout") for k in ("stream", "display_data", "execute_result")}
    assert FILE.stat().st_size < 120_000 and "/tmp/" not in FILE.read_text()


@pytest.mark.slow
def test_every_cell_prints_what_is_stored(notebook, data_dir, tmp_path):
    shown = [text_of(cell) for cell in notebook.cells]
    environment = {**pages.Session(tmp_path / "clone", data_dir).env, "HOME": str(tmp_path)}
    prepare = [sys.executable, ROOT / "tools" / "prepare_data.py", "digits"]  # it says so
    subprocess.run(prepare, env=environment, check=True, capture_output=True)
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}})
    done = stored(client.execute(env=environment))
    if updates():
        nbformat.write(done, FILE)
        return
    printed = [text_of(cell) for cell in done.cells]
    for one, other in zip(shown, printed, strict=True):
        assert pages.matches(one, other, varies=True), other
    assert "False\nall gradients: 8 times what it should be" in "".join(printed)
    outputs = [output for cell in done.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 2
