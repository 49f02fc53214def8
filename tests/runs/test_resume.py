"""A continued run is the run: the same examples, records and weights, wherever it was ended."""

import json
import random
import signal
import time

import numpy as np
import pytest

from research_dp.runs.checkpoint_files import HALF_WRITTEN, steps_in
from research_dp.runs.flight_recorder import last_notes
from tests.support.data import tfrecord_dir as tfrecord_dir
from tests.support.processes import start
from tests.support.repository import ROOT
from tests.support.runs import MLP, records, summary

CONSTANT = [
    *MLP,
    "--gin.train.optimizer=@optax.adam()",
    "--gin.optax.adam.learning_rate=1e-3",  # a schedule would follow train.num_steps
    "--allow_unused",
    "--gin.train.log_every=1",
    "--gin.train.eval_every=None",
]


def losses(folder):
    return [line["loss"] for line in records(folder, "train")]


@pytest.mark.slow
def test_a_stream_without_random_access_is_continued_exactly_and_says_how(command, tmp_path):
    flags = [
        *CONSTANT,
        "--gin_file=gin/options/tf_data.gin",
        f"--gin.tfds_data.data_dir={tmp_path}",
    ]
    flags += ["--gin.tf_data.shuffle_buffer=300", "--cpu_devices=2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder, steps in ((whole, 40), (broken, 17), (broken, 40)):
        done = command(*flags, f"--workdir={folder}", f"--gin.train.num_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert "Reading 2,176 examples of digits again to find the place" in done.stdout
    assert losses(broken) == losses(whole) and len(losses(whole)) == 40
    assert summary(broken)["params_fingerprint"] == summary(whole)["params_fingerprint"]
    other = command(
        *[flag for flag in flags if "shuffle_buffer" not in flag],
        f"--workdir={broken}",
        "--gin.train.num_steps=50",
    )
    assert other.returncode == 2
    assert "tf.data, shuffle_buffer 300, not digits/1.0.0 train, tf.data" in other.stderr


# ---- Other meshes, strategies and numbers of processes ----


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    """40 steps of `fsdp` on 8 devices of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = command(*CONSTANT, "--cpu_devices=8", "--gin.train.num_steps=40", f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def continue_under(command, folder, stem, processes, devices, steps):
    """Runs to a step under a strategy, on processes of so many devices; returns what it said."""
    flags = [
        *CONSTANT,
        f"--gin_file=gin/strategies/{stem}.gin",
        f"--cpu_devices={devices}",
        f"--gin.train.num_steps={steps}",
        f"--workdir={folder}",
    ]
    if processes == 1:
        done = command(*flags)
        assert done.returncode == 0, done.stderr
        return done.stdout
    outputs = [p.communicate(timeout=200)[0] for p in start(command, processes, *flags)]
    assert summary(folder)["processes"] == processes, outputs
    return outputs[0]


@pytest.mark.exhaustive
def test_loss_follows_the_undisturbed_run_over_other_meshes(command, tmp_path, undisturbed):
    chain = [("fsdp", 2, 4), ("ddp", 1, 4), ("hsdp", 4, 2), ("zero1", 2, 2)]
    for number, (stem, processes, devices) in enumerate(chain, 1):
        said = continue_under(command, tmp_path, stem, processes, devices, 10 * number)
        # Its checksums are compared on the new mesh: what is not the same bits is damaged.
        assert "damaged" not in said
        assert number == 1 or f"Continuing from step {10 * (number - 1)}" in said
        result = summary(tmp_path)
        assert (result["step"], result["strategy"]) == (10 * number, stem)
        assert result["examples_seen"] == 128 * 10 * number
    found = records(tmp_path, "train")
    assert [line["step"] for line in found] == list(range(1, 41))
    np.testing.assert_allclose(losses(tmp_path), losses(undisturbed), atol=1e-5)


# ---- Killed at random moments ----

RECORDING = '''
"""The default reader, which also writes which examples it gave to which step."""

import json
import os
import zlib

import gin

from research_dp.data.tfds import random_access
from research_dp.types import Splits


@gin.register
def recorded(builder, train_split, eval_split, preprocess) -> Splits:
    splits = random_access(builder, train_split, eval_split, preprocess)

    def train(order):
        for step, batch in enumerate(splits.train(order), order.first_step):
            ids = [zlib.crc32(image.tobytes()) for image in batch["image"]]
            with open(os.environ["SEEN"], "a") as file:
                file.write(json.dumps([step, ids]) + "\\n")
            yield batch

    return splits._replace(train=train)
'''


def seen(file):
    """Ids of the examples of each step; a step that was begun twice must have had the same."""
    steps = {}
    for line in file.read_text().splitlines():
        if line.endswith("]]"):  # the last line of a killed run may be half a line
            step, ids = json.loads(line)
            assert steps.setdefault(step, ids) == ids
    return steps


class Killer:
    """Ends runs by SIGKILL at chosen moments."""

    def __init__(self, process, folder, chance):
        self.process, self.folder, self.chance = process, folder, chance

    def wait_for(self, happened):
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline, "it never came to that"
            assert self.process.poll() is None, self.process.communicate()[0]

    def half_written(self):
        return [p for p in (self.folder / "checkpoints").glob("*") if HALF_WRITTEN.match(p.name)]

    def in_a_step(self):
        metrics = self.folder / "metrics.jsonl"
        before = metrics.stat().st_size if metrics.exists() else 0
        self.wait_for(lambda: metrics.exists() and metrics.stat().st_size > before + 500)
        time.sleep(self.chance.uniform(0, 0.3))

    def in_a_save(self):
        # Not in the first: a restore is to be interrupted later, so there must be what to restore.
        self.wait_for(lambda: steps_in(self.folder / "checkpoints"))
        before = {p.name for p in self.half_written()}
        self.wait_for(lambda: {p.name for p in self.half_written()} - before)
        time.sleep(self.chance.uniform(0, 0.01))

    def in_a_restore(self):
        holder = self.folder / ".run.holder"
        mine = f"process {self.process.pid} "
        self.wait_for(lambda: holder.exists() and holder.read_text().startswith(mine))
        self.wait_for(lambda: [note.phase for note in last_notes(self.folder)] == ["restore"])
        time.sleep(self.chance.uniform(0, 0.1))


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_where_an_undisturbed_run_ends(command, tmp_path):
    (tmp_path / "recording.py").write_text(RECORDING)
    flags = [
        *CONSTANT,
        "--import=recording",
        "--gin.tfds_data.reader=@recorded",
        "--gin.train.num_steps=300",
        "--gin.train.checkpoint_every=25",
        "--cpu_devices=2",
    ]
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = command(*flags, f"--workdir={whole}", SEEN=str(tmp_path / "all"), **path)
    assert done.returncode == 0, done.stderr
    chance = random.Random(0)
    extra = {"SEEN": str(tmp_path / "seen"), **path}
    saved, in_saves = [], 0
    for moment in ("in_a_step", "in_a_save", "in_a_restore", "in_a_save", "in_a_step"):
        process = command(*flags, f"--workdir={broken}", start_only=True, **extra)
        killer = Killer(process, broken, chance)
        getattr(killer, moment)()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        in_saves += bool(killer.half_written())
        saved.append(steps_in(broken / "checkpoints")[-1:])
    assert in_saves, "no save was interrupted"
    assert not (broken / "summary.json").exists() and any(saved)
    done = command(*flags, f"--workdir={broken}", **extra)
    assert done.returncode == 0, done.stderr
    assert f"Continuing from step {saved[-1][0]} in" in done.stdout
    a, b = summary(whole), summary(broken)
    assert a["params_fingerprint"] == b["params_fingerprint"]
    assert a["examples_seen"] == b["examples_seen"] == 300 * 128
    assert records(broken) == records(whole)
    assert seen(tmp_path / "seen") == seen(tmp_path / "all")
    assert len(seen(tmp_path / "all")) == 300
