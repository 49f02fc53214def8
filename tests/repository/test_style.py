"""README and the guides read well: short sentences, the field's words, links that lead on."""

import re

import pytest

from tests.support.repository import ROOT, relative

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
GUIDES = [page for page in PAGES if page.name != "gin.md"]  # written by tools/generate.py
LINKING = sorted([*PAGES, *ROOT.glob("*.md"), *(ROOT / "experiments").rglob("*.md")])
WORDS_A_SENTENCE = 17

# What this project once called things -> what the field calls them.
REPLACED = {
    r"wholes?|wholly": "replicated, unsharded, all of",
    r"told|tells?": "reports, says, shows",
    r"lie|lies|lay|laid": "is sharded, is stored",
    r"holds?|held": "stores, contains; is true",
    r"mine|spoilt|alone|apart": "say what it is: non-finite, by itself, far from",
    r"travels?|travelled": "is communicated",
    r"looks? at|look ahead": "inspects, checks, reads",
    r"in vain|left over|as written": "say what happens",
    r"beside": "next to, compared with; overlapped with",
    r"oracle": "reference",
    r"lest|whose sake|whence": "plain words",
}


def prose(page):
    """The paragraphs and items of a page, without code, tables, comments and headings."""
    text = re.sub(r"^( *)(```+).*?^\1\2", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[a-z/][^>]*>", "", text, flags=re.DOTALL)
    text = re.sub(r"^(#.*|\s*\|.*|---.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def sentences(page):
    """The end of a paragraph or of an item ends a sentence too."""
    found = [s for part in prose(page) for s in re.split(r"(?<=[.!?])\s+(?=[\"'(*]*[A-Z])", part)]
    return [sentence for sentence in found if re.search(r"[a-z]", sentence)]


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    made = []
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        made.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return made


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_sentences_are_short(page):
    lengths = {s: len(re.findall(r"[\w'-]+", s)) for s in sentences(page)}
    mean = sum(lengths.values()) / len(lengths)
    longest = sorted(lengths, key=lengths.get, reverse=True)[:5]
    assert mean <= WORDS_A_SENTENCE, "\n".join([f"mean {mean:.1f} words; longest:", *longest])


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_words_are_the_fields(page):
    text = "\n".join(prose(page))
    wrong = [
        f"{text[max(0, found.start() - 30) : found.end() + 20]!r}: say {instead}"
        for word, instead in REPLACED.items()
        for found in re.finditer(rf"\b(?:{word})\b", text, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", LINKING, ids=relative)
def test_links_lead_to_a_heading(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    missing = []
    for link in re.findall(r"\]\(([^)\s]+#[^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and target.suffix == ".md" and anchor not in anchors(target):
            missing.append(f"{link}: there are {anchors(target)}")
    assert not missing


def test_every_page_is_on_the_site():
    """Its navigation lists what is there; a page that nothing leads to is not found."""
    config = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w/]+\.md)$", config, re.MULTILINE))
    assert {page.name for page in PAGES} - {"README.md"} <= listed
    results = {p.relative_to(ROOT) for p in (ROOT / "experiments").rglob("*.md")}
    names = {p.parent.name + p.stem.removeprefix("README") for p in results}
    assert {f"results/{n.replace('experiments', 'index')}.md" for n in names} <= listed
