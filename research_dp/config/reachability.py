"""What a run calls: from `train` along the references of what is bound, nothing being called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from research_dp.config import gin_internals
from research_dp.config.parser import Binding, Macro, Reference, references

Key = tuple[str, str, str]  # scope, whole name of the function, parameter
MACRO = "gin.macro"


@dataclasses.dataclass(frozen=True)
class Reached:
    """What is called, and with which bindings.

    Attributes:
        used: The bindings that take effect.
        functions: Whole names of the functions that are called, each with its scopes.
        supplied: Functions that are called with what is bound alone, for `@f()` passes nothing.
        defaults: Parameters that nothing binds and whose default is a function that gin knows:
            (whole name of the function, parameter) -> whole name of the default.
        unbound: Macros that are used and bound nowhere, each with a binding that uses it.
    """

    used: list[Binding] = dataclasses.field(default_factory=list)
    functions: set[tuple[tuple[str, ...], str]] = dataclasses.field(default_factory=set)
    supplied: set[tuple[tuple[str, ...], str]] = dataclasses.field(default_factory=set)
    defaults: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    unbound: list[tuple[str, Binding]] = dataclasses.field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.functions}


def key(binding: Binding) -> Key | None:
    """Which parameter of which function it binds; None if there is no such function, or several."""
    if not binding.selector:
        return f"{binding.scope}/{binding.parameter}".strip("/"), MACRO, "value"
    names = gin_internals.matching(binding.selector)
    return (binding.scope, names[0], binding.parameter) if len(names) == 1 else None


def winners(bindings: Iterable[Binding]) -> dict[Key, Binding]:
    """The binding of each parameter that wins.

    The command line wins over files, a file over what it includes, and of two of the same rank
    the later one. So files can be given in any order where they bind different things.
    """
    won: dict[Key, Binding] = {}
    for binding in bindings:
        where = key(binding)
        if where is not None and (where not in won or binding.depth <= won[where].depth):
            won[where] = binding
    return won


def reach(
    table: Mapping[Key, Binding], root: str, *, more: Sequence[Reference | Macro] = ()
) -> Reached:
    """Follows references from a function.

    Args:
        table: `winners`.
        root: Whole name of the function that a command calls.
        more: References that are followed too.
    """
    by_function: dict[tuple[str, str], dict[str, Binding]] = {}
    for (scope, name, parameter), binding in table.items():
        by_function.setdefault((scope, name), {})[parameter] = binding
    found = Reached()
    ahead: list[tuple[tuple[str, ...], str]] = [((), root)]
    followed: set[tuple[Binding, tuple[str, ...]]] = set()

    def visit(scopes: tuple[str, ...], name: str) -> None:
        if (scopes, name) in found.functions:
            return
        found.functions.add((scopes, name))
        bound: dict[str, Binding] = {}
        for depth in range(len(scopes) + 1):
            bound.update(by_function.get(("/".join(scopes[:depth]), name), {}))
        for binding in bound.values():
            follow(binding, scopes)
        for parameter, default in _default_functions(name).items():
            if parameter not in bound:
                found.defaults[name, parameter] = default
                ahead.append((scopes, default))

    def follow(binding: Binding, scopes: tuple[str, ...]) -> None:
        if (binding, scopes) in followed:
            return
        followed.add((binding, scopes))
        if binding not in found.used:
            found.used.append(binding)
        for item in references(binding.value):
            point(item, binding, scopes)

    def point(item: Reference | Macro, binding: Binding | None, scopes: tuple[str, ...]) -> None:
        if isinstance(item, Macro):
            bound = by_function.get((item.name, MACRO), {}).get("value")
            if bound is not None:
                follow(bound, scopes)
            elif binding is not None and item.name not in gin_internals.constants():
                found.unbound.append((item.name, binding))
            return
        names = gin_internals.matching(item.selector)
        if len(names) == 1:
            inner = item.scopes or scopes
            if item.evaluated and binding is not None:
                found.supplied.add((inner, names[0]))
            ahead.append((inner, names[0]))

    for item in more:
        point(item, None, ())
    while ahead:
        visit(*ahead.pop())
    found.supplied.add(((), root))
    return found


def _default_functions(name: str) -> dict[str, str]:
    """Parameters of a function whose default is a function that gin can configure."""
    known = gin_internals.configurables()
    entry = known.get(name)
    if entry is None:
        return {}
    by_function = {id(other.function): other.selector for other in known.values()}
    defaults = {p.name: by_function.get(id(p.default)) for p in entry.parameters.values()}
    return {parameter: default for parameter, default in defaults.items() if default}
