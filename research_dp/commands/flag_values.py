"""Values and bindings as words of a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from research_dp.errors import UsageError

_BARE_WORD = re.compile(r"^([A-Za-z_]|~|\.{0,2}/)[\w./+~-]*$")
_LITERALS = {"None", "True", "False"}


def take_varied(words: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(the other words, what is varied), in the order given."""
    others, varied, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name != "--vary_file" and not name.startswith("--vary."):
            others.append(word)
            continue
        if not equals and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        varied.append((name.removeprefix("--vary_file").removeprefix("--vary."), text))
    return others, varied


def expand_bindings(argv: Sequence[str]) -> list[str]:
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


def elements(text: str) -> list[str]:
    """The values in 'V,W,...' or '[V, W]', each as it stands in a gin file."""
    parts = _split(text)
    if len(parts) == 1 and text[:1] == "[" and text[-1:] == "]":
        parts = _split(text[1:-1])
    if "" in parts:
        raise UsageError(f"{text!r}: a value before or after a comma is missing.")
    return [_as_gin(part) for part in parts]


def _split(text: str) -> list[str]:
    """Cuts at commas, but not those within brackets or quotes."""
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
