"""Tables on terminals of 80 and 100 columns and in pipes; progress; what a run prints."""

import ast
import io
import itertools
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from research_dp import console
from research_dp.analysis.topologies import topology
from research_dp.certification.certificate import Certificate, StepRecord
from research_dp.certification.tolerances import Difference, Gap
from research_dp.commands import checkpoints, dry_run, sweep
from research_dp.comparison import runs
from research_dp.comparison.comparison import Comparison
from research_dp.comparison.differences import Setting
from research_dp.comparison.verdicts import Verdict
from research_dp.planning import tables
from research_dp.planning.row import CollectiveTotal, Row
from research_dp.runs.checkpoint_files import Row as Checkpoint
from research_dp.runs.status import Status
from research_dp.training import sharding_table
from research_dp.training.metric_log import ProgressBar
from tests.support import decoder
from tests.support.plan_rows import GPUS
from tests.support.programs import environment
from tests.support.repository import ROOT, stems
from tests.support.strategies import build, one_matrix
from tests.support.terminal import in_pipe, on_terminal, run, screen

PATHS = [f"blocks/{part}/kernel" for part in ("attention/query", "attention/out", "mlp/wide_in")]


def plan_rows(names, *, measured=False):
    """Rows as they are for a model of a billion parameters on 64 devices."""
    parts = ("compute", "memory", "network_inside", "network_across", "exposed")
    for number, name in enumerate(names):
        yield Row(
            name,
            mesh={"data": 2, "fsdp": 32} if number % 2 else {"data": 64, "fsdp": 1},
            params_bytes=4_832_000_000,
            opt_bytes=9_664_000_000,
            state_bytes=14_500_000_000,
            batch_bytes=1_000_000,
            temp_bytes=30_571_000_000,
            needed_bytes=45_068_000_000,
            available_bytes=78_148_000_000,
            fits=number != 3,
            problem="does not fit: it needs 99 GB" if number == 3 else None,
            collectives=[
                CollectiveTotal("all-to-all", "data+fsdp", "bf16", "embedding", 64, 592, 4.7e9),
                CollectiveTotal("reduce-scatter", "fsdp", "f32", "reduce-scatter", 32, 23, 2.2e9),
            ],
            wire_bytes={"total": 14.005e9},
            min_wire_bytes=13.9e9,
            hidden_fraction=0.59,
            flops=20_070_000_000_000,
            predicted_seconds=4.14485,
            is_lower_bound=number == 2,
            predicted_parts={part: 3.27486 for part in parts},
            bound="network inside",
            mfu=0.447,
            tokens_per_second=3_697_738.0,
            compile_seconds=12.0,
            measured_seconds=5.14485 if measured else None,
        )


def plans():
    long = ["fsdp+h100", "hsdp+bf16_collectives", "spmd_fsdp+h100_memory"]
    for names in (stems(), long):
        for where, measured in ((GPUS, False), (topology("cpu:8"), False), (GPUS, True)):
            for verbose in (False, True):
                rows = list(plan_rows(names, measured=measured))
                yield from tables.tables(rows, where, verbose=verbose)
                yield tables.size_table({row.strategy: {1: row, 4096: row} for row in rows}, where)


def certificates():
    gap = Gap(1.0, 7.29e6, 6.4e-1)
    for verbose in (False, True):
        found = Certificate("spmd_fsdp+h100_memory on data 2 x fsdp 4 against single, 30 steps")
        kinds = ["loss", "loss, in a row", "gradient norm", "gradient", "gradient size"]
        for step in range(0, 30, 4):
            differences = [
                Difference(kind, path if kind.startswith("gradient ") or kind == "gradient" else "",
                           step, gap, 16.0)
                for kind in kinds for path in PATHS
            ]  # fmt: skip
            found.steps.append(StepRecord(step, 2.376387, 2.376387, 1.269895, 1.26, differences))
        found.check("moved to single on data 1 x fsdp 1", True, "the same bits")
        found.check("gradient size", False, f"2.2e+05 times its bound at {PATHS[0]}, step 0")
        found.check("bytes sent a step", None, "510,040 (the table has no row 'two_level')")
        parts = found.parts(verbose=verbose)
        yield from (part for part in parts if isinstance(part, console.Table))


