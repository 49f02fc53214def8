"""Whether the run in a folder is done, is running, was stopped or died; writes nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from research_dp.runs import files, flight_recorder
from research_dp.runs.facts import bindings_in, summary_step
from research_dp.runs.workdir import in_use

State = Literal["done", "running", "stopped", "died", "no run"]
_BEFORE_TRAINING = ("start", "test", "restore")


class Status(NamedTuple):
    """The state of a run, the step that it does or did last, and both as a part of a sentence."""

    state: State
    step: int | None  # of a run that is going on or died: the step that it is in, from 1
    message: str  # e.g. "running, step 40 of 200, phase eval"


def status_of(folder: Path) -> Status:
    """The status of the run in a folder, also of one on another machine or an earlier version."""
    if not folder.is_dir():
        return _no_run("it is no folder" if folder.exists() else "there is no such folder")
    holder = in_use(folder)  # first: what a run wrote at its end is read after it
    notes = flight_recorder.last_notes(folder)
    # Of processes at the same place the first speaks for all.
    note = flight_recorder.straggler(notes) or next(iter(notes), None)
    config = folder / files.CONFIG
    last = _num_steps(config) if config.is_file() else None
    if holder:
        return _running(note, last)
    done = summary_step(folder)
    if config.is_file() and type(done) is int and _is_of_the_end(done, last, note):
        return Status("done", done, f"done, step {done}")
    if in_use(folder):  # it began while its files were read
        return _running(None, last)
    if not config.is_file():
        where = f"; a start of it died in phase {note.phase}" if note else ""
        return _no_run(f"it has no {files.CONFIG}{where}")
    of = f" of {last}" if last is not None else ""
    if note is None:
        missing = f"no {files.SUMMARY} of its last step, and no notes in {files.FLIGHT}/"
        return Status("died", None, f"died, nobody knows where: it has {missing}")
    if all(note.phase == "end" for note in notes) and note.step == last:
        return Status("died", note.step, f"ended at step {last}, but has no {files.SUMMARY} of it")
    if all(note.phase == "end" for note in notes):
        return Status("stopped", note.step, f"stopped by a signal at step {note.step}{of}, saved")
    who = f": process {note.process} was behind" if len(notes) > 1 else ""
    return Status("died", note.step, f"died at step {note.step}{of}, phase {note.phase}{who}")


def _no_run(why: str) -> Status:
    return Status("no run", None, f"no run: {why}")


def _running(note: flight_recorder.Note | None, last: int | None) -> Status:
    if note is None:
        return Status("running", None, "running, before its first step")
    of = f" of {last}" if last is not None else ""
    return Status("running", note.step, f"running, step {note.step}{of}, phase {note.phase}")


def _is_of_the_end(done: int, last: int | None, note: flight_recorder.Note | None) -> bool:
    """Whether a summary of step `done` is that of the newest start, not of one before it."""
    if last is not None and done < last:
        return False
    if note is None or note.phase in _BEFORE_TRAINING:
        return True  # nothing was done after the summary
    return note.phase == "end" and done >= note.step


def _num_steps(config: Path) -> int | None:
    """`train.num_steps` of a saved configuration, where it is a number or a macro of one."""
    bound = bindings_in(config.read_text(errors="replace"))
    value = bound.get("train.num_steps", "")
    value = bound.get(value.removeprefix("%"), value)
    return int(value) if value.isdecimal() else None
