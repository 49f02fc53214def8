"""Who stops reading ends a listing, not a run; other broken pipes are errors like any."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
import os, sys
from research_dp.config import ending, printing

def body(session):
    {body}
    return 0

status = ending.told(body)
print("the status is", status, file=sys.stderr)
"""
BROKEN = "r, w = os.pipe(); os.close(r); os.write(w, b'x')"


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ("print('x' * 10**6, flush=True)", 141, None),
        (f"with printing.while_read(): print('x' * 10**6, flush=True)\n    {BROKEN}", 1, "Broken"),
        ("with printing.while_read(): print('x' * 10**6, flush=True); print('y')", 0, None),
        # What is printed waits in a buffer until the command ends.
        ("print('x')", 141, None),
        ("with printing.while_read(): print('x')", 0, None),
    ],
)
def test_nobody_reads(body, status, told):
    done = run(PROGRAM.format(body=body), read=False)
    assert f"the status is {status}\n" in done.stderr
    assert ("BrokenPipeError" in done.stderr) == bool(told)
    assert done.returncode == 0, "something that was not printed broke the interpreter's end"


def test_another_pipe_breaks_while_somebody_reads():
    done = run(PROGRAM.format(body=BROKEN), read=True)
    assert "the status is 1\n" in done.stderr
    assert "BrokenPipeError" in done.stderr


def run(program, read):
    """Runs a program whose output is read, or is not."""
    reader, writer = os.pipe()
    if not read:
        os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-c", program],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
        )
    finally:
        os.close(writer)
        if read:
            os.close(reader)
