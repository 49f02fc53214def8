"""Imports run one way, and what must be quick to import is."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

PACKAGE = ROOT / "research_dp"
# Layer -> the layers of this package that it may import.
ALLOWED = {
    "distributed": {"distributed"},
    "strategies": {"strategies", "distributed"},
    "models": {"models", "distributed"},
    "data": {"data", "distributed"},
    "analysis": {"analysis", "strategies", "distributed"},
    "planning": {"planning", "analysis", "strategies", "distributed"},
    "conformance": {"conformance", "analysis", "models", "strategies", "distributed"},
    "training": {"training", "analysis", "strategies", "distributed"},
    "certification": {"certification", "analysis", "strategies", "training", "distributed"},
    "config": {
        *("config", "analysis", "distributed", "strategies", "models", "data", "training"),
        *("certification", "planning"),
    },
}
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


def wrong_imports(layer, source):
    """Those imports of a source that its layer may not have."""
    for name in imported(source):
        first, *rest = name.split(".")
        if first == "research_dp":
            wrong = layer in ALLOWED and (not rest or rest[0] not in ALLOWED[layer])
        elif layer in ("distributed", "strategies"):
            wrong = first not in CORE | sys.stdlib_module_names
        else:
            wrong = not first  # relative
        if wrong:
            yield name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert not list(wrong_imports(path.relative_to(PACKAGE).parts[0], path.read_text()))


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("training", "import research_dp.data.tfds"),
        ("training", "from research_dp.data import DataSet"),
        ("training", "from research_dp import data"),
        ("training", "def late():\n    from research_dp.models import mlp"),
        ("data", "from research_dp import UsageError"),
        ("data", "import research_dp"),
        ("models", "from ..data import dataset"),
        ("models", "from . import mlp"),
        ("distributed", "import tensorflow as tf"),
    ],
)
def test_an_import_against_the_arrows_is_caught(layer, source):
    assert list(wrong_imports(layer, source))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_fit_in_a_head(path):
    assert path.stem not in ("utils", "util", "helpers")
    assert len(path.read_text().splitlines()) <= 350
    if path.parent == PACKAGE and path.stem in (
        "train",
        "sweep",
        "conform",
        "checkpoints",
        "plan",
        "certify",
        "compare",
    ):
        assert len(path.read_text().splitlines()) <= 80


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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
