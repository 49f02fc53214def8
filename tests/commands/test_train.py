"""The command, as a user runs it: results, mistakes, kill and resume."""

import os
import re
import signal
import time

import pytest

from tests.support.marks import exhaustive, slow
from tests.support.runs import MLP, killed_once_saved, lines, summary


@pytest.mark.parametrize(
    ("stem", "more"),
    [
        pytest.param("zero1", [], marks=pytest.mark.exhaustive),
        ("fsdp_keep", ["--gin_file=gin/precision/bf16_gather.gin"]),
    ],
)
def test_a_run_leaves_what_was_promised_and_its_config_runs_it_again(command, tmp_path, stem, more):
    first = tmp_path / "first"
    done = command(
        *MLP,
        f"--gin_file=gin/strategies/{stem}.gin",
        *more,
        "--gin.train.num_steps=12",
        "--gin.train.log_every=5",
        "--gin.train.profile_at=6",
        "--cpu_devices=8",
        f"--workdir={first}",
    )
    assert done.returncode == 0, done.stderr
    result = summary(first)
    assert (result["step"], result["examples_seen"]) == (12, 12 * 128)
    assert (result["devices"], result["processes"], result["strategy"]) == (8, 1, stem)
    assert result["mesh"] == {"data": 1, "fsdp": 8}
    assert result["seconds_to_first_step"] > 0 and result["steps_per_second"] > 0
    assert len(result["params_fingerprint"]) == 64
    assert sorted(lines(first, "train")) == [5, 10, 12]
    assert lines(first, "eval")[12]["accuracy"] == result["eval"]["accuracy"]
    assert list((first / "tensorboard" / "train").iterdir())
    assert list((first / "profile").rglob("*.xplane.pb"))
    for name in ("config.gin", "operative_config.gin"):
        again = tmp_path / name
        flags = [f"--gin_file={first / name}", "--gin.train.profile_at=None", "--cpu_devices=8"]
        done = command(*flags, f"--workdir={again}")
        assert done.returncode == 0, done.stderr
        assert summary(again)["params_fingerprint"] == result["params_fingerprint"]


# Slots of the others have state, which is saved, or an optimizer of their own.
@pytest.mark.parametrize(
    "more",
    [
        [],
        slow(["strategies/compressed/ddp_q8.gin"]),
        exhaustive(["strategies/low_communication/diloco.gin"]),
        exhaustive(["examples/ddp_error_feedback.gin"]),
        exhaustive(["strategies/compressed/fsdp_q8.gin"]),
        exhaustive(["strategies/compressed/zero1_q4.gin"]),
        exhaustive(["strategies/compressed/ddp_sign.gin"]),
    ],
)
def test_killed_and_continued_ends_where_an_undisturbed_run_ends(command, tmp_path, more):
    flags = [
        *MLP,
        *(f"--gin_file={file}" for file in more),
        *(["--gin.compression.min_size=256"] if "compressed" in "".join(more) else []),
        "--gin.train.num_steps=400",
        "--gin.train.checkpoint_every=45",
        "--gin.train.log_every=10",
        "--cpu_devices=2",
    ]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert command(*flags, f"--workdir={whole}").returncode == 0
    killed_once_saved(command, broken, *flags)
    done = command(*flags, f"--workdir={broken}")
    assert done.returncode == 0, done.stderr
    assert "Continuing from step" in done.stdout
    a, b = summary(whole), summary(broken)
    assert a["params_fingerprint"] == b["params_fingerprint"]
    assert a["train"]["loss"] == b["train"]["loss"]
    assert a["examples_seen"] == b["examples_seen"]
    assert sorted(lines(broken, "train")) == list(range(10, 401, 10)), "lost or doubled records"


