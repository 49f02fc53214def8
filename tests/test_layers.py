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
    "training": {"training", "strategies", "distributed", "data"},
    "config": {"config", "distributed", "strategies", "models", "data", "training"},
}
CORE = {"jax", "flax", "optax", "gin", "numpy"}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    layer = path.relative_to(PACKAGE).parts[0]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "research_dp" and layer in ALLOWED and len(parts) > 1:
            assert parts[1] in ALLOWED[layer], f"{path} imports {name}"
        elif layer in ("distributed", "strategies") and parts[0] not in sys.stdlib_module_names:
            assert parts[0] in CORE | {"research_dp"}, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_fit_in_a_head(path):
    assert path.stem not in ("utils", "util", "helpers")
    assert len(path.read_text().splitlines()) <= 350
    if path.parent == PACKAGE and path.stem in ("train", "plan", "certify", "compare"):
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
        "print([m for m in ('tensorflow', 'clu', 'tensorflow_datasets', 'grain', 'orbax')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
