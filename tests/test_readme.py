"""The promises of README.md, and of the page on strategies of one's own."""

import json
import os
import re
import shutil
import subprocess
import sys

from conftest import ROOT

README = (ROOT / "README.md").read_text()


def add_two_level(clone):
    """Adds the strategy of docs/own_strategy.md to a clone, as the page says."""
    page = (ROOT / "docs" / "own_strategy.md").read_text()
    for shown, path in {
        "my_pkg/two_level.py": "research_dp/strategies/two_level.py",
        "gin/strategies/two_level.gin": "gin/strategies/two_level.gin",
    }.items():
        (text,) = re.findall(rf"`{shown}`\n\n<!-- [^\n]* -->\n```\w+\n(.*?)```", page, re.DOTALL)
        assert not (clone / path).exists()
        (clone / path).write_text(text)


def test_it_is_one_page_long():
    assert len(README.splitlines()) <= 120


def test_the_first_command_reaches_the_accuracy_that_it_shows(command, tmp_path):
    (line,) = re.findall(r"^\$ python -m research_dp.train (.*) --workdir=\S+$", README, re.M)
    done = command(*line.split(), f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / "summary.json").read_text())["eval"]["accuracy"]
    shown = float(re.findall(r"^Done: .*accuracy ([\d.]+)", README, re.M)[0])
    assert shown >= 0.98
    assert abs(accuracy - shown) <= 0.015
    assert f"accuracy {accuracy:.4g}" in done.stdout


def test_the_pictures_are_readable_on_light_and_dark_pages():
    for name in re.findall(r"!\[.*?\]\((docs/\w+\.svg)\)", README):
        picture = (ROOT / name).read_text()
        assert "background" not in picture
        assert not re.findall(r"(?:fill|stroke): (?:#000000|#ffffff|black|white)\b", picture), name


def test_the_example_strategy_is_two_files_that_the_equivalence_test_finds(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
    add_two_level(clone)
    words = ["-m", "pytest", "-q", "tests/test_strategies.py", "-k", "two_level and follows"]
    done = subprocess.run(
        [sys.executable, *words, "-p", "no:cacheprovider"],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
