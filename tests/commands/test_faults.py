"""Faults of disks, files and folders: a clear message, the promised status, nothing lost."""

import fcntl
import re
import sys

import pytest

from research_dp.data import builders
from research_dp.runs.checkpoint_files import steps_in
from tests.support.disks import RUN
from tests.support.disks import disk as disk
from tests.support.disks import train as train
from tests.support.processes import start
from tests.support.runs import summary

# ---- Folders ----


def test_a_second_run_in_the_same_folder_is_refused(train, tmp_path):
    with open(tmp_path / ".run.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (tmp_path / ".run.holder").write_text("process 7 on otherhost")
        status, _, err = train(tmp_path)
        assert status == 2
        assert f"another run (process 7 on otherhost) is using {tmp_path}" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.holder", ".run.lock"]


@pytest.mark.slow
def test_the_folder_of_another_run_is_refused(train, tmp_path):
    assert train(tmp_path)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    for flags, told in (
        (
            ["--gin.mlp.widths=(128,)"],
            "is of another model, optimizer or train.frozen: params/head/kernel",
        ),
        (["--gin.mlp.widths=(256, 256)"], "params/hidden_1/bias, float32[256], is not in it"),
        (
            ["--gin_file=gin/optim/sgd_momentum.gin"],
            "is of another model, optimizer or train.frozen: opt_state",
        ),
        (["--gin.train.seed=5"], "has train.seed = 0, not 5"),
        (["--gin.train.batch_size=64"], "has train.batch_size = 128, not 64"),
        (
            ["--gin.tfds_data.train_split=train[:90%]"],
            "= digits/1.0.0 train, by index, not digits",
        ),
    ):
        status, _, err = train(tmp_path, "--gin.train.num_steps=30", *flags)
        assert status == 2 and told in err, err
        assert "Use another --workdir" in err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")} == before


# ---- Disks ----


def test_a_disk_that_cannot_be_written_is_refused(disk):
    disk.mount("size=1m,ro")
    done = disk.train()
    assert done.returncode == 2 and "cannot be written: Read-only file system" in done.stderr


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_loses_nothing(disk):
    """A checkpoint of this model has 260 KB: two are kept where there is room for three."""
    disk.mount("size=820k")
    flags = ["--gin.train.num_steps=100", "--gin.train.keep=9"]
    done = disk.train(*flags)
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "the same command continues" in done.stderr
    saved = steps_in(disk.seen / "checkpoints")
    whole = disk.run(sys.executable, "-m", "research_dp.checkpoints", disk.folder, "--verify")
    assert saved and whole.returncode == 0, whole.stdout
    disk.mount("remount,size=30m")
    done = disk.train(*flags)
    assert done.returncode == 0, done.stderr
    assert f"Continuing from step {saved[-1]}" in done.stdout
    assert summary(disk.seen)["step"] == 100


# ---- Data ----


@pytest.fixture
def spoiled(tmp_path, data_dir):
    """Digits in one of the two formats, with a byte of the training file changed."""

    def prepare(file_format):
        folder = tmp_path / "data"
        builder = builders.find_builder("digits", str(folder), file_format)
        builders.download_and_prepare(builder)
        (file,) = (p for p in folder.rglob("*-train.*") if p.is_file())
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 16
        file.write_bytes(content)
        return folder

    return prepare


@pytest.mark.parametrize(
    "flags", [[], pytest.param(["--gin.random_access.workers=1"], marks=pytest.mark.slow)]
)
def test_an_example_that_cannot_be_read_is_named(train, spoiled, tmp_path, flags):
    data = spoiled("array_record")
    run = tmp_path / "run"
    status, _, err = train(run, f"--gin.tfds_data.data_dir={data}", *flags)
    assert status == 2
    assert re.search(r"example \d+ of digits train cannot be read", err)
    assert f"Move {data / 'digits' / '1.0.0'} away" in err


@pytest.mark.slow
def test_a_stream_that_cannot_be_read_is_told(train, spoiled, tmp_path):
    data = spoiled("tfrecord")
    flags = ["--gin_file=gin/options/tf_data.gin", f"--gin.tfds_data.data_dir={data}"]
    status, _, err = train(tmp_path / "run", *flags)
    assert status == 2 and "an example of digits train cannot be read" in err


# ---- Several processes ----


@pytest.mark.slow
def test_processes_agree_on_what_is_damaged_and_on_who_may_run(command, tmp_path):
    def both(*more):
        processes = start(command, 2, *RUN[2:-1], "--cpu_devices=4", f"--workdir={tmp_path}", *more)
        outputs = [process.communicate(timeout=200)[0] for process in processes]
        return [process.returncode for process in processes], outputs

    statuses, outputs = both()
    assert statuses == [0, 0], outputs
    # A part that one process alone reads.
    largest = max((tmp_path / "checkpoints/20").rglob("ocdbt.process_1/d/*"), key=size_of)
    largest.write_bytes(largest.read_bytes()[:100])
    with open(tmp_path / ".run.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        statuses, outputs = both("--gin.train.num_steps=30")
    assert statuses == [2, 2], outputs
    assert all("another run" in output for output in outputs)
    statuses, outputs = both("--gin.train.num_steps=30")
    assert statuses == [0, 0], outputs
    assert "The checkpoint of step 20 is damaged: process " in outputs[0]
    assert "Continuing from step 10 in" in outputs[0]
    assert summary(tmp_path)["step"] == 30
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "10",
        "20",
        "20.damaged",
        "30",
    ]


def size_of(file):
    return file.stat().st_size
