"""Commands as Python functions: arguments become a command, and mistakes speak of arguments."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_types import described, is_array
from research_dp.commands import jax_setup
from research_dp.commands.flags import Command
from research_dp.config import gin_internals, load
from research_dp.errors import UsageError

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Bindings = Mapping[str, Any] | Sequence[str]
C = TypeVar("C", bound=Command)
_BINDING_PLACE = re.compile(r"^--gin\.\S+: |(^|(?<=in ))--gin\.[\w./]+$", re.MULTILINE)
_BINDING = re.compile(r"--(?:gin|vary)\.([\w./]+)=(\S+)")
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z_]+)([a-z_]+)")
_ARGUMENTS = {
    "gin_file": "gin_files",
    "gin_bindings": "bindings",
    "import": "imports",
    "export": "to",
}


def command_of(kind: type[C], gin_files: Files, bindings: Bindings, **fields: Any) -> C:
    """A command with the fields that flags would set."""
    files = [gin_files] if isinstance(gin_files, str | os.PathLike) else gin_files
    if isinstance(bindings, Mapping):
        bindings = [f"{name} = {as_gin(value)}" for name, value in bindings.items()]
    paths = [os.fspath(file) for file in files]
    return kind(gin_files=paths, bindings=list(bindings), **fields)


@contextlib.contextmanager
def session(command: Command) -> Iterator[None]:
    """Restores gin's bindings at the end; a mistake is a UsageError that names arguments."""
    jax_setup.quieten_tensorflow()
    with gin_internals.kept():
        try:
            yield
        except (UsageError, TypeError, RuntimeError) as error:
            mistake = load.as_mistake(error, command.config)
            if mistake is None:
                raise
            message = in_arguments(mistake.removeprefix("error: ").replace("\nerror: ", "\n"))
            if message == str(error):
                raise
            if isinstance(error, load.Mistakes):
                error.args = (message,)
                raise
            raise UsageError(message, binding=getattr(error, "binding", None)) from error


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
