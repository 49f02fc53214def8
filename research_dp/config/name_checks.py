"""Mistakes in single bindings: a name that there is not, a type that does not fit, a repetition."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from research_dp.config import gin_internals
from research_dp.config.parser import Binding, Macro, Mistake, Reference, references
from research_dp.config.reachability import Key, key
from research_dp.config.typecheck import annotation, complaint


def mistakes(binding: Binding, macros: dict[str, Binding]) -> list[Mistake]:
    """What is wrong with one binding by itself.

    Args:
        binding: The binding, which another may override.
        macros: The binding of each macro that wins.
    """
    return [*_of_names(binding), *_of_type(binding, macros)]


def _of_names(binding: Binding) -> Iterator[Mistake]:
    yield from _of_key(binding)
    for item in references(binding.value):
        if isinstance(item, Reference):
            problem = _unknown(item.selector)
            if problem:
                yield Mistake(binding.place, f"{binding}: {problem}")


def _of_key(binding: Binding) -> Iterator[Mistake]:
    if not binding.selector:
        return
    problem = _unknown(binding.selector)
    if problem:
        yield Mistake(binding.place, f"{binding}: {problem}")
        return
    entry = gin_internals.configurables().get(gin_internals.matching(binding.selector)[0])
    if entry is None:
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in entry.parameters.values())
    if binding.parameter in entry.denied:
        yield Mistake(
            binding.place, f"{binding}: {entry.name} takes this from the command, not from gin."
        )
    elif binding.parameter not in entry.parameters and not takes_any:
        hint = did_you_mean(binding.parameter, entry.parameters)
        yield Mistake(
            binding.place, f"{binding}: {entry.name} has no parameter {binding.parameter!r}.{hint}"
        )


def _unknown(selector: str) -> str:
    """What is wrong with a function's name; empty if it names one."""
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


def _of_type(binding: Binding, macros: dict[str, Binding]) -> Iterator[Mistake]:
    if not binding.selector or any(_of_names(binding)):
        return
    entry = gin_internals.configurables().get(gin_internals.matching(binding.selector)[0])
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
        told = f"{binding.name} = {value!r}: {problem}"
        end = "" if told.endswith("?") else "."
        yield Mistake(binding.place, told + end + via, binding.name)


def _resolved(value: Any, macros: dict[str, Binding], within: tuple[str, ...]) -> Any:
    """A value with what its macros are bound to, as far as they are.

    Raises:
        RecursionError: A macro is bound to itself, perhaps by way of others.
    """
    if isinstance(value, Macro) and value.name in macros:
        if value.name in within:
            round_ = " = ".join(f"%{name}" for name in (*within, value.name))
            raise RecursionError(f"{round_} has no end. Bind one of them to a value.")
        return _resolved(macros[value.name].value, macros, (*within, value.name))
    if isinstance(value, list | tuple):
        return type(value)(_resolved(item, macros, within) for item in value)
    if isinstance(value, dict):
        return {k: _resolved(item, macros, within) for k, item in value.items()}
    return value


def repeated(bindings: Iterable[Binding]) -> Iterator[Mistake]:
    """A parameter that one file binds twice, to different values."""
    first: dict[tuple[str, Key], Binding] = {}
    for binding in bindings:
        where = key(binding)
        if where is None or not binding.file:
            continue
        before = first.setdefault((binding.file, where), binding)
        if before.place != binding.place and repr(before.value) != repr(binding.value):
            yield Mistake(
                binding.place,
                f"{binding}: {before.place} in the same file says {before.value!r}. Leave one out.",
            )


def missing(name: str, bound: Iterable[str], *, supplied: bool) -> list[str]:
    """The parameters that a function lacks.

    Args:
        name: Whole name of the function.
        bound: Parameters that are bound.
        supplied: Whether nothing else supplies any: it is called as `@f()`.
    """
    import gin

    entry = gin_internals.configurables().get(name)
    if entry is None:
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    lacks = [p for p in entry.parameters.values() if p.name not in bound and p.kind not in kinds]
    return [
        p.name for p in lacks if p.default is gin.REQUIRED or (supplied and p.default is p.empty)
    ]


def did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """The nearest right names, or all if there are few, as a sentence; empty if none is near."""
    known = sorted(known)
    # 'adamm' is near 'optax.adamw', by its last part.
    by_last = {name.split(".")[-1]: name for name in known} if "." not in wanted else {}
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.7)
    near += [by_last[last] for last in difflib.get_close_matches(wanted, by_last, n=3)]
    if near:
        return f" Did you mean {', '.join(dict.fromkeys(near))}?"
    return f" It has {', '.join(known)}." if 0 < len(known) < 20 else ""
