"""Every block of README.md, docs/, examples/ runs as printed; tests/support/pages.py says how."""

import ast
import builtins
import json
import subprocess
import sys
import tomllib

import pytest
import yaml

from tests.support import pages, terminal
from tests.support.compilers import COMPILES_FAST
from tests.support.golden import updates
from tests.support.repository import ROOT, relative

PAGES = sorted(
    [
        ROOT / "README.md",
        *(page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md")),
    ]
)
QUICK = {"docs/api.md", "docs/api_linen.md", "docs/api_updates.md"}
# Pages whose commands are those of others, or take a minute and more.
EXHAUSTIVE = {
    f"docs/{name}.md"
    for name in (
        *("api_nnx", "compare", "compressed", "configuration", "determinism", "fine_tune"),
        *("low_communication", "own_data", "own_optimizer", "own_strategy", "own_text"),
        *("spot_the_bug", "strategies"),
    )
}
# What a page's code must have reached at its end.
ENDS = {
    "docs/api_linen.md": "assert float(step(params, state, x, y)[2]) < float(loss)",
    "docs/api_nnx.md": "assert np.isfinite(loss)",
    "docs/api_updates.md": "assert on_disk[0].mu['scale'].shape == () and float(norm) > 0",
}
SYNTAX = {
    "python": ast.parse,
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": yaml.safe_load,
    "text": str,
    "bibtex": str,
}


def cases(slow=True):
    """The pages as parameters of a test, with their marks."""
    for page in PAGES:
        name = relative(page)
        mark = pytest.mark.exhaustive if name in EXHAUSTIVE else pytest.mark.slow
        marks = [mark] if slow and name not in QUICK else []
        yield pytest.param(page, marks=marks, id=name)


@pytest.mark.parametrize("page", list(cases(slow=False)))
def test_every_block_is_of_a_kind_that_is_tested(page, tmp_path):
    assert page.read_text().count("```") == 2 * len(pages.blocks(page)), "a fence is not closed"
    for block in pages.blocks(page):
        if block.mark == "file":
            assert pages.copied(block), f"{block} is not a part of {block.value}"
        elif block.mark != "not run":
            known = {*pages.RUN, *SYNTAX, "gin"}
            assert block.kind in known, f"{block}: ```{block.kind}: use one of {sorted(known)}"
            SYNTAX.get(block.kind, str)(block.text)
            if block.kind == "gin" and not block.mark:
                assert not pages.gin_mistakes(block.text, tmp_path), block
        if block.kind == "console":
            assert pages.commands(block)
        if block.mark == "varies":
            assert block.kind == "console"


COPIED = ["README.md", "docs/own_model.md", "docs/own_data.md", "docs/own_strategy.md"]


@pytest.mark.parametrize("page", COPIED)
def test_a_block_that_is_copied_has_its_imports(page):
    for block in pages.blocks(ROOT / page):
        if block.kind == "python":
            assert not undefined(block.text), f"{block}: import or define {undefined(block.text)}"


def undefined(code):
    """The names that code reads and nowhere binds, not even as a built-in."""
    nodes = list(ast.walk(ast.parse(code)))
    read = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
    bound = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    bound |= {(x.asname or x.name).partition(".")[0] for x in nodes if isinstance(x, ast.alias)}
    bound |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    bound |= {x.name for x in nodes if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    return sorted(read - bound - set(dir(builtins)))


@pytest.fixture(scope="module")
def prepared(command):
    """Prepares the data set that pages train on, so that nothing about it is printed."""
    words = [sys.executable, ROOT / "tools" / "prepare_data.py", "digits"]
    done = subprocess.run(words, env=command.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", list(cases()))
def test_a_page_runs_as_printed(page, request, command, tmp_path):
    blocks = [b for b in pages.blocks(page) if b.runs or b.mark == "write"]
    if any(block.kind in ("bash", "console") for block in blocks):
        request.getfixturevalue("prepared")
    with pages.Session(tmp_path / "clone", command.environment["TFDS_DATA_DIR"]) as session:
        for block in blocks:
            run(block, session)
        if relative(page) in ENDS:
            end = dict(page=page, line=0, kind="python", indent="", mark="", value="")
            session.execute(pages.Block(text=ENDS[relative(page)], **end))


def run(block, session):
    """Runs a block, and compares what it prints with what the page shows."""
    if block.mark == "write":
        pages.write(block, session.folder)
    elif block.kind == "python":
        session.execute(block)
    elif block.kind == "bash":
        done = session.shell(block.text)
        assert done.returncode == 0, f"{block}: status {done.returncode}\n{done.stdout[-3000:]}"
    else:
        varies = block.mark == "varies"
        for command, shown in pages.commands(block):
            # It compiles long and computes little, and none of its numbers is compared here.
            quick = varies and not updates() and ".certify " in command
            real = session.output(command, **({"XLA_FLAGS": COMPILES_FAST} if quick else {}))
            if updates() and not pages.matches(shown, real, varies):
                pages.rewrite(block, command, shown, real)
                shown = pages.rewritten(shown, real)
            message = f"{block}: $ {command} prints\n{real}\nIf this is meant: tools/generate.py"
            assert pages.matches(shown, real, varies), message


@pytest.mark.parametrize(
    ("shown", "real", "alike"),
    [
        ("step 100: loss 0.7123", "step 100: loss 0.7124", True),
        ("step 100: loss 0.7123", "step 100: loss 0.8", False),
        ("step 100: loss 0.7123", "step 101: loss 0.7123", False),
        ("19,882 bytes", "19,883 bytes", False),
        ("at most 2.4e-07 apart", "at most 0.0e+00 apart", True),
        ("at most 2.4e-07 apart", "at most 9.1e-07 apart", True),
        ("at most 2.4e-07 apart", "at most 2.4e-03 apart", False),
        ("at most 0.0e+00 apart", "at most 2.4e-03 apart", False),
        ("12345678 bytes", "12345679 bytes", False),
        ("done in 3.2 s, 1,234 examples/s", "done in 11 s, 999 examples/s", True),
        ("saved at 2026-01-02 03:04:05", "saved at 2027-11-22 13:14:15", True),
        ("fingerprint 0123456789abcdef", "fingerprint ffff456789abcdef", True),
        ("conv_0/kernel float32", "conv_1/kernel float32", False),
        ("a  b\n────\n\nc", "a b\n──\nc", True),
        ("a line\nthat is wrapped", "a line that is\nwrapped", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nc\n...", "a\nb\nc", True),
        ("a\n...\nx\n...\nd", "a\nb\nd", False),
        ("a\n...\nb\n...\nd", "a\nd", False),
        ("...\nd", "a\nd\ne", False),
        ("a", "a\nWARNING: b", False),
    ],
)
def test_outputs_are_compared_word_by_word_and_number_by_number(shown, real, alike):
    assert pages.matches(shown, real) == alike


def test_a_rewritten_output_keeps_what_it_leaves_out():
    assert pages.rewritten("a\n...\nd\n", "A\nb\nc\nD\n") == "A\n...\nD\n"
    assert pages.rewritten("a\n", "b \nc\n") == "b\nc\n"
    assert pages.rewritten("a\n...\n", "A\nb\n") == "A\n...\n"
    assert (
        pages.rewritten("...\nb 1\nx\nc\n...\n", "a\nb 2\ny\nz\nc\nd\n")
        == "...\nb 2\ny\nz\nc\n...\n"
    )


def test_pages_that_are_named_here_exist():
    assert {*QUICK, *ENDS} <= {relative(page) for page in PAGES}


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("a\r\nb\r\n", "a\nb\n"),
        ("\x1b[1;32mgreen\x1b[0m\r\n", "green\n"),
        ("step 1\rstep 2\x1b[K\r\n", "step 2\n"),
        ("bar\r\x1b[2K\x1b[?25hdone\r\n", "done\n"),
        ("bar\r\n\x1b[1A\x1b[2Kdone\r\n", "done\n"),
    ],
)
def test_what_a_terminal_shows(output, shown):
    assert terminal.screen(output) == shown
