"""Walks through the operations of a traced program and of the programs inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def walk(jaxpr: Any, callers: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """All operations, each before those inside it.

    Args:
        jaxpr: The program.
        callers: Operations that it is inside of, the outermost first.

    Yields:
        The operation and its callers.
    """
    for equation in jaxpr.eqns:
        yield equation, callers
        for inner in jaxprs_in_params(equation.params):
            yield from walk(inner, (*callers, equation))
