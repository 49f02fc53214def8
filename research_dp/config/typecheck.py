"""Checks values as gin files write them against the annotations of parameters."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from research_dp.argument_checks import (
    CONTAINERS,
    annotation_of,
    bare,
    choices_of,
    fits,
    is_callable,
    members,
    words_of,
)
from research_dp.argument_types import AnyDtype
from research_dp.config import gin_internals
from research_dp.config.parser import Reference, references

# Their classes are plain values. No configurable is the usual way to make one.
_PLAIN_MODULES = {"builtins", "typing", "collections", "jax", "jaxlib", "numpy"}


def annotation(function: Callable[..., Any], name: str) -> Any:
    """A parameter's annotation ('return': the result's), or `Any` if there is none.

    A parameter called dtype expects one, although libraries annotate it with `Any`.
    """
    expected = annotation_of(function, name)
    vague = Any in members(expected)
    return AnyDtype | None if vague and re.fullmatch("(.*_)?dtype", name) else expected


def complaint(value: Any, expected: Any) -> str | None:
    """What to give instead of a value; None if the annotation accepts it.

    Args:
        value: A Python value or a `Reference`, as parsed from a file.
        expected: The annotation.
    """
    if isinstance(value, Reference):
        return _reference_complaint(value, expected)
    if any(references(value)):
        return None  # their values are not known before they are called
    if isinstance(value, float) and not math.isfinite(value):
        return "give a finite number"
    if fits(value, expected):
        return None
    verb = "use" if choices_of(expected) else "give"
    return f"{verb} {in_words(expected, value)}{_nearest(value, expected)}"


def in_words(expected: Any, like: Any = None) -> str:
    """E.g. 'an integer, or None'.

    Args:
        expected: The annotation.
        like: A wrong value. The example is the valid one nearest to it.
    """
    accepted = members(expected)
    if float in accepted and any(_is_array(member) for member in accepted):
        # A scalar of any kind: a gin file would have a float.
        accepted = [m for m in accepted if not _is_array(m) and m not in (bool, int, complex)]
    phrases, examples = words_of(accepted), makers(expected)
    if examples:
        near = difflib.get_close_matches(f"@{like}", examples, n=1, cutoff=0.5)
        prefix = "a function, " if any(map(is_callable, accepted)) else ""
        optional = ["None"] if "None" in phrases else []
        phrases = [f"{prefix}e.g. {(near or examples)[0]}", *optional]
    return ", or ".join(phrases)


def makers(expected: Any) -> list[str]:
    """References that give what is expected: '@convnet()' for a model, '@mapped' for an engine."""
    found = []
    for part in members(expected):
        is_function = typing.get_origin(part) is collections.abc.Callable
        result = (typing.get_args(part) or [None])[-1] if is_function else part
        if not _is_class(result) or result.__module__.split(".")[0] in _PLAIN_MODULES:
            continue
        for entry in gin_internals.configurables().values():
            if annotation(entry.function, "return") is result:
                found.append(f"@{entry.name}" + ("" if is_function else "()"))
    return found  # in the order of registration, the usual ones first


def _reference_complaint(value: Reference, expected: Any) -> str | None:
    """The complaint about a reference, from the annotation of its function's result."""
    names = gin_internals.matching(value.selector)
    entry = gin_internals.configurables().get(names[0]) if names else None
    accepted = [member for member in members(expected) if member is not type(None)]
    if entry is None or not all(_is_plain(member) or is_callable(member) for member in accepted):
        return None
    takes_function = any(map(is_callable, accepted))
    returned = annotation(entry.function, "return")
    if not value.evaluated:
        if takes_function:
            return _result_complaint(returned, accepted, expected)
        if returned is Any or returned in accepted:
            return f"@{value.name} is the function itself; @{value.name}() is what it returns"
        return f"give {in_words(expected)}"
    if not _is_class(returned):
        return None
    if any(_is_class(member) and issubclass(returned, member) for member in accepted):
        return None
    if takes_function and any("__call__" in vars(base) for base in returned.__mro__):
        return None
    if takes_function:
        return f"@{value.name}() is what the function returns; give the function, @{value.name}"
    return f"it returns {returned.__name__}; give {in_words(expected)}"


def _result_complaint(returned: Any, accepted: Sequence[Any], expected: Any) -> str | None:
    """The complaint about a function whose result has the wrong type."""
    results = [typing.get_args(member)[-1] for member in accepted if typing.get_args(member)]
    if not _is_class(returned) or not results or not all(map(_is_class, results)):
        return None
    if any(issubclass(returned, result) for result in results):
        return None
    return f"it returns {returned.__name__}; give {in_words(expected)}"


def _nearest(value: Any, expected: Any) -> str:
    choices = [c for c in choices_of(expected) if isinstance(c, str)]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f". Did you mean {near[0]!r}?" if near else ""


def _is_array(part: Any) -> bool:
    return getattr(part, "__module__", "").split(".")[0] in ("jax", "jaxlib", "numpy")


def _is_plain(part: Any) -> bool:
    """Whether it is a class, so that `isinstance` decides."""
    part = bare(part)
    origin = typing.get_origin(part)
    if origin is not None:
        return origin in CONTAINERS or origin is typing.Literal
    return _is_class(part) and not getattr(part, "_is_protocol", False)


def _is_class(part: Any) -> bool:
    return inspect.isclass(part) and part is not Any  # `Any` is a class since Python 3.11
