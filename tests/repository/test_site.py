"""The site: it loads nothing from elsewhere, and has all that links and the API name."""

import importlib
import os
import re
import subprocess
import sys

import pytest

import research_dp
from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {str(page.relative_to(folder)): page.read_text() for page in folder.rglob("*.html")}


def test_every_public_name_is_in_one_group_of_the_reference(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    pages = importlib.import_module("site_pages").reference_pages()  # raises on 0 or 2 groups
    listed = [line for page in pages.values() for line in page.splitlines()]
    assert not [name for name in research_dp.__all__ if f"::: research_dp.{name}" not in listed]


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?((?:https?:)?//[^\" >]*)")
    assert not {page: loaded.findall(text) for page, text in site.items() if loaded.search(text)}


@pytest.mark.slow
def test_every_public_name_has_its_docstring_in_the_reference(site):
    reference = "".join(text for page, text in site.items() if page.startswith("reference/"))
    assert not [n for n in research_dp.__all__ if f'id="research_dp.{n}"' not in reference]
    shown = reference[reference.index('id="research_dp.shard_params"') :]
    assert "min_weight_size" in shown[: shown.index('id="research_dp.sharding_report"')]
    # Fields of dataclasses are described by the comments beside them.
    assert "why it is replicated, or padded; else empty" in reference


@pytest.mark.slow
def test_links_out_of_docs_lead_to_pages_of_the_site(site):
    assert 'href="source/examples/loop.py.html"' in site["index.html"]
    assert "A training loop without gin" in site["source/examples/loop.py.html"]
    assert "## " not in site["source/examples/own_model.html"]
    assert "linen.gin" in site["source/examples/own_model.html"]  # a link to a folder: its files
    assert 'href="../plan.html' in site["results/plan.html"]
    assert 'src="strategies.svg"' in site["index.html"]
