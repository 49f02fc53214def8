"""Processes that die, hang or are told to stop: who is named, how soon, with which status."""

import itertools
import math
import os
import re
import signal
import socket
import subprocess
import time

import pytest

from research_dp.runs import flight_recorder as recorder
from research_dp.runs.flight_recorder import Note, Recorder
from research_dp.training.watchdog import Watchdog
from tests.support import programs
from tests.support.marks import exhaustive, slow
from tests.support.processes import FAULTY, RUN, launch

WATCHDOG = 6


def note(process, step, phase):
    return Note(process, 1, "host", step, phase, 0.0)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(8, "step"), (8, "data")], 1),
        ([(9, "data"), (8, "step"), (9, "step")], 1),
        ([(8, "save"), (8, "step"), (9, "data")], 1),
        ([(8, "step"), (8, "step")], None),
        ([(8, "data"), (8, "data")], 0),
        ([(3, "eval")], 0),
    ],
)
def test_the_process_that_others_wait_for_is_the_one_behind(places, expected):
    found = recorder.straggler([note(i, *place) for i, place in enumerate(places)])
    assert (found and found.process) == expected


def test_of_equal_notes_the_one_of_a_stopped_process_is_behind():
    host = socket.gethostname().split(".")[0][:20]
    with subprocess.Popen(["sleep", "60"]) as child:
        notes = [Note(i, pid, host, 5, "step", 0.0) for i, pid in enumerate((1, child.pid))]
        assert recorder.straggler(notes) is None
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert recorder.straggler(notes) is notes[1]
        assert recorder.post_mortem(notes)[0] == "process 1 is behind: step 5, phase step"
        child.kill()


def test_notes_are_there_without_an_orderly_end_and_the_newest_is_found(tmp_path):
    one = Recorder(tmp_path, 0, 2)
    for step in range(1, 200):  # around the ring, more than once
        one.note("data", step)
        one.note("step", step)
    with Recorder(tmp_path, 1, 2) as other:
        other.note("save", 7)
    first, second = recorder.last_notes(tmp_path)
    assert (first.step, first.phase, first.pid) == (199, "step", os.getpid())
    assert (second.step, second.phase) == (7, "end")
    assert recorder.note_file(tmp_path, 0).stat().st_size == 64 * 64
    (tmp_path / "flight" / "process_2.txt").write_text("process 2")  # begun, and killed
    assert len(recorder.last_notes(tmp_path)) == 2


@pytest.mark.parametrize("where", ["time.sleep(60)", "ctypes.PyDLL(None).sleep(60)"])
def test_a_stuck_process_writes_its_stacks_and_ends(tmp_path, where):
    """Also where C code keeps the interpreter's lock, so that no thread of Python's runs."""
    code = f"""
import ctypes, time
from pathlib import Path
from research_dp.training.watchdog import monitored
def load_it():
    {where}
with monitored(Path({str(tmp_path)!r}), 0.4) as recorder:
    recorder.note("step", 5)
    time.sleep(0.2)
    recorder.note("data", 6)
    print(time.time(), flush=True)
    load_it()
"""
    done = programs.run(code, timeout=50)
    took = time.time() - float(done.stdout)
    assert done.returncode == (-signal.SIGABRT if "PyDLL" in where else 1)
    assert took < 20  # well before the sleep ends; a helper starts in it, and the interpreter ends
    assert "in load_it" in done.stderr, "no stacks"
    if "PyDLL" not in where:
        assert "process 0 made no progress" in done.stderr
        assert "step 6, phase data" in done.stderr
    (left,) = recorder.last_notes(tmp_path)
    assert (left.step, left.phase) == (6, "data")


SUSPENDED = """
import sys, time
from pathlib import Path
from research_dp.training.watchdog import monitored
with monitored(Path(sys.argv[1]), 1.0) as recorder:
    recorder.note("step", 5)
    print("ready", flush=True)
    time.sleep(0.5)
    recorder.note("step", 6)
    time.sleep(0.5)
"""


