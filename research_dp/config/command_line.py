"""The flags of the commands."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import NoReturn

_BARE_WORD = re.compile(r"^([A-Za-z_]|~|\.{0,2}/)[\w./+~-]*$")
_LITERALS = {"None", "True", "False"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        gin_files: Configuration files; later ones win.
        bindings: Single bindings; they win over files, later ones over earlier ones.
        workdir: Where results go.
        cpu_devices: Into how many devices this machine's CPU is split; None: as it is.
        dry_run: Check and show the configuration, train nothing.
        imports: Modules that register functions of the user's own.
        allow_unused: Whether a binding may be without effect.
        list: Show what there is: '' for all, or a name; None: do not.
        json: Show it as JSON.
    """

    gin_files: tuple[str, ...]
    bindings: tuple[str, ...]
    workdir: str | None
    cpu_devices: int | None
    dry_run: bool = False
    imports: tuple[str, ...] = ()
    allow_unused: bool = False
    list: str | None = None
    json: bool = False


def parse(argv: Sequence[str], description: str) -> Options:
    """Parses flags; exits with status 2 and a line of explanation if they are wrong."""
    parser = _Parser(
        prog="python -m research_dp.train", description=description, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gin_file", action="append", default=[], metavar="F", help="later files win; repeatable")
    add(
        "--gin_bindings",
        action="append",
        default=[],
        metavar="'NAME = VALUE'",
        help="a binding that wins over files; repeatable",
    )
    add("--gin.NAME", metavar="VALUE", help="the same, shorter: --gin.train.num_steps=20")
    add("--workdir", metavar="DIR", help="where results go, and from where a run continues")
    add("--cpu_devices", type=_positive, metavar="N", help="split the CPU into N devices")
    add("--dry_run", action="store_true", help="check and show the configuration; train nothing")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module of yours that registers functions with gin; repeatable",
    )
    add("--allow_unused", action="store_true", help="accept bindings without effect")
    add(
        "--list",
        nargs="?",
        const="",
        metavar="NAME",
        help="show all that gin files can name, or one of it; train nothing",
    )
    add("--json", action="store_true", help="with --list: as JSON")
    parsed = parser.parse_args(_expand_bindings(argv))
    if parsed.list is None and not parsed.gin_file and not parsed.gin_bindings:
        parser.error("nothing to run: give --gin_file, e.g. --gin_file=gin/runs/digits.gin")
    if not parsed.workdir and not parsed.dry_run and parsed.list is None:
        parser.error("--workdir=DIR is required: results and checkpoints go there")
    return Options(
        tuple(parsed.gin_file),
        tuple(parsed.gin_bindings),
        parsed.workdir,
        parsed.cpu_devices,
        parsed.dry_run,
        tuple(parsed.imports),
        parsed.allow_unused,
        parsed.list,
        parsed.json,
    )


def _expand_bindings(argv: Sequence[str]) -> list[str]:
    """Rewrites `--gin.NAME=VALUE` (or `--gin.NAME VALUE`) to `--gin_bindings=NAME = VALUE`."""
    expanded, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--gin."):
            expanded.append(word)
            continue
        name, equals, value = word.removeprefix("--gin.").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        expanded.append(f"--gin_bindings={name} = {_as_gin(value)}")
    return expanded


def _as_gin(value: str) -> str:
    """A bare word (bfloat16) or a path is a string; everything else is what gin makes of it."""
    bare = _BARE_WORD.match(value) and value not in _LITERALS
    return repr(value) if bare else value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line; --help shows the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help shows all flags)\n")
