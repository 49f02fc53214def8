"""docs/api_linen.md and docs/api_updates.md: each is one program, with an example of each name."""

import re

import numpy as np
import pytest
from conftest import ROOT

import research_dp


def blocks(page):
    """The code of a page, from top to bottom."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def run(page):
    """What the code of a page leaves behind."""
    scope = {"__name__": "docs"}
    exec(compile(blocks(page), page, "exec"), scope)
    return scope


def test_the_documented_step_trains_and_the_other_examples_run():
    scope = run("api_linen.md")
    assert np.isfinite(scope["loss"])
    _, _, second = scope["step"](scope["params"], scope["state"], scope["x"], scope["y"])
    assert float(second) < float(scope["loss"])


def test_the_sharded_update_runs_and_its_state_is_whole_on_disk():
    scope = run("api_updates.md")
    assert scope["on_disk"][0].mu["scale"].shape == ()
    assert float(scope["norm"]) > 0


@pytest.mark.parametrize("page", ["api_linen.md", "api_updates.md"])
def test_every_name_of_the_first_table_has_an_example(page):
    first_table = re.search(r"(^\|.*\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE)[0]
    names = set(re.findall(r"\w+", first_table)) & set(research_dp.__all__)
    code = "".join(map(blocks, ("api.md", page)))
    assert names
    assert not [name for name in names if not re.search(rf"\b{name}\b", code)]
