"""Reads gin files and bindings as statements, each with its file and line."""

from __future__ import annotations

import dataclasses
import re
import tokenize
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from research_dp.config import gin_internals, spellings
from research_dp.errors import printable

Key = tuple[str, str, str]  # scope, full name of the function, parameter
MACRO = "gin.macro"
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
    """One reading of a gin file; a file that is included twice is two of them."""

    path: Path  # resolved
    name: str  # in messages, e.g. 'runs/digits.gin'
    parent: File | None = None  # the file that includes it; None: the command line names it

    @property
    def chain(self) -> tuple[File, ...]:
        """The files through which it is included, outermost first, and itself."""
        return (*(self.parent.chain if self.parent else ()), self)


@dataclasses.dataclass(frozen=True, eq=False)
class Binding:
    """One binding of a file or of the command line."""

    scope: str  # e.g. 'train' in `train/f.x = 1`; usually ''
    selector: str  # the function as written, e.g. 'optax.adamw'; '' for a macro
    parameter: str  # or the name of the macro
    value: Any  # a Python value that may contain `Reference`s and `Macro`s
    place: str  # e.g. 'runs/digits.gin:12', '--gin.train.num_steps'
    file: File | None = None  # None: the command line

    @property
    def name(self) -> str:
        """The name as written, without its scope."""
        return f"{self.selector}.{self.parameter}" if self.selector else self.parameter

    @property
    def key(self) -> Key:
        """The parameter that it binds; of an unknown function, as written."""
        if not self.selector:
            return f"{self.scope}/{self.parameter}".strip("/"), MACRO, "value"
        names = gin_internals.matching(self.selector)
        return self.scope, names[0] if len(names) == 1 else self.selector, self.parameter

    @property
    def files(self) -> tuple[File, ...]:
        """The file with those that include it, outermost first."""
        return self.file.chain if self.file else ()

    @property
    def macros(self) -> list[str]:
        """The macros that it uses."""
        return [item.name for item in references(self.value) if isinstance(item, Macro)]

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
    """Something wrong at a place: what, what was expected, the nearest valid name."""

    place: str  # '' if there is none
    message: str
    binding: str | None = None  # the parameter to blame, if it is one

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


Statement = Binding | Import | Mistake
# How gin's parser makes references and macros: without looking anything up.
_SYMBOLS = types.SimpleNamespace(configurable_reference=Reference, macro=Macro)


def read(files: Sequence[str], bindings: Sequence[str]) -> Iterator[Statement]:
    """The statements of files, with those of the files that they include, then of bindings.

    Files are paths that `find` locates, bindings text such as 'train.num_steps = 20'. What cannot
    be read is a `Mistake`.
    """
    for name in files:
        path = find(name)
        if path is None:
            yield Mistake("", f"--gin_file={name}: no such file.{nearest_file(name)}")
        else:
            yield from _read_file(File(path.resolve(), name))
    for text in bindings:
        yield from _statements(text, f"--gin.{text.split('=')[0].strip()}", None)


def find(name: str, beside: Path | None = None) -> Path | None:
    """A file in folder `beside`, in the working directory, or a shipped one.

    E.g. 'my.gin', 'gin/runs/digits.gin', 'runs/digits.gin'.
    """
    shipped = [SHIPPED / name, SHIPPED.parent / name]
    candidates = [*([beside / name] if beside else []), Path(name).expanduser(), *shipped]
    return next((path for path in candidates if path.is_file()), None)


def shipped() -> list[str]:
    """The files that come with the package, as 'strategies/ddp.gin'."""
    return sorted(str(path.relative_to(SHIPPED)) for path in SHIPPED.rglob("*.gin"))


def references(value: Any) -> Iterator[Reference | Macro]:
    """All references and macros inside a value."""
    if isinstance(value, Reference | Macro):
        yield value
    elif isinstance(value, Mapping):
        yield from references([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from references(part)


def _read_file(file: File) -> Iterator[Statement]:
    try:
        text = file.path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        yield Mistake(file.name, f"cannot be read as text in UTF-8: {error}.")
    else:
        yield from _statements(text, file.name, file)


def _statements(text: str, name: str, file: File | None) -> Iterator[Statement]:
    """The statements of one text. After a line that cannot be read, those below it."""
    lines, start = text.splitlines(), 0
    while start < len(lines):
        rest = "\n" * start + "\n".join(lines[start:])
        try:
            for item in config_parser.ConfigParser(rest, _SYMBOLS):
                place = f"{name}:{item.location.line_num}" if file else name
                yield from _as_statement(item, place, file)
            return
        except RecursionError:
            yield Mistake(name, "too many brackets are inside each other.")
            return
        except (SyntaxError, tokenize.TokenError) as error:
            if isinstance(error, SyntaxError):
                line, message = error.lineno or 1, (error.msg or "").split("\n")[0].strip()
            else:
                line, message = error.args[1][0], "a bracket or a quote is not closed"
            line = min(line, len(lines))
            if "malformed node or string" in message or "Unable to parse value" in message:
                message = f"the value is not a Python literal ({_advice(lines[line - 1])})"
            message = f"{message.rstrip('.')}: {printable(lines[line - 1].strip())}"
            yield Mistake(f"{name}:{line}" if file else name, message)
            below = range(max(line, start + 1), len(lines))
            start = next((i for i in below if _STATEMENT_START.match(lines[i])), len(lines))


def _advice(text: str) -> str:
    """What the value of a binding may mean, if it is no literal."""
    word = text.partition("=")[2].partition("#")[0].strip()
    if (name := word.removesuffix("()")) and (entry := gin_internals.find(name)):
        return f"did you mean @{word if entry.passed else f'{name}()'}?"
    return "put quotes around a string, % before a macro, @ before a function"


def _as_statement(item: Any, place: str, file: File | None) -> Iterator[Statement]:
    """Gin's statement as one of this module; what it includes, if it is an include."""
    if isinstance(item, config_parser.BindingStatement):
        selector, name = (item.selector, item.arg_name) if item.arg_name else ("", item.selector)
        yield Binding(item.scope, selector, name, item.value, place, file)
    elif isinstance(item, config_parser.ImportStatement):
        yield Import(item.module, item.format(), place)
    elif isinstance(item, config_parser.IncludeStatement):
        name = item.filename
        path = find(name, file.path.parent) if file else None
        if file is None:
            yield Mistake(place, f"include: give --gin_file={name} instead.")
        elif path is None:
            yield Mistake(place, f"include: no file {name!r}.{nearest_file(name)}")
        elif path.resolve() in [outer.path for outer in file.chain]:
            yield Mistake(place, f"{name!r} includes itself.")
        else:  # messages name a shipped file by its short name, others as they were given
            shown = name if Path(name) == path else str(path)
            if path.resolve().is_relative_to(SHIPPED):
                shown = str(path.resolve().relative_to(SHIPPED))
            yield from _read_file(File(path.resolve(), shown, file))


def nearest_file(name: str) -> str:
    """The shipped file that a wrong name may mean, as a sentence; '' if none is near."""
    near = spellings.nearest_file(name, shipped())
    return f" Did you mean {near}?" if near else ""
