"""docs/configuration.md: what its commands print is what stands below them."""

import os
import re
import shlex

import pytest
from conftest import ROOT

PAGE = ROOT / "docs" / "configuration.md"
BLOCK = re.compile(r"```console\n\$ python -m (\S+) (.*)\n((?:.*\n)*?)```\n")


@pytest.mark.parametrize("number", range(len(BLOCK.findall(PAGE.read_text()))))
def test_outputs_are_real(number, command):
    module, flags, shown = BLOCK.findall(PAGE.read_text())[number]
    done = command(*shlex.split(flags), module=module)
    real = "".join(f"{line.rstrip()}\n" for line in (done.stderr + done.stdout).splitlines())
    if os.environ.get("UPDATE_GOLDEN"):
        text = PAGE.read_text()
        found = list(BLOCK.finditer(text))[number]
        PAGE.write_text(text[: found.start(3)] + real + text[found.end(3) :])
        shown = real
    assert comparable(shown) == comparable(real), "if this is meant: python tools/generate.py"


def comparable(text):
    """Without the sizes of differences of rounding, which differ between machines."""
    return re.sub(r"\d\.\de[+-]\d\d apart", "so far apart", text)


def test_the_page_itself_has_the_sizes_that_were_printed():
    assert re.search(r"[1-9]\.\de-\d\d apart", PAGE.read_text()), "differences are never all 0"
