"""What pages and scripts name exists: paths, links, modules, gin parameters. Prose is wrapped."""

import ast
import importlib
import re

import pytest

from research_dp.commands import catalog
from research_dp.strategies.slots import Stateful
from tests.support.repository import ROOT, relative

FOLDERS = ("", "research_dp", "research_dp/distributed", "gin", "tests")  # where a path may begin
# Packages whose functions another test of the process registers.
OF_TESTS = ("examples.", "tests.")
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "experiments").rglob("*.md"),
    ]
)
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a changelog names the past
# Files of a run, files that a page shows how to write, and other people's files.
EXAMPLES = re.compile(r"config\.gin|two_level|my_pkg|my/own|[A-Z]{4}|rendezvous\.cc|damaged|^F$")


def without_code(text):
    """The text with its code blocks left out."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(page):
    return re.findall(r"`([^`]+)`", without_code(page.read_text()))


def words(page):
    """The words of all code spans and code blocks."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.splitlines() if "python" in line]
    return {
        word for part in [*code_spans(page), *commands] for word in re.split(r"[\s,='\"()+]+", part)
    }


def exists(page, path):
    """Whether a path, or a pattern, is there: from the root, from a usual folder, or beside it."""
    starts = [page.parent, *(ROOT / folder for folder in FOLDERS)]
    return any(list(start.glob(path.rstrip("/"))) for start in starts)


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_paths_exist(page):
    folders = "|".join(folder for folder in ("docs", "experiments", "tools", *FOLDERS) if folder)
    is_path = re.compile(rf"[\w./*-]+\.(py|gin|toml|md|svg)|({folders})/[\w./*-]+")
    paths = {word for word in words(page) if is_path.fullmatch(word)}
    missing = [p for p in paths if not EXAMPLES.search(p) and not exists(page, p)]
    assert not missing


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    targets = [link.partition("#")[0] for link in links if "://" not in link]
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_modules_and_their_members_exist(page):
    dotted = set(re.findall(r"\bresearch_dp(?:\.\w+)+", page.read_text()))
    assert not [text for text in dotted if not EXAMPLES.search(text) and not resolves(text)]


def resolves(dotted):
    """Whether a dotted name is a module, or a member of one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_scripts_import_what_exists():
    """Scripts of experiments/ and tools/ are not run by tests, so a rename can break them."""
    missing = []
    for script in [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("research_dp"):
                dotted = [f"{node.module}.{alias.name}" for alias in node.names]
                missing += [f"{relative(script)}: {text}" for text in dotted if not resolves(text)]
    assert not missing


@pytest.mark.parametrize("page", CURRENT, ids=relative)
def test_gin_parameters_exist(page):
    entries = [entry for group in catalog.everything() for entry in group["entries"]]
    known = {entry["name"]: entry["parameters"] for entry in entries if "text" not in entry}
    bound = {tuple(m) for span in code_spans(page) for m in re.findall(r"\b(\w+)\.(\w+)\b", span)}
    files = {"gin", "py", "md", "sbatch"}
    assert not [
        f"{function}.{parameter}"
        for function, parameter in bound
        if function in known and parameter not in {*known[function], *files}
    ]


@pytest.mark.parametrize("stem", ["weights", "plan", "compare", "configuration"])
def test_pages_about_a_runs_folder_say_that_its_imports_are_executed(stem):
    text = " ".join((ROOT / "docs" / f"{stem}.md").read_text().split())
    sentences = re.split(r"(?<=[.:]) ", text)
    assert [s for s in sentences if re.search("import|modules", s) and "execute" in s]
    assert "config.gin" in text


def test_the_page_on_strategies_has_what_a_slot_with_state_needs():
    page = (ROOT / "docs" / "own_strategy.md").read_text()
    members = {*Stateful.__annotations__, *vars(Stateful)}
    assert all(f"| `{name}" in page for name in members if not name.startswith("_"))
    assert "a `Stateful`" in page


def test_every_parameter_that_gin_can_bind_is_described():
    entries = [entry for group in catalog.everything() for entry in group["entries"]]
    missing = [
        f"{entry['selector']}.{name}: write it under Args: of the docstring"
        for entry in entries
        if not entry.get("selector", "").startswith(OF_TESTS)
        for name, known in entry.get("parameters", {}).items()
        if known["bindable"] and not known["description"]
    ]
    assert not missing


def test_the_page_on_installation_names_what_is_installed():
    page = (ROOT / "docs" / "install.md").read_text()
    (pinned,) = re.findall(r"^jax==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"with JAX {pinned}, which `constraints.txt` pins" in page
    extras = re.findall(r'^    "([\w-]+)": ', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert len(extras) > 8
    assert not [extra for extra in extras if f"`{extra}`" not in page]


def test_what_contributing_names_is_in_the_code():
    """Functions and classes of the pages that say where things are."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    guide = text[text.index("## Read the heart") : text.index("## Rooms")]
    sources = [*(ROOT / "research_dp").rglob("*.py"), *(ROOT / "gin").rglob("*.gin")]
    code = "\n".join(path.read_text() for path in sources)
    spans = {span for span in re.findall(r"`([^`]+)`", guide) if re.fullmatch(r"[\w.]+", span)}
    named = {part for span in spans for part in span.split(".")}
    missing = [part for part in sorted(named) if not re.search(rf"\b{part}\b", code)]
    assert not [part for part in missing if part not in ("py", "gin", "toml", "NAME", "README")]
    for names, file in re.findall(r"((?:`[\w.]+`(?:,\s| and\s)?)+)\s?in\s`([\w/]+\.py)`", guide):
        source = (ROOT / "research_dp" / file.removeprefix("research_dp/")).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            last = name.rpartition(".")[2]
            assert re.search(rf"(def|class) {last}\b", source), f"{name} is not in {file}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_prose_is_at_most_100_columns_wide(page):
    lines = without_code(page.read_text()).splitlines()
    prose = [line for line in lines if not line.startswith(("|", "#", "<!--", "![", "<picture"))]
    too_wide = [line for line in prose if len(line) > 100 and " " in line.strip()[:100]]
    assert not too_wide
