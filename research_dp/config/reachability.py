"""Which functions a run calls: follows references from `train`, without calling anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from research_dp.config import gin_internals
from research_dp.config.parser import MACRO, Binding, Key, Macro, references
from research_dp.types import Bound

Call = tuple[tuple[str, ...], str]  # scopes, full name of the function
ROOT = "research_dp.training.train.train"


@dataclasses.dataclass(frozen=True)
class Config:
    """The bindings of a run that win, what it calls, and with which of them."""

    table: dict[Key, Binding]  # of each parameter the last one, as in gin
    # Those that take effect, in the order in which references lead to them.
    used: dict[Binding, None] = dataclasses.field(default_factory=dict)
    calls: set[Call] = dataclasses.field(default_factory=set)
    # Functions called as `@f()`, which get no argument but what is bound.
    evaluated: set[Call] = dataclasses.field(default_factory=set)
    # Unbound parameters whose default is a function that gin knows: (full name of the function,
    # parameter) -> full name of the default.
    defaults: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    # What a user may not expect of correct bindings, a line each.
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def functions(self) -> set[str]:
        """Full names of the functions that the run calls."""
        return {name for _, name in self.calls}

    @property
    def unused(self) -> list[Binding]:
        """Those without effect: a component was replaced, or a file offers more."""
        return [binding for binding in self.table.values() if binding not in self.used]

    def of_strategy(self) -> Config:
        """The part that `train.strategy` leads to."""
        table = self.table.values()
        return reach(x for x in table if x.key[1] != ROOT or x.key[2] == "strategy")

    def origin(self, name: str) -> str | None:
        """Where e.g. 'make_mesh.axes' is bound, else first in a scope: 'strategies/ddp.gin:12'.

        For a function without a parameter it is where its result is bound.
        """
        selector, _, parameter = name.rpartition(".")
        key = Binding("", selector, parameter, None, "").key
        exact = [x for x in self.used if x.name == name or x.key == key]
        scoped = [x for x in self.used if selector and x.key[1:] == key[1:]]
        calls = [] if selector else [x for x in self.used if _calls(x, parameter)]
        return next((binding.place for binding in (*exact, *scoped, *calls)), None)

    def bound(self) -> dict[str, Bound]:
        """The bindings that take effect, by their names in gin's own dumps.

        Those of the strategy are those that nothing but `train.strategy` leads to.
        """
        table = self.table.values()
        run = reach(table).used
        others = reach(x for x in table if x.key != ("", ROOT, "strategy")).used
        return {
            _name_in_dumps(x): Bound(repr(x.value), x.place, x in run and x not in others)
            for x in self.used
        }


def _name_in_dumps(binding: Binding) -> str:
    scope, function, parameter = binding.key
    if function == MACRO:
        return scope
    name = f"{gin_internals.name_in_dumps(function)}.{parameter}"
    return f"{scope}/{name}" if scope else name


def _calls(binding: Binding, function: str) -> bool:
    used = (x for x in references(binding.value) if not isinstance(x, Macro))
    return function in (reference.selector.split(".")[-1] for reference in used)


def prefixes(scopes: tuple[str, ...]) -> list[str]:
    """The scopes whose bindings hold in nested scopes, outermost first."""
    return ["/".join(scopes[:length]) for length in range(len(scopes) + 1)]


def reach(bindings: Iterable[Binding], more: Any = ()) -> Config:
    """Follows references from `train`, and those inside the value `more`."""
    table = {binding.key: binding for binding in bindings}
    config = Config(table)
    pending: list[Call] = [((), ROOT)]
    followed: set[tuple[Binding, tuple[str, ...]]] = set()
    known = gin_internals.configurables()
    name_of = {id(entry.function): name for name, entry in known.items()}

    def visit(scopes: tuple[str, ...], name: str) -> None:
        bound: dict[str, Binding] = {}
        for prefix in prefixes(scopes):
            bound |= {p: b for (*where, p), b in table.items() if where == [prefix, name]}
        for binding in bound.values():
            use(binding, scopes)
        for parameter in known[name].parameters.values() if name in known else ():
            default = name_of.get(id(parameter.default))
            if default and parameter.name not in bound:
                config.defaults[name, parameter.name] = default
                pending.append((scopes, default))

    def use(binding: Binding, scopes: tuple[str, ...]) -> None:
        if (binding, scopes) not in followed:
            followed.add((binding, scopes))
            config.used[binding] = None
            config.evaluated.update(follow(binding.value, scopes))

    def follow(value: Any, scopes: tuple[str, ...]) -> list[Call]:
        """Uses the macros and notes the calls inside a value; returns those as `@f()`."""
        evaluated = []
        for item in references(value):
            if isinstance(item, Macro):
                if bound := table.get((item.name, MACRO, "value")):
                    use(bound, scopes)
            elif len(names := gin_internals.matching(item.selector)) == 1:
                pending.append((item.scopes or scopes, names[0]))
                if item.evaluated:
                    evaluated.append(pending[-1])
        return evaluated

    follow(more, ())
    while pending:
        call = pending.pop()
        if call not in config.calls:
            config.calls.add(call)
            visit(*call)
    config.evaluated.add(((), ROOT))
    return config
