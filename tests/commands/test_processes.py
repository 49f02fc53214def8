"""Several processes on one machine: the same numbers, one writer, one agreed stop."""

import signal
import time

import pytest

from tests.support.marks import exhaustive, slow
from tests.support.processes import RUN, start
from tests.support.runs import summary


# Processes are told to the mesh alone: each collective between them, over one axis and over two.
@pytest.mark.parametrize("stem", ["fsdp", slow("hsdp"), exhaustive("ddp")])
def test_two_processes_compute_what_one_does(command, tmp_path, stem):
    flags = [f"--gin_file=gin/strategies/{stem}.gin", "--gin.train.num_steps=10"]
    alone = command(*RUN, *flags, "--cpu_devices=8", f"--workdir={tmp_path / 'one'}")
    assert alone.returncode == 0, alone.stderr
    both = start(command, 2, *flags, "--cpu_devices=4", f"--workdir={tmp_path / 'two'}")
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    one, two = summary(tmp_path / "one"), summary(tmp_path / "two")
    assert (two["processes"], two["devices"]) == (2, 8)
    assert two["train"]["loss"] == pytest.approx(one["train"]["loss"], abs=1e-6)
    assert two["eval"]["accuracy"] == pytest.approx(one["eval"]["accuracy"], abs=0.01)
    records = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert len(records) == 3, "a record was written by more than one process"
    assert "step 10/10" in outputs[0] and "step 10/10" not in outputs[1]


@pytest.mark.slow
def test_replicas_in_four_processes_compute_what_those_of_one_do(command, tmp_path):
    flags = [
        "--gin_file=gin/strategies/low_communication/diloco.gin",
        "--gin.make_mesh.axes={'data': 4, 'fsdp': 2}",
        *("--gin.outer.every=4", "--gin.train.num_steps=8"),
    ]
    alone = command(*RUN, *flags, "--cpu_devices=8", f"--workdir={tmp_path / 'one'}")
    assert alone.returncode == 0, alone.stderr
    all_four = start(command, 4, *flags, "--cpu_devices=2", f"--workdir={tmp_path / 'four'}")
    outputs = [process.communicate(timeout=300)[0] for process in all_four]
    assert [process.returncode for process in all_four] == [0] * 4, outputs
    one, four = summary(tmp_path / "one"), summary(tmp_path / "four")
    assert (four["processes"], four["mesh"]) == (4, {"data": 4, "fsdp": 2})
    for name, x in one["train"].items():
        assert four["train"][name] == pytest.approx(x, rel=1e-5)
    assert four["eval"]["loss"] == pytest.approx(one["eval"]["loss"], rel=1e-5)


def test_what_runs_in_one_process_is_refused_in_two(command, tmp_path):
    both = start(command, 2, "--gin_file=gin/strategies/single.gin", f"--workdir={tmp_path}")
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [2, 2], outputs
    assert all("runs in one process" in output for output in outputs)


def test_sigterm_to_one_process_saves_and_stops_both(command, tmp_path):
    flags = ["--gin.train.num_steps=1000000", "--cpu_devices=2", f"--workdir={tmp_path}"]
    both = start(command, 2, *flags)
    deadline = time.monotonic() + 120
    while not (tmp_path / "metrics.jsonl").exists():
        assert time.monotonic() < deadline and both[0].poll() is None
        time.sleep(0.05)
    both[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [143, 143], outputs
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert f"step {max(saved)} is saved" in outputs[0]
