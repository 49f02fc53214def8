"""The README's quickstart, and the strategy that docs/strategies.md adds, as they stand there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from conftest import ROOT

README = (ROOT / "README.md").read_text()
STRATEGIES = (ROOT / "docs" / "strategies.md").read_text()


def test_it_is_at_most_120_lines_long():
    assert len(README.splitlines()) <= 120


def test_the_first_command_reaches_the_accuracy_that_it_promises(command, tmp_path):
    words = shlex.split(re.findall(r"^\$ research-dp train (.*)$", README, re.MULTILINE)[0])
    flags = [word for word in words if not word.startswith("--workdir")]
    done = command(*flags, f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / "summary.json").read_text())["eval"]["accuracy"]
    assert accuracy >= 0.97
    assert f"accuracy {accuracy:.4g}" in done.stdout


def test_the_example_strategy_is_two_files_that_the_equivalence_test_finds(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
    added = re.findall(
        r"`([\w/]+two_level\.\w+)`\n\n<!--.*?-->\n```\w*\n(.*?)```", STRATEGIES, re.DOTALL
    )
    assert len(added) == 2
    for name, text in added:
        assert not (clone / name).exists()
        (clone / name).write_text(text)
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
