"""SIGINT and SIGTERM: agreed on, saved, 143; a second SIGINT ends a process at once."""

import os
import signal
import subprocess
import time

import pytest

from research_dp.errors import UsageError
from research_dp.runs import flight_recorder
from tests.support import programs
from tests.support.marks import exhaustive, slow
from tests.support.processes import RUN, launch
from tests.support.terminal import on_terminal

LISTEN = """
import ctypes, time
from research_dp.training.preemption import StopSignal
with StopSignal().listen() as stop:
    print("ready", flush=True)
    {body}
"""
# A lock that is taken twice is waited for in C, and no signal ends that.
IN_C = "c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64)\n"
IN_C += "    c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"
IN_PYTHON = "while not stop.requested(0): time.sleep(0.02)\n    raise SystemExit(143)"


BEFORE_STEPS = """
import ctypes, time
from research_dp.training import preemption
with preemption.exit_on_signals():
    try:
        print("ready", flush=True)
        {body}
    finally:
        print("closed", flush=True)
"""


@pytest.fixture(autouse=True)
def a_hangup_is_as_by_default():
    """Whatever ran before in this process: what tests start inherits an ignored or blocked one."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGHUP, before)


def listen(body, program=LISTEN):
    process = programs.start(program.format(body=body), stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        exhaustive(signal.SIGTERM),
        exhaustive(signal.SIGHUP),
    ],
)
def test_a_signal_is_noted_and_the_loop_is_told(number):
    process = listen(IN_PYTHON)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 143
    assert ("again: it stops at once" in said) == (number == signal.SIGINT)


def test_a_second_sigint_ends_a_process_that_waits_in_c():
    process = listen(IN_C)
    process.send_signal(signal.SIGINT)
    assert "again: it stops at once" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "nothing saved" in said


def test_a_second_sigint_leaves_a_terminal_its_cursor():
    twice = "for _ in (1, 2): os.kill(os.getpid(), signal.SIGINT); time.sleep(1)"
    program = LISTEN.format(body=f"import os, signal\n    print('\\x1b[?25l')\n    {twice}")
    status, shown = on_terminal("-c", program)
    assert status == 130 and "\x1b[?25h" in "".join(text for _, text in shown)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("time.sleep(60)", signal.SIGTERM),
        pytest.param("time.sleep(60)", signal.SIGHUP, marks=pytest.mark.exhaustive),
    ],
)
def test_before_the_steps_there_is_nothing_to_save_and_what_is_open_is_closed(body, number):
    process = listen(body, BEFORE_STEPS)
    process.send_signal(number)
    printed, said = process.communicate(timeout=20)
    assert process.returncode == 143
    assert printed == "closed\n"
    assert said == f"{signal.Signals(number).name}: stopped; there was nothing to save\n"


@pytest.mark.slow
def test_before_the_steps_a_process_that_waits_in_c_ends_too():
    body = f"preemption._SECONDS_TO_LEAVE = 0.5\n    {IN_C}".replace("\n", "\n    ")
    process = listen(body, BEFORE_STEPS)
    time.sleep(1)  # until it waits
    process.send_signal(signal.SIGTERM)
    printed, said = process.communicate(timeout=20)
    assert process.returncode == 143
    assert not printed and said.count("\n") == 1


IN_A_COLLECTION = """
        import gc, os, signal
        gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGTERM))
        gc.collect(0)
        gc.callbacks.pop()
        time.sleep(20)
