"""Imports run one way, and what must be quick to import is."""

import ast
import graphlib
import re
import subprocess
import sys

import pytest

from research_dp.commands import entries
from tests.support import programs
from tests.support.repository import ROOT, relative

PACKAGE = ROOT / "research_dp"
GROUND = {"", "distributed", "strategies", "deterministic"}
# Package -> the packages of research_dp that it may import; "" has the modules that all share.
ALLOWED = {
    "": {""},
    "distributed": {"", "distributed"},
    "deterministic": GROUND,
    "strategies": GROUND - {"deterministic"},
    "compat": {"", "distributed", "compat"},
    "models": {"", "distributed", "models"},
    "data": {"", "distributed", "data"},
    "runs": {*GROUND, "runs"},
    "training": {*GROUND, "runs", "training"},
    "analysis": {*GROUND, "analysis"},
    "planning": {*GROUND, "analysis", "planning"},
    "certification": {*GROUND, "analysis", "runs", "training", "certification"},
}
ALLOWED["comparison"] = ALLOWED["planning"] | ALLOWED["certification"] | {"comparison"}
ALLOWED["config"] = {*ALLOWED, "config"}
SHARED = {"types", "errors", "console", "argument_checks", "argument_types"}
SHARED |= {"html_page", "html_charts"}
DOORWAYS = {"train", "plan", "certify", "compare", "conform", "sweep", "evaluate", "launch"}
DOORWAYS |= {"checkpoints", "__main__"}
CORE = {"jax", "flax", "optax", "gin", "numpy"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(source):
    """Dotted names of the modules that a source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module == "research_dp":
                # What is imported may be a module itself: `from research_dp import data`.
                yield from (f"{'.' * node.level}{node.module}.{a.name}" for a in node.names)
            else:
                yield node.module


def room_of(parts):
    """The package of a module, by its path below research_dp; "" for one that all share."""
    if len(parts) > 1:
        return parts[0]
    return "" if parts and parts[0] in SHARED else None


def wrong_imports(room, source):
    """Those imports of a source that its room may not have."""
    for name in imported(source):
        first, *rest = name.split(".")
        if first == "research_dp":
            other = "" if rest and rest[0] in SHARED else (rest or [None])[0]
            wrong = room in ALLOWED and other not in ALLOWED[room]
        elif room in GROUND - {""}:
            wrong = first not in CORE | sys.stdlib_module_names
        else:
            wrong = not first  # relative
        if wrong:
            yield name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    room = room_of(path.relative_to(PACKAGE).with_suffix("").parts)
    assert not list(wrong_imports(room, path.read_text()))


def test_contributing_has_the_table_of_rooms():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w.]+/?`(?:, )?)+) \| .+ \| (.+) \|$", text, re.M)
    rooms, files, every = {}, set(), {*ALLOWED, "commands"}
    for names, may in rows:
        if may == "each other" or ".py" in names:
            files |= {name.removesuffix(".py") for name in re.findall(r"[\w.]+", names)}
            continue
        (room,) = re.findall(r"(\w+)/", names)
        named = set(re.findall(r"`(\w+)`", may))
        found = every - named if may.startswith("all") else {room, "", *named}
        rooms[room] = found | (GROUND if "the ground" in may else set())
    assert rooms.pop("commands") == every
    assert rooms == {room: ALLOWED[room] for room in ALLOWED if room}
    assert files == SHARED | DOORWAYS
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*rooms, "commands"}


def test_no_file_imports_one_that_imports_it():
    """Late imports, those by a string and those for type checkers alone count too."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    graph = {name: files_imported(path.read_text(), modules) for name, path in modules.items()}
    targets = {f"commands.{entry.module}" for entry in entries.COMMANDS.values()}
    graph["research_dp.commands.main"] |= {f"research_dp.{target}" for target in targets}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def files_imported(source, modules):
    """The modules of this package that a source imports."""
    found = set()
    pending = [ast.parse(source)]
    while pending:
        node = pending.pop()
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    return found & modules.keys()


TESTS = ROOT / "tests"


def test_tests_are_found_by_the_name_of_their_package():
    """Or in repository/; tests of modules that all packages share are in no folder."""
    wrong = []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder = path.parent.relative_to(TESTS)
        if path.parent == TESTS:
            is_right = (PACKAGE / path.name.removeprefix("test_")).exists()
        else:
            is_right = folder.name == "repository" or (PACKAGE / folder / "__init__.py").exists()
        if not (is_right and (path.parent / "__init__.py").exists()):
            wrong.append(relative(path))
    assert not wrong


def test_no_file_of_tests_imports_a_test_or_conftest():
    """What several need is in tests/support, fixtures are in conftest."""
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            elif not isinstance(node, ast.Import):
                continue
            parts = {part for name in names for part in name.split(".")}
            if any(part == "conftest" or part.startswith("test_") for part in parts):
                wrong.append(f"{relative(path)}:{node.lineno}: {', '.join(names)}")
    assert not wrong


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("training", "import research_dp.data.tfds"),
        ("training", "from research_dp.data import DataSet"),
        ("training", "from research_dp import data"),
        ("training", "def late():\n    from research_dp.models import mlp"),
        ("data", "from research_dp import train"),
        ("data", "import research_dp"),
        ("models", "from ..data import tfds"),
        ("models", "from . import mlp"),
        ("distributed", "import tensorflow as tf"),
    ],
)
def test_an_import_against_the_arrows_is_caught(layer, source):
    assert list(wrong_imports(layer, source))