def test_continues_on_another_strategy_and_number_of_devices(command, main, tmp_path):
    flags = [*MLP, f"--workdir={tmp_path}"]
    first = main(*flags, "--gin.train.num_steps=10", "--cpu_devices=8")
    assert first.returncode == 0, first.stderr
    again = ["--gin_file=gin/strategies/ddp.gin", "--cpu_devices=4", "--gin.train.num_steps=20"]
    more = command(*flags, *again)
    assert more.returncode == 0, more.stderr
    assert "Continuing from step 10" in more.stdout
    assert (summary(tmp_path)["step"], summary(tmp_path)["strategy"]) == (20, "ddp")

    text, records = (tmp_path / "summary.json").read_text(), lines(tmp_path, "eval")
    repeated = command(*flags, *again)
    assert repeated.returncode == 0 and "Done already, at step 20" in repeated.stdout
    assert (tmp_path / "summary.json").read_text() == text
    assert lines(tmp_path, "eval") == records
    config = (tmp_path / "config.gin").read_text()
    for change in ("--gin.train.batch_size=256", "--gin.train.seed=1"):
        other = main(*flags, change, "--gin.train.num_steps=30", "--cpu_devices=8")
        assert other.returncode == 2 and "order of examples would break" in other.stderr
    less = main(*flags, "--gin.train.num_steps=15", "--cpu_devices=8")
    assert less.returncode == 2
    assert "is at step 20, past train.num_steps = 15" in less.stderr
    assert (tmp_path / "config.gin").read_text() == config, "a refused command changed the run"


