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
import jax.numpy as jnp
import numpy as np

from research_dp.argument_types import Leaves, described, is_integer, is_number
from research_dp.errors import UsageError, binding_error, first_line

F = TypeVar("F", bound=Callable[..., Any])

# Type -> what it is in words, its plural, and which values it accepts.
_SCALARS: dict[Any, tuple[str, str, Callable[[Any], bool]]] = {
    int: ("an integer", "integers", is_integer),
    float: ("a number", "numbers", is_number),
    str: ("a string", "strings", lambda x: isinstance(x, str)),
    bool: ("True or False", "", lambda x: isinstance(x, bool | np.bool_)),
    type(None): ("None", "", lambda x: x is None),
    None: ("None", "", lambda x: x is None),
}
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
    parameters = signature.parameters.values()
    required = {p.name: gin.REQUIRED for p in parameters if p.default is gin.REQUIRED}

    @functools.cache
    def annotations() -> dict[str, Any]:
        return {name: annotation_of(function, name) for name in signature.parameters}

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
        value, options, problem = arguments[name], members(annotation), None
        trees = [x for part in options for x in limits(part) if isinstance(x, Leaves)]
        if value is gin.REQUIRED:
            problem = f" is missing: give {in_words(annotation)}."
        elif trees:
            if value is not None or type(None) not in options:
                problem = trees[0].problem(value, arguments)
        elif not fits(value, annotation):
            verb = "use" if choices_of(annotation) else "give"
            problem = f" = {described(value)}: {verb} {in_words(annotation)}."
            if missing := _missing(value, options):
                problem += f" It lacks {' and '.join(missing)}."
            if inspect.isfunction(value) and not any(map(is_callable, options)):
                problem = f" is the function {value.__name__} itself. Give {in_words(annotation)}."
        if problem:
            raise binding_error(f"{function}.{name}", problem)


def _missing(value: Any, options: Sequence[Any]) -> list[str]:
    """The attributes that an object lacks to be of the `Protocol` of which it has some."""
    for part in options:
        if getattr(part, "_is_protocol", False):
            names = [*vars(part).get("__annotations__", {}), *vars(part)]
            public = [name for name in names if not name.startswith("_")]
            lacks = [name for name in public if not hasattr(value, name)]
            return lacks if len(lacks) < len(public) else []
    return []


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
    if part in _SCALARS:
        return _SCALARS[part][-1](value)
    if is_callable(part):
        return callable(value)
    kind = origin or part
    if not inspect.isclass(kind):
        return True
    if kind is collections.abc.Sequence and isinstance(value, str | bytes):
        return False  # a sequence of letters to Python, but a mistake here
    try:
        is_instance = isinstance(value, kind)
        if not is_instance or (kind is type and inner and not issubclass(value, inner[0])):
            return False
    except TypeError:  # a class without instance checks, such as a Protocol
        return True
    if not inner or kind not in CONTAINERS:
        return True
    if CONTAINERS[kind] == "a dict":
        return all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return all(fits(element, inner[0]) for element in value)


def in_words(annotation: Any) -> str:
    """E.g. 'an integer, or None'."""
    words = words_of(members(annotation))
    for index, word in enumerate(words):
        if word.isidentifier() and word != "None":
            words[index] = f"{'an' if word[0] in 'AEIOU' else 'a'} {word}"
    return ", or ".join(words)


def words_of(parts: Sequence[Any]) -> list[str]:
    """The members of an annotation in words, without repetition, the choices first."""
    choices = [choice for part in parts for choice in choices_of(part)]
    words = [_word(part) for part in parts if typing.get_origin(part) is not Literal]
    return list(dict.fromkeys([f"one of {choices}"] * bool(choices) + words))


def _word(part: Any) -> str:
    origin, inner = typing.get_origin(part), typing.get_args(part)
    if origin is Annotated:
        texts = [getattr(x, "description", x) for x in part.__metadata__]
        return next((text for text in texts if isinstance(text, str)), None) or _word(bare(part))
    if origin in CONTAINERS:
        of_values = inner[1:] if CONTAINERS[origin] == "a dict" else inner
        elements = [bare(x) for x in of_values if x is not Ellipsis]
        plural = "functions" if any(map(is_callable, elements)) else ""
        if len(elements) == 1 and elements[0] in _SCALARS:
            plural = _SCALARS[elements[0]][1]
        return CONTAINERS[origin] + (f" of {plural}" if plural else "")
    if is_callable(part):
        return "a function"
    return _SCALARS[part][0] if part in _SCALARS else str(getattr(part, "__name__", part))


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


def as_numbers(what: str, value: Any, guide: str = "") -> np.ndarray:
    """A host array of numbers; UsageError for what is none, such as text, dates and random keys."""
    check_unmasked(what, value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:  # random keys, lists of different lengths
        raise UsageError(
            f"{what} is {described(value)}, which is no array of numbers: "
            f"{first_line(error)}{guide}"
        ) from error
    if not (array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number)):
        raise UsageError(
            f"{what} is of dtype {array.dtype}. Give numbers of one shape: encode text and "
            f"categories as integers, and pad what differs in length.{guide}"
        )
    return array


def check_unmasked(what: str, value: Any) -> None:
    """Raises UsageError for a masked array, alone or in lists: NumPy would drop the mask."""
    if isinstance(value, list | tuple) and {*map(type, value)} - {bool, int, float, str}:
        for part in value:
            check_unmasked(what, part)
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(
            f"{what} is a masked array, and the numbers under its mask would be used. Fill it, "
            "e.g. with filled(0), and give the mask as an array of weights."
        )
