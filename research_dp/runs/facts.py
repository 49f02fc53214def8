"""What a run says of itself: `run.json`, the training step's program as text, `summary.json`."""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
import shlex
import socket
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gin
import jax

from research_dp.argument_checks import fits
from research_dp.distributed.placement import ProgramMemory
from research_dp.errors import first_line
from research_dp.runs import files
from research_dp.runs.manifest import origin
from research_dp.strategies import Strategy
from research_dp.types import Bound

_FORMAT = 1
# What a reader of `run.json` expects: of it, of a binding and of a start in it.
_FACTS: dict[str, Any] = {
    **{"strategy": str, "algorithm": str | None, "mesh": dict[str, int]},
    **{"bytes_per_device": dict[str, int], "program": dict[str, Any] | None},
    **{"bindings": dict[str, dict[str, Any]], "starts": list[dict[str, Any]]},
}
_BOUND = typing.get_type_hints(Bound)
_START = {"versions": dict[str, str | None]}  # by package
_MOST_TEXT = 2**30  # bytes of a program's text
_GIT_SECONDS = 10.0
_MOST_COMMAND = 2_000  # characters: `python -c` has its code in them
# A binding of gin's own dump; its value may continue on indented lines.
_BINDING = re.compile(r"^([^#\s][^\s=]*) = (.*(?:\n[ \t].*)*)", re.MULTILINE)


class RunFacts:
    """Writes `run.json` and `train_step.hlo.gz`, in process 0."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        bound: Mapping[str, Bound] | None,
        first_step: int,
        *,
        ends: bool,
        bytes_per_device: Mapping[str, int],
        say: Callable[[str], None],
    ):
        self._path, self._strategy, self._first_step = folder / files.FACTS, strategy, first_step
        self._ends = ends  # no training step follows
        self._bytes_per_device, self._say = bytes_per_device, say
        if bound is None:
            dumped = bindings_in(gin.config_str())
            bound = {name: Bound(value, None, None) for name, value in dumped.items()}
        self._bound = bound
        self._facts: dict[str, Any] = {}

    def begin(self) -> None:
        """Adds this start to those of the run; process 0 calls it."""
        before, strategy = self._read(), self._strategy
        self._facts = {
            "format": _FORMAT,
            "strategy": strategy.name,
            "mesh": dict(strategy.mesh.shape),
            "algorithm": strategy.algorithm,
            "bytes_per_device": dict(self._bytes_per_device),
            "program": before.get("program") if self._ends else None,
            "bindings": {name: bound._asdict() for name, bound in self._bound.items()},
            "starts": [*before.get("starts", ()), _start(self._first_step)],
        }
        self._write()

    def compiled(self) -> None:
        """Adds the program of the training step, which has run; every process calls it.

        JAX remembers the program. If it ever did not, all processes would compile it again: the
        compilation of a program for several processes may wait for all of them.
        """
        strategy, problem, sizes = self._strategy, None, {}
        path = self._path.with_name(files.PROGRAM)
        try:
            step: Any = strategy.train_step  # jitted, so that it can be lowered
            program = step.lower(strategy.abstract_state, strategy.abstract_batch).compile()
            if jax.process_index() != 0:
                return
            sizes = ProgramMemory.of(program)._asdict()
            files.replace(path, gzip.compress(program.as_text().encode(), 6, mtime=0))
        except Exception as error:  # compilers raise many types, and the run needs none of this
            problem = f"{type(error).__name__}: {first_line(error)}"
        if jax.process_index() == 0:
            if problem is not None:
                sizes["problem"] = problem
                path.unlink(missing_ok=True)  # it would be the program of an earlier start
            self._facts["program"] = sizes
            self._write()

    def _read(self) -> dict[str, Any]:
        """What earlier starts wrote; empty if there is none, or it is damaged and put aside."""
        content = self._path.read_bytes() if self._path.exists() else b""
        before = files.read_json(content)
        if are_facts(before):
            return before
        if content:
            aside = files.free_name(self._path)
            files.replace(aside, content)
            self._say(
                f"{files.shown(self._path)} is damaged, and begins anew; {files.shown(aside)} has "
                "what it was"
            )
        return {}

    def _write(self) -> None:
        files.replace(self._path, json.dumps(self._facts, indent=2) + "\n")


def read_facts(folder: Path) -> dict[str, Any]:
    """What is in a run's `run.json`, if anything; `are_facts` says whether it can be used."""
    file = folder / files.FACTS
    try:
        return files.read_json(file.read_bytes()) if file.is_file() else {}  # a FIFO would block
    except OSError:
        return {}


def are_facts(facts: Mapping[str, Any]) -> bool:
    """Whether these are facts as `RunFacts` writes them."""
    return (
        facts.get("format") == _FORMAT
        and _has_types(facts, _FACTS)
        and all(_has_types(bound, _BOUND) for bound in facts["bindings"].values())
        and all(_has_types(start, _START) for start in facts["starts"])
    )


def _has_types(fields: Mapping[str, Any], types: Mapping[str, Any]) -> bool:
    return all(name in fields and fits(fields[name], kind) for name, kind in types.items())


def read_program(folder: Path) -> bytes:
    """A run's program, compressed: runs of a sweep share it. OSError: it cannot be read."""
    return (folder / files.PROGRAM).read_bytes()


def program_text(compressed: bytes) -> str:
    """The program as `Compiled.as_text` gave it; OSError, EOFError, ValueError: it is damaged."""
    with gzip.open(io.BytesIO(compressed)) as inflated:
        text = inflated.read(_MOST_TEXT + 1)
    if len(text) > _MOST_TEXT:
        raise ValueError(f"{files.PROGRAM} inflates to more than {_MOST_TEXT / 2**30:g} GiB")
    return text.decode()


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes what a run has at its end."""
    text = files.json_text(summary) + "\n"
    files.replace(folder / files.SUMMARY, text)


def read_summary(folder: Path) -> dict[str, Any]:
    """What is in a run's `summary.json`; OSError: there is none, or it cannot be read."""
    return files.read_json((folder / files.SUMMARY).read_bytes())


def summary_step(folder: Path) -> Any:
    """The step of a run's summary; None: it has none. OSError: it cannot be read."""
    return read_summary(folder).get("step") if (folder / files.SUMMARY).is_file() else None


def bindings_in(dump: str) -> dict[str, str]:
    """Name -> value, on one line, of the bindings in gin's own dump of a configuration."""
    found = _BINDING.findall(dump)
    return {name: _on_one_line(value) for name, value in found}


def _on_one_line(value: str) -> str:
    """A value as `repr` writes it, where it is a literal: gin's dump wraps long ones."""
    text = value.removeprefix("\\").strip()
    try:
        return repr(ast.literal_eval(f"({text})"))
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # e.g. a reference or a macro
        return " ".join(text.split())


def _start(step: int) -> dict[str, Any]:
    device = jax.devices()[0]
    program, *arguments = sys.orig_argv or [""]  # Python inside another program has none
    return origin(
        step=step,
        command=shlex.join([Path(program).name, *arguments])[:_MOST_COMMAND],
        commit=_commit(),
        platform=device.platform,
        device_kind=device.device_kind,
        host=socket.gethostname(),
    )


def _commit() -> str | None:
    """The commit in the working directory, e.g. '0123abcd, changed'; None: git knows none."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--exclude=*", "--abbrev=8"]
    try:
        done = subprocess.run(
            [*command, "--dirty=, changed"],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
