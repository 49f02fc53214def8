"""Sweeps, and runs from Python: the same as the command, more than once in a process."""

import csv
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from research_dp.commands import cli, configured, sweep
from research_dp.commands import main as command_line
from research_dp.errors import UsageError
from tests.support.repository import ROOT
from tests.support.runs import summary

SMALL = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin", "--gin.mlp.widths=(16,)"]


@pytest.mark.slow
def test_a_sweep_runs_the_product_and_continues_what_is_missing(command, tmp_path):
    flags = [
        *SMALL,
        "--gin.train.num_steps=2",
        "--vary_file=strategies/ddp.gin,strategies/zero1.gin",
        "--vary.train.seed=0,1",
        "--cpu_devices=2",
        f"--workdir={tmp_path}",
    ]
    done = command(*flags, module="research_dp.sweep")
    assert done.returncode == 0, done.stderr
    folders = ["ddp-seed=0", "ddp-seed=1", "zero1-seed=0", "zero1-seed=1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*folders, "sweep.csv"])
    summaries = {f: summary(tmp_path / f) for f in folders}
    assert summaries["zero1-seed=1"]["strategy"] == "zero1"
    prints = {f: s["params_fingerprint"] for f, s in summaries.items()}
    assert prints["ddp-seed=0"] == prints["zero1-seed=0"] != prints["zero1-seed=1"]
    with open(tmp_path / "sweep.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [Path(row["folder"]).name for row in table] == folders
    for row, folder in zip(table, folders, strict=True):
        assert row["fingerprint"] == prints[folder] and row["status"] == "done"
        assert float(row["eval loss"]) == summaries[folder]["eval"]["loss"]
    rows = [line.split() for line in done.stdout.splitlines()[-7:]]
    assert [row[:3] for row in rows if row[1:] and row[0] != "The"] == [
        ["ddp", "0", "done"],
        ["ddp", "1", "done"],
        ["zero1", "0", "done"],
        ["zero1", "1", "done"],
    ]
    assert prints["ddp-seed=0"][:12] in done.stdout

    (tmp_path / "ddp-seed=1" / "summary.json").unlink()
    again = command(*flags, module="research_dp.sweep")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("Done already") == 3
    assert summary(tmp_path / "ddp-seed=1")["params_fingerprint"] == prints["ddp-seed=1"]


def test_a_mistake_in_all_combinations_is_refused_and_in_one_is_told(main, tmp_path):
    flags = [*SMALL, "--vary_file=strategies/ddp.gin,strategies/spmd.gin", f"--workdir={tmp_path}"]
    wrong = main(*flags, "--gin.train.num_stpes=2", name="sweep")
    assert wrong.returncode == 2 and "Did you mean num_steps?" in wrong.stderr
    one = main(*flags, "--gin_file=precision/bf16_gather.gin", "--dry_run", name="sweep")
    assert one.returncode == 1
    assert "error: spmd: precision/bf16_gather.gin: nothing here has an effect" in one.stderr
    assert ["ddp", "missing"] in [line.split() for line in one.stdout.splitlines()]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("float32,bfloat16", ["'float32'", "'bfloat16'"]),
        ("[(8,), (16, 32)]", ["(8,)", "(16, 32)"]),
        ("{'data': 1, 'fsdp': -1},{'data': -1}", ["{'data': 1, 'fsdp': -1}", "{'data': -1}"]),
        ("@mlp(),@convnet()", ["@mlp()", "@convnet()"]),
        ("None,0.5", ["None", "0.5"]),
        ("[1,2],[3,4]", ["[1,2]", "[3,4]"]),
        ("'a,b','c'", ["'a,b'", "'c'"]),
    ],
)
def test_values_that_are_varied(text, values):
    assert cli.elements(text) == values


def test_a_missing_value_is_told():
    with pytest.raises(UsageError, match="is missing"):
        cli.elements("1,")


