"""What a parameter's annotation expects of a value, checked by typeguard, and said in words."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typeguard

from research_dp.config import gin_state
from research_dp.config.sources import Macro, Reference
from research_dp.distributed.kinds import AnyDtype

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
}
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}
_CONTAINERS = {
    tuple: "a tuple",
    list: "a list",
    collections.abc.Sequence: "a tuple or list",
    dict: "a dict",
    collections.abc.Mapping: "a dict",
}
# Whose classes are values that one writes or computes, not what a configurable is there to make.
_NOT_MADE = {"builtins", "typing", "collections", "jax", "jaxlib", "numpy"}


def annotation(function: Callable[..., Any], name: str) -> Any:
    """What is written at a parameter ('return': at the result); `Any` if it says nothing.

    What is called a dtype is taken for one: libraries write `Any` there.
    """
    written = _written(function, name)
    vague = Any in members(written)
    return AnyDtype | None if vague and re.fullmatch("(.*_)?dtype", name) else written


def _written(function: Callable[..., Any], name: str) -> Any:
    code = inspect.unwrap(function)
    if inspect.isclass(code):
        code = code.__init__
    written = getattr(code, "__annotations__", {}).get(name, Any)
    if not isinstance(written, str):
        return written
    try:
        return eval(written, getattr(code, "__globals__", {}))  # one at a time: some cannot be
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


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
    if any(_fits(value, part) for part in members(expected)):
        return None
    verb = "use" if _choices(expected) else "give"
    return f"{verb} {in_words(expected, value)}{_nearest(value, expected)}"


def in_words(expected: Any, like: Any = None) -> str:
    """E.g. 'a whole number, or None'.

    Args:
        expected: The annotation.
        like: A wrong value, whose nearest right one is the example.
    """
    wanted = [m for m in members(expected) if typing.get_origin(m) is not typing.Literal]
    if float in wanted and any(_is_array(member) for member in wanted):
        # Annotated as a scalar of whatever kind: said of it is what one would write.
        wanted = [m for m in wanted if not _is_array(m) and m not in (bool, int, complex)]
    choices, examples = _choices(expected), makers(expected)
    words = [_word(member) for member in wanted]
    if choices:
        words.insert(0, f"one of {choices}")
    if examples:
        near = difflib.get_close_matches(f"@{like}", examples, n=1, cutoff=0.5)
        kind = "a function, " if any(map(_is_callable, wanted)) else ""
        words = [f"{kind}e.g. {(near or examples)[0]}", *(["None"] if "None" in words else [])]
    return ", or ".join(dict.fromkeys(words))


def makers(expected: Any) -> list[str]:
    """References that give what is expected: '@convnet()' for a model, '@mapped' for an engine."""
    found = []
    for part in members(expected):
        called = typing.get_origin(part) is collections.abc.Callable
        given = (typing.get_args(part) or [None])[-1] if called else part
        if not _is_class(given) or given.__module__.split(".")[0] in _NOT_MADE:
            continue
        for entry in gin_state.configurables().values():
            if annotation(entry.function, "return") is given:
                found.append(f"@{entry.name}" + ("" if called else "()"))
    return found  # in the order in which they were registered, the usual ones first


def _complaint_of_reference(value: Reference, expected: Any) -> str | None:
    """The same of a reference, from what its function says that it returns."""
    names = gin_state.matching(value.selector)
    entry = gin_state.configurables().get(names[0]) if names else None
    wanted = [member for member in members(expected) if member is not type(None)]
    if entry is None or not all(_is_plain(member) or _is_callable(member) for member in wanted):
        return None
    takes_function = any(map(_is_callable, wanted))
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


def members(expected: Any) -> list[Any]:
    """The members of a union, or the annotation alone."""
    if isinstance(expected, types.UnionType) or typing.get_origin(expected) is typing.Union:
        return [part for member in typing.get_args(expected) for part in members(member)]
    return [expected]


def _fits(value: Any, part: Any) -> bool:
    if isinstance(value, bool) and _bare(part) in (int, float):
        return False  # bool is an int to Python, and a slip here
    return _is_type(value, part) and _in_limits(value, part) and _elements_fit(value, part)


def _elements_fit(value: Any, part: Any) -> bool:
    """Whether the elements of a sequence are within their limits too."""
    inner = typing.get_args(part)
    is_sequence = typing.get_origin(part) in (collections.abc.Sequence, list)
    return not is_sequence or all(complaint(element, inner[0]) is None for element in value)


def _is_type(value: Any, part: Any) -> bool:
    try:
        typeguard.check_type(
            value,
            _bare(part),
            forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
            collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
        )
    except typeguard.TypeCheckError:
        return False
    except TypeError:  # an annotation that cannot be asked: it accepts all
        return True
    return True


def _in_limits(value: Any, part: Any) -> bool:
    """Whether the metadata of `Annotated` accept a value of the right type."""
    return all(limit.accepts(value) for limit in _limits(part))


def _limits(part: Any) -> list[Any]:
    return [limit for limit in getattr(part, "__metadata__", ()) if hasattr(limit, "accepts")]


def _bare(part: Any) -> Any:
    return typing.get_args(part)[0] if typing.get_origin(part) is typing.Annotated else part


def _counts(inner: Sequence[Any]) -> bool:
    return len(inner) == 1 and _bare(inner[0]) in _PLURALS


def _choices(expected: Any) -> list[Any]:
    literals = [m for m in members(expected) if typing.get_origin(m) is typing.Literal]
    return [choice for literal in literals for choice in typing.get_args(literal)]


def _word(part: Any) -> str:
    if typing.get_origin(part) is typing.Annotated:
        return str(_limits(part)[0]) if _limits(part) else _word(_bare(part))
    origin = typing.get_origin(part)
    if origin in _CONTAINERS:
        inner = [a for a in typing.get_args(part) if a is not Ellipsis]
        return _CONTAINERS[origin] + (f" of {_PLURALS[_bare(inner[0])]}" if _counts(inner) else "")
    if _is_callable(part):
        return "a function"
    return _WORDS.get(part) or str(getattr(part, "__name__", part))


def _nearest(value: Any, expected: Any) -> str:
    """The right string that a wrong one is like."""
    choices = [c for c in _choices(expected) if isinstance(c, str)]
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f". Did you mean {near[0]!r}?" if near else ""


def _is_array(part: Any) -> bool:
    return getattr(part, "__module__", "").split(".")[0] in ("jax", "jaxlib", "numpy")


def _is_callable(part: Any) -> bool:
    return collections.abc.Callable in (part, typing.get_origin(part))


def _is_plain(part: Any) -> bool:
    """Whether it is a class that a value either is of or is not."""
    part = _bare(part)
    origin = typing.get_origin(part)
    if origin is not None:
        return origin in _CONTAINERS or origin is typing.Literal
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