"""


def test_a_signal_during_a_garbage_collection_ends_the_process():
    """Python drops what a callback of a collection raises, and JAX registers one."""
    process = listen(IN_A_COLLECTION, BEFORE_STEPS)
    printed, said = process.communicate(timeout=15)
    assert (process.returncode, printed) == (143, "closed\n")
    assert said == "SIGTERM: stopped; there was nothing to save\n"


ENDING = """
import os, signal, time
from research_dp.training.preemption import StopSignal, exit_on_signals
with exit_on_signals():
    try:
        with StopSignal().listen():
            pass
    finally:  # while a run is closed
        for number in (signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        time.sleep(0.3)
        print("saved")
"""


def test_a_signal_to_a_run_that_is_ending_changes_nothing():
    done = programs.run(ENDING, timeout=50)
    assert (done.returncode, done.stdout) == (0, "saved\n")
    said = [f"{name}: the run is ending already" for name in ("SIGTERM", "SIGHUP")]
    assert sorted(done.stderr.splitlines()) == sorted(said)


@pytest.mark.slow
def test_a_hangup_that_is_ignored_stays_ignored():
    body = "import os; os.kill(os.getpid(), 1); time.sleep(0.5)"
    body += "; raise SystemExit(7 + stop.requested(0))"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = listen(body)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.communicate(timeout=20)
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("module", "flags"), [("research_dp.train", ["--dry_run"]), ("research_dp.certify", [])]
)
def test_a_signal_ends_a_command_that_still_imports(command, tmp_path, module, flags):
    (tmp_path / "tensorflow_datasets.py").write_text(
        "print('ready', flush=True); import time; time.sleep(60)"
    )
    path = f"{tmp_path}{os.pathsep}{command.environment['PYTHONPATH']}"
    process = command(*RUN, *flags, module=module, start_only=True, PYTHONPATH=path)
    lines = iter(process.stdout.readline, "")
    assert "ready\n" in lines  # reads up to it: a command may say before what it does
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 143
    # On a busy machine what it does may be repeated before it ends.
    said = [line for line in output.splitlines() if not line.startswith("Reading the config")]
    assert said == ["SIGTERM: stopped; there was nothing to save"]


@pytest.mark.slow
def test_a_data_set_that_is_prepared_when_the_run_is_told_to_stop_leaves_nothing(command, tmp_path):
    flags = [*RUN, f"--workdir={tmp_path / 'run'}"]
    process = command(*flags, start_only=True, TFDS_DATA_DIR=str(tmp_path / "tfds"))
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("tfds/digits/incomplete.*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "SIGTERM: stopped; there was nothing to save" in output
    assert not list(tmp_path.glob("tfds/digits/*"))


def until_trained(tmp_path, process):
    """Waits until both processes are past some steps; their notes."""
    deadline = time.monotonic() + 120
    while True:
        notes = flight_recorder.last_notes(tmp_path)
        if len(notes) == 2 and min(note.step for note in notes) > 3:
            return notes
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "to"),
    [slow("SIGINT", "launcher"), exhaustive("SIGINT", "one"), exhaustive("SIGTERM", "all")],
)
def test_a_signal_to_any_process_stops_all_at_one_step(command, tmp_path, number, to):
    flags = ["--gin.train.num_steps=1000000", "--cpu_devices=1"]
    launcher = launch(command, tmp_path, *flags, start_only=True)
    notes = until_trained(tmp_path, launcher)
    pids = {"launcher": [launcher.pid], "one": [notes[1].pid], "all": [n.pid for n in notes]}
    for pid in pids[to]:
        os.kill(pid, getattr(signal, number))
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 143, output
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert f"step {saved} is saved" in output
    assert {(n.step, n.phase) for n in flight_recorder.last_notes(tmp_path)} == {(saved, "end")}


def two_without_a_launcher(command, tmp_path, *flags):
    """Two processes of one run; in the flags a {process} is the number of each."""
    port = programs.free_port()
    return [
        command(
            *RUN,
            *(flag.format(process=process) for flag in flags),
            f"--coordinator=127.0.0.1:{port}",
            "--num_processes=2",
            f"--process_id={process}",
            f"--workdir={tmp_path}",
            start_only=True,
        )
        for process in range(2)
    ]


@pytest.mark.parametrize("victim", [exhaustive(0), slow(1)])
def test_without_a_launcher_the_others_end_by_the_heartbeat(command, tmp_path, victim):
    flags = ["--gin.train.num_steps=1000000", "--heartbeat_seconds=10"]
    both = two_without_a_launcher(command, tmp_path, *flags)
    until_trained(tmp_path, both[0])
    # Not killed: then its connections would break, and tell the other one at once.
    both[victim].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    output, _ = both[1 - victim].communicate(timeout=60)
    assert both[1 - victim].returncode not in (0, 143), output
    assert time.monotonic() - stopped < 2 * 10 + 5
    both[victim].kill()  # it is stopped, so that nothing milder ends it


@pytest.mark.slow
def test_processes_with_different_configurations_are_refused_at_once(command, tmp_path):
    for process in two_without_a_launcher(command, tmp_path, "--gin.train.seed={process}"):
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert "process 0 has 'train.seed = 0', process 1 has 'train.seed = 1'" in output
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--num_processes=2"], "--num_processes say which process this is: give --coordinator"),
        (["--coordinator=localhost:1"], "needs --num_processes (or JAX_NUM_PROCESSES)"),
        (["--coordinator=localhost", "--num_processes=1", "--process_id=0"], "give HOST:PORT"),
        (["--coordinator=h:1", "--num_processes=2", "--process_id=2"], "an id from 0 to"),
        (["--coordinator=auto", "--process_id=0"], "asks the cluster: leave out --process_id"),
        (["--coordinator=auto"], "--coordinator=auto: the processes of the run cannot join"),
    ],
)
def test_mistakes_about_processes_are_told(capsys, tmp_path, flags, expected):
    from research_dp import train

    assert train.main([*RUN, *flags, f"--workdir={tmp_path}"]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_would_each_train_alone_are_refused(monkeypatch, variable):
    from research_dp.commands import jax_setup

    monkeypatch.setenv(variable, "1")
    jax_setup.set_up_processes()
    monkeypatch.setenv(variable, "4")
    with pytest.raises(UsageError, match=f"{variable}=4: .*--coordinator=auto"):
        jax_setup.set_up_processes()


def test_a_cause_without_words_is_named_by_its_kind(monkeypatch):
    from research_dp.commands import jax_setup

    def fail(**_):
        raise RuntimeError

    monkeypatch.setattr(jax_setup.jax.distributed, "initialize", fail)
    with pytest.raises(UsageError, match="cannot join: RuntimeError Start each"):
        jax_setup.set_up_processes("h:1234", 2, 1)


def test_a_process_that_waits_for_others_to_start_says_so(monkeypatch, capfd):
    from research_dp.commands import jax_setup

    monkeypatch.setattr(jax_setup, "_SECONDS_TO_WARN", 0.05)
    monkeypatch.setattr(jax_setup.jax.distributed, "initialize", lambda **_: time.sleep(0.5))
    jax_setup.set_up_processes("h:1234", 2, 1)
    told = capfd.readouterr().err
    assert "process 1 of 2, coordinator h:1234: still waits for the other" in told
