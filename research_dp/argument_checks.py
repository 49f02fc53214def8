"""The arguments of a function against its annotations, and the advice in words."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import gin
import numpy as np

from research_dp.argument_types import Leaves, described, is_integer, is_number
from research_dp.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
}
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}
CONTAINERS = {
    tuple: "a tuple",
    list: "a list",
    collections.abc.Sequence: "a tuple or list",
    dict: "a dict",
    collections.abc.Mapping: "a dict",
}


def checked(function: F) -> F:
    """Makes a function, or a class, refuse arguments that its annotations do not accept.

    The annotations are read at the first call. Where gin knows the function, `gin.register` comes
    above this decorator.

    Raises:
        UsageError: By the function made, with its name and the parameter's.
    """
    if inspect.isclass(function):
        function.__init__ = checked(function.__init__)  # type: ignore[method-assign]
        return function
    signature = inspect.signature(function)
    *_, owner, name = ("", *function.__qualname__.split("."))
    title = owner if name == "__init__" else name
    known = signature.parameters
    missing = {name: gin.REQUIRED for name in known if known[name].default is gin.REQUIRED}

    @functools.cache
    def expected() -> list[tuple[str, Any]]:
        read = {name: written(function, name) for name in signature.parameters}
        return [(name, kind) for name, kind in read.items() if kind is not Any]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            bound = None
        if bound is None:
            return function(*args, **kwargs)  # raises Python's own error, which names the function
        given = missing | bound
        check_values(title, given, [x for x in expected() if x[0] in given])
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]  # gin asks for no wrapped function
    return typing.cast(F, call)


def check_values(
    function: str, values: Mapping[str, Any], expected: Sequence[tuple[str, Any]]
) -> None:
    """Raises UsageError for the first value that its annotation does not accept.

    Args:
        function: The name to blame, e.g. 'make_mesh'.
        values: Parameter -> value.
        expected: (parameter, annotation) of those that are checked.
    """
    for name, kind in expected:
        binding = f"{function}.{name}"
        if values[name] is gin.REQUIRED:
            raise UsageError(f"{binding} is missing: give {in_words(kind)}.", binding=binding)
        problem = trouble(values[name], kind, values)
        if problem:
            raise UsageError(binding + problem, binding=binding)


def written(function: Callable[..., Any], name: str) -> Any:
    """The annotation of a parameter ('return': of the result); `Any` if there is none to read."""
    code = inspect.unwrap(function)
    if inspect.isclass(code):
        code = code.__init__
    text = getattr(code, "__annotations__", {}).get(name, Any)
    if not isinstance(text, str):
        return text
    try:
        return eval(text, getattr(code, "__globals__", {}))  # one at a time: some cannot be
    except (NameError, AttributeError, TypeError, SyntaxError):
        return Any


def fits(value: Any, expected: Any) -> bool:
    """Whether a value is what an annotation accepts; what an annotation leaves open is accepted."""
    return any(_fits(value, part) for part in members(expected))


def _fits(value: Any, part: Any) -> bool:
    if typing.get_origin(part) is typing.Annotated:
        own = limits(part)
        return all(x.accepts(value) for x in own) and (bool(own) or fits(value, bare(part)))
    origin, inner = typing.get_origin(part), typing.get_args(part)
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if part in (int, float):
        return is_integer(value) if part is int else is_number(value)
    if part is bool:
        return isinstance(value, bool | np.bool_)
    if part is None:
        return value is None
    kind = origin or part
    if not inspect.isclass(kind):
        return True
    if kind is collections.abc.Callable:
        return callable(value)
    if kind is collections.abc.Sequence and isinstance(value, str | bytes):
        return False  # a sequence of letters to Python, and a slip here
    try:
        if not isinstance(value, kind):
            return False
        if kind is type and inner:
            return issubclass(typing.cast(type, value), inner[0])
    except TypeError:  # a class that cannot be asked
        return True
    return _elements_fit(value, kind, inner)


def _elements_fit(value: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    if not inner or kind not in CONTAINERS:
        return True
    if kind in (dict, collections.abc.Mapping):
        return all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(element, inner[0]) for element in value)


def trouble(value: Any, expected: Any, others: Mapping[str, Any]) -> str | None:
    """The problem with an argument, worded to follow its name; None if it is accepted.

    Args:
        value: The argument.
        expected: The annotation of its parameter.
        others: All arguments of the call, for those that must fit each other.
    """
    trees = [x for part in members(expected) for x in limits(part) if isinstance(x, Leaves)]
    if trees:
        optional = value is None and type(None) in members(expected)
        return None if optional else trees[0].trouble(value, {"": value, **others})
    if fits(value, expected):
        return None
    name = getattr(value, "__name__", None)
    if inspect.isfunction(value) and name and not any(map(is_callable, members(expected))):
        return f" is the function {name} itself. Give {in_words(expected)}."
    verb = "use" if choices_of(expected) else "give"
    return f" = {described(value)}: {verb} {in_words(expected)}."


def in_words(expected: Any) -> str:
    """E.g. 'a whole number, or None'."""
    words = words_of(members(expected))
    return ", or ".join(f"{_article(w)}{w}" for w in words)


def _article(words: str) -> str:
    """What is written before the name of a class."""
    is_class = words.isidentifier() and words != "None"
    return ("an " if words[0] in "AEIOU" else "a ") if is_class else ""


def words_of(parts: Sequence[Any]) -> list[str]:
    """The members of an annotation in words, each once, what can be chosen from first."""
    choices = [choice for part in parts for choice in choices_of(part)]
    words = [word(part) for part in parts if typing.get_origin(part) is not typing.Literal]
    return list(dict.fromkeys([f"one of {choices}"] * bool(choices) + words))


def members(expected: Any) -> list[Any]:
    """The members of a union, or the annotation alone."""
    if isinstance(expected, types.UnionType) or typing.get_origin(expected) is typing.Union:
        return [part for member in typing.get_args(expected) for part in members(member)]
    return [expected]


def limits(part: Any) -> list[Any]:
    """The limits among the metadata of `Annotated`."""
    return [limit for limit in getattr(part, "__metadata__", ()) if hasattr(limit, "accepts")]


def bare(part: Any) -> Any:
    """An annotation without its metadata."""
    return typing.get_args(part)[0] if typing.get_origin(part) is typing.Annotated else part


def choices_of(expected: Any) -> list[Any]:
    """The values of the `Literal`s of an annotation."""
    literals = [m for m in members(expected) if typing.get_origin(m) is typing.Literal]
    return [choice for literal in literals for choice in typing.get_args(literal)]


def is_callable(part: Any) -> bool:
    """Whether an annotation is of functions."""
    return collections.abc.Callable in (part, typing.get_origin(part))


def word(part: Any) -> str:
    """One member of an annotation in words."""
    if typing.get_origin(part) is typing.Annotated:
        said = [str(x) for x in part.__metadata__ if isinstance(x, str) or hasattr(x, "accepts")]
        return said[0] if said else word(bare(part))
    origin = typing.get_origin(part)
    if origin in CONTAINERS:
        inner = [a for a in typing.get_args(part) if a is not Ellipsis]
        of = f" of {_PLURALS[bare(inner[0])]}" if _counts(inner) else ""
        return CONTAINERS[origin] + of
    if is_callable(part):
        return "a function"
    return _WORDS.get(part) or str(getattr(part, "__name__", part))


def _counts(inner: Sequence[Any]) -> bool:
    return len(inner) == 1 and bare(inner[0]) in _PLURALS