@pytest.mark.slow
def test_matrices_continue_on_fewer_devices_with_the_same_bits(command, tmp_path):
    flags = [*MLP, "--gin_file=optim/muon.gin", "--gin_file=options/deterministic.gin"]
    flags += ["--gin.train.num_steps=60", "--gin.train.checkpoint_every=5"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert command(*flags, "--cpu_devices=8", f"--workdir={whole}").returncode == 0
    killed_once_saved(command, broken, *flags, "--cpu_devices=8")
    ddp = "--gin_file=gin/strategies/ddp.gin"
    done = command(*flags, ddp, "--cpu_devices=2", f"--workdir={broken}")
    assert done.returncode == 0, done.stderr
    assert "Continuing from step" in done.stdout
    assert summary(whole)["params_fingerprint"] == summary(broken)["params_fingerprint"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_to_the_whole_group_saves_and_exits_143(command, tmp_path, workers):
    flags = [*MLP, "--gin.train.num_steps=1000000", f"--workdir={tmp_path}", "--cpu_devices=2"]
    flags.append(f"--gin.random_access.workers={workers}")
    process = command(*flags, "--gin.train.log_every=10", start_only=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists() or not lines(tmp_path, "train"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    saved = [int(p.name) for p in (tmp_path / "checkpoints").iterdir()]
    assert f"step {max(saved)} is saved" in output


def test_a_checkpoint_of_another_model_is_refused_by_name(main, tmp_path):
    flags = ["--gin.train.num_steps=1", f"--workdir={tmp_path}"]
    assert main(*MLP, *flags).returncode == 0
    done = main(*MLP, *flags, "--gin.mlp.widths=(16,)")
    assert done.returncode == 2
    assert "params/head/kernel is float32[16, 10] here and float32[32, 10] there" in done.stderr
    assert "Traceback" not in done.stderr
    assert "mlp.widths = (32,)" in (tmp_path / "config.gin").read_text()


def test_dry_run_shows_configuration_and_layout_and_trains_nothing(main, tmp_path):
    done = main(*MLP, "--dry_run", "--cpu_devices=8", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "train.batch_size = 128" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "hidden_0/kernel" in line)
    assert "(64, 32)" in row and "fsdp (dim 0)" in row and "1,024" in row
    assert "min_weight_size 1024" in done.stdout
    assert not list(tmp_path.iterdir())


def test_dry_run_shows_what_is_chosen_for_the_devices(main):
    flags = ["--gin_file=runs/lm_stdlib.gin", "--gin_file=strategies/single.gin", "--dry_run"]
    tuned = ["data_parallel.tuning=@tuning()", "tuning.compiler_options={'xla_a': 1}"]
    shown = [
        "transformer.unroll = 4",
        "transformer.logits_at_once = 8388608 (1 chunks of the vocabulary)",
    ]
    done = main(*flags)
    assert re.findall("Chosen for these devices: (.*)", done.stdout) == shown
    done = main(*flags, "--gin.transformer.unroll=2", *(f"--gin.{x}" for x in tuned))
    assert "error: tuning.compiler_options on cpu" in done.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--gin.make_mesh.axes={'data': 3, 'fsdp': 4}"],
            ["= 12 devices, but 8", "--gin.make_mesh.axes"],
        ),
        (
            ["--gin.train.batch_size=100"],
            ["train.batch_size = 100 does not divide", "Take 96 or 104", "bound in --gin"],
        ),
        (["--gin.convnet.num_classes=11"], ["num_classes is 11 in train.model but 10 in digits"]),
        (
            ["--gin_file=optim/muon.gin", "--gin.muon.matrices={'.*kernel': (0, 1, 3)}"],
            ["muon.matrices: (0, 1, 3) for conv_0/kernel", "--gin.muon.matrices"],
        ),
        (["--cpu_device=8"], ["no flag --cpu_device. Did you mean --cpu_devices=8?"]),
        (["--gin.tfds_data.data_dir=/nowhere", "--gin.train.seed=a/b"], ["'a/b': give an integer"]),
        (["--cpu_devices=many"], ["'many' is not a whole number"]),
        (["--gin.image_classification.mean=(0.5, 0.5, 0.5)"], ["each of the 1 channels"]),
        (["--gin.train.profile_at=5000"], ["profile_at = 5000 is never passed", "Bind less"]),
        (["--gin_file=gin/data/pystdlib_text.gin"], ["reads 'label'", "['tokens', 'weights']"]),
    ],
)
def test_mistakes_are_told_in_a_line_or_two(main, flags, expected):
    """Those that a check of names and values finds are in tests/config/test_gin_mistakes.py."""
    base = [] if any("cpu_device" in f for f in flags) else ["--cpu_devices=8"]
    done = main("--gin_file=gin/runs/digits.gin", *base, *flags, "--dry_run")
    assert done.returncode == 2, done.stdout + done.stderr
    # Preparing a data set may have shown its progress before.
    told = done.stderr[max(0, done.stderr.find("error: ")) :].strip().splitlines()
    for part in expected:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert told[0].startswith("error: ") and len(told) <= 2, done.stderr


def test_a_folder_that_cannot_be_made_is_refused(main, tmp_path):
    (tmp_path / "file").touch()
    for workdir, told in ((tmp_path / "file", "cannot be made"), ("gs://bucket/x", "mounted")):
        done = main("--gin_file=gin/runs/digits.gin", f"--workdir={workdir}")
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_learning_rate_follows_the_length_of_the_run(command, tmp_path):
    flags = ["--gin.train.log_every=1", "--gin.train.checkpoint_every=10", f"--workdir={tmp_path}"]
    for steps in (10, 20):
        done = command(*MLP, *flags, f"--gin.train.num_steps={steps}")
        assert done.returncode == 0, done.stderr
    # A schedule that ends at step 10 would not change the weights after it.
    assert len({record["loss"] for record in lines(tmp_path, "eval").values()}) == 2


def test_the_place_of_a_mistake_in_a_file_is_named(main, tmp_path):
    mistake = tmp_path / "mistake.gin"
    mistake.write_text("# A mesh that does not fit.\n\nmake_mesh.axes = {'data': 5}\n")
    flags = ["--gin_file=gin/runs/digits.gin", f"--gin_file={mistake}", "--dry_run"]
    done = main(*flags, "--cpu_devices=8")
    assert done.returncode == 2
    assert f"{mistake}:3" in done.stderr


def test_a_run_with_a_checkpoint_compiles_its_own_programs_alone(command, tmp_path):
    # Each operation outside jit, or slice that Orbax cuts, is a program of its own.
    flags = ["--cpu_devices=8", "--gin.train.num_steps=4", f"--workdir={tmp_path}"]
    done = command(*MLP, *flags, JAX_LOG_COMPILES="1")
    assert done.returncode == 0, done.stderr
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", done.stderr)
    own = ["init_state", "schedule", "train", "_gathered_checksums", "_all_finite", "evaluate"]
    # Of the batch in two orders, and of parameters that are moved, one for each shape.
    judging = ["arrange", *["_aside"] * compiled.count("_aside")]
    assert sorted(compiled) == sorted([*own, *judging]), compiled
    assert compiled.count("_aside") <= 6  # arrays of parameters
