"""Parsing gin files, and saying where a value came from."""

from __future__ import annotations

import difflib
import inspect
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from research_dp.distributed.errors import UsageError

_GIN_ERRORS = (
    *(ValueError, SyntaxError, TypeError, OSError, ImportError, NameError, RuntimeError),
    tokenize.TokenError,
)
_ROOT = Path(__file__).resolve().parents[2]


def reset() -> None:
    """Forgets all bindings and unlocks the configuration."""
    gin.config._set_config_is_locked(False)
    gin.clear_config()


def load(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Replaces what is bound by files, then bindings, and locks the configuration.

    Args:
        files: Paths, from the working directory or from the folder that holds `gin/`.
        bindings: Text such as 'train.num_steps = 20'.

    Raises:
        UsageError: A file does not exist or does not parse, or a name is unknown.
    """
    # The package's own configurables are always there, so that a binding may name any of them.
    import research_dp.data
    import research_dp.models
    import research_dp.strategies
    import research_dp.training.loop  # noqa: F401

    reset()
    gin.add_config_file_search_path(str(_ROOT))
    for file in files:
        if not find(file):
            near = difflib.get_close_matches(file, [*_shipped()], n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"--gin_file={file}: no such file.{hint}")
        with _explained():
            gin.parse_config_file(file)
    for binding in bindings:
        with _explained(f"in --gin_bindings={binding!r}"):
            gin.parse_config(binding)
    with _explained():
        gin.finalize()


def missing_binding(error: BaseException) -> UsageError | None:
    """A call's missing parameter, told as the user's mistake; None if the error is another."""
    text = str(error)
    found = re.search(r"No values supplied by Gin or caller for arguments: \[(.+?)\]", text)
    function = re.search(r"^\s*In call to configurable '(.+?)'", text, re.MULTILINE)
    if found and function:
        first = found[1].split(",")[0].strip("' ")
        return UsageError(
            f"{function[1]} needs {found[1]}. Bind e.g. {function[1]}.{first} in a gin file."
        )
    required = re.search(r"Required bindings for `(.+?)` not provided in config: \[(.+?)\]", text)
    if required:
        first = required[2].split(",")[0].strip("' ")
        return UsageError(
            f"{required[1]} needs {required[2]}, which nothing binds. Add the gin file that does, "
            f"or --gin.{required[1]}.{first}=..."
        )
    return None


def find(file: str) -> Path | None:
    """Where gin finds a file: as given, or below the folder that holds `gin/`."""
    candidates = [Path(file), _ROOT / file]
    return next((path for path in candidates if path.is_file()), None)


def origin(name: str, files: Sequence[str], bindings: Sequence[str]) -> str | None:
    """Where a parameter was last bound, e.g. 'gin/strategies/ddp.gin:12'; None: nowhere.

    Args:
        name: E.g. 'make_mesh.axes'.
        files: As for `load`.
        bindings: As for `load`.
    """
    found = None
    for file in files:
        for bound, place in _bound_in(file):
            found = place if bound == name else found
    for binding in bindings:
        key = binding.split("=")[0].strip()
        found = f"--gin.{key}" if key.split("/")[-1] == name else found
    return found


def _bound_in(file: str) -> Iterator[tuple[str, str]]:
    """(name, place) of each binding of a file and of those it includes, in order."""
    path = find(file)
    if path is None:
        return
    with path.open() as lines:
        for statement in config_parser.ConfigParser(lines, _Names()):
            if isinstance(statement, config_parser.IncludeStatement):
                yield from _bound_in(statement.filename)
            elif isinstance(statement, config_parser.BindingStatement):
                selector = statement.selector.split(".")[-1]
                name = f"{selector}.{statement.arg_name}" if statement.arg_name else selector
                yield name, f"{file}:{statement.location.line_num}"


class _Names(config_parser.ParserDelegate):
    """Parses values without looking anything up."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return scoped_configurable_name, evaluate

    def macro(self, macro_name: str) -> Any:
        return macro_name


class _explained:
    """Turns gin's errors into one or two lines with the place and the nearest right name."""

    def __init__(self, place: str = ""):
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _GIN_ERRORS):
            raise UsageError(_explain(error, self._place)) from error


def _explain(error: BaseException, place: str) -> str:
    if isinstance(error, SyntaxError):
        where = f"in {error.filename}:{error.lineno}" if error.filename else place
        message = error.msg.split("\n")[0]
        if message.startswith("malformed node or string"):
            message = "not a Python literal (put quotes around a string)"
        return f"{message} {where}: {(error.text or '').strip()}".strip()
    message, *rest = str(error).split("\n")
    macro = re.search(r"No bindings specified for '(\w+)/gin\.macro'", message)
    if macro:
        return (
            f"%{macro[1]} is used and bound nowhere. Add the gin file that binds it, or "
            f"--gin.{macro[1]}=..."
        )
    found = re.search(r'file "(.+?)",? line (\d+)', "\n".join(rest))
    where = f"in {found[1]}:{found[2]}" if found else place
    if isinstance(error, ImportError):
        message = f"cannot import: {message}"
    return " ".join(part for part in (message, where, _suggest(message)) if part)


def _suggest(message: str) -> str:
    """The nearest right name for gin's complaint about a wrong one."""
    unknown = re.search(r"No configurable matching (?:reference )?'@?([\w./]+?)(?:\(\))?'", message)
    parameter = re.search(
        r"Configurable '([\w./]+)' doesn't have a parameter named '(\w+)'", message
    )
    if unknown:
        wanted, known = unknown[1].split("/")[-1], configurables()
    elif parameter:
        wanted, known = parameter[2], parameters(parameter[1])
    else:
        return ""
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    return f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(sorted(known))}."


def configurables() -> list[str]:
    """Short names of all registered configurables but gin's own."""
    return sorted({name.split(".")[-1] for name in _registry() if not name.startswith("gin.")})


def parameters(selector: str) -> list[str]:
    """Names of the parameters of a configurable that gin can bind."""
    for name, configurable in _registry().items():
        if name == selector or name.endswith("." + selector):
            return list(inspect.signature(configurable.wrapped).parameters)
    return []


def _registry() -> dict[str, Any]:
    return {name: value for name, value in gin.config._REGISTRY.items()}


def _shipped() -> list[str]:
    return [str(path.relative_to(_ROOT)) for path in (_ROOT / "gin").rglob("*.gin")]
