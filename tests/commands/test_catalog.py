"""What there is can be found: `--list`, and the reference page."""

import json
import subprocess
import sys

import pytest

from research_dp import train
from research_dp.commands import catalog
from research_dp.config import parser, spellings
from tests.support.repository import ROOT, stems


@pytest.fixture
def listed(capsys):
    def run(*flags):
        assert train.main(["--list", *flags]) == 0
        return capsys.readouterr().out

    return run


def test_all_is_listed_in_groups_a_line_each(listed):
    blocks = {block.splitlines()[0]: block for block in listed().split("\n\n")}
    assert list(blocks)[: len(catalog._GROUPS)] == [*catalog._GROUPS]
    for stem in stems():
        assert f"\n  strategies/{stem}.gin " in blocks["strategies"]
    for group, name in {
        "strategies": "mapped",
        "models": "resnet",
        "data": "tfds_data",
        "optimizers": "optax.adamw",
        "options": "precision/bf16_gather.gin",
    }.items():
        assert f"\n  {name} " in blocks[group]
    assert not [
        line for line in blocks["models"].splitlines()[1:] if line.rstrip() == line.split()[0]
    ]


def test_one_function_is_shown_in_full(listed):
    told = listed("convnet")
    for part in (
        "norm: Norm = 'group',  # one of ['batch', 'group', 'none']",
        "num_classes: Count,  # required; an integer of at least 1",
        "dropout_rate: Dropout before the last layer.",
        "In research_dp/models/image_classifiers.py:",
        "  models/convnet_nnx.gin",
    ):
        assert part in told


def test_a_file_is_shown_as_it_is(listed):
    text = (ROOT / "gin/strategies/ddp.gin").read_text().strip()
    for name in ("strategies/ddp.gin", "gin/strategies/ddp.gin", "ddp.gin", "ddp"):
        assert text in listed(name)


def test_a_group_is_listed_alone_and_files_of_one_name_together(listed):
    assert listed("models").startswith("models\n  models/convnet.gin ")
    assert "\n\n" not in listed("models")
    lines = listed("digits").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["runs/digits.gin", "data/digits.gin"]


def test_json_has_the_same(listed):
    groups = {group["group"]: group["entries"] for group in json.loads(listed("--json"))}
    (found,) = [entry for entry in groups["models"] if entry["name"] == "mlp"]
    assert found == json.loads(listed("mlp", "--json"))
    assert found["parameters"]["num_classes"]["required"]
    assert found["parameters"]["widths"]["default"] == "(256, 256)"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("resnett", "resnet"),
        ("zero3", "strategies/fsdp.gin"),
        ("optax.adamm", "optax.adam"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(capsys, name, meant):
    assert train.main(["--list", name]) == 2
    assert f"Did you mean {meant}" in capsys.readouterr().err


def test_the_nearest_file_of_several_is_a_run():
    shipped = list(parser.shipped())
    assert spellings.nearest_file("my/digits.gin", shipped) == "runs/digits.gin"
    assert spellings.nearest_file("my/data/digits.gin", shipped) == "data/digits.gin"


def test_a_function_of_ones_own_may_have_any_parameters_and_docstring(
    listed, monkeypatch, tmp_path
):
    """No parameter is left out by its name; a section `Args:` may be empty."""
    (tmp_path / "listed_module.py").write_text(
        "import gin\n\n\n@gin.configurable\ndef listed_words(path, features=3):\n"
        '    """Reads words.\n\n    Args:\n    """\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    shown = json.loads(listed("listed_words", "--import=listed_module", "--json"))
    assert all(shown["parameters"][name]["bindable"] for name in ("path", "features"))
    assert shown["summary"] == "Reads words."


def test_on_a_terminal_no_word_is_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(catalog.sys.stdout, "isatty", lambda: True, raising=False)
    groups = catalog.everything()
    lines = catalog.in_lines(groups).splitlines()
    assert max(map(len, lines)) <= 80
    words = {word for g in groups for e in g["entries"] for word in e["summary"].split()}
    assert words <= {word for line in lines for word in line.split()}


def test_a_reader_of_the_list_may_go_away():
    line = f"{sys.executable} -m research_dp.train --list | head -1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "runs\n" and not done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--gin_file=gin/runs/digits.gin", "--dry_run", "--json"], "--json goes with --list"),
        (["--gin_file=gin/runs/digits.gin", "--list"], "leave out gin files"),
    ],
)
def test_flags_without_effect_are_refused(capsys, flags, told):
    try:
        status = train.main(flags)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert told in capsys.readouterr().err
