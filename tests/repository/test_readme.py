"""The promises of README.md, and of the page on strategies of one's own."""

import os
import re
import shutil
import subprocess

import pytest

from tests.support import pages
from tests.support.pages import add_two_level
from tests.support.programs import python
from tests.support.repository import ROOT
from tests.support.runs import summary

README = (ROOT / "README.md").read_text()
CLONE = "git clone URL research_dp && cd research_dp && "


def test_it_is_one_page_long():
    assert len(README.splitlines()) <= 120


def test_the_first_command_reaches_the_accuracy_that_it_shows(command, tmp_path):
    (line,) = re.findall(r"^\$ python -m research_dp.train (.*) --workdir=\S+$", README, re.M)
    done = command(*line.split(), f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    accuracy = summary(tmp_path)["eval"]["accuracy"]
    shown = float(re.findall(r"^Done: .*accuracy ([\d.]+)", README, re.M)[0])
    assert shown >= 0.98
    assert abs(accuracy - shown) <= 0.015
    assert f"accuracy {accuracy:.4g}" in done.stdout


def test_its_two_commands_are_each_one_line_for_a_shell():
    first, second = (block for block in pages.blocks(ROOT / "README.md") if block.mark == "ci")
    for block in (first, second):
        *others, _ = block.text.splitlines()
        assert all(line.endswith(" && \\") for line in others)
    (shown,) = re.findall(r"^\$ (python -m research_dp.train .*)$", README, re.M)
    assert first.text.startswith(CLONE) and first.text.endswith(f"  {shown}\n")
    assert second.text.endswith(" && pytest -q -n 2\n")


@pytest.fixture
def ci(tmp_path):
    """Runs .ci/run, with programs that do nothing, where README has these two commands."""
    checkout, programs, temporary = (tmp_path / name for name in ("a & b", "bin", "temporary"))
    for folder in (checkout / ".ci", programs, temporary):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci")
    for name in ("chromium", "pip", "pytest", "ruff", "mypy"):
        (programs / name).write_text('#!/bin/sh\necho "$(basename "$0")" $PYTEST_ADDOPTS "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    env = {"PATH": path, "TMPDIR": str(temporary), "HOME": str(tmp_path)}
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody"]

    def run(first, second):
        blocks = {"first": first, "second": second}
        page = [f"<!-- ci: {name} -->\n```bash\n{text}\n```\n" for name, text in blocks.items()]
        (checkout / "README.md").write_text("\n".join(page))
        for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "all"]):
            subprocess.run(["git", *words], cwd=checkout, env=env, check=True)
        (checkout / "not_committed").touch()
        options = {"env": env, "capture_output": True, "text": True, "check": False}
        done = subprocess.run(["bash", checkout / ".ci" / "run"], **options)
        assert not list(temporary.iterdir()), "it left its folder"
        return done

    return run


def test_ci_runs_its_two_commands_in_a_clone(ci):
    done = ci(f"{CLONE}\\\n  here=$PWD && ls", "pytest --quick && echo in ${here##*/}")
    assert done.returncode == 0, done.stderr
    assert "Changes that are not committed are not tested" in done.stdout
    printed = [line for line in done.stdout.splitlines() if not line.startswith(("==", "Changes"))]
    quick = "pytest --no-skips --durations=25 --quick"
    assert printed[1:4] == ["README.md", quick, "in research_dp"]
    assert [line.split()[0] for line in printed[4:]] == ["pip", "ruff", "ruff", "mypy", "pytest"]
    assert printed[-1] == "pytest -q -n 2 --no-skips -m slow --durations=25"


@pytest.mark.parametrize(
    ("first", "second", "reached", "message"),
    [
        (f"{CLONE}false && echo trained", "pytest", "README, first", ""),
        (f"{CLONE}echo trained", "false && pytest", "README, second", ""),
        (f"{CLONE}echo trained", "pytest && touch text", "slow tests", "\n?? text"),
        ("git clone URL && cd research_dp", "pytest", "", "no block <!-- ci: first --> that"),
        (f"{CLONE}echo trained", "", "", "no block <!-- ci: second --> that"),
    ],
    ids=["first fails", "second fails", "a file is left", "no first", "no second"],
)
def test_ci_fails_where_one_of_its_steps_does(ci, first, second, reached, message):
    done = ci(first, second)
    assert done.returncode == 1 and message in done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert steps[-1].startswith(f"== {reached}") if reached else not steps


def test_the_pictures_are_readable_on_light_and_dark_pages():
    for name in re.findall(r"docs/\w+\.svg", README):
        picture = (ROOT / name).read_text()
        assert "background" not in picture
        assert not re.findall(r"(?:fill|stroke): (?:#000000|#ffffff|black|white)\b", picture), name


def test_the_example_strategy_is_two_files_that_the_equivalence_test_finds(tmp_path):
    clone, left_out = tmp_path / "clone", (".git", ".venv", "runs")  # but packages of these names
    shutil.copytree(ROOT, clone, ignore=lambda at, _: left_out if at == str(ROOT) else ())
    add_two_level(clone)
    words = ["-m", "pytest", "-q", "tests/strategies/test_strategies.py"]
    words += ["-m", "", "-k", "two_level and follows", "-p", "no:cacheprovider"]
    done = python(*words, folder=clone)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