def test_only_the_room_runs_knows_the_files_of_a_run():
    from research_dp.runs import checkpoint_files, files

    named = {x for x in vars(files).values() if isinstance(x, str) and re.search(r"\.\w+$", x)}
    named |= {files.NOTHING_SAVED, checkpoint_files.MANIFEST.name}
    assert {"run.json", "summary.json", "metrics.jsonl", "config.gin", "manifest.json"} <= named
    folders = (files.CHECKPOINTS, files.FLIGHT, files.TENSORBOARD)
    joined = re.compile(rf"/ ['\"]({'|'.join(folders)})")
    for path in FILES:
        if path.parent != PACKAGE / "runs":
            source = path.read_text()
            strings = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)}
            assert not {x for x in strings if isinstance(x, str)} & named, path
            assert not joined.search(source), path


ROOMS_WITHOUT = {
    "train": ("distributed", "models", "data", "compat", "strategies", "deterministic"),
    "data_parallel": ("distributed", "models", "data", "compat"),
}


@pytest.mark.parametrize("name", ROOMS_WITHOUT)
def test_no_text_names_a_binding_of_a_higher_room(name):
    binding = re.compile(rf"(?<![\w.]){name}\.[a-z]")
    for room in ROOMS_WITHOUT[name]:
        for path in (PACKAGE / room).rglob("*.py"):
            assert not binding.search(path.read_text()), path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_of_one_subject(path):
    assert path.stem not in ("utils", "util", "helpers")
    if path.parent == PACKAGE and path.stem in DOORWAYS:
        assert len(path.read_text().splitlines()) <= 80


# Rooms -> most lines of them together. What is added pays by what it makes unnecessary.
CEILINGS = {
    (".",): 36_000,
    ("distributed", "strategies"): 9_700,
    ("commands",): 4_300,
}


@pytest.mark.parametrize("rooms", CEILINGS, ids="+".join)
def test_rooms_stay_below_their_ceilings(rooms):
    files = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in files) <= CEILINGS[rooms]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_fit_on_a_screen(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{path}: {node.name} has {lines} lines"


def test_the_loop_knows_no_strategy_model_or_data_set():
    names = {p.stem for d in ("strategies", "models", "data") for p in (ROOT / "gin" / d).iterdir()}
    for path in (PACKAGE / "training").glob("*.py"):
        strings = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not strings & names, path


def test_import_needs_no_tensorflow_and_no_clu():
    code = (
        "import sys, research_dp, research_dp.strategies\n"
        "late = ('tensorflow', 'clu', 'tensorflow_datasets', 'grain', 'orbax')\n"
        "print([m for m in late if m in sys.modules])"
    )
    assert programs.output(code).strip() == "[]"


ALONE = """
import importlib, os, sys
import clu.metrics, flax.linen, flax.nnx, gin, grain.python, jax, optax, rich.console
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    "first", ["research_dp.deterministic.step", pytest.param("", marks=pytest.mark.exhaustive)]
)
def test_each_module_can_be_imported_first(first):
    """Two that import each other can, or cannot, by which comes first."""
    paths = [f.relative_to(ROOT).with_suffix("") for f in FILES if f.stem != "__main__"]
    names = [first] if first else [".".join(path.parts) for path in paths]
    words = [sys.executable, "-W", "ignore", "-c", ALONE, *names]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