def dry_runs():
    strategy = decoder.build("fsdp", decoder.model())
    yield sharding_table.parameter_table(strategy)
    yield dry_run.state_table(strategy)
    yield dry_run.collectives_table(strategy)


def sweeps():
    choices = [
        sweep.binding_choices("shard_params.min_weight_size", "262144,0"),
        sweep.binding_choices("warmup_cosine_decay_schedule.peak_value", "0.0003,0.001"),
        sweep.file_choices(2, "precision/bf16_collectives.gin,"),
    ]
    for count in (2, 8):
        members = sweep.members(Path("runs/a"), choices)[:count]
        for member in members:
            member.status = "done"
            member.summary = {
                "step": 100_000,
                "eval": {"accuracy": 0.98765, "loss": 0.0123456},
                "steps_per_second": 12345.6,
                "params_fingerprint": "0123456789abcdef" * 4,
            }
        yield sweep.table(members)


def listings():
    origin = {"strategy": "fsdp_keep", "mesh": {"data": 16, "fsdp": 128}}
    origin["time"] = "2026-11-22 19:38:27 UTC"
    manifest = types.SimpleNamespace(origin=origin, examples_seen=123_456_789)
    rows = [Checkpoint(1_000 * n, 12_345_678_901, "not verified", False, manifest) for n in (1, 2)]
    rows.append(Checkpoint(3_000, 5, f"damaged: {PATHS[0]} has another checksum", True))
    yield checkpoints.listing(Path("/runs/long/digits/checkpoints"), rows)


def comparisons():
    """Ten runs that differ in all that can differ."""
    shipped = [*stems(), "fsdp+bf16_collectives+h100-learning_rate=0.0003"]
    found = []
    for name in shipped:
        facts = {
            "strategy": name.split("+")[0],
            "bytes_per_device": {"params": 2.4e9, "gradients": 2.4e9, "opt_state": 4.8e9},
            "program": {"temp_bytes": 12.3e9, "needed_bytes": 2.1e10},
            "starts": [{"platform": "cpu", "devices": 64, "device_kind": "NVIDIA H100 80GB HBM3"}],
        }
        kinds = {"all-gather": 1.7e9, "all-reduce": 4.2e6, "reduce-scatter": 1.7e9}
        records = {
            "train": {"step": np.array([100_000.0]), "loss": np.array([2.376387])},
            "eval": {"loss": np.array([0.0123456]), "accuracy": np.array([0.98765])},
        }
        summary = {"steps_per_second": 12345.6, "seconds": dict.fromkeys(runs.SECONDS, 123456.7)}
        status = Status("died", 7, "died at step 7 of 200, phase data: process 1 was behind")
        wire = runs.WireBytes(3.4e9, kinds, {"data+fsdp": 3.4e9})
        found.append(runs.Run(name, Path("/r"), status, facts, summary, records, {}, wire))
    values = {run.name: str(number % 3) for number, run in enumerate(found)}
    places = dict.fromkeys(values, "some/long/path/of/a/run/file.gin:123")
    settings = [Setting("warmup_cosine_decay_schedule.peak_value", values, places, "other")]
    why = f"beyond rounding first in params/{PATHS[0]}: 4e+03 times the allowed (1e-02 of its size)"
    verdicts = [Verdict(run.name, found[0].name, "differs", why) for run in found[1:]]
    planned = dict(zip(shipped, plan_rows(shipped), strict=True))
    result = Comparison(found, found[0], settings, verdicts, "h100:8x8", True, planned)
    parts = result.parts(verbose=True)
    yield from (part for part in parts if isinstance(part, console.Table))


# Where the package makes tables -> those of this test.
PRODUCERS = {
    "planning/tables.py": plans,
    "certification/certificate.py": certificates,
    "training/sharding_table.py": dry_runs,
    "commands/dry_run.py": dry_runs,
    "commands/sweep.py": sweeps,
    "commands/checkpoints.py": listings,
    "comparison/tables.py": comparisons,
}


