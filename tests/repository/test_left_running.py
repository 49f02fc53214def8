"""What a test starts and leaves running ends with it, also if the test fails."""

import time
from pathlib import Path

from tests.support import left_running

SLEEPS = (
    "import subprocess, time\n"
    "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    "time.sleep(600)"
)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_a_failed_test_left_running_ends_with_those_it_started(command, tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with left_running.ended():
        process = command(module="sleeps", start_only=True, cwd=tmp_path)
        child = int(process.stdout.readline())
        assert is_there(child) and process.poll() is None
    assert process.poll() is not None and process.stdout.closed
    deadline = time.monotonic() + 20
    while is_there(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)
