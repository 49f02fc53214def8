"""docs/notebook/first_hour.ipynb runs from its first cell to its last, and is stored bare."""

import nbclient
import nbformat
import pytest

from tests.support import pages
from tests.support.repository import ROOT

FILE = ROOT / "docs" / "notebook" / "first_hour.ipynb"


@pytest.fixture
def notebook():
    found = nbformat.read(FILE, as_version=4)
    nbformat.validate(found)
    return found


def test_outputs_are_not_stored(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


@pytest.mark.slow
def test_every_cell_runs(notebook, data_dir, tmp_path):
    environment = {**pages.Session(tmp_path / "clone", data_dir).env, "HOME": str(tmp_path)}
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}})
    done = client.execute(env=environment)
    outputs = [output for cell in done.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "False\nall gradients: 8 times what it should be" in printed
    assert "True\n" in printed, "the strategy without the bug is certified"
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 2