def test_two_runs_do_not_share_a_folder(tmp_path):
    with pytest.raises(UsageError, match="two runs of the sweep would be in"):
        sweep.members(tmp_path, [sweep.binding_choices("train.seed", "1,1")])
    files = sweep.file_choices(0, "a/x.gin,b/x.gin")
    assert [member.folder.name for member in sweep.members(tmp_path, [files])] == [
        "a_x.gin",
        "b_x.gin",
    ]


def test_the_table_is_written_after_each_run(tmp_path, monkeypatch):
    """A sweep that is killed leaves what is done; runs of one summary stand in one column each."""
    runs = sweep.members(
        tmp_path / "w",
        [sweep.file_choices(0, "a/x.gin,a/y.gin"), sweep.file_choices(1, "a/u.gin,a/v.gin")],
    )
    seen = []

    def finish(run, member, cpu_devices):
        file = tmp_path / "w" / sweep.CSV
        seen.append(file.read_text().count(",done,") if file.exists() else 0)
        member.status, member.summary = "done", {"step": 3, "eval": {"loss": 0.5}}

    monkeypatch.setattr(sweep, "_train", finish)
    monkeypatch.setattr(configured.Run, "load", lambda *_: None)
    assert sweep.train_all(configured.Run(), runs, tmp_path / "w", None) == 0
    assert seen == [0, 1, 2, 3]
    with open(tmp_path / "w" / sweep.CSV, newline="") as file:
        pairs = [(row["a 1"], row["a 2"], row["eval loss"]) for row in csv.DictReader(file)]
    assert pairs == [(x, u, "0.5") for x in "xy" for u in "uv"]


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Sweeps in one folder, whose runs only say that they are done; returns status and table."""
    monkeypatch.setattr(configured.Run, "load", lambda *_: None)

    def run(*dimensions, finish=lambda member: None):
        def done(run, member, cpu_devices):
            member.status, member.summary = "done", {"step": 3, "params_fingerprint": "abc"}
            finish(member)

        monkeypatch.setattr(sweep, "_train", done)
        runs = sweep.members(tmp_path, dimensions)
        status = sweep.train_all(configured.Run(), runs, tmp_path, None)
        with open(tmp_path / sweep.CSV, newline="") as file:
            return status, list(csv.DictReader(file))

    return run


def test_a_second_sweep_replaces_the_table_of_the_first(swept):
    swept(sweep.binding_choices("train.seed", "0,1"))
    _, table = swept(sweep.binding_choices("train.seed", "1,2"))
    assert [(row["train.seed"], row["status"]) for row in table] == [("1", "done"), ("2", "done")]


@pytest.mark.parametrize("status", ["refused", "failed"])
def test_a_sweep_fails_where_one_of_its_runs_does(swept, status):
    def finish(member):
        member.status = status if member.label == "seed=0" else "done"

    found, table = swept(sweep.binding_choices("train.seed", "0,1"), finish=finish)
    assert found == 1 and [row["status"] for row in table] == [status, "done"]


@pytest.mark.parametrize("name", ["status", "step", "folder", "fingerprint", "steps/s"])
def test_what_is_varied_has_a_column_beside_those_of_each_table(swept, name):
    _, table = swept(sweep.binding_choices(name, "1,2"))
    assert [row[f"varied {name}"] for row in table] == ["1", "2"]
    assert [(row["status"], row["step"], row["fingerprint"]) for row in table] == [
        ("done", "3", "abc")
    ] * 2


def test_a_table_that_cannot_be_written_is_refused_before_the_first_run(swept, tmp_path):
    (tmp_path / sweep.CSV).mkdir()
    with pytest.raises(UsageError, match=r"sweep\.csv: the sweep's table cannot be"):
        swept(sweep.binding_choices("train.seed", "0,1"), finish=pytest.fail)
    (tmp_path / sweep.CSV).rmdir()
    (tmp_path / sweep.CSV).write_bytes(b"\xff\x00 notes of mine")
    with pytest.raises(UsageError, match=r"no table of a sweep.*Move it away"):
        swept(sweep.binding_choices("train.seed", "0,1"), finish=pytest.fail)
    assert [path.name for path in tmp_path.iterdir()] == [sweep.CSV]


def test_a_table_that_fails_later_does_not_end_the_sweep(swept, tmp_path, monkeypatch, capsys):
    """A disk that is full during the first run has room again after the second."""

    def full(path, content):
        raise OSError(28, "No space left on device")

    real = sweep.files.replace
    tries = iter([real, full, real])
    monkeypatch.setattr(sweep.files, "replace", lambda *args: next(tries)(*args))
    status, table = swept(sweep.binding_choices("train.seed", "0,1"))
    assert status == 0 and [row["status"] for row in table] == ["done", "done"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("sweep.csv is not written: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == [sweep.CSV]


@pytest.mark.slow
def test_python_runs_what_the_command_runs_and_more_than_once(command, tmp_path, data_dir):
    code = f"""
