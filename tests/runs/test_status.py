"""The status of a run is read from its folder: by its lock, its notes and its summary."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from research_dp.runs import files, flight_recorder, status
from research_dp.runs.flight_recorder import Recorder
from research_dp.runs.status import status_of
from research_dp.runs.workdir import in_use, locked_workdir
from tests.support import tiny_run
from tests.support.repository import ROOT
from tests.support.run_folders import tree

HOLDS = """
import sys
from research_dp.runs.workdir import locked_workdir
with locked_workdir(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert tiny_run.outcome(folder, num_steps=6) == (0, "")
    (folder / files.CONFIG).write_text("train.num_steps = 6\n")  # tiny runs have no bindings
    return folder


@pytest.fixture
def run(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "run")


def notes(folder, *places):
    """Last notes of processes that did not end: (step, phase) of each."""
    shutil.rmtree(folder / files.FLIGHT)
    for process, (step, phase) in enumerate(places):
        Recorder(folder, process, len(places)).note(phase, step)


def test_a_run_that_ended_is_done_and_asking_leaves_its_folder_as_it_was(run):
    before = tree(run)
    assert status_of(run) == ("done", 6, "done, step 6")
    assert tree(run) == before


def test_a_run_of_an_earlier_version_and_one_without_notes_have_a_status(run):
    (run / files.FACTS).unlink()
    assert status_of(run).state == "done"
    shutil.rmtree(run / files.FLIGHT)
    assert status_of(run).state == "done"
    (run / files.SUMMARY).unlink()
    assert status_of(run).state == "died" and "no notes in flight/" in status_of(run).message


def test_a_run_that_goes_on_is_recognised_by_its_lock_by_several_readers(tmp_path):
    folder = tmp_path / "run"
    program = [sys.executable, "-c", HOLDS, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, cwd=ROOT, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        assert status_of(folder) == ("running", None, "running, before its first step")
        (folder / files.CONFIG).write_text("STEPS = 200\n\ntrain.num_steps = %STEPS\n")
        (folder / files.FLIGHT).mkdir()
        notes(folder, (40, "eval"), (41, "data"))
        for _ in range(2):
            assert status_of(folder) == ("running", 40, "running, step 40 of 200, phase eval")
        assert in_use(folder) == f"process {other.pid} on {os.uname().nodename}"
        other.send_signal(signal.SIGKILL)
    assert status_of(folder).state == "died"  # its lock is free, though its file is there
    assert status_of(folder).message.startswith("died at step 40 of 200, phase eval: process 0 was")


def test_a_reader_does_not_take_another_for_a_run_and_a_run_waits_for_a_reader(run):
    with open(run / files.LOCK) as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert in_use(run) is None and status_of(run).state == "done"
        leaves = threading.Timer(0.03, fcntl.flock, (reader, fcntl.LOCK_UN))
        leaves.start()
        with locked_workdir(str(run)):
            assert in_use(run)
        leaves.join()


def test_a_run_that_a_signal_stopped_is_told_from_one_that_died(run):
    summary = json.loads((run / files.SUMMARY).read_text())
    (run / files.SUMMARY).unlink()
    assert status_of(run) == ("died", 6, "ended at step 6, but has no summary.json of it")
    notes(run, (3, "data"))
    assert status_of(run) == ("died", 3, "died at step 3 of 6, phase data")
    notes(run, (4, "step"), (3, "eval"))
    message = "died at step 3 of 6, phase eval: process 1 was behind"
    assert status_of(run) == ("died", 3, message)
    # The run was continued past its summary, and stopped.
    (run / files.SUMMARY).write_text(json.dumps(summary))
    (run / files.CONFIG).write_text("train.num_steps = 9\n")
    notes(run, (8, "end"))
    assert status_of(run) == ("stopped", 8, "stopped by a signal at step 8 of 9, saved")


def test_a_start_that_failed_before_training_leaves_a_finished_run_done(run):
    notes(run, (0, "restore"))
    assert status_of(run).state == "done"


def test_what_is_no_run_says_why(tmp_path):
    assert status_of(tmp_path / "none") == ("no run", None, "no run: there is no such folder")
    assert status_of(tmp_path) == ("no run", None, "no run: it has no config.gin")
    assert not list(tmp_path.iterdir()), "asking made a file"
    (tmp_path / "file").write_text("")
    assert status_of(tmp_path / "file").message == "no run: it is no folder"
    Recorder(tmp_path).note("test", 0)
    assert status_of(tmp_path).message.endswith("; a start of it died in phase test")


@pytest.mark.parametrize("what", ["lock", "summary", "config", "notes"])
def test_a_fifo_or_rubbish_blocks_no_reader(run, what):
    path = {
        "lock": run / files.LOCK,
        "summary": run / files.SUMMARY,
        "config": run / files.CONFIG,
        "notes": flight_recorder.note_file(run, 0),
    }[what]
    path.unlink()
    os.mkfifo(path)
    assert status_of(run).state in ("done", "stopped", "died", "no run")
    path.unlink()
    path.write_bytes(b"\xff\x00{[")
    assert status_of(run).state in ("done", "stopped", "died", "no run")


def test_a_run_that_starts_while_its_files_are_read_is_running(run, monkeypatch):
    (run / files.SUMMARY).unlink()
    holders = iter([None, "process 1 on host"])
    monkeypatch.setattr(status, "in_use", lambda folder: next(holders))
    assert status_of(run).state == "running"
