"""Starts one run in several processes of this machine, and reports what went wrong.

Nothing here computes: JAX is used by the processes that it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from research_dp.commands import failures
from research_dp.commands.cli import Parser
from research_dp.commands.entries import COMMANDS, program
from research_dp.errors import UsageError
from research_dp.runs import files, flight_recorder
from research_dp.runs.workdir import in_use

FINE = (0, 143)
TRAIN = "research_dp.train"
GRACE_SECONDS = 8.0  # for other processes to hit the same error and report it
TAIL_LINES = 3
# Gloo's line about each group of processes, which no setting of it turns off.
GLOO = re.compile(rb"\[Gloo\] Rank \d+ is connected to .*\n")


@dataclasses.dataclass
class Process:
    """One process of the run.

    Attributes:
        number: Its number in the run, from 0.
        log: The file of its output.
        begins: Offset of this run's output in the log.
        popen: The process.
        ended: Time at which its end was noticed; None: it runs.
        by_us: Whether this launcher ended it.
    """

    number: int
    log: Path
    begins: int
    popen: subprocess.Popen
    ended: float | None = None
    by_us: bool = False

    @property
    def status(self) -> int:
        """The exit status as a shell reports it."""
        code = self.popen.returncode
        return 128 - code if code < 0 else code

    def how(self) -> str:
        """Describes how it ended."""
        code = self.popen.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser("launch", argument_default=None)
    parser.add_argument(
        "--num_processes", "-n", type=int, metavar="N", help="how many processes to start"
    )
    looks_back = "say where each process of an earlier run was, also of one on a cluster"
    parser.add_argument("--post_mortem", type=Path, metavar="DIR", help=looks_back)
    module = "module to run (default: %(default)s)"
    parser.add_argument("--module", default=TRAIN, help=module)
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of each process")
    if "--" not in argv and parser.parse_known_args(argv)[1]:
        example = f"{program('launch')} {COMMANDS['launch'].examples[0]}"
        parser.error(f"the flags of the run come after --. E.g. {example}")
    given = parser.parse_args(argv)
    if given.post_mortem:
        return look_back(given.post_mortem)
    workdir = _workdir(given.flags)
    if workdir is None:
        parser.error("give --workdir=DIR after --: logs and flight records go there")
    if not given.num_processes or given.num_processes < 1:
        parser.error("--num_processes: give a whole number of at least 1")
    holder = in_use(workdir)
    if holder:  # its logs and notes stay unchanged
        tell(f"error: another run ({holder}) is using {workdir}.", sys.stderr)
        return 2
    asked = listen()
    try:
        processes = start(given.module, given.flags, given.num_processes, workdir)
    except OSError as error:
        tell(f"error: --workdir={workdir} cannot be written: {error.strerror}.", sys.stderr)
        return 2
    first = watch(processes, asked, workdir, given.module)
    if first is None:
        return max(process.status for process in processes)
    tell("\n".join(post_mortem(processes, first, workdir)), sys.stderr)
    return first.status or failures.FAILED


def listen() -> list[int]:
    """Collects signals from now on, for `watch` to forward."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        # The processes have their own sessions, so nothing else would signal them.
        signal.signal(signal.SIGHUP, lambda *_: asked.append(signal.SIGTERM))
    return asked


