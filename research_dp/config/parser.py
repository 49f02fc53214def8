"""Reads gin files and bindings as statements, each with its file and line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

_PACKAGE = Path(__file__).resolve().parents[1]
# Inside the package in a wheel, beside it in a clone.
SHIPPED = next(p for p in (_PACKAGE / "gin", _PACKAGE.parent / "gin") if p.is_dir())
_STATEMENT_START = re.compile(r"[A-Za-z_]")  # not indented, so not inside a block


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/name` or `@scope/name()`, not looked up yet."""

    name: str
    evaluated: bool

    @property
    def selector(self) -> str:
        return self.name.split("/")[-1]

    @property
    def scopes(self) -> tuple[str, ...]:
        return tuple(self.name.split("/")[:-1])

    def __repr__(self) -> str:
        return f"@{self.name}" + ("()" if self.evaluated else "")


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%NAME`."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class File:
    """One reading of a gin file; a file that is included twice is two of them.

    Attributes:
        path: The resolved path.
        name: How messages name it, e.g. 'gin/runs/digits.gin'.
        parent: The file that includes it; None: the command line names it.
    """

    path: Path
    name: str
    parent: File | None = None

    @property
    def chain(self) -> tuple[File, ...]:
        """The files through which it is included, outermost first, and itself."""
        return (*(self.parent.chain if self.parent else ()), self)


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One binding of a file or of the command line.

    Attributes:
        scope: E.g. 'train' in `train/f.x = 1`; usually ''.
        selector: The function as written, e.g. 'optax.adamw'; '' for a macro.
        parameter: The parameter, or the name of the macro.
        value: A Python value that may contain `Reference`s and `Macro`s.
        place: E.g. 'gin/runs/digits.gin:12', '--gin.train.num_steps'.
        file: The file; None for the command line.
    """

    scope: str
    selector: str
    parameter: str
    value: Any
    place: str
    file: File | None = None

    @property
    def name(self) -> str:
        """The name as written, without its scope."""
        return f"{self.selector}.{self.parameter}" if self.selector else self.parameter

    @property
    def files(self) -> tuple[File, ...]:
        """The file with those that include it, outermost first."""
        return self.file.chain if self.file else ()

    def __str__(self) -> str:
        return f"{f'{self.scope}/' if self.scope else ''}{self.name} = {self.value!r}"


@dataclasses.dataclass(frozen=True)
class Import:
    """An import of a module, with the text of the statement."""

    module: str
    text: str
    place: str


@dataclasses.dataclass(frozen=True)
class Mistake:
    """Something wrong at a place.

    Attributes:
        place: E.g. 'gin/runs/digits.gin:12'; '' if there is none.
        message: What is wrong, what was expected, the nearest valid name.
        binding: The parameter to blame, if it is one.
    """

    place: str
    message: str
    binding: str | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


Statement = Binding | Import | Mistake


def read(files: Sequence[str], bindings: Sequence[str]) -> Iterator[Statement]:
    """The statements of files, with those of the files that they include, then of bindings.

    Args:
        files: Paths; `find` locates them.
        bindings: Text such as 'train.num_steps = 20'.

    Yields:
        Bindings and imports in gin's order, and a `Mistake` for what cannot be read.
    """
    for name in files:
        path = find(name)
        if path is None:
            yield Mistake("", f"--gin_file={name}: no such file.{_nearest_file(name)}")
        else:
            yield from _read_file(File(path.resolve(), name))
    for text in bindings:
        place = f"--gin.{text.split('=')[0].strip()}"
        for statement in _statements(text, place):
            if isinstance(statement, _Include):
                yield Mistake(place, f"include: give --gin_file={statement.name} instead.")
            else:
                yield dataclasses.replace(statement, place=place)


def find(name: str, beside: Path | None = None) -> Path | None:
    """A file beside the one that includes it, in the working directory, or a shipped one.

    Args:
        name: E.g. 'my.gin', 'gin/runs/digits.gin', 'runs/digits.gin'.
        beside: The folder of the file that includes it.
    """
    shipped = [SHIPPED / name, SHIPPED.parent / name]
    candidates = [*([beside / name] if beside else []), Path(name).expanduser(), *shipped]
    return next((path for path in candidates if path.is_file()), None)


def shipped() -> list[str]:
    """The files that come with the package, as 'gin/strategies/ddp.gin'."""
    return sorted(f"gin/{path.relative_to(SHIPPED)}" for path in SHIPPED.rglob("*.gin"))


def references(value: Any) -> Iterator[Reference | Macro]:
    """All references and macros inside a value."""
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, Mapping):
        for part in (*value.keys(), *value.values()):
            yield from references(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from references(part)


def _read_file(file: File) -> Iterator[Statement]:
    try:
        text = file.path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        yield Mistake(file.name, f"cannot be read as text in UTF-8: {error}.")
        return
    for statement in _statements(text, file.name):
        if isinstance(statement, Binding):
            yield dataclasses.replace(statement, file=file)
        elif isinstance(statement, _Include):
            yield from _read_include(statement, file)
        else:
            yield statement


def _read_include(include: _Include, file: File) -> Iterator[Statement]:
    path = find(include.name, file.path.parent)
    if path is None:
        hint = _nearest_file(include.name)
        yield Mistake(include.place, f"include: no file {include.name!r}.{hint}")
    elif path.resolve() in [outer.path for outer in file.chain]:
        yield Mistake(include.place, f"{include.name!r} includes itself.")
    else:
        yield from _read_file(File(path.resolve(), _display_name(path, include.name), file))


def _display_name(path: Path, name: str) -> str:
    """How messages name a file: a shipped one by its short name, others as they were given."""
    if path.is_relative_to(SHIPPED):
        return f"gin/{path.relative_to(SHIPPED)}"
    return name if Path(name) == path else str(path)


@dataclasses.dataclass(frozen=True)
class _Include:
    name: str
    place: str


def _statements(text: str, name: str) -> Iterator[Any]:
    """The statements of one text. After a line that cannot be read, those below it."""
    lines, start = text.splitlines(), 0
    while start < len(lines):
        rest = "\n" * start + "\n".join(lines[start:])
        try:
            for item in config_parser.ConfigParser(rest, _Symbols()):
                yield from _as_statement(item, f"{name}:{item.location.line_num}")
            return
        except (SyntaxError, tokenize.TokenError) as error:
            line, message = _syntax_error(error, lines)
            yield Mistake(f"{name}:{line}", message)
            below = range(max(line, start + 1), len(lines))
            start = next((i for i in below if _STATEMENT_START.match(lines[i])), len(lines))


def _as_statement(item: Any, place: str) -> Iterator[Any]:
    if isinstance(item, config_parser.BindingStatement):
        selector, name = (item.selector, item.arg_name) if item.arg_name else ("", item.selector)
        yield Binding(item.scope, selector, name, item.value, place)
    elif isinstance(item, config_parser.ImportStatement):
        yield Import(item.module, item.format(), place)
    elif isinstance(item, config_parser.IncludeStatement):
        yield _Include(item.filename, place)


def _syntax_error(error: Exception, lines: Sequence[str]) -> tuple[int, str]:
    """(line, message) for what gin's parser could not read."""
    if isinstance(error, SyntaxError):
        line = error.lineno or 1
        message = (error.msg or "").split("\n")[0].strip()
    else:
        line = error.args[1][0]
        message = "a bracket or a quote is not closed"
    line = min(line, len(lines))
    if "malformed node or string" in message or "Unable to parse value" in message:
        message = "the value is not a Python literal (put quotes around a string)"
    return line, f"{message.rstrip('.')}: {lines[line - 1].strip()}"


def _nearest_file(name: str) -> str:
    near = difflib.get_close_matches(name, shipped(), n=1, cutoff=0.4)
    return f" Did you mean {near[0]}?" if near else ""


class _Symbols(config_parser.ParserDelegate):
    """Parses values without looking anything up."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Any:
        return Macro(macro_name)
