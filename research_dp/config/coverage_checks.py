"""Finds bindings without effect, and parameters and macros that nothing binds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from research_dp.config import gin_internals
from research_dp.config.name_checks import did_you_mean, missing
from research_dp.config.parser import Binding, File, Macro, Mistake, Reference, references
from research_dp.config.reachability import MACRO, Key, Reached, effective, key, reach
from research_dp.config.typecheck import annotation, makers


def unbound_macros(
    table: dict[Key, Binding], used: Iterable[Binding]
) -> Iterator[tuple[str, Mistake]]:
    """(macro, mistake) for each use of a macro that is bound nowhere."""
    macros = {scope for scope, name, _ in table if name == MACRO}
    for binding in used:
        for name in _macros_in(binding):
            if name not in macros and name not in gin_internals.constants():
                hint = did_you_mean(name, macros)
                message = (
                    f"{binding}: %{name} is used and bound nowhere.{hint} Add the file that binds "
                    f"it, or --gin.{name}=..."
                )
                yield name, Mistake(binding.place, message)


def missing_parameters(bound: Iterable[Key], reached: Reached) -> Iterator[Mistake]:
    """Required parameters of called functions that nothing binds, a line each function."""
    reported: set[str] = set()
    for scopes, name in sorted(reached.functions):
        prefixes = {"/".join(scopes[:length]) for length in range(len(scopes) + 1)}
        given = {p for scope, function, p in bound if function == name and scope in prefixes}
        lacking = missing(name, given, evaluated=(scopes, name) in reached.evaluated)
        if lacking and name not in reported:
            reported.add(name)
            entry = gin_internals.configurables()[name]
            example = (makers(annotation(entry.function, lacking[0])) or ["..."])[0]
            yield Mistake(
                "",
                f"{entry.name} needs {', '.join(map(repr, lacking))}, which nothing binds. Bind "
                f"{entry.name}.{lacking[0]} = {example}, or add the gin file that does.",
            )


def left_over(
    bindings: Sequence[Binding], table: dict[Key, Binding], reached: Reached, root: str
) -> Iterator[Mistake]:
    """Bindings left over from a file whose component another file replaced."""
    for binding in bindings:
        where = key(binding)
        if where[1] != root or not isinstance(binding.value, Reference):
            continue
        winner = table[where]
        if not winner.file or winner.file in binding.files:
            continue  # the winner's file includes this one and builds on it
        if sum(b.file is binding.file and b.selector == binding.selector for b in bindings) > 1:
            continue  # a complete run, one component of which is replaced
        for other in reached.used:
            if other.file is binding.file and other.selector and key(other)[1] != root:
                yield Mistake(
                    other.place,
                    f"{other} is left over: {winner.place} chose another {binding.name} than "
                    f"{binding.place}. Bind {other.name} in {winner.file.name} too.",
                )


def unused(
    bindings: Sequence[Binding], table: dict[Key, Binding], reached: Reached, root: str
) -> Iterator[Mistake]:
    """Bindings without effect that must have one, and files without any effect.

    Parameters on the command line and in files that bind `train` must take effect, and macros
    everywhere. Two kinds may be without: what took effect until another file replaced a component,
    and macros that a file offers which only chooses a component, as a data set does.
    """
    used = set(reached.used)
    idle = [binding for binding in table.values() if binding not in used]
    runs = [b for b in bindings if key(b)[1] == root]
    strict = {b.file for b in runs} | {None}
    settings = {b.file for b in runs if not isinstance(b.value, Reference)}
    components = strict - settings - {None}
    alone = {
        file: set(reach(effective(b for b in bindings if file in b.files), root).used)
        for file in {file for binding in idle for file in binding.files}
    }
    macros = [binding.parameter for binding in idle if not binding.selector]
    misspelt = {
        near
        for name, _ in unbound_macros(table, reached.used)
        for near in difflib.get_close_matches(name, macros)
    }
    for binding in idle:
        is_strict = binding.file in strict if binding.selector else binding.file not in components
        is_replaced = any(binding in alone[file] for file in binding.files)
        if is_strict and not is_replaced and binding.parameter not in misspelt:
            yield Mistake(binding.place, f"{binding}: {_why_unused(binding, table, reached)}")
    for file in dict.fromkeys(b.file for b in idle if b.file not in strict):
        inside = [b for b in table.values() if b.file is file]
        if file and not any(b in used or b.parameter in misspelt for b in inside):
            yield from _unused_file(file, [b for b in inside if b.selector], table, reached)


def _macros_in(binding: Binding) -> list[str]:
    return [item.name for item in references(binding.value) if isinstance(item, Macro)]


def _unused_file(
    file: File, inside: Sequence[Binding], table: dict[Key, Binding], reached: Reached
) -> Iterator[Mistake]:
    if len(inside) == 1:
        reason = f"{inside[0]}: {_why_unused(inside[0], table, reached)}"
        yield Mistake(inside[0].place, reason)
    elif inside:
        functions = ", ".join(dict.fromkeys(b.selector for b in inside))
        reason = f"nothing here has an effect: this run never calls {functions}."
        yield Mistake(file.name, reason)


def _why_unused(binding: Binding, table: dict[Key, Binding], reached: Reached) -> str:
    if not binding.selector:
        names = {name for other in table.values() for name in _macros_in(other)}
        return f"nothing uses %{binding.parameter}.{did_you_mean(binding.parameter, names)}"
    name = gin_internals.matching(binding.selector)[0]
    if binding.scope and name in reached.names:
        return f"nothing is called in scope {binding.scope!r}."
    known = gin_internals.configurables()
    called = {known[n].name: known[n] for n in reached.names if n in known}
    similar = [
        f"{n}.{binding.parameter}" for n, e in called.items() if binding.parameter in e.parameters
    ]
    near = did_you_mean(binding.name, similar)
    hint = near if "Did you mean" in near else _called_instead(name, called, table)
    return f"this run never calls {binding.selector}.{hint}"


def _called_instead(
    name: str, called: dict[str, gin_internals.Configurable], table: dict[Key, Binding]
) -> str:
    """The binding that chose another function of the same result, or all called functions."""
    result = annotation(gin_internals.configurables()[name].function, "return")
    for (_, function, parameter), binding in table.items():
        entry = gin_internals.configurables().get(function)
        if entry is None or entry.name not in called:
            continue
        expected = annotation(entry.function, parameter)
        if isinstance(result, type) and result.__module__ != "builtins" and expected is result:
            return f" {binding.name} is {binding.value!r} ({binding.place})."
    return f" It calls {', '.join(sorted(called))}."