import gin, research_dp.strategies
gin.parse_config("make_mesh.axes = {{'data': 1}}")
settings = {{"train.num_steps": 2, "mlp.widths": (16,), "tfds_data.data_dir": {str(data_dir)!r}}}
files = ["runs/digits.gin", "models/mlp.gin"]
for name in ("a", "b"):
    found = research_dp.run(files, settings, workdir={str(tmp_path)!r} + "/" + name, cpu_devices=2)
    print("fingerprint", found["params_fingerprint"], found["step"])
    assert "{{'data': 1}}" in gin.config_str() and not gin.config_is_locked()
try:
    research_dp.run(files, {{"train.num_stpes": 2, "train.seed": "x"}}, workdir="never")
except research_dp.UsageError as error:
    assert len(error.mistakes) == 2
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    flags = [*SMALL, "--gin.train.num_steps=2", "--cpu_devices=2", f"--workdir={tmp_path / 'c'}"]
    assert command(*flags).returncode == 0
    expected = summary(tmp_path / "c")["params_fingerprint"]
    assert done.stdout.count(f"fingerprint {expected} 2") == 2
    assert "Did you mean num_steps?" in done.stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(3), "3"),
        (jnp.bfloat16, "'bfloat16'"),
        (np.dtype("float32"), "'float32'"),
        (["@mlp()", np.float64(0.5)], "[@mlp(), 0.5]"),
        ((8,), "(8, )"),
        ({"data": np.int32(2)}, "{'data': 2}"),
        ("digits", "'digits'"),
    ],
)
def test_python_values_as_they_stand_in_a_gin_file(value, text):
    assert configured.as_gin(value) == text


@pytest.mark.parametrize(
    "word",
    [
        "bfloat16",
        "train[:90%]",
        "train[10%:-5]+test",
        "~/a.b",
        "../c-d",
        "gs://bucket/x",
        "optax.adam",
    ],
)
def test_a_bare_word_of_a_flag_is_a_string(word):
    given = cli.parse("train", ["--dry_run", "--gin_file=f", f"--gin.a.b={word}"])
    assert given["bindings"] == [f"a.b = {word!r}"]


@pytest.mark.parametrize(
    "literal",
    [
        *("3", "-1e-3", ".5", "None", "True", "[1, 2]", "[a:b]", "{'data': 4}", "('a',)", "()"),
        *("@mlp()", "@a/mlp", "%SIZE", "'train[:90%]'", "[%SIZE]", "r'a'", "90%", "a b", "f(x)"),
    ],
)
def test_everything_else_is_left_to_gin(literal):
    given = cli.parse("train", ["--dry_run", "--gin_file=f", f"--gin.a.b={literal}"])
    assert given["bindings"] == [f"a.b = {literal}"]


def test_what_is_varied_may_stand_in_a_word_of_its_own(capsys):
    given = ["--gin_file=runs/digits.gin", "--dry_run"]
    options = cli.parse("sweep", [*given, "--vary_file", "a,b", "--vary.x.y", "1,2"])
    assert options["vary"] == [("", "a,b"), ("x.y", "1,2")]
    for last in ("--vary_file", "--vary.x.y="):
        assert command_line.main(["sweep", *given, last]) == 2
        assert "give values" in capsys.readouterr().err
