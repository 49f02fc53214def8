"""What a parameter's annotation expects of a value, as gin writes it: references and words."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
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
from research_dp.config.parser import Macro, Reference

# Whose classes are values that one writes or computes, not what a configurable is there to make.
_NOT_MADE = {"builtins", "typing", "collections", "jax", "jaxlib", "numpy"}


def annotation(function: Callable[..., Any], name: str) -> Any:
    """What is written at a parameter ('return': at the result); `Any` if it says nothing.

    What is called a dtype is taken for one: libraries write `Any` there.
    """
    expected = annotation_of(function, name)
    vague = Any in members(expected)
    return AnyDtype | None if vague and re.fullmatch("(.*_)?dtype", name) else expected


def complaint(value: Any, expected: Any) -> str | None:
    """What to give instead of a value, or None: it is right.

    Args:
        value: As written in a file: a Python value, or a `Reference`.
        expected: The annotation.
    """
    if isinstance(value, Reference):
        return _complaint_of_reference(value, expected)
    if _holds_references(value):
        return None  # what they stand for is not known before they are called
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
        like: A wrong value, whose nearest right one is the example.
    """
    wanted = members(expected)
    if float in wanted and any(_is_array(member) for member in wanted):
        # Annotated as a scalar of whatever kind: said of it is what one would write.
        wanted = [m for m in wanted if not _is_array(m) and m not in (bool, int, complex)]
    words, examples = words_of(wanted), makers(expected)
    if examples:
        near = difflib.get_close_matches(f"@{like}", examples, n=1, cutoff=0.5)
        kind = "a function, " if any(map(is_callable, wanted)) else ""
        words = [f"{kind}e.g. {(near or examples)[0]}", *(["None"] if "None" in words else [])]
    return ", or ".join(words)


def makers(expected: Any) -> list[str]:
    """References that give what is expected: '@convnet()' for a model, '@mapped' for an engine."""
    found = []
    for part in members(expected):
        called = typing.get_origin(part) is collections.abc.Callable
        given = (typing.get_args(part) or [None])[-1] if called else part
        if not _is_class(given) or given.__module__.split(".")[0] in _NOT_MADE:
            continue
        for entry in gin_internals.configurables().values():
            if annotation(entry.function, "return") is given:
                found.append(f"@{entry.name}" + ("" if called else "()"))
    return found  # in the order in which they were registered, the usual ones first


def _complaint_of_reference(value: Reference, expected: Any) -> str | None:
    """The same of a reference, from what its function says that it returns."""
    names = gin_internals.matching(value.selector)
    entry = gin_internals.configurables().get(names[0]) if names else None
    wanted = [member for member in members(expected) if member is not type(None)]
    if entry is None or not all(_is_plain(member) or is_callable(member) for member in wanted):
        return None
    takes_function = any(map(is_callable, wanted))
    returned = annotation(entry.function, "return")
    if not value.evaluated:
        if takes_function:
            return _complaint_of_result(returned, wanted, expected)
        if returned is Any or returned in wanted:
            return f"@{value.name} is the function itself; @{value.name}() is what it returns"
        return f"give {in_words(expected)}"
    if not _is_class(returned):
        return None
    if any(_is_class(member) and issubclass(returned, member) for member in wanted):
        return None
    if takes_function and any("__call__" in vars(base) for base in returned.__mro__):
        return None
    if takes_function:
        return f"@{value.name}() is what the function returns; give the function, @{value.name}"
    return f"it returns {returned.__name__}; give {in_words(expected)}"


def _complaint_of_result(returned: Any, wanted: Sequence[Any], expected: Any) -> str | None:
    """What to give instead of a function, from what it returns and what is to be returned."""
    results = [typing.get_args(member)[-1] for member in wanted if typing.get_args(member)]
    if not _is_class(returned) or not results or not all(map(_is_class, results)):
        return None
    if any(issubclass(returned, result) for result in results):
        return None
    return f"it returns {returned.__name__}; give {in_words(expected)}"


def _nearest(value: Any, expected: Any) -> str:
    """The right string that a wrong one is like."""
    choices = [c for c in choices_of(expected) if isinstance(c, str)]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f". Did you mean {near[0]!r}?" if near else ""


def _is_array(part: Any) -> bool:
    return getattr(part, "__module__", "").split(".")[0] in ("jax", "jaxlib", "numpy")


def _is_plain(part: Any) -> bool:
    """Whether it is a class that a value either is of or is not."""
    part = bare(part)
    origin = typing.get_origin(part)
    if origin is not None:
        return origin in CONTAINERS or origin is typing.Literal
    return _is_class(part) and not getattr(part, "_is_protocol", False)


def _is_class(part: Any) -> bool:
    """Whether it is a class that says something: `Any` is one too, since Python 3.11."""
    return inspect.isclass(part) and part is not Any


def _holds_references(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_references, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return any(map(_holds_references, value))
    return isinstance(value, Reference | Macro)
