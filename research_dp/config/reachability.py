"""Which functions a run calls: follows references from `train`, without calling anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from research_dp.config import gin_internals
from research_dp.config.parser import Binding, Macro, Reference, references

Key = tuple[str, str, str]  # scope, full name of the function, parameter
Call = tuple[tuple[str, ...], str]  # scopes, full name of the function
MACRO = "gin.macro"


@dataclasses.dataclass(frozen=True)
class Reached:
    """What is called, and with which bindings.

    Attributes:
        used: The bindings that take effect.
        functions: The functions that are called.
        evaluated: Those called as `@f()`, which get no argument but what is bound.
        defaults: Unbound parameters whose default is a function that gin knows:
            (full name of the function, parameter) -> full name of the default.
    """

    used: list[Binding] = dataclasses.field(default_factory=list)
    functions: set[Call] = dataclasses.field(default_factory=set)
    evaluated: set[Call] = dataclasses.field(default_factory=set)
    defaults: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.functions}


def key(binding: Binding) -> Key:
    """The parameter that it binds; of an unknown function, as written."""
    if not binding.selector:
        return f"{binding.scope}/{binding.parameter}".strip("/"), MACRO, "value"
    names = gin_internals.matching(binding.selector)
    return binding.scope, names[0] if len(names) == 1 else binding.selector, binding.parameter


def effective(bindings: Iterable[Binding]) -> dict[Key, Binding]:
    """The binding of each parameter that wins: the last one, as in gin."""
    return {key(binding): binding for binding in bindings}


def reach(
    table: Mapping[Key, Binding], root: str, *, more: Sequence[Reference | Macro] = ()
) -> Reached:
    """Follows references from a function.

    Args:
        table: From `effective`.
        root: Full name of the function that a command calls.
        more: References that are followed too.
    """
    by_function: dict[tuple[str, str], dict[str, Binding]] = {}
    for (scope, name, parameter), binding in table.items():
        by_function.setdefault((scope, name), {})[parameter] = binding
    reached = Reached()
    pending: list[Call] = [((), root)]
    followed: set[tuple[Binding, tuple[str, ...]]] = set()

    def visit(scopes: tuple[str, ...], name: str) -> None:
        if (scopes, name) in reached.functions:
            return
        reached.functions.add((scopes, name))
        bound: dict[str, Binding] = {}
        for length in range(len(scopes) + 1):
            bound.update(by_function.get(("/".join(scopes[:length]), name), {}))
        for binding in bound.values():
            follow(binding, scopes)
        for parameter, default in _default_functions(name).items():
            if parameter not in bound:
                reached.defaults[name, parameter] = default
                pending.append((scopes, default))

    def follow(binding: Binding, scopes: tuple[str, ...]) -> None:
        if (binding, scopes) in followed:
            return
        followed.add((binding, scopes))
        if binding not in reached.used:
            reached.used.append(binding)
        for item in references(binding.value):
            follow_reference(item, scopes)
            if isinstance(item, Reference) and item.evaluated:
                reached.evaluated.update(calls(item, scopes))

    def follow_reference(item: Reference | Macro, scopes: tuple[str, ...]) -> None:
        if isinstance(item, Reference):
            pending.extend(calls(item, scopes))
        elif bound := by_function.get((item.name, MACRO)):
            follow(bound["value"], scopes)

    def calls(item: Reference, scopes: tuple[str, ...]) -> list[Call]:
        names = gin_internals.matching(item.selector)
        return [(item.scopes or scopes, name) for name in names] if len(names) == 1 else []

    for item in more:
        follow_reference(item, ())
    while pending:
        visit(*pending.pop())
    reached.evaluated.add(((), root))
    return reached


def _default_functions(name: str) -> dict[str, str]:
    """Parameters of a function whose default is a function that gin can configure."""
    known = gin_internals.configurables()
    if name not in known:
        return {}
    by_function = {id(other.function): other.selector for other in known.values()}
    defaults = {p.name: by_function.get(id(p.default)) for p in known[name].parameters.values()}
    return {parameter: default for parameter, default in defaults.items() if default}