def start(module: str, flags: list[str], count: int, workdir: Path) -> list[Process]:
    """Starts all processes, each with its own log.

    Raises:
        OSError: A log cannot be written; nothing was started.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (workdir / "logs").mkdir(parents=True, exist_ok=True)
    processes = []
    logs = [workdir / "logs" / f"process_{number}.log" for number in range(count)]
    for log in logs:
        os.close(files.append(log))  # check all of them before any process starts
    for number, log in enumerate(logs):
        where = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}"]
        with os.fdopen(files.append(log), "ab") as file:
            begins = file.tell()
            popen = subprocess.Popen(
                [sys.executable, "-m", module, *where, f"--process_id={number}", *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                # A terminal's Ctrl-C reaches only this process, which forwards it once.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        processes.append(Process(number, log, begins, popen))
    return processes


def watch(processes: list[Process], asked: list[int], workdir: Path, module: str) -> Process | None:
    """Waits for all processes, shows the output of process 0, and forwards signals.

    Returns:
        The first process that failed, or left while others waited for it; None if all ended well.
        If several failures are noticed at once, one that was killed by a signal: it may have caused
        the others.
    """
    done = threading.Event()
    shown = threading.Thread(target=_show, args=(processes[0], done))
    shown.start()
    first: Process | None = None
    left: Process | None = None  # the first that ended without a failure, but too early
    while any(process.ended is None for process in processes):
        time.sleep(0.05)
        while asked:
            _pass_on(processes, asked.pop(0))
        now = time.monotonic()
        ended = [p for p in processes if p.ended is None and p.popen.poll() is not None]
        for process in ended:
            process.ended = now
        bad = [process for process in ended if process.status not in FINE]
        if first is None and bad:
            first = min(bad, key=lambda process: (process.popen.returncode >= 0, process.number))
        if left is None and ended:
            fine = _ended_well(module, processes, workdir)
            left = next((process for process in ended if process.popen.pid not in fine), None)
        if first is None and left and now - (left.ended or now) > GRACE_SECONDS:
            first = left if any(process.ended is None for process in processes) else None
        for process in processes:
            if process.ended is None and first and now - (first.ended or now) > GRACE_SECONDS:
                # Not SIGTERM: saving needs all processes, and one is gone.
                process.by_us = True
                _signal(process, signal.SIGKILL)
    done.set()
    shown.join()
    return first


def _ended_well(module: str, processes: list[Process], workdir: Path) -> set[int]:
    """Pids of the processes that noted their end; of all, if a module of others writes no notes."""
    pids = {process.popen.pid for process in processes}
    notes = [note for note in flight_recorder.last_notes(workdir) if note.pid in pids]
    writes = module == TRAIN or notes
    return {note.pid for note in notes if note.phase == "end"} if writes else pids


def post_mortem(processes: list[Process], first: Process, workdir: Path) -> list[str]:
    """Says which process failed or hung first, where, and which log to read."""
    # Notes of an earlier run have other process ids.
    pids = {process.popen.pid for process in processes}
    notes = [note for note in flight_recorder.last_notes(workdir) if note.pid in pids]
    suspect = flight_recorder.straggler(notes)
    lines = [f"The run ended badly: process {first.number} was first, {first.how()}."]
    by_number = {note.process: note for note in notes}
    if first.number in by_number:
        note = by_number[first.number]
        lines.append(f"It was at step {note.step}, phase {note.phase}.")
    else:
        lines.append("It ended before its first note.")
    culprit = first
    if suspect and suspect.process != first.number and first.status == 1:
        culprit = processes[suspect.process]
        lines.append(
            f"Process {suspect.process} was behind all others: step {suspect.step}, phase "
            f"{suspect.phase}. They may have waited for it."
        )
    for process in processes:
        how = "ended by the launcher" if process.by_us else process.how()
        lines.append(f"  {by_number.get(process.number, f'process {process.number}')}: {how}")
    lines.append(f"Read {culprit.log}; it ends:")
    said = GLOO.sub(b"", culprit.log.read_bytes()[culprit.begins :] + b"\n")
    tail = said.decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
    return [*lines, *(f"  | {line}" for line in tail)]


def look_back(workdir: Path) -> int:
    """Prints which process of a finished run was behind, and where each process was."""

    def body() -> int:
        notes = flight_recorder.last_notes(workdir)
        if not notes:
            raise UsageError(f"{workdir} has no flight/process_I.txt: no run began there")
        print("\n".join(flight_recorder.post_mortem(notes)))
        return 0

    return failures.run_command(body)


def tell(text: str, stream: TextIO | None) -> None:
    """Writes a line if possible; neither the run nor its exit status depends on it."""
    _write(f"{text}\n".encode(errors="replace"), stream)


def _write(text: bytes, stream: TextIO | None) -> None:
    if stream is not None:  # None: it was closed before the start
        rest = memoryview(text)
        with contextlib.suppress(OSError):
            while rest:
                try:
                    rest = rest[os.write(stream.fileno(), rest) :]
                except BlockingIOError:  # a full pipe in non-blocking mode
                    select.select([], [stream], [], 1.0)


def _workdir(flags: list[str]) -> Path | None:
    workdir = None
    for flag, following in zip(flags, [*flags, ""][1:], strict=True):
        if flag.startswith("--workdir="):
            workdir = flag.partition("=")[2]
        elif flag == "--workdir":
            workdir = following
    return Path(workdir).expanduser() if workdir else None


def _show(process: Process, done: threading.Event) -> None:
    """Copies a log to standard output as it grows, but for Gloo's lines."""
    with process.log.open("rb") as file:
        file.seek(process.begins)
        rest = b""
        while True:
            last = done.is_set()
            lines = (rest + file.read()).splitlines(keepends=True) or [b""]
            # The beginning of a line waits for its end if the line may be Gloo's.
            waits = not last and lines[-1].startswith(b"[") and not lines[-1].endswith(b"\n")
            rest = lines.pop() if waits else b""
            _write(b"".join(line for line in lines if not GLOO.fullmatch(line)), sys.stdout)
            if last:
                return
            done.wait(0.2)


def _pass_on(processes: list[Process], number: int) -> None:
    for process in processes:
        if process.popen.poll() is None:
            _signal(process, number)


def _signal(process: Process, number: int) -> None:
    try:
        os.kill(process.popen.pid, number)
    except ProcessLookupError:
        return  # it has already ended
