"""Mistakes of a configuration as a whole: what is bound in vain, and what is missing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from research_dp.config import gin_internals, parser
from research_dp.config.name_checks import did_you_mean, missing
from research_dp.config.parser import Binding, Macro, Mistake, Reference, references
from research_dp.config.reachability import MACRO, Key, Reached, key, reach, winners
from research_dp.config.typecheck import annotation, makers


def mistakes(
    bindings: Sequence[Binding],
    table: dict[Key, Binding],
    reached: Reached,
    root: str,
    lacks_none: Sequence[Key],
    allow_unused: bool,
) -> Iterator[Mistake]:
    """What is wrong with the bindings together.

    Args:
        bindings: All that are right by themselves.
        table: Those that win.
        reached: What the run calls.
        root: Whole name of the function that the command calls.
        lacks_none: Parameters that are bound, to something wrong.
        allow_unused: Whether something may be bound in vain.
    """
    yield from unbound(table, reached.unbound)
    yield from _missing([*table, *lacks_none], reached)
    if not allow_unused:
        yield from _left_over(bindings, table, reached, root)
        yield from _in_vain(bindings, table, reached, root)
        yield from _files_in_vain(table, reached)
        yield from _runs_at_once(bindings, root)


def macros_in(table: dict[Key, Binding]) -> Iterator[tuple[str, Binding]]:
    """(macro, binding that uses it) of all bindings that win."""
    for binding in table.values():
        for item in references(binding.value):
            if isinstance(item, Macro) and item.name not in gin_internals.constants():
                yield item.name, binding


def unbound(table: dict[Key, Binding], uses: Iterable[tuple[str, Binding]]) -> Iterator[Mistake]:
    """Macros that are used and bound nowhere."""
    macros = {scope for scope, name, _ in table if name == MACRO}
    for name, binding in uses:
        if name in macros:
            continue
        hint = did_you_mean(name, macros)
        yield Mistake(
            binding.place,
            f"{binding}: %{name} is used and bound nowhere.{hint} Add the file that binds it, or "
            f"--gin.{name}=...",
        )


def _missing(bound_keys: Iterable[Key], reached: Reached) -> Iterator[Mistake]:
    told: set[str] = set()
    for scopes, name in sorted(reached.functions):
        prefixes = {"/".join(scopes[:depth]) for depth in range(len(scopes) + 1)}
        bound = {p for scope, function, p in bound_keys if function == name and scope in prefixes}
        lacks = missing(name, bound, supplied=(scopes, name) in reached.supplied)
        if lacks and name not in told:
            told.add(name)
            entry = gin_internals.configurables()[name]
            example = (makers(annotation(entry.function, lacks[0])) or ["..."])[0]
            yield Mistake(
                "",
                f"{entry.name} needs {', '.join(map(repr, lacks))}, which nothing binds. Bind "
                f"{entry.name}.{lacks[0]} = {example}, or add the gin file that does.",
            )


def _left_over(
    bindings: Sequence[Binding], table: dict[Key, Binding], reached: Reached, root: str
) -> Iterator[Mistake]:
    """Of two files that choose the same part of a run, what stays of the one that lost."""
    for binding in bindings:
        where = key(binding)
        if where is None or where[1] != root or not isinstance(binding.value, Reference):
            continue
        winner = table[where]
        if not winner.file or winner.file == binding.file or binding.file in _inside(winner, table):
            continue
        if sum(b.file == binding.file and b.selector == binding.selector for b in bindings) > 1:
            continue  # a whole run, a part of which is swapped
        for other in reached.used:
            part = other.selector and key(other)
            if other.file == binding.file and part and part[1] != root:
                yield Mistake(
                    other.place,
                    f"{other} is left over: {winner.place} chose another {binding.name} than "
                    f"{binding.place}. Bind {other.name} in {_file(winner)} too.",
                )


def _inside(winner: Binding, table: dict[Key, Binding]) -> set[str]:
    """The files that the winner's file includes, which it builds on."""
    return {b.file for b in table.values() if winner.file in b.included_by}