@pytest.mark.parametrize("whole_job", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_process_that_is_suspended_and_continued_goes_on(tmp_path, whole_job):
    """For longer than it may be silent, also by the clock of the helper that watches it."""
    pipe = {"stderr": subprocess.PIPE, "start_new_session": True}
    process = programs.start(SUSPENDED, tmp_path, **pipe)
    try:
        assert process.stdout.readline() == "ready\n"
        send = os.killpg if whole_job else os.kill
        send(process.pid, signal.SIGSTOP)
        time.sleep(3)
        send(process.pid, signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said) == (0, "")


def test_a_step_may_take_its_time_between_two_looks(tmp_path):
    """What did not run does not count, what did counts from the note on."""
    with Recorder(tmp_path) as recorder:
        watchdog = Watchdog(recorder, 8.0)
        recorder.note("step", 1)
        watchdog._checked_at -= 100.0  # before the note: not its time
        assert watchdog.check() == pytest.approx(1.7 * 8, abs=0.5)
        watchdog._checked_at -= 100.0  # suspended
        assert watchdog.check() == pytest.approx(1.7 * 8 - 2, abs=0.5)
        watchdog._checked_at -= 1.0
        assert watchdog.check() == pytest.approx(1.7 * 8 - 3, abs=0.5)
        recorder.note("start", 1)
        assert watchdog.check() == math.inf


@pytest.mark.slow
def test_what_compiles_or_takes_long_is_given_time(command, tmp_path):
    flags = [f"--gin.train.{each}_every=1" for each in ("checkpoint", "eval", "check_replicas")]
    steps = "--gin.train.num_steps=2"
    done = command(*RUN, *flags, steps, "--cpu_devices=2", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    written = recorder.note_file(tmp_path, 0).read_text().splitlines()[1:]
    notes = [(int(line.split()[1]), line.split()[2]) for line in written if line.strip()]
    places = [place for place, _ in itertools.groupby(notes)]
    start = ["start", "test", "restore", "start"]
    assert [phase for step, phase in places if step == 0] == start, "a first batch has no limit"
    first, second = ([p for s, p in places if s == step and p != "data"] for step in (1, 2))
    # The first step with its comparison, its evaluation, its save.
    assert first == ["compile"] * 3
    assert second == ["step", "step", "save", "save", "eval", "save", "end"]
    arrays = 4
    assert notes[-arrays - 1 :] == [(2, "save")] * arrays + [(2, "end")], "a fingerprint is long"


@pytest.mark.parametrize(
    ("kind", "status", "read", "expected"),
    [
        exhaustive("sleep", 1, 1, ["process 1 made no progress for", "in _fail"]),
        slow("hold", 1, 1, ["Process 1 was behind all others"]),
        exhaustive("freeze", 1, 1, ["Process 1 was behind all others"]),
        slow("kill", 137, 1, ["process 1 was first, killed by SIGKILL", "phase data."]),
        exhaustive("abort", 134, 1, ["process 1 was first, killed by SIGABRT", "phase data."]),
        # The other one may see a closed connection and end before it.
        exhaustive("raise", 1, 1, ["exit status 1", "OSError: the disk is gone"]),
    ],
)
def test_one_of_two_processes_fails_and_is_named(command, tmp_path, kind, status, read, expected):
    done = launch(
        command,
        tmp_path,
        f"--gin.train.watchdog_seconds={WATCHDOG}",
        "--gin.train.num_steps=1000",
        f"--gin.faulty.kind={kind}",
        *FAULTY,
    )
    ended = time.time()
    assert done.returncode == status, done.stderr
    logs = [(tmp_path / "logs" / f"process_{i}.log").read_text() for i in range(2)]
    for text in expected:
        assert text in done.stderr + logs[1], done.stderr
    assert f"process_{read}.log; it ends:" in done.stderr, done.stderr
    notes = recorder.last_notes(tmp_path)
    assert notes[1].phase == "data" and notes[1].step <= 8
    waited = [float(x) for log in logs for x in re.findall(r"no progress for ([\d.]+) s", log)]
    stuck = kind in ("sleep", "hold", "freeze")
    assert bool(waited) == stuck and max(waited, default=0) < 2 * WATCHDOG
    # Of which the launcher takes its grace, and the machine some seconds.
    assert ended - notes[1].time < (2 * WATCHDOG if stuck else 0) + 8 + 6