def test_each_place_that_makes_a_table_is_tested_here():
    makers = set()
    for file in (ROOT / "research_dp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("table", "console.table"):
                makers.add(str(file.relative_to(ROOT / "research_dp")))
    assert makers == set(PRODUCERS)


def shown(table, width):
    terminal = Console(width=width, file=io.StringIO())
    terminal.print(*table.layout(width), sep="\n", soft_wrap=True)
    return terminal.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("producer", dict.fromkeys(PRODUCERS.values()))
def test_no_cell_is_cut_or_broken_on_a_narrow_terminal(producer, width):
    every = list(producer())
    assert every
    for table in every:
        text = shown(table, width)
        lines = [line.strip() for line in text.splitlines()]
        assert not [line for line in lines if len(line) > width and " " in line], text
        assert "…" not in text
        words = {word.rstrip(":") for word in text.split()}
        for row in table.rows:
            for cell, column in zip(map(str, row), table.columns, strict=True):
                if column.endswith("~") or width < 80:
                    assert {word.rstrip(":") for word in cell.split()} <= words, (cell, text)
                else:
                    assert cell in text, f"{cell!r} is broken in\n{text}"
        for head in table.heads:
            assert set(head.split()) <= words, f"{head!r} is broken in\n{text}"


def test_a_row_that_does_not_fit_is_a_paragraph_of_named_cells():
    table = console.table("Title", "run", "step:", "why~")
    table.add_row("fsdp+bf16", "1,000", "a word " * 8)
    table.add_row("ddp", "", "")
    assert [line.rstrip() for line in shown(table, 30).splitlines()] == [
        *("Title", "", "run: fsdp+bf16", "    step: 1,000"),
        *("    why: a word a word a word", "    a word a word a word a", "    word a word"),
        *("run: ddp", ""),
    ]
    assert " ddp                " in shown(table, 80)


def test_in_a_pipe_a_row_is_a_line(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    (wide,) = (t for t in tables.tables(list(plan_rows(stems())), GPUS, verbose=True)[1:2])
    console.put(wide, Text("styled", "bold red"))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    rows = [line for line in printed.splitlines() if line.split()[:1] == ["spmd_fsdp"]]
    assert len(rows) == 1 and "3,697,738" in rows[0]
    console.put("a sentence " * 30)
    assert capsys.readouterr().out == f"{('a sentence ' * 30).rstrip()}\n"
    monkeypatch.setenv("COLUMNS", "80")  # as pages are written
    console.put(wide)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def printed_on_terminal(code, **variables):
    """What a few lines of Python leave on a terminal of 80 columns."""
    words = ["-c", f"from research_dp import console\n{code}"]
    env = environment(TERM="xterm", **variables)
    status, text = run([sys.executable, *words], env=env)
    assert status == 0, text
    return text


def test_no_word_is_broken_on_a_terminal():
    path = f"--logdir=/{'long/' * 30}tensorboard"
    code = f'console.put("  curves:  tensorboard {path} and more words " + "a word " * 20)'
    lines = printed_on_terminal(code).splitlines()
    assert [line.split() for line in lines if path in line] == [[path]]
    assert max(len(line) for line in lines if path not in line) <= 80
    assert sum(line.count("a word") for line in lines) >= 19


@pytest.mark.parametrize("shows", [on_terminal, in_pipe])
def test_only_a_terminal_that_moves_its_cursor_gets_codes(shows):
    """TERM=dumb shows progress as lines; FORCE_COLOR makes no terminal of a pipe."""
    code = """
import time
from research_dp import console
from research_dp.training.metric_log import ProgressBar
with console.Progress("Reading"):
    time.sleep(0.2)
console.put("a sentence " * 20)
bar = ProgressBar(3, 0)
bar.doing("Saving", at_once=True)
bar.close()
"""
    variables = {"TERM": "dumb"} if shows is on_terminal else {"FORCE_COLOR": "1"}
    env = environment(JAX_PLATFORMS="cpu", **variables)
    env.pop("COLUMNS", None)
    status, chunks = shows("-c", code, env=env)
    text = "".join(part for _, part in chunks)
    assert status == 0 and "\x1b" not in text, text
    assert text.splitlines() == ["Reading", ("a sentence " * 20).rstrip(), "Saving"]


def test_brackets_are_no_markup(capsys):
    odd = console.table("[bold]title", "name", "text~")
    odd.add_row("[red]x[/red]", "[1/3] of it")
    console.put(odd, "[green]no")
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("[bold]title", "[red]x[/red]", "[1/3]", "[green]no"))


def test_a_pipe_gets_a_line_for_each_activity_and_more_if_it_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(console, "_SECONDS", 0.2)
    with console.Progress("Reading") as report:
        report("Comparing", "step 1 of 9")
        report("Comparing", "step 2 of 9")
        time.sleep(0.7)
        report("Comparing", "step 3 of 9")
        time.sleep(0.3)
        report("Saving")
        time.sleep(0.7)
    time.sleep(0.3)
    lines = [line.partition(" ...")[0] for line in capsys.readouterr().err.splitlines()]
    steps = [f"Comparing, step {n} of 9" for n in (2, 3)]
    assert lines[:5] == ["Reading", "Comparing", *steps, "Saving"]
    assert 1 <= len(lines[5:]) <= 4 and set(lines[5:]) == {"Saving"}


@pytest.mark.parametrize("stem", stems())
def test_a_run_begins_with_what_a_device_has(stem):
    strategy = build(stem, one_matrix())
    first, second = sharding_table.summary(strategy)
    assert max(len(first), len(second)) <= 80
    assert first.startswith(f"{stem} on ")
    sharded = {
        name: f"sharded {name}" in f"{first} {second}"
        for name in ("parameters", "gradients", "optimizer state")
    }
    has = {
        **dict.fromkeys(("single", "ddp", "spmd"), (False, False, False)),
        "zero1": (False, False, True),
        "zero2": (False, True, True),
        "fsdp_keep": (True, False, True),
    }
    assert tuple(sharded.values()) == has.get(stem, (True, True, True))


@pytest.mark.filterwarnings("ignore:fsdp. nothing is sharded")  # which is for Python callers
def test_a_run_whose_strategy_shards_nothing_says_why():
    strategy = build("fsdp", one_matrix(), bindings=["shard_params.min_weight_size = 1000000"])
    *_, why, advice = sharding_table.summary(strategy)
    assert why.startswith("Nothing is sharded; the largest array, ")
    assert "min_weight_size 1000000" in why
    assert "--gin.shard_params.min_weight_size=1024" in advice


def test_parts_of_a_line_are_not_broken():
    parts = ["train step 100/400", "accuracy 0.7495", "loss 0.78", "1,235.0 examples/s", "2 s left"]
    assert list(map(str, console.filled(map(Text, parts), 1000))) == ["  ".join(parts)]
    for width in (40, 60, 80):
        lines = list(map(str, console.filled(map(Text, parts), width)))
        assert max(map(len, lines)) <= width
        assert re.split("  +", "  ".join(line.strip() for line in lines)) == parts


def test_a_pipe_hears_of_an_activity_only_if_it_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(console, "_PATIENCE", 0.1)
    bar = ProgressBar(10, 0)
    bar.doing("Saving")
    bar.doing("")
    bar.doing("Writing the checkpoint")
    time.sleep(0.5)
    bar.close()
    assert capsys.readouterr().out == "Writing the checkpoint ... 0 s\n"


def test_a_line_of_progress_is_never_wider_than_the_terminal():
    code = """
import time
from research_dp.training.metric_log import ProgressBar
with console.Progress("Reading " * 20) as report:
    report("Comparing", "step 1 of a great many steps")
    time.sleep(0.5)
    print("printed meanwhile")
bar = ProgressBar(300, 100)
bar.metrics("train", 100, {"steps_per_second": 2.0, "examples_per_second": 64.0})
time.sleep(0.5)
bar.doing("Saving")
time.sleep(0.5)
bar.say("said")
bar.close()
"""
    words = ["-c", f"from research_dp import console\n{code}"]
    status, chunks = on_terminal(*words, env=environment(JAX_PLATFORMS="cpu"), columns=30)
    text = "".join(part for _, part in chunks)
    assert status == 0 and "Comparing, step 1 of a great " in text, text
    assert "step 100/300" in text and "━" in text and "Saving ... 0 s" in text
    lines = [line.strip() for line in screen(text).splitlines() if line]
    assert lines[:2] == ["printed meanwhile", "train step 100/300"]
    assert lines[2:] == ["2.0 steps/s  64 examples/s", "1 min 40 s left", "said"]
    assert " ... 0 s" not in text.replace("Saving ... 0 s", ""), "a frame has no activity"
    # Each frame is one line: the cursor goes up only to erase the last one at the end.
    assert "\x1b[1A\x1b[2K\x1b[1A" not in text


DIGITS = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin"]
COMMANDS = {
    "certify": [*DIGITS, "--cpu_devices=8", "--steps=6"],
    "plan": [*DIGITS, "--topology=cpu:8", "--strategies=ddp,fsdp"],
}


@pytest.mark.slow
@pytest.mark.parametrize("shows", [on_terminal, in_pipe])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_long_command_shows_something_at_once_and_every_few_seconds(name, shows, command):
    module = f"research_dp.{name}"
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", f"import research_dp.commands.{name}"],
        env=command.environment,
        check=True,
    )
    importing = time.monotonic() - began  # more than it should be on a busy machine
    status, chunks = shows("-m", module, *COMMANDS[name], env=command.environment)
    text = "".join(part for _, part in chunks)
    assert status == 0, text
    times = [when for when, _ in chunks]
    assert times[0] < max(2.0, importing + 1.0)
    if shows is in_pipe:
        steps = re.findall(r"^(.*, step .*) \.\.\. \d+ s$", text, re.MULTILINE)
        assert len(steps) == len(set(steps)) and max(map(len, text.splitlines())) < 200
    if shows is on_terminal:
        assert max(b - a for a, b in itertools.pairwise(times)) < 5.0
        lines = screen(text).splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if re.search(r" \.\.\. \d+ s$", line)]
        first = next(line for line in lines if not re.match(r"Prepar|\(once\)", line))
        assert first.startswith(("CERTIFIED", "Least memory"))


