"""`python -m research_dp.certify`: exit status, what it prints, and its page."""

import json
import os
import re
import shlex

import pytest
from conftest import ROOT


class TestCommand:
    """The command itself: exit status and what it prints."""

    @pytest.fixture
    def certify(self, command):
        def run(*flags, **options):
            return command(*flags, module="research_dp.certify", **options)

        return run

    def test_mistakes_are_told_in_a_line(self, certify, tmp_path):
        run = ["--gin_file=runs/digits.gin", "--cpu_devices=2"]
        done = certify(*run, f"--json={tmp_path / 'none' / 'c.json'}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith("c.json cannot be written: No such file or directory.\n")
        done = certify(*run, "--workdir=w")
        assert done.returncode == 2 and "unrecognized arguments: --workdir=w" in done.stderr

    def test_a_run_is_certified(self, certify):
        run = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--cpu_devices=2"]
        done = certify(*run, "--steps=2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "CERTIFIED" in done.stdout

    @pytest.mark.slow
    def test_an_oracle_that_there_is_not_is_told(self, certify):
        done = certify("--gin_file=runs/digits.gin", "--against=sinle", "--cpu_devices=2")
        assert done.returncode == 2
        assert "sinle.gin" in done.stderr and "Traceback" not in done.stderr

    @pytest.mark.slow
    def test_another_strategy_can_be_the_oracle(self, certify, tmp_path):
        file = tmp_path / "c.json"
        flags = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp_nnx.gin", "--cpu_devices=4"]
        done = certify(*flags, "--against=ddp", "--steps=4", f"--json={file}")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(file.read_text())
        assert found["certified"] and found["first_difference"] is None
        assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
        gradient = found["steps"][0]["differences"]["gradient hidden_0/kernel"]
        assert gradient["ulps"] < gradient["bound_ulps"]  # on one machine both sum in one order
        assert "moved to ddp on data 4 x fsdp 1" in {check["what"] for check in found["checks"]}

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["bf16_gather", "bf16_params", "f16"])
    def test_named_dtypes_are_certified_within_their_own_rounding(self, certify, precision):
        flags = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--cpu_devices=4"]
        done = certify(*flags, f"--gin_file=precision/{precision}.gin", "--steps=4")
        assert done.returncode == 0, done.stdout + done.stderr


PAGE = ROOT / "docs" / "certify.md"
OUTPUT = re.compile(r"```console\n\$ python -m (\S+) (.*)\n((?:.*\n)*?)```\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_the_page_shows_what_the_command_prints(number, command, tmp_path):
    text = PAGE.read_text()
    for name, source in re.findall(r"`(my_pkg/[\w.]+)`\n\n```\w*\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    (tmp_path / "my_pkg" / "__init__.py").touch()
    found = list(OUTPUT.finditer(text))[number]
    paths = {"cwd": tmp_path, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = command(*shlex.split(found[2]), module=found[1], **paths)
    assert done.returncode == number, done.stderr
    shown = done.stdout[done.stdout.index("Steps from") :]  # not that the data was prepared
    real = "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text[: found.start(3)] + real + text[found.end(3) :])
    else:
        assert verdicts(found[3]) == verdicts(real)


def verdicts(output):
    """What does not differ between machines: checks, whether they hold, and the last lines."""
    checks = re.findall(r"^  (\w[\w ,]*?) +(holds|FAILS|-)  ", output, re.MULTILINE)
    ends = [line for line in output.splitlines() if re.match("(NOT )?CERT|Cause", line)]
    return checks, ends