def _in_vain(
    bindings: Sequence[Binding], table: dict[Key, Binding], reached: Reached, root: str
) -> Iterator[Mistake]:
    """Bindings of what is never called, where no other file has swapped it out."""
    dead = [binding for binding in table.values() if binding not in reached.used]
    macros = [binding.parameter for binding in dead if not binding.selector]
    meant = {near for name, _ in reached.unbound for near in _near(name, macros)}
    for binding in dead:
        if (
            binding.optional
            or binding.parameter in meant
            or _used_in_own_source(binding, bindings, root)
        ):
            continue
        yield Mistake(binding.place, f"{binding}: {_why_in_vain(binding, table, reached)}")


def _near(name: str, macros: Sequence[str]) -> list[str]:
    """The idle macros that one which is bound nowhere may be a misspelling of."""
    return difflib.get_close_matches(name, macros)


def _used_in_own_source(binding: Binding, bindings: Sequence[Binding], root: str) -> bool:
    """Whether it has an effect in its own file, so that only a swapped part made it idle.

    Its own file, with what that includes, or one that includes it: whichever was swapped.
    """
    if not binding.file:
        return False
    for file in (binding.file, *binding.included_by):
        of_file = (b for b in bindings if file in (b.file, *b.included_by))
        own = winners(b for b in of_file if b.source == binding.source)
        if any(b is binding for b in reach(own, root).used):
            return True
    return False


def _why_in_vain(binding: Binding, table: dict[Key, Binding], reached: Reached) -> str:
    if not binding.selector:
        names = {
            p.name for b in table.values() for p in references(b.value) if isinstance(p, Macro)
        }
        return f"nothing uses %{binding.parameter}.{did_you_mean(binding.parameter, names)}"
    name = gin_internals.matching(binding.selector)[0]
    if binding.scope and name in reached.names:
        return f"nothing is called in scope {binding.scope!r}."
    called = {
        gin_internals.configurables()[n].name: gin_internals.configurables()[n]
        for n in reached.names
        if n in gin_internals.configurables()
    }
    same = [n for n, e in called.items() if binding.parameter in e.parameters]
    near = did_you_mean(binding.name, [f"{n}.{binding.parameter}" for n in same])
    near = near if "Did you mean" in near else ""
    return f"this run never calls {binding.selector}.{near or _instead(name, called, table)}"


def _instead(name: str, called: dict[str, gin_internals.Configurable], table: dict) -> str:
    """What is called where the function could be."""
    result = annotation(gin_internals.configurables()[name].function, "return")
    for (_, function, parameter), binding in table.items():
        entry = gin_internals.configurables().get(function)
        if entry is None or entry.name not in called:
            continue
        expected = annotation(entry.function, parameter)
        if isinstance(result, type) and result.__module__ != "builtins" and expected is result:
            return f" {binding.name} is {binding.value!r} ({binding.place})."
    return f" It calls {', '.join(sorted(called))}."


def _files_in_vain(table: dict[Key, Binding], reached: Reached) -> Iterator[Mistake]:
    """Files of options none of which has an effect."""
    by_file: dict[str, list[Binding]] = {}
    for binding in table.values():
        by_file.setdefault(binding.file, []).append(binding)
    for inside in by_file.values():
        if all(b.optional and b not in reached.used for b in inside):
            names = ", ".join(dict.fromkeys(b.selector for b in inside if b.selector))
            yield Mistake(
                _file(inside[0]), f"nothing here has an effect: this run never calls {names}."
            )


def _runs_at_once(bindings: Sequence[Binding], root: str) -> Iterator[Mistake]:
    """Files given beside each other each of which is a whole run."""
    given: dict[int, tuple[str, set[str]]] = {}
    for binding in bindings:
        where = key(binding)
        if binding.file and where is not None and where[1] == root:
            outermost = (*binding.included_by, binding.file)[0]
            name = parser.name_shown(Path(outermost), outermost)
            given.setdefault(binding.source, (name, set()))[1].add(where[2])
    runs = [file for file, bound in given.values() if not missing(root, bound, supplied=False)]
    if len(runs) > 1:
        yield Mistake(
            runs[-1],
            f"this is a whole run, and so is {runs[0]}. Give one of them, and files that change "
            "parts of it; or write one that includes what you want of both.",
        )


def _file(binding: Binding) -> str:
    return binding.place.rpartition(":")[0]