@pytest.mark.slow
def test_a_run_on_a_terminal_leaves_its_lines_and_no_bar(command, tmp_path):
    flags = [*DIGITS, "--gin_file=strategies/zero1.gin", "--gin.train.num_steps=20"]
    flags += ["--gin.train.log_every=5", "--cpu_devices=8", f"--workdir={tmp_path}"]
    flags += [f"--gin.tfds_data.data_dir={tmp_path / 'data'}"]  # it is prepared, too
    status, chunks = on_terminal("-m", "research_dp.train", *flags, env=command.environment)
    text = "".join(part for _, part in chunks)
    assert status == 0, text
    assert "Reading the data ... " in text and "Compiling the training step ... " in text
    lines = [line for line in screen(text).splitlines() if line]
    assert not [line for line in lines if "━" in line], lines
    assert not re.search(r"Generating|Shuffling|Dataset digits|%\|", text)
    ends = [i for i, line in enumerate(lines) if line.startswith("Done: step 20, accuracy ")]
    (end,) = ends
    commands = [line.partition(":")[2].strip() for line in lines[end + 1 :]]
    assert f"tensorboard --logdir={tmp_path / 'tensorboard'}" in commands
    assert f"python -m research_dp.evaluate --workdir={tmp_path}" in commands
    assert "add --gin_file=strategies/fsdp.gin and change --workdir" in commands
    assert any(line.startswith("zero1 on data 1 x fsdp 8; per device ") for line in lines)
    steps = [line for line in lines if line.startswith("train step ")]
    assert [line.split()[2] for line in steps] == ["5/20", "10/20", "15/20", "20/20"]
    assert all(re.search(r"\d steps/s|examples/s$|\w$", line) for line in steps)
