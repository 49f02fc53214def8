"""Checks arguments against the annotations of their parameters, and says what to give instead."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import gin
import numpy as np

from research_dp.argument_types import Leaves, described, is_integer, is_number
from research_dp.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "True or False",
    type(None): "None",
}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
CONTAINERS = {
    tuple: "a tuple",
    list: "a list",
    collections.abc.Sequence: "a tuple or list",
    dict: "a dict",
    collections.abc.Mapping: "a dict",
}


def checked(function: F) -> F:
    """Makes a function, or a class, refuse arguments that its annotations do not accept.

    The annotations are read at the first call. `gin.register` goes above this decorator. Messages
    name a class as gin does, by its attribute `gin_name` if it has one.

    Raises:
        UsageError: By the decorated function, with its name and the parameter's.
    """
    if inspect.isclass(function):
        title = getattr(function, "gin_name", function.__name__)
        function.__init__ = _checked(function.__init__, title)  # type: ignore[method-assign]
        return function
    return _checked(function, function.__name__)


def _checked(function: F, title: str) -> F:
    """`checked` of a function that messages call `title`."""
    signature = inspect.signature(function)
    defaults = {name: p.default for name, p in signature.parameters.items()}
    required = {name: gin.REQUIRED for name in defaults if defaults[name] is gin.REQUIRED}

    @functools.cache
    def annotations() -> dict[str, Any]:
        return {name: annotation_of(function, name) for name in defaults}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = None
        with contextlib.suppress(TypeError):  # raised again by the function, with its name
            bound = signature.bind(*args, **kwargs).arguments
        if bound is not None:
            check_arguments(title, required | bound, annotations())
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]  # gin does not unwrap functions
    return typing.cast(F, call)


def check_arguments(
    function: str, arguments: Mapping[str, Any], annotations: Mapping[str, Any]
) -> None:
    """Raises UsageError for the first argument that its annotation does not accept."""
    for name, annotation in annotations.items():
        if name not in arguments or annotation is Any:
            continue
        binding = f"{function}.{name}"
        if arguments[name] is gin.REQUIRED:
            raise UsageError(f"{binding} is missing: give {in_words(annotation)}.", binding=binding)
        problem = _problem(arguments[name], annotation, arguments)
        if problem:
            raise UsageError(binding + problem, binding=binding)


def _problem(value: Any, annotation: Any, others: Mapping[str, Any]) -> str | None:
    """The problem with an argument, worded to follow its name; None if it is accepted."""
    options = members(annotation)
    trees = [x for part in options for x in limits(part) if isinstance(x, Leaves)]
    if trees:
        optional = value is None and type(None) in options
        return None if optional else trees[0].problem(value, others)
    if fits(value, annotation):
        return None
    if inspect.isfunction(value) and not any(map(is_callable, options)):
        return f" is the function {value.__name__} itself. Give {in_words(annotation)}."
    verb = "use" if choices_of(annotation) else "give"
    return f" = {described(value)}: {verb} {in_words(annotation)}."


def annotation_of(function: Callable[..., Any], name: str) -> Any:
    """The annotation of a parameter ('return': of the result); `Any` if there is none to read."""
    code = inspect.unwrap(function)
    if inspect.isclass(code):
        if name == "return":
            return code if dataclasses.is_dataclass(code) else Any
        code = inspect.unwrap(code.__init__)
    text = getattr(code, "__annotations__", {}).get(name, Any)
    if not isinstance(text, str):
        return text
    with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):
        return eval(text, getattr(code, "__globals__", {}))  # one at a time: some cannot be
    return Any


def fits(value: Any, annotation: Any) -> bool:
    """Whether an annotation accepts a value; what it leaves open is accepted."""
    return any(_fits(value, part) for part in members(annotation))


def _fits(value: Any, part: Any) -> bool:
    origin, inner = typing.get_origin(part), typing.get_args(part)
    if origin is Annotated:
        own = limits(part)
        return all(x.accepts(value) for x in own) if own else fits(value, bare(part))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if part in (int, float):
        return is_integer(value) if part is int else is_number(value)
    if part is bool:
        return isinstance(value, bool | np.bool_)
    if part is None:
        return value is None
    if is_callable(part):
        return callable(value)
    kind = origin or part
    if not inspect.isclass(kind):
        return True
    if kind is collections.abc.Sequence and isinstance(value, str | bytes):
        return False  # a sequence of letters to Python, but a mistake here
    try:
        if not isinstance(value, kind):
            return False
        if kind is type and inner:
            return issubclass(typing.cast(type, value), inner[0])
    except TypeError:  # a class without instance checks, such as a Protocol
        return True
    return not inner or kind not in CONTAINERS or _elements_fit(value, kind, inner)


def _elements_fit(value: Any, kind: Any, inner: tuple[Any, ...]) -> bool:
    if kind in (dict, collections.abc.Mapping):
        return all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(element, inner[0]) for element in value)


def in_words(annotation: Any) -> str:
    """E.g. 'an integer, or None'."""
    words = words_of(members(annotation))
    names = {word for word in words if word.isidentifier() and word != "None"}
    articles = {word: "an " if word[0] in "AEIOU" else "a " for word in names}
    return ", or ".join(articles.get(word, "") + word for word in words)


def words_of(parts: Sequence[Any]) -> list[str]:
    """The members of an annotation in words, without repetition, the choices first."""
    choices = [choice for part in parts for choice in choices_of(part)]
    words = [_word(part) for part in parts if typing.get_origin(part) is not Literal]
    return list(dict.fromkeys([f"one of {choices}"] * bool(choices) + words))


def _word(part: Any) -> str:
    origin, inner = typing.get_origin(part), typing.get_args(part)
    if origin is Annotated:
        texts = [str(x) for x in part.__metadata__ if isinstance(x, str) or hasattr(x, "accepts")]
        return texts[0] if texts else _word(bare(part))
    if origin in CONTAINERS:
        elements = [bare(x) for x in inner if x is not Ellipsis]
        plural = _PLURALS.get(elements[0]) if len(elements) == 1 else None
        return CONTAINERS[origin] + (f" of {plural}" if plural else "")
    if is_callable(part):
        return "a function"
    return _WORDS.get(part) or str(getattr(part, "__name__", part))


def members(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [part for member in typing.get_args(annotation) for part in members(member)]
    return [annotation]


def limits(part: Any) -> list[Any]:
    """The `Limit`s and `Leaves` among the metadata of `Annotated`."""
    return [limit for limit in getattr(part, "__metadata__", ()) if hasattr(limit, "accepts")]


def bare(part: Any) -> Any:
    """An annotation without its metadata."""
    return typing.get_args(part)[0] if typing.get_origin(part) is Annotated else part


def choices_of(annotation: Any) -> list[Any]:
    """The values of the `Literal`s of an annotation."""
    literals = [m for m in members(annotation) if typing.get_origin(m) is Literal]
    return [choice for literal in literals for choice in typing.get_args(literal)]


def is_callable(part: Any) -> bool:
    """Whether an annotation is a `Callable`."""
    return collections.abc.Callable in (part, typing.get_origin(part))
