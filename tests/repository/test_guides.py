"""docs/coming_from.md and docs/troubleshooting.md: what they name is in the code."""

import ast
import re

import pytest
import yaml

import research_dp
from research_dp.config import parser
from tests.support import pages
from tests.support.repository import ROOT

SOURCES = (ROOT / "research_dp").rglob("*.py")


def rows():
    """The cells of the tables of docs/coming_from.md after the first, without their heads."""
    text = (ROOT / "docs" / "coming_from.md").read_text()
    for line in text[text.index("## PyTorch") :].splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if row and "---" not in row[0] and row[0] != "setting":
            yield row


def spans(text):
    return re.findall(r"`([^`]+)`", text)


TRANSLATED = sorted({span for row in rows() for span in spans(row[1])})


def test_translations_are_found():
    assert len(TRANSLATED) > 30


@pytest.mark.parametrize("span", TRANSLATED)
def test_what_a_setting_becomes_is_accepted(span, tmp_path):
    if span.endswith(".gin"):
        assert parser.find(span), span
    elif span.startswith("--"):
        flags = "".join(p.read_text() for p in (ROOT / "research_dp/commands").glob("*.py"))
        assert span[2:] in flags
    elif span.startswith("python -m"):
        assert (ROOT / "research_dp" / f"{span.rpartition('.')[2]}.py").exists()
    else:
        assert " = " in span
        assert not pages.gin_mistakes(span, tmp_path)


def test_the_first_table_names_the_shipped_strategies():
    table = (ROOT / "docs/coming_from.md").read_text().split("\n## ")[1]
    named = {n for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for n in spans(row)}
    shipped = {path.stem for path in (ROOT / "gin/strategies").glob("*.gin")}
    assert named | {"single"} == shipped


def literals(node):
    """The text of a string in the code, with a mark for each value; '' for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "\0"
    if isinstance(node, ast.JoinedStr):
        return "".join(literals(part) for part in node.values)
    return "\0"


TEXTS = [
    literals(node)
    for path in SOURCES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant | ast.JoinedStr)
]
MESSAGES = [
    line
    for block in pages.blocks(ROOT / "docs" / "troubleshooting.md")
    if block.kind == "text"
    for line in block.text.splitlines()
]


def test_messages_are_found():
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_code_prints(message):
    parts = [re.escape(part.strip(" ")) for part in message.split("...")]
    assert max(map(len, parts)) > 12, "too short to be found on purpose"
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in TEXTS)


def test_bullets_of_the_changelog_are_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    bullets = re.findall(r"^- (.*(?:\n  .*)*)", text, re.MULTILINE)
    assert len(bullets) > 20
    assert not [bullet for bullet in bullets if len(bullet.split()) > 25]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["version"] == research_dp.__version__
    assert f"## [{research_dp.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
