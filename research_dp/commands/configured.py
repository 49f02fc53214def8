"""The run of gin files that a caller names, loaded for the time of a call.

Messages speak of flags, as commands have them. For Python callers they become arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import numbers
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp import html_page
from research_dp.argument_types import described, is_array
from research_dp.commands import entries, jax_setup
from research_dp.config import gin_internals, load
from research_dp.config.load import Config
from research_dp.errors import UsageError
from research_dp.runs import files
from research_dp.runs.workdir import config_of
from research_dp.training import python_objects

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Bindings = Mapping[str, Any] | Sequence[str]
# Values of a parameter, or '' and the names of files: (name, 'V,W,...'), in the order given.
Varied = Sequence[tuple[str, str]]
_BINDING_PLACE = re.compile(r"^--gin\.\S+: |(^|(?<=in ))--gin\.[\w./]+$", re.MULTILINE)
_BINDING = re.compile(r"--(?:gin|vary)\.([\w./]+)=(\S+)")
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z_]+)([a-z_]+)")
_ARGUMENTS = {**{flag: name for name, flag in entries.FLAGS.items()}, "export": "to"}
_speaks_flags = False  # whether messages are for a command line


@dataclasses.dataclass
class Run:
    """Gin files and bindings; `config` once they are loaded: an error names the line of a value."""

    gin_files: Sequence[str] = ()
    bindings: Sequence[str] = ()
    imports: Sequence[str] = ()
    allow_unused: bool = False
    config: Config | None = None
    noted: set[str] = dataclasses.field(default_factory=set)  # printed already

    def load(
        self,
        files: Sequence[str] = (),
        bindings: Sequence[str] = (),
        *,
        allow_unused: bool = False,
        complete: bool = True,
        saved: Path | None = None,
    ) -> Config:
        """Loads the run, with further files and bindings, after the one saved in a folder."""
        self.config = load.load(
            [*self.gin_files, *files],
            [*self.bindings, *bindings],
            imports=self.imports,
            allow_unused=self.allow_unused or allow_unused,
            complete=complete,
            saved=str(config_of(saved)) if saved else None,
        )
        for note in dict.fromkeys(self.config.notes):
            if note not in self.noted:
                self.noted.add(note)
                print(f"Note: {note}", file=sys.stderr, flush=True)
        return self.config


@contextlib.contextmanager
def session(
    gin_files: Files = (),
    bindings: Bindings = (),
    *,
    imports: Sequence[str] = (),
    allow_unused: bool = False,
    **objects: Any,
) -> Iterator[Run]:
    """A run; restores gin's bindings at the end. A mistake is a UsageError with its place.

    It speaks of arguments, but within `speaking_flags`. `objects` are bound to the parameters of
    `train` of their names; None: not given.
    """
    if isinstance(bindings, Mapping):
        bindings = [f"{name} = {as_gin(value)}" for name, value in bindings.items()]
    names = [gin_files] if isinstance(gin_files, str | os.PathLike) else gin_files
    objects = {name: value for name, value in objects.items() if value is not None}
    given = [f"train.{name} = {python_objects.REFERENCES[name]}" for name in objects]
    run = Run([os.fspath(name) for name in names], [*bindings, *given], imports, allow_unused)
    jax_setup.quieten_tensorflow()
    with gin_internals.kept(), python_objects.given(objects):
        try:
            yield run
        except (UsageError, TypeError, RuntimeError) as error:
            mistake = load.as_mistake(error, run.config)
            if mistake is None:
                raise
            message = mistake.removeprefix("error: ").replace("\nerror: ", "\n")
            message = message if _speaks_flags else in_arguments(message)
            if message == str(error):
                raise
            if isinstance(error, load.Mistakes):
                error.args = (message,)
                raise
            raise UsageError(message, binding=getattr(error, "binding", None)) from error


@contextlib.contextmanager
def speaking_flags() -> Iterator[None]:
    """Within it messages are for a command line."""
    global _speaks_flags
    before, _speaks_flags = _speaks_flags, True
    try:
        yield
    finally:
        _speaks_flags = before


def in_arguments(message: str) -> str:
    """A message with arguments of functions in place of flags of commands."""
    message = _BINDING_PLACE.sub(lambda place: "" if place[0][-1] == " " else "bindings", message)
    message = _BINDING.sub(r"the binding \1 = \2", message)
    return _FLAG.sub(lambda flag: _ARGUMENTS.get(flag[1], flag[1]), message)


def as_gin(value: Any) -> str:
    """A Python value as a gin file writes it."""
    if isinstance(value, str) and value[:1] in ("@", "%"):
        return value
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, list):
        return f"[{', '.join(map(as_gin, value))}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # as Optax's optimizers have
        return f"({''.join(f'{as_gin(item)}, ' for item in value)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_gin(k)}: {as_gin(v)}" for k, v in value.items()) + "}"
    if isinstance(value, np.dtype | type) and jnp.dtype(value) != np.dtype(object):
        return repr(jnp.dtype(value).name)  # e.g. jnp.bfloat16
    if isinstance(value, jax.Array | np.ndarray) and (value.ndim or not is_array(value)):
        raise UsageError(f"bindings: {described(value)} is no value of a gin file: give numbers.")
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, str | bytes | numbers.Number | None):
        is_function = inspect.isroutine(value) or isinstance(value, type)
        it, name = ("it", "@name") if is_function else ("a function that returns it", "@name()")
        raise UsageError(
            f"bindings: {described(value)} is no value of a gin file. Decorate {it} with "
            f"@gin.register, and give '{name}'."
        )
    return repr(value)


@contextlib.contextmanager
def usage_error(message: str) -> Iterator[None]:
    """Adds the reason of an OSError to a message."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{message}: {error.strerror}.") from error


def check_outputs(**named: str | os.PathLike[str] | None) -> None:
    """Raises UsageError if a file cannot be written or made, before hours of work would be lost.

    Args:
        named: Parameter -> the file that it names.
    """
    if named.get("html_file"):
        html_page.check_installed()
    given = {entries.flag(name): os.fspath(file) for name, file in named.items() if file}
    paths = {flag: Path(file).expanduser().resolve() for flag, file in given.items()}
    if len(set(paths.values())) < len(paths):
        raise UsageError(f"{' and '.join(paths)} are the same file: give two names.")
    for flag, path in paths.items():
        exists = path.exists()
        with usage_error(f"{flag}={given[flag]} cannot be written"):
            path.open("a").close()
        if not exists:
            path.unlink()  # what is refused afterwards leaves no empty file


def write_output(parameter: str, file: str | os.PathLike[str], content: Any) -> None:
    """Writes a text, or anything else as JSON; UsageError if the file cannot be written."""
    text = content if isinstance(content, str) else files.json_text(content) + "\n"
    with usage_error(f"{entries.flag(parameter)}={os.fspath(file)} cannot be written"):
        Path(file).expanduser().write_text(text, encoding="utf-8")
