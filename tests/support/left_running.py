"""Ends what a test started and left running."""

import contextlib
import os
import signal
import subprocess

started = []  # processes, each in a group of its own


@contextlib.contextmanager
def ended():
    """Ends what is started inside, with the processes that those started, whatever happens."""
    before = len(started)
    try:
        yield
    finally:
        while len(started) > before:
            process = started.pop()
            if process.poll() is None:
                process.terminate()  # a launcher ends the processes that it started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with process:  # closes its pipe, and waits for it
                pass
