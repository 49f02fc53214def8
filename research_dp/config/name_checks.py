"""Checks single bindings: unknown names, values of the wrong type."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import gin

from research_dp.config import gin_internals
from research_dp.config.parser import Binding, Macro, Mistake, Reference, references
from research_dp.config.typecheck import annotation, complaint


def mistakes(binding: Binding, macros: dict[str, Binding]) -> list[Mistake]:
    """What is wrong with one binding by itself.

    Args:
        binding: The binding, which another may override.
        macros: The binding of each macro that wins.
    """
    problems = [*_name_problems(binding)]
    found = [Mistake(binding.place, f"{binding}: {problem}") for problem in problems]
    return found or [*_type_mistakes(binding, macros)]


def missing(name: str, bound: Iterable[str], *, evaluated: bool) -> list[str]:
    """The parameters that a function lacks.

    Args:
        name: Full name of the function.
        bound: Parameters that are bound.
        evaluated: Whether it is called as `@f()`, which passes no argument.
    """
    entry = gin_internals.configurables().get(name)
    if entry is None:
        return []
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    unbound = [
        p for p in entry.parameters.values() if p.name not in bound and p.kind not in variadic
    ]
    return [
        p.name for p in unbound if p.default is gin.REQUIRED or (evaluated and p.default is p.empty)
    ]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest valid names, or all if there are few, as a sentence; '' if none is near."""
    known = sorted(known)
    # 'adamm' is near 'optax.adamw', by its last part.
    by_last = {item.split(".")[-1]: item for item in known} if "." not in name else {}
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
    near += [by_last[last] for last in difflib.get_close_matches(name, by_last, n=3)]
    if near:
        return f" Did you mean {', '.join(dict.fromkeys(near))}?"
    return f" It has {', '.join(known)}." if 0 < len(known) < 20 else ""


def _name_problems(binding: Binding) -> Iterator[str]:
    if binding.selector:
        yield from _selector_problems(binding)
    for item in references(binding.value):
        if isinstance(item, Reference) and (problem := _unknown(item.selector)):
            yield problem


def _selector_problems(binding: Binding) -> Iterator[str]:
    if problem := _unknown(binding.selector):
        yield problem
        return
    entry = _entry(binding)
    if entry is None:
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in entry.parameters.values())
    if binding.parameter in entry.denied:
        yield f"{entry.name} takes this from the command, not from gin."
    elif binding.parameter not in entry.parameters and not takes_any:
        hint = did_you_mean(binding.parameter, entry.parameters)
        yield f"{entry.name} has no parameter {binding.parameter!r}.{hint}"


def _entry(binding: Binding) -> gin_internals.Configurable | None:
    return gin_internals.configurables().get(gin_internals.matching(binding.selector)[0])


def _unknown(selector: str) -> str:
    """What is wrong with a function's name; '' if it names one function."""
    names = gin_internals.matching(selector)
    if any(name.startswith("gin.") for name in names):
        return f"{selector!r} is gin's own. Write %NAME for a macro."
    if len(names) > 1:
        return f"{selector!r} may be any of {', '.join(names)}; write one of them."
    if names:
        return ""
    known = {entry.name for entry in gin_internals.configurables().values()}
    hint = did_you_mean(selector, known)
    return f"there is no {selector!r}.{hint or ' --list shows all; is its module imported?'}"


def _type_mistakes(binding: Binding, macros: dict[str, Binding]) -> Iterator[Mistake]:
    entry = _entry(binding) if binding.selector else None
    if entry is None or binding.parameter not in entry.parameters:
        return
    value, via = binding.value, ""
    if isinstance(value, Macro) and value.name in macros:
        via = f" (%{value.name} is bound in {macros[value.name].place})"
    try:
        value = _resolved(value, macros, ())
    except RecursionError as error:
        yield Mistake(binding.place, f"{binding.name} = {binding.value!r}: {error}")
        return
    if isinstance(value, Macro):
        return
    problem = complaint(value, annotation(entry.function, binding.parameter))
    if problem:
        message = f"{binding.name} = {value!r}: {problem}"
        end = "" if message.endswith("?") else "."
        yield Mistake(binding.place, message + end + via, binding.name)


def _resolved(value: Any, macros: dict[str, Binding], outer: tuple[str, ...]) -> Any:
    """A value with its bound macros replaced by their values.

    Raises:
        RecursionError: A macro is bound to itself, perhaps by way of others.
    """
    if isinstance(value, Macro) and value.name in macros:
        if value.name in outer:
            cycle = " = ".join(f"%{name}" for name in (*outer, value.name))
            raise RecursionError(f"{cycle} has no end. Bind one of them to a value.")
        return _resolved(macros[value.name].value, macros, (*outer, value.name))
    if isinstance(value, list | tuple):
        return type(value)(_resolved(item, macros, outer) for item in value)
    if isinstance(value, dict):
        return {k: _resolved(item, macros, outer) for k, item in value.items()}
    return value
