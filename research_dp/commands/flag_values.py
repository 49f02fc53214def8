"""Parses bindings and values on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from research_dp.errors import UsageError

_BARE_WORD = re.compile(r"^([A-Za-z_]|~|\.{0,2}/)[\w./+~-]*$")
_LITERALS = {"None", "True", "False"}


def take_varied(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(the other arguments, (name, values) of each `--vary` in order)."""
    others, varied = [], []
    for argument, name, value in _flags(arguments, r"--vary_file$|--vary\."):
        if name is None:
            others.append(argument)
        else:
            varied.append((name.removeprefix("--vary_file").removeprefix("--vary."), value))
    return others, varied


def expand_bindings(argv: Sequence[str]) -> list[str]:
    """Rewrites `--gin.NAME=VALUE` (or `--gin.NAME VALUE`) to `--gin_bindings=NAME = VALUE`."""
    return [
        argument
        if name is None
        else f"--gin_bindings={name.removeprefix('--gin.')} = {_as_gin(value)}"
        for argument, name, value in _flags(argv, r"--gin\.")
    ]


def elements(text: str) -> list[str]:
    """The values in 'V,W,...' or '[V, W]', each as a gin file writes it."""
    parts = _split(text)
    if len(parts) == 1 and text[:1] == "[" and text[-1:] == "]":
        parts = _split(text[1:-1])
    if "" in parts:
        raise UsageError(f"{text!r}: a value before or after a comma is missing.")
    return [_as_gin(part) for part in parts]


def _flags(arguments: Sequence[str], pattern: str) -> Iterator[tuple[str, str | None, str]]:
    """(argument, name, value) of each argument; name is None where the pattern does not match."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not re.match(pattern, name):
            yield argument, None, ""
            continue
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield argument, name, value


def _as_gin(value: str) -> str:
    """A bare word (bfloat16) or a path is a string; everything else is gin's to read."""
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
