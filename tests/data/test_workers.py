"""Worker processes that read data end with the run, however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.programs import environment, python

PARENT = """
import multiprocessing, os, time, types
from research_dp.data.indexed import _in_worker

def work(sender):
    _in_worker([], types.SimpleNamespace(example_is_random=False), 0, "a split", "a folder")
    sender.send(os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    context.Process(target=work, args=(sender,)).start()
    sender.close()
    print(receiver.recv(), flush=True)
    time.sleep(600)
"""


UNGUARDED = """
import numpy as np, research_dp
data = research_dp.from_source([{"x": np.zeros(3, np.float32)}] * 20, workers=1)
order = research_dp.TrainOrder(
    seed=0, batch_size=2, rows=np.arange(2), first_step=0, num_steps=2
)
list(data.train(order))
"""


def test_a_program_without_a_guard_learns_of_it(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(UNGUARDED)
    done = python(program, timeout=100)
    assert done.returncode == 1 and "can only join a started process" not in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr


KILLED = """
import multiprocessing, os
import numpy as np, research_dp

class Source:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None and index == 7:
            os.kill(os.getpid(), 9)
        return {"x": np.zeros(3, np.float32)}

if __name__ == "__main__":
    data = research_dp.from_source(Source(), workers=1, eval=0.1)
    order = research_dp.TrainOrder(
        seed=0, batch_size=2, rows=np.arange(2), first_step=0, num_steps=40
    )
    try:
        list(data.train(order))
    except research_dp.errors.RunFailure as error:
        print(error)
"""


def test_a_worker_that_is_killed_is_told_with_what_is_left(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    done = python(program, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "a worker process that reads data ended (exit code -9)" in done.stdout
    assert "the same command continues from the last step" in done.stdout


@pytest.mark.slow
def test_a_worker_ends_with_a_run_that_is_killed_and_not_by_a_signal_to_all(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    words = [sys.executable, program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGTERM)
        time.sleep(0.5)
        os.kill(worker, 0)
        parent.kill()
    deadline = time.monotonic() + 20
    while runs(worker):
        assert time.monotonic() < deadline, "an orphan that nothing but SIGKILL ends"
        time.sleep(0.1)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
