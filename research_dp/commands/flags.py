"""Commands as dataclasses: their fields are flags, `run` is what they do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from research_dp.commands import entries, streams
from research_dp.config import spellings
from research_dp.config.load import Config, load
from research_dp.errors import UsageError

_BARE_WORD = re.compile(r"^([A-Za-z_]|~|\.{0,2}/)[\w./+~:%\[\]-]*$")
_LITERALS = {"None", "True", "False"}


def flag(text: str, metavar: str = "", name: str = "", default: Any = None, **settings: Any) -> Any:
    """A field that a flag sets; `name` is the flag's, where it is not the field's."""
    settings |= {"help": text} | ({"metavar": metavar} if metavar else {})
    factory = {"default_factory": list} if default is list else {"default": default}
    return dataclasses.field(**factory, metadata={"name": name, **settings})


switch: Callable[..., Any] = functools.partial(flag, default=False, action="store_true")
texts: Callable[..., Any] = functools.partial(flag, default=list, action="append")


def whole_number(text: str, least: int = 1) -> int:
    """Reads a flag's value."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


class Parser(argparse.ArgumentParser):
    """The parser of a command: its help ends with examples, a mistake is one line with a hint."""

    def __init__(self, name: str):
        width = streams.width()
        entry = entries.COMMANDS[name]
        about = " ".join([f"{entry.summary[:1].upper()}{entry.summary[1:]}.", entry.details])
        super().__init__(
            prog=entries.program(name),
            description=textwrap.fill(about, width - 2),
            epilog=entries.examples(name, width),
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, width=width - 2
            ),
            allow_abbrev=False,
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what is no flag with the nearest one."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            first, *more = map(self._hint, unknown)
            self.error(" ".join([first, *(hint[:1].upper() + hint[1:] for hint in more)]))
        return namespace

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows all flags)\n")

    def _hint(self, word: str) -> str:
        if not word.startswith("-"):
            is_file = word.endswith(".gin")
            hint = f" Did you mean --gin_file={word}?" if is_file else ""
            return f"{word!r} belongs to no flag.{hint}"
        flags = {flag for flag in self._option_string_actions if "." not in flag}
        name, equals, value = word.partition("=")
        if name in ("--strategy", "--model", "--data") and "--strategies" not in flags:
            folder = {"--strategy": "strategies", "--model": "models", "--data": "data"}[name]
            return (
                f"there is no flag {name}. Did you mean --gin_file={folder}/{value or 'NAME'}.gin?"
            )
        if name in ("--num_steps", "--batch_size", "--seed", "--log_every", "--eval_every"):
            binding = f"--gin.train.{name.removeprefix('--')}={value or 'VALUE'}"
            return f"there is no flag {name}. Did you mean {binding}?"
        if spellings.plain(name) in ("config", "ginconfig", "ginfiles", "configfile"):
            name = "--gin_file"
        by_plain = {spellings.plain(flag): flag for flag in flags}
        near = difflib.get_close_matches(spellings.plain(name), by_plain, n=1, cutoff=0.7)
        hint = f" Did you mean {by_plain[near[0]]}{equals}{value}?" if near else ""
        return f"there is no flag {word.partition('=')[0]}.{hint}"


