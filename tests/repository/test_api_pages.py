"""docs/api*.md: each name has an example; mended examples of other packages do as is said."""

import re

import pytest

import research_dp
from tests.support import pages
from tests.support.repository import ROOT

PAGES = {path.name: path for path in (ROOT / "docs").glob("api*.md")}


def blocks(page):
    """The code of a page, from top to bottom."""
    return [block for block in pages.blocks(PAGES[page]) if block.kind == "python"]


def code(*names):
    return "\n".join(block.text for name in names for block in blocks(name))


def run(text, names):
    exec(compile(text, "docs/api_nnx.md", "exec"), names)


@pytest.mark.slow
def test_mended_examples_do_as_said_as_printed():
    names, seen = {"__name__": "docs"}, []
    for block in blocks("api_nnx.md"):
        printed = dict(names)
        if "# mended: @jax.pmap" in block.text:
            as_printed = re.sub(r"@functools.*# mended: (.*)", r"\1", block.text)
            assert "\n@jax.pmap\n" in as_printed
            run(as_printed, printed)
            params, batch = printed["jnp"].ones((8, 784)), printed["batch"]
            rows = printed["jax"].tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
            with pytest.raises(NameError, match="unbound axis name: batch"):
                printed["train_step"](params, rows)
            seen.append("pmap")
        if "# mended: this line was missing" in block.text:
            run(re.sub(r"nnx.update\(.*# mended.*\n", "", block.text), printed)
            seen.append(float(printed["loss"]))
        run(block.text, names)
    assert seen == ["pmap", pytest.approx(float(names["loss"]), rel=1e-6)]


@pytest.mark.parametrize("page", ["api_linen.md", "api_updates.md"])
def test_every_name_of_the_first_table_has_an_example(page):
    first_table = re.search(r"(^\|.*\n)+", PAGES[page].read_text(), re.MULTILINE)[0]
    names = set(re.findall(r"\w+", first_table)) & set(research_dp.__all__)
    assert names
    examples = code("api.md", page)
    assert not [name for name in names if not re.search(rf"\b{name}\b", examples)]


def test_every_name_of_the_nnx_page_has_a_line_and_an_example():
    public = {name: getattr(research_dp, name) for name in research_dp.__all__}
    late = {n for n, x in public.items() if getattr(x, "__module__", "").endswith("compat.artifex")}
    shown = {"DeviceMeshManager", "place_batch_on_shards", "reduce_gradient_tree", *late}
    text, examples = PAGES["api_nnx.md"].read_text(), code("api_nnx.md")
    for name in shown:
        assert f"`{name}" in text
        assert re.search(rf"\b{name}\(", examples), name
