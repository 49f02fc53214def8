"""Short programs in Python processes of their own, alone or in pairs, and free ports."""

import contextlib
import os
import socket
import subprocess
import sys

from tests.support.repository import ROOT


def free_port(host="127.0.0.1"):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def environment(folder=ROOT, **more):
    """This process's, for one that imports what is in a folder."""
    return {**os.environ, "PYTHONPATH": str(folder), **more}


def python(*words, folder=ROOT, timeout=None, **more):
    """Runs Python in a folder, whose modules it imports; returns the finished process."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env=environment(folder, **more),
        check=False,
    )


def run(code, *arguments, timeout=100):
    """Runs a program to its end; returns the finished process."""
    return python("-c", code, *arguments, timeout=timeout, JAX_PLATFORMS="cpu")


def output(code):
    """What a program prints that ends without an error."""
    done = run(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(code, *arguments, **options):
    """Starts a program; its output can be read."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(JAX_PLATFORMS="cpu"),
        **options,
    )


@contextlib.contextmanager
def pair(code, **options):
    """Two processes of a program, given a coordinator's address and their number; killed at last.

    Yields:
        The address, and the processes.
    """
    address = f"127.0.0.1:{free_port()}"
    both = [start(code, address, number, **options) for number in range(2)]
    try:
        yield address, both
    finally:
        for process in both:
            process.kill()
            process.communicate()
