"""A command on a terminal of some width: what it shows, when, and what stands there at the end."""

import errno
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time

_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b.|\r|\n|\x08|[^\x1b\r\n\x08]+", re.DOTALL)


def on_terminal(*words, columns=80, timeout=300, env=None, **options):
    """Runs `python words` on a terminal: (status, [(seconds since the start, text)])."""
    environment = {**(env or os.environ)}
    environment["TERM"] = "dumb" if environment.get("TERM") == "dumb" else "xterm"
    environment.pop("COLUMNS", None)
    program = [sys.executable, *map(str, words)]
    return _shown(program, columns, timeout, env=environment, start_new_session=True, **options)


def run(words, columns=80, timeout=900, **options):
    """Runs a command on a terminal of so many columns; (exit status, what stands there at the end).

    Colors are left out. What the command erased, such as progress, is not there.
    """
    status, chunks = _shown(words, columns, timeout, **options)
    return status, screen("".join(text for _, text in chunks))


def _shown(words, columns, timeout, **options):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    began, chunks = time.monotonic(), []
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, **options
    )
    os.close(theirs)
    reader = threading.Thread(target=_read, args=(ours, chunks, began))
    reader.start()
    try:
        status = process.wait(timeout=timeout)
    finally:
        process.kill()
        reader.join(timeout=20)
        os.close(ours)
    return status, [(seconds, text.decode(errors="replace")) for seconds, text in chunks]


def _read(terminal, chunks, began):
    try:
        while chunk := os.read(terminal, 65536):
            chunks.append((time.monotonic() - began, chunk))
    except OSError as error:  # Linux says so when nothing has the terminal open
        if error.errno not in (errno.EIO, errno.EBADF):
            raise


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


def screen(output):
    """The lines that a terminal shows after this output, however many it could show at once."""
    lines, row, column = [""], 0, 0
    for token in _TOKEN.finditer(output):
        text, arguments, control = token[0], token[1], token[2]
        count = int(arguments) if (arguments or "").isdigit() else 1
        if text == "\r":
            column = 0
        elif text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text == "\x08":
            column = max(0, column - 1)
        elif control == "A":
            row = max(0, row - count)
        elif control == "B":
            row += count
            lines += [""] * (row + 1 - len(lines))
        elif control == "K":
            lines[row] = "" if arguments == "2" else lines[row][:column]
        elif control == "J":
            lines[row:] = [lines[row][:column]]
        elif not text.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return "".join(f"{line.rstrip()}\n" for line in lines).rstrip("\n") + "\n"
