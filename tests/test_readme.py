"""The README's commands and its example, as they stand there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from conftest import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def train_flags(line):
    words = shlex.split(line.split("-m research_dp.train", 1)[1])
    return [word for word in words if not word.startswith("--workdir")]


def test_the_first_command_reaches_the_accuracy_that_it_promises(command, tmp_path):
    done = command(*train_flags(blocks("bash")[0]), f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / "summary.json").read_text())["eval"]["accuracy"]
    assert accuracy >= 0.97
    assert f"accuracy {accuracy:.4g}" in done.stdout


def test_the_other_commands_are_accepted(command):
    others = [line for block in blocks("bash")[2:] for line in block.splitlines()]
    trains = [line for line in others if "research_dp.train" in line]
    assert len(trains) == 3
    for line in trains:
        done = command(*[f for f in train_flags(line) if f != "--dry_run"], "--dry_run")
        assert done.returncode == 0, done.stderr


def test_the_example_strategy_is_two_files_that_the_equivalence_test_finds(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
    added = re.findall(r"`([\w/]+two_level\.\w+)`\n\n```\w*\n(.*?)```", README, re.DOTALL)
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
