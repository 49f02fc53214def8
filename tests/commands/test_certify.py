"""`python -m research_dp.certify`: exit status and what it prints."""

import json
import re
import shlex

import pytest

import research_dp
from tests.support.repository import ROOT


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
        assert done.returncode == 2 and "there is no flag --workdir." in done.stderr

    def test_a_run_is_certified(self, certify):
        run = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--cpu_devices=2"]
        done = certify(*run, "--steps=2")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if not line.startswith("Prepar")]
        verdict, nearest, checks, *more = lines
        assert verdict.startswith("CERTIFIED: fsdp on data 1 x fsdp 2 against single, 2 steps")
        assert nearest.startswith("Nearest to its bound: ")
        assert "0 fail" in checks and not more

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
    def test_named_dtypes_are_certified_within_their_own_rounding(self, main, precision):
        flags = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--cpu_devices=8"]
        flags += [f"--gin_file=precision/{precision}.gin", "--steps=4"]
        done = main(*flags, name="certify")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("include 'strategies/ddp.gin'\nmake_mesh.axes = {'data': 3}", "  bound in {}:2"),
        ("train.seed = 3", "train.strategy is bound nowhere"),
        ("train.strategy = 3", "{}:1: train.strategy = 3: give e.g. @data_parallel()"),
        (None, "against={}: no such file"),
    ],
)
def test_an_unfit_file_of_against_is_blamed_itself(tmp_path, text, said):
    file = tmp_path / "against.gin"
    if text:
        file.write_text(text)
    with pytest.raises(research_dp.UsageError) as refused:
        research_dp.certify(["runs/digits.gin", "models/mlp.gin"], against=str(file), steps=1)
    assert str(refused.value).startswith(f"against={file}: ")
    assert said.format(file) in str(refused.value)


@pytest.mark.slow
def test_the_page_shows_the_checks_that_the_command_prints(command):
    """Numbers, and which array is nearest to its bound, differ between machines."""
    text = (ROOT / "docs" / "certify.md").read_text()
    flags, shown = re.search(r"^\$ python -m research_dp.certify (.* --verbose)\n((?:.*\n)*?)```$",
                             text, re.MULTILINE).groups()  # fmt: skip
    done = command(*shlex.split(flags), module="research_dp.certify", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    checks = r"^ (\w[\w ,]*?) +(holds|FAILS|-)  "
    found = [re.findall(checks, output, re.MULTILINE) for output in (shown, done.stdout)]
    assert found[0] == found[1] and len(found[0]) == 23


def test_a_dtype_that_a_quick_run_does_not_use_widens_no_bound():
    """The model of the gin files computes in bfloat16, that of the quick run does not."""
    files = ["runs/digits.gin", "models/mlp.gin", "strategies/ddp.gin"]
    bindings = ["COMPUTE_DTYPE = 'bfloat16'", "data_parallel.sync = @rounded_before"]
    options = {"quick": True, "cpu_devices": 8, "imports": ["examples.planted_bugs"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        done = research_dp.certify(files, bindings, **options)
        right = research_dp.certify(files, bindings[:1], **options)
    assert right.certified and not done.certified
