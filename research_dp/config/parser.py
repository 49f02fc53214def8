"""Reading gin files and bindings as statements, each with the place where it stands."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

_PACKAGE = Path(__file__).resolve().parents[1]
# Beside the package in a clone, inside of it where a wheel was installed.
SHIPPED = next(p for p in (_PACKAGE / "gin", _PACKAGE.parent / "gin") if p.is_dir())
COMMAND_LINE = -1  # wins over files, which are 0, and over what they include, 1 and more
_BEGINS = re.compile(r"[A-Za-z_]")  # a statement, and not what is inside of a block
_MARK = re.compile(r"#\s*if used\b")


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/name` or `@scope/name()`; looked up later."""

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
class Binding:
    """One binding of one file, or of the command line.

    Attributes:
        scope: E.g. 'train' in `train/f.x = 1`; '' for most.
        selector: The function as written, e.g. 'optax.adamw'; '' for a macro.
        parameter: The parameter; the name of a macro.
        value: A Python value that may hold `Reference`s and `Macro`s.
        place: E.g. 'gin/runs/digits.gin:12', '--gin.train.num_steps'.
        file: The file; '' for the command line.
        source: Number of the file or binding on the command line that it came with.
        depth: How deep in includes; `COMMAND_LINE` is least.
        optional: Whether `# if used` stands beside it.
        included_by: The files through which it came, outermost first.
    """

    scope: str
    selector: str
    parameter: str
    value: Any
    place: str
    file: str = ""
    source: int = 0
    depth: int = COMMAND_LINE
    optional: bool = False
    included_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name as written, without its scope."""
        return f"{self.selector}.{self.parameter}" if self.selector else self.parameter

    def __str__(self) -> str:
        return f"{f'{self.scope}/' if self.scope else ''}{self.name} = {self.value!r}"


@dataclasses.dataclass(frozen=True)
class Import:
    """An import statement."""

    text: str
    place: str


@dataclasses.dataclass(frozen=True)
class Mistake:
    """What is wrong at a place.

    Attributes:
        place: E.g. 'gin/runs/digits.gin:12'; '' if there is none.
        message: What is wrong, what was expected, the nearest right name.
        binding: The parameter to blame, if it is one.
    """

    place: str
    message: str
    binding: str | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


Statement = Binding | Import | Mistake


def read(files: Sequence[str], bindings: Sequence[str]) -> Iterator[Statement]:
    """The statements of files, with all that they include, and of bindings.

    Args:
        files: Paths, found as `find` says.
        bindings: Text such as 'train.num_steps = 20'.

    Yields:
        Bindings and imports in order, and what cannot be read as a `Mistake`.
    """
    for source, file in enumerate(files):
        path = find(file)
        if path is None:
            yield Mistake("", f"--gin_file={file}: no such file.{_nearest_file(file)}")
        else:
            yield from _read_file(path, file, source, ())
    for source, text in enumerate(bindings, len(files)):
        place = f"--gin.{text.split('=')[0].strip()}"
        for statement in _statements(text, place):
            if isinstance(statement, _Include):
                yield Mistake(place, f"include: give --gin_file={statement.file} instead.")
                continue
            yield dataclasses.replace(
                statement,
                place=place,
                **({"source": source} if isinstance(statement, Binding) else {}),
            )


def find(file: str, beside: Path | None = None) -> Path | None:
    """A file beside the one that includes it, from the working directory, or among those shipped.

    Args:
        file: E.g. 'my.gin', 'gin/runs/digits.gin', 'runs/digits.gin'.
        beside: The folder of the file that includes it.
    """
    shipped = [SHIPPED / file, SHIPPED.parent / file]
    candidates = [*([beside / file] if beside else []), Path(file).expanduser(), *shipped]
    return next((path for path in candidates if path.is_file()), None)


def shipped() -> list[str]:
    """The files that come with the package, as 'gin/strategies/ddp.gin'."""
    return sorted(f"gin/{path.relative_to(SHIPPED)}" for path in SHIPPED.rglob("*.gin"))


def first_comment(file: str) -> str:
    """What a file says that it is, in the first sentence of its first comment or two."""
    path = find(file)
    lines = path.read_text().splitlines() if path else []
    comment = list(itertools.takewhile(lambda line: line.startswith("# "), lines))
    text = " ".join(line[2:] for line in comment)
    return text if text.endswith(".") and len(comment) == 1 else text.partition(". ")[0] + "."


def _read_file(path: Path, shown: str, source: int, outer: tuple[str, ...]) -> Iterator[Statement]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        yield Mistake(shown, f"cannot be read as text in UTF-8: {error}.")
        return
    lines = text.splitlines()
    for statement in _statements(text, shown):
        if isinstance(statement, _Include):
            inner = find(statement.file, path.parent)
            if inner is None:
                hint = _nearest_file(statement.file)
                yield Mistake(statement.place, f"include: no file {statement.file!r}.{hint}")
            elif str(inner.resolve()) in outer or inner.resolve() == path.resolve():
                yield Mistake(statement.place, f"{statement.file!r} includes itself.")
            else:
                chain = (*outer, str(path.resolve()))
                yield from _read_file(inner, name_shown(inner, statement.file), source, chain)
        elif isinstance(statement, Binding):
            line = int(statement.place.rpartition(":")[2])
            yield dataclasses.replace(
                statement,
                file=str(path.resolve()),
                source=source,
                depth=len(outer),
                optional=bool(_MARK.search(lines[line - 1])),
                included_by=outer,
            )
        else:
            yield statement


def name_shown(path: Path, file: str) -> str:
    """How messages name a file: a shipped one by its short name, others as they were given."""
    if path.is_relative_to(SHIPPED):
        return f"gin/{path.relative_to(SHIPPED)}"
    return file if Path(file) == path else str(path)


@dataclasses.dataclass(frozen=True)
class _Include:
    file: str
    place: str


def _statements(text: str, shown: str) -> Iterator[Any]:
    """The statements of one text; after a line that cannot be read, those below it."""
    lines, done = text.splitlines(), 0
    while done < len(lines):
        rest = "\n" * done + "\n".join(lines[done:])
        try:
            for item in config_parser.ConfigParser(rest, _Symbols()):
                yield from _as_statement(item, f"{shown}:{item.location.line_num}")
            return
        except (SyntaxError, tokenize.TokenError) as error:
            line, message = _what_is_wrong(error, lines)
            yield Mistake(f"{shown}:{line}", message)
            below = range(max(line, done + 1), len(lines))
            done = next((i for i in below if _BEGINS.match(lines[i])), len(lines))


def _as_statement(item: Any, place: str) -> Iterator[Any]:
    if isinstance(item, config_parser.BindingStatement):
        selector, name = (item.selector, item.arg_name) if item.arg_name else ("", item.selector)
        yield Binding(item.scope, selector, name, item.value, place)
    elif isinstance(item, config_parser.ImportStatement):
        yield Import(item.format(), place)
    elif isinstance(item, config_parser.IncludeStatement):
        yield _Include(item.filename, place)


def _what_is_wrong(error: Exception, lines: Sequence[str]) -> tuple[int, str]:
    """(line, message) for what the parser could not read."""
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


def _nearest_file(file: str) -> str:
    known = shipped()
    near = difflib.get_close_matches(file, known, n=1, cutoff=0.4)
    return f" Did you mean {near[0]}?" if near else ""


class _Symbols(config_parser.ParserDelegate):
    """Parses values without looking anything up."""

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        return Reference(scoped_configurable_name, evaluate)

    def macro(self, macro_name: str) -> Any:
        return Macro(macro_name)


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
