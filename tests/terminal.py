"""A command on a terminal of some width: what it shows, and when."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time


def on_terminal(*words, columns=80, env=None, timeout=300):
    """Runs `python words` on a terminal: (status, [(seconds since the start, text)])."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {**(env or os.environ), "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    began, chunks = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    while time.monotonic() < began + timeout:
        try:
            text = os.read(ours, 65536)
        except OSError:  # the terminal is closed: the process has ended
            break
        if not text:
            break
        chunks.append((time.monotonic() - began, text.decode(errors="replace")))
    os.close(ours)
    return process.wait(timeout=30), chunks


def in_pipe(*words, env=None, timeout=300):
    """The same with a pipe for both streams."""
    began, chunks = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, "-u", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
    )
    with process.stdout as lines:
        chunks += [(time.monotonic() - began, line) for line in lines]
    return process.wait(timeout=timeout), chunks


def screen(text):
    """The lines that a terminal shows in the end: of a rewritten line what was written last."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif part and not part.startswith("\x1b["):
            before, after = lines[row][:column], lines[row][column + len(part) :]
            lines[row] = before.ljust(column) + part + after
            column += len(part)
    return [line.rstrip() for line in lines]