@dataclasses.dataclass
class Command:
    """A command on a run of gin files.

    `config` is the configuration once it is loaded: a later error names the line of a value.
    """

    gin_files: Sequence[str] = texts(
        "later files win; repeatable; shipped ones are found as runs/digits.gin", "F", "--gin_file"
    )
    bindings: Sequence[str] = texts(
        "a binding that wins over files; repeatable", "'NAME = VALUE'", "--gin_bindings"
    )
    _binding: Sequence[str] = texts(
        "the same, shorter: --gin.train.num_steps=20; a bare word is a string",
        *("VALUE", "--gin.NAME"),
        dest="bindings",
    )
    workdir: str | None = None  # a flag of commands that train
    cpu_devices: int | None = flag("split the CPU into N devices", "N", type=whole_number)
    imports: Sequence[str] = texts(
        "a module of yours that registers functions with gin; repeatable", "MODULE", "--import"
    )
    allow_unused: bool = switch("accept bindings without effect")
    config: Config | None = None
    noted: set[str] = dataclasses.field(default_factory=set)  # printed already
    rewritten: ClassVar[str] = r"--gin\."
    verb: ClassVar[str] = "run"

    def parse(self, argv: Sequence[str]) -> Self:
        """Sets the fields; exits with status 2 and one line if flags are wrong."""
        parser = Parser(type(self).__name__.lower())
        for field in dataclasses.fields(self):
            if field.metadata:
                settings = {"dest": field.name, **field.metadata}
                if field.default not in (None, False, "", dataclasses.MISSING):
                    settings["help"] += f" (default: {field.default})"
                name = settings.pop("name") or f"--{field.name}"
                if name == field.name:  # no flag, but words
                    del settings["dest"]
                parser.add_argument(name, **settings)
        parser.parse_args(_rewritten(argv, self.rewritten), self)
        self.check(parser.error)
        return self

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        """Refuses flags that do not go together."""
        if not self.gin_files and not self.bindings:
            name = type(self).__name__.lower()
            example = f"{entries.program(name)} {entries.COMMANDS[name].examples[0]}"
            refuse(f"nothing to {self.verb}: give --gin_file. E.g. {example}")

    def load(
        self,
        files: Sequence[str] = (),
        bindings: Sequence[str] = (),
        *,
        allow_unused: bool = False,
        complete: bool = True,
        saved: str | None = None,
    ) -> Config:
        """Loads the command's run, with further files and bindings; `saved` as in `load`."""
        self.config = load(
            [*self.gin_files, *files],
            [*self.bindings, *bindings],
            imports=self.imports,
            allow_unused=self.allow_unused or allow_unused,
            complete=complete,
            saved=saved,
        )
        for note in dict.fromkeys(self.config.notes):
            if note not in self.noted:
                self.noted.add(note)
                print(f"Note: {note}", file=sys.stderr, flush=True)
        return self.config

    def run(self) -> int:
        """Returns the exit status."""
        raise NotImplementedError


@dataclasses.dataclass
class RunCommand(Command):
    """A command that trains, unless `dry_run`."""

    workdir: str | None = flag("where results go, and from where a run continues", "DIR")
    dry_run: bool = False

    def check(self, refuse: Callable[[str], NoReturn]) -> None:
        super().check(refuse)
        if not self.workdir and not self.dry_run:
            refuse("--workdir=DIR is required: results and checkpoints go there")


@contextlib.contextmanager
def usage_error(message: str) -> Iterator[None]:
    """Adds the reason of an OSError to a message."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{message}: {error.strerror}.") from error


def check_writable(flag: str, file: str | None) -> None:
    """Raises UsageError if a file cannot be written, before hours of work would be lost."""
    if file is not None:
        path = Path(file).expanduser().resolve()
        exists = path.exists()
        with usage_error(f"{flag}={file} cannot be written"):
            path.open("a").close()
        if not exists:
            path.unlink()  # what is refused afterwards leaves no empty file


def write_file(flag: str, file: str, text: str) -> None:
    """Writes a file that a flag names; UsageError if it cannot be written."""
    with usage_error(f"{flag}={file} cannot be written"):
        Path(file).expanduser().write_text(text, encoding="utf-8")


def elements(text: str) -> list[str]:
    """The values in 'V,W,...' or '[V, W]', each as a gin file writes it."""
    parts = _split(text)
    if len(parts) == 1 and text[:1] == "[" and text[-1:] == "]":
        parts = _split(text[1:-1])
    if "" in parts:
        raise UsageError(f"{text!r}: a value before or after a comma is missing.")
    return [_as_gin(part) for part in parts]


def _rewritten(argv: Sequence[str], flags: str) -> list[str]:
    """Rewrites `--gin.NAME=VALUE` (or `--gin.NAME VALUE`) to `--gin.NAME=NAME = VALUE`."""
    rest, result = list(argv), []
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if match := re.match(flags, name):
            if not equals and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            value = _as_gin(value) if match[0] == "--gin." else value
            parameter = f"NAME={name[match.end() :]} = " if match[0].endswith(".") else "="
            argument = f"{match[0]}{parameter}{value}"
        result.append(argument)
    return result


def _as_gin(value: str) -> str:
    """A bare word (bfloat16), a path or a split (train[:90%]) is a string; gin reads all else."""
    is_bare = _BARE_WORD.match(value) and value not in _LITERALS
    return repr(value) if is_bare else value


def _split(text: str) -> list[str]:
    """Splits at commas, except within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
