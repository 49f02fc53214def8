"""The launcher by itself: folders that are in use or cannot be written, signals, who was first."""

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from research_dp.commands import launch as launcher
from research_dp.errors import UsageError
from research_dp.runs import workdir
from research_dp.runs.flight_recorder import Recorder, last_notes
from research_dp.training.watchdog import monitored


@pytest.fixture(autouse=True)
def signals_as_they_were():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_folder_in_use_is_refused_and_the_run_in_it_keeps_its_notes_and_logs(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "process_0.log"
    log.write_text("as it was\n")
    with workdir.locked_workdir(str(tmp_path)), Recorder(tmp_path) as recorder:
        assert launcher.main(["-n", "1", "--", f"--workdir={tmp_path}"]) == 2
        recorder.note("step", 7)
        (left,) = last_notes(tmp_path)
        assert (left.step, left.phase) == (7, "step"), "the run writes where nobody reads"
    told = capfd.readouterr().err
    assert "error: another run (process " in told and str(tmp_path) in told
    assert log.read_text() == "as it was\n"


def test_a_folder_that_cannot_be_written_is_told_in_a_line(tmp_path, capfd):
    (tmp_path / "logs").write_text("a file")
    assert launcher.main(["-n", "1", "--", f"--workdir={tmp_path}"]) == 2
    assert f"error: --workdir={tmp_path} cannot be written: " in capfd.readouterr().err


def test_no_link_is_followed_and_no_fifo_waited_for(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "process_0.log"
    (tmp_path / "precious").write_text("precious")
    for make in (lambda: log.symlink_to(tmp_path / "precious"), lambda: os.mkfifo(log)):
        make()
        assert launcher.main(["-n", "1", "--", f"--workdir={tmp_path}"]) == 2
        assert f"error: --workdir={tmp_path} cannot be written: " in capfd.readouterr().err
        log.unlink()
    assert (tmp_path / "precious").read_text() == "precious"


def test_notes_of_a_run_of_more_processes_go_once_the_folder_is_held(tmp_path):
    for process in range(3):
        Recorder(tmp_path, process, 3).note("step", 9)
    with monitored(tmp_path, None):
        assert [note.process for note in last_notes(tmp_path)] == [0]


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match="no locks"), workdir.locked_workdir(str(tmp_path)):
        pass


def started(tmp_path, *programs):
    processes = []
    for number, program in enumerate(programs):
        log = tmp_path / f"{number}.log"
        log.touch()
        popen = subprocess.Popen([sys.executable, "-c", program])
        processes.append(launcher.Process(number, log, 0, popen))
    return processes


def test_of_two_ends_at_once_the_one_that_was_killed_is_first(tmp_path):
    kill = "import os; os.kill(os.getpid(), 9)"
    processes = started(tmp_path, "raise SystemExit(1)", kill)
    for process in processes:
        process.popen.wait()
    assert launcher.watch(processes, [], tmp_path, "") is processes[1]


@pytest.mark.parametrize("status", [0, 143])
def test_who_leaves_without_a_failure_ends_those_that_wait_for_it(tmp_path, monkeypatch, status):
    """As one that SIGTERM ended while it imported, or whose user code called os._exit(0)."""
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.5)
    waits = "import time; time.sleep(100)"
    processes = started(tmp_path, waits, f"import os; os._exit({status})")
    assert launcher.watch(processes, [], tmp_path, launcher.TRAIN) is processes[1]
    assert processes[0].by_us and processes[0].how() == "killed by SIGKILL"
    processes[1].log.write_text("its last line\n[Gloo] Rank 0 is connected to 1 peer ranks.\n")
    said = launcher.post_mortem(processes, processes[1], tmp_path)
    assert f"process 1 was first, exit status {status}" in said[0]
    assert said[-1] == "  | its last line"


@pytest.mark.parametrize("module", [launcher.TRAIN, "a.module.that.writes.no.notes"])
def test_who_ended_well_is_no_reason_to_end_the_others(tmp_path, monkeypatch, module):
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    processes = started(tmp_path, "import time; time.sleep(2)", "import time; time.sleep(1)")
    if module == launcher.TRAIN:
        monkeypatch.setattr(os, "getpid", lambda: processes[1].popen.pid)
        with Recorder(tmp_path, 1, 2):
            pass
    assert launcher.watch(processes, [], tmp_path, module) is None
    assert [process.status for process in processes] == [0, 0]


def test_a_closed_terminal_stops_the_run_as_sigterm_does(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    asked = launcher.listen()
    processes = started(tmp_path, "import time; time.sleep(60)")
    signal.raise_signal(signal.SIGHUP)
    begun = time.monotonic()
    assert launcher.watch(processes, asked, tmp_path, "") is None
    assert processes[0].popen.returncode == -signal.SIGTERM
    assert time.monotonic() - begun < 30


def test_all_is_shown_where_writes_are_partial(tmp_path, monkeypatch):
    """A pipe that its reader made non-blocking takes what it has room for, or nothing."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    text = b"what process 0 writes\n" * 20_000
    with open(reads, "rb") as out, open(writes, "wb", buffering=0) as stream:
        writing = threading.Thread(target=launcher._write, args=(text, stream), daemon=True)
        writing.start()
        found = b""
        while len(found) < len(text) and select.select([out], [], [], 20)[0]:
            found += os.read(reads, 10_000)
        writing.join(20)
    assert found == text and not writing.is_alive()


def test_the_launcher_outlives_what_it_writes_to(tmp_path, monkeypatch, capfd):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        processes = started(tmp_path, "import sys; sys.exit(3)")
        processes[0].log.write_text("what process 0 writes\n" * 1000)
        assert launcher.watch(processes, [], tmp_path, "") is processes[0]
        launcher.tell("the post-mortem", sys.stderr)
        monkeypatch.setattr(sys, "stderr", None)  # closed before the start
        launcher.tell("the post-mortem", sys.stderr)
    assert capfd.readouterr() == ("", "")
