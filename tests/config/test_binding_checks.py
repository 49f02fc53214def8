"""Values against annotations, and what is told of those that do not fit."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gin
import pytest

from research_dp.argument_types import BelowOne, Count, CountOrZero, Dtype, Fraction, Positive
from research_dp.config.binding_checks import annotation, complaint, in_words
from research_dp.config.parser import Reference


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((3, int), (3, float), (0.5, float), ("a", str), (None, int | None), (True, bool)),
        *(((1, 2), Sequence[int]), ([1], Sequence[Count]), ({"a": 1}, Mapping[str, int])),
        *(("a", Literal["a", "b"]), (None, Literal["a"] | None), (len, Callable[..., Any])),
        *((1, Count), (0, CountOrZero), (1, Positive), (1.0, Fraction), (0.0, BelowOne)),
        *(("bfloat16", Dtype), (None, Dtype | None), ("float8_e4m3fn", Dtype)),
        *((object(), Any),),
    ],
)
def test_right_values(value, expected):
    assert complaint(value, expected) is None


@pytest.mark.parametrize(
    ("value", "expected", "told"),
    [
        (True, int, "give an integer"),
        (True, float, "give a number"),
        (1.0, int, "give an integer"),
        ("1", int | None, "give an integer, or None"),
        (None, str, "give a string"),
        ((1, 2.5), Sequence[int], "give a tuple or list of integers"),
        ((1, True), Sequence[int], "give a tuple or list of integers"),
        ({"a": "1"}, Mapping[str, int], "give a dict of integers"),
        ({"a": 1}, Mapping[str, Callable[..., Any]], "give a dict of functions"),
        ("c", Literal["a", "b"], "use one of ['a', 'b']"),
        ("grop", Literal["group", "none"], "use one of ['group', 'none']. Did you mean 'group'?"),
        (3, Callable[..., Any], "give a function"),
        (0, Count, "give an integer of at least 1"),
        (0, Positive | None, "give a positive number, or None"),
        (1.1, Fraction, "give a fraction in [0, 1]"),
        (1, BelowOne, "give a fraction in [0, 1)"),
        ("int8", Dtype, "give a floating-point dtype, e.g. 'bfloat16'"),
    ],
)
def test_wrong_values(value, expected, told):
    assert complaint(value, expected) == told


def test_annotations_that_cannot_be_read_accept_everything():
    def function(a: "Missing", b: "int | None", c): ...  # noqa: F821

    assert annotation(function, "a") is Any
    assert annotation(function, "b") == int | None
    assert annotation(function, "c") is Any
    assert in_words(int | None) == "an integer, or None"


class Model:
    pass


@gin.register(module="tests")
def bare(x=1): ...


@gin.register(module="tests")
class Bare:
    def __init__(self, x=1): ...


@pytest.mark.parametrize("expected", [Model, Model | None, Callable[..., Model], Callable, Any])
@pytest.mark.parametrize("name", ["bare", "Bare"])
def test_functions_without_annotations_are_accepted_and_checked_when_called(name, expected):
    assert complaint(Reference(name, evaluated=True), expected) is None
    takes_functions = expected not in (Model, Model | None)
    told = complaint(Reference(name, evaluated=False), expected)
    called = f"@{name} is the function itself; @{name}() is what it returns"
    assert told == (None if takes_functions else called)
