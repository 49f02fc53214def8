"""docs/api_nnx.md runs from top to bottom; the seed pages' examples also without their mends."""

import re
import traceback

import pytest
from conftest import ROOT

DOC = ROOT / "docs" / "api_nnx.md"


def blocks():
    """(line in the file, code) of each block."""
    text = DOC.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), match[1]


def run(code, line, names):
    exec(compile("\n" * line + code, str(DOC), "exec"), names)


@pytest.mark.slow
def test_every_block_runs_and_mended_examples_do_as_said_as_printed():
    names, seen = {"__name__": "docs"}, []
    for line, code in blocks():
        if "# mended: @jax.pmap" in code:
            as_printed = re.sub(r"@functools.*# mended: (.*)", r"\1", code)
            assert "\n@jax.pmap\n" in as_printed
            printed = dict(names)
            run(as_printed, line, printed)
            params, batch = printed["jnp"].ones((8, 784)), printed["batch"]
            rows = printed["jax"].tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
            with pytest.raises(NameError, match="unbound axis name: batch"):
                printed["train_step"](params, rows)
            seen.append("pmap")
        if "# mended: this line was missing" in code:
            as_printed = re.sub(r"nnx.update\(.*# mended.*\n", "", code)
            printed = dict(names)
            run(as_printed, line, printed)
            seen.append(float(printed["loss"]))
        try:
            run(code, line, names)
        except Exception:
            pytest.fail(f"the block at line {line}:\n{traceback.format_exc()}")
    assert seen == ["pmap", pytest.approx(float(names["loss"]), rel=1e-6)]


def test_every_name_has_a_line_and_an_example():
    import research_dp

    text, code = DOC.read_text(), "\n".join(code for _, code in blocks())
    late = {n for n, file in research_dp._LATE.items() if file.endswith("compat.artifex")}
    shown = {"DeviceMeshManager", "place_batch_on_shards", "reduce_gradient_tree", *late}
    for name in shown:
        assert f"`{name}" in text
        assert re.search(rf"\b{name}\(", code), name
