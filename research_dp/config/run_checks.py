"""Checks a run's bindings together: what is missing, without effect, or undone by a later file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence

from research_dp.config import gin_internals
from research_dp.config.binding_checks import annotation, did_you_mean, hint_for, makers, missing
from research_dp.config.parser import MACRO, Binding, File, Key, Mistake, Reference
from research_dp.config.reachability import ROOT, Config, prefixes, reach
from research_dp.errors import some_of


def mistakes(
    bindings: Sequence[Binding],
    invalid: Iterable[Binding],
    config: Config,
    allow_unused: bool,
    saved: str | None = None,
) -> Iterator[Mistake]:
    """What is wrong with the valid bindings of a run; what `invalid` ones bind is not missing.

    Bindings of the file `saved` may be without effect, and others may replace them all.
    """
    unbound = unbound_macros(config.table, config.used)
    yield from unbound.values()
    yield from _missing_parameters([*config.table, *(b.key for b in invalid)], config)
    if allow_unused:
        return
    if saved is None:
        wrong_order = list(_wrong_orders(bindings, config.table))
        yield from wrong_order or _left_over(bindings, config)
    idle = [b for b in config.unused if saved not in [file.name for file in b.files]]
    yield from _unused(bindings, idle, config, {name for _, name in unbound})


def unbound_macros(
    table: dict[Key, Binding], used: Iterable[Binding]
) -> dict[tuple[Binding, str], Mistake]:
    """(binding, macro) -> mistake for each use of a macro that is bound nowhere."""
    bound = {scope for scope, name, _ in table if name == MACRO}
    return {
        (binding, name): Mistake(
            binding.place,
            f"{binding}: %{name} is used and bound nowhere.{did_you_mean(name, bound)} Add the "
            f"file that binds it, or --gin.{name}=...",
        )
        for binding in used
        for name in binding.macros
        if name not in bound and name not in gin_internals.constants()
    }


def conflicts(bindings: Sequence[Binding]) -> Iterator[Mistake]:
    """Parameters to which one file gives two values, the second perhaps by an include."""
    first: dict[tuple[File, Key], Binding] = {}
    for binding in bindings:
        for file in binding.files:
            before = first.get((file, binding.key))
            if before is None or repr(before.value) == repr(binding.value):
                continue
            if file is binding.file:
                problem = f"{before.place} in the same file says {before.value!r}. Leave one out."
                yield Mistake(binding.place, f"{binding}: {problem}")
            else:
                problem = f"{binding.place}, which is included below it, replaces it with"
                advice = "Move the include above it, or leave one out."
                yield Mistake(before.place, f"{before}: {problem} {binding.value!r}. {advice}")
        if binding.file:
            first.setdefault((binding.file, binding.key), binding)


def _missing_parameters(bound: Iterable[Key], config: Config) -> Iterator[Mistake]:
    """Required parameters of called functions that nothing binds, a line each function."""
    reported: set[str] = set()
    for scopes, name in sorted(config.calls):
        given = {p for scope, f, p in bound if f == name and scope in prefixes(scopes)}
        lacking = missing(name, given, evaluated=(scopes, name) in config.evaluated)
        if lacking and name not in reported:
            reported.add(name)
            entry = gin_internals.configurables()[name]
            example = (makers(annotation(entry.function, lacking[0])) or ["..."])[0]
            problem = f"{entry.name} needs {', '.join(map(repr, lacking))}, which nothing binds."
            advice = f"Bind {entry.name}.{lacking[0]} = {example}, or add the gin file that does."
            yield Mistake("", f"{problem} {advice}")


def _wrong_orders(bindings: Sequence[Binding], table: dict[Key, Binding]) -> Iterator[Mistake]:
    """Complete runs beside each other, and files that undo what an earlier one is for."""
    bound: dict[File, set[str]] = {}  # parameters of `train`, by a file with what it includes
    for binding in bindings:
        for file in binding.files if binding.key[1] == ROOT else ():
            bound.setdefault(file, set()).add(binding.parameter)
    runs = [file for file, names in bound.items() if not missing(ROOT, names, evaluated=False)]
    given = [file for file in runs if file.parent is None]
    if len(given) > 1:
        problem = f"this is a complete run, and so is {given[0].name}."
        advice = "Give one of them, and files that change parts of it"
        choice = "or write one that includes what you want of both."
        yield Mistake(given[-1].name, f"{problem} {advice}; {choice}")
        return
    # File -> its bindings that a later file beside it replaces, each with that file. Files are
    # beside each other on the command line, or if the same file includes them.
    replaced: dict[File, dict[Binding, File]] = {}
    for binding in bindings:
        for file, later in zip(binding.files, table[binding.key].files, strict=False):
            if file is not later:
                replaced.setdefault(file, {})[binding] = later
                break
    for file, by_binding in replaced.items():
        changed = {
            binding: later
            for binding, later in by_binding.items()
            if repr(binding.value) != repr(table[binding.key].value)
        }
        what, advice, undone = "every binding of it", "Leave it out, or give", changed
        if len(by_binding) != sum(file in b.files for b in bindings):
            undone = {
                binding: later
                for binding, later in changed.items()
                if later in runs or _undoes_macro(binding, file, later, bindings)
            }
            what, advice = some_of([str(binding) for binding in undone], 3), "Give"
        if undone:
            others = [other.name for other in dict.fromkeys(undone.values())]
            order = " ".join(f"--gin_file={name}" for name in (*others, file.name))
            if file.parent:
                order = ", then ".join(f"include {name!r}" for name in (*others, file.name))
            problem = f"{' and '.join(others)} replaces {what}, since the last file wins."
            yield Mistake(file.name, f"{problem} {advice} {order} in this order.")


def _undoes_macro(binding: Binding, file: File, later: File, bindings: Sequence[Binding]) -> bool:
    """Whether a file sets a macro for others, and a later one sets and uses it itself."""
    users = [b for b in bindings if binding.name in b.macros]
    uses = [any(one in b.files for b in users) for one in (file, later)]
    return not binding.selector and uses == [False, True]


def _left_over(bindings: Sequence[Binding], config: Config) -> Iterator[Mistake]:
    """Bindings left over from a file whose component another file replaced."""
    for binding in bindings:
        if binding.key[1] != ROOT or not isinstance(binding.value, Reference):
            continue
        winner = config.table[binding.key]
        if not winner.file or winner.file in binding.files:
            continue  # the winner's file includes this one and builds on it
        if sum(b.file is binding.file and b.selector == binding.selector for b in bindings) > 1:
            continue  # a complete run, one component of which is replaced
        for other in config.used:
            if other.file is binding.file and other.selector and other.key[1] != ROOT:
                reason = f"{winner.place} chose another {binding.name} than {binding.place}."
                advice = f"Bind {other.name} in {winner.file.name} too."
                yield Mistake(other.place, f"{other} is left over: {reason} {advice}")


def _unused(
    bindings: Sequence[Binding], idle: Sequence[Binding], config: Config, unbound: Iterable[str]
) -> Iterator[Mistake]:
    """Which bindings among `idle`, and which files, must have an effect.

    Parameters on the command line and in files that bind `train` must take effect, and macros
    everywhere. Two kinds may be without: what took effect until another file replaced a component,
    and macros that a file offers which only chooses a component, as a data set does.
    """
    runs = [b for b in bindings if b.key[1] == ROOT]
    strict = {b.file for b in runs} | {None}
    settings = {b.file for b in runs if not isinstance(b.value, Reference)}
    components = strict - settings - {None}
    alone = {
        file: reach(b for b in bindings if file in b.files).used
        for file in {file for binding in idle for file in binding.files}
    }
    macros = [binding.parameter for binding in idle if not binding.selector]
    misspelt = {near for name in unbound for near in difflib.get_close_matches(name, macros)}
    for binding in idle:
        is_strict = binding.file in strict if binding.selector else binding.file not in components
        is_replaced = any(binding in alone[file] for file in binding.files)
        if is_strict and not is_replaced and binding.parameter not in misspelt:
            yield Mistake(binding.place, f"{binding}: {_why_unused(binding, config)}")
    for file in dict.fromkeys(b.file for b in idle if b.file and b.file not in strict):
        inside = [b for b in config.table.values() if b.file is file]
        if any(b in config.used or b.parameter in misspelt for b in inside):
            continue
        inside = [b for b in inside if b.selector]
        if len(inside) == 1:
            reason = f"{inside[0]}: {_why_unused(inside[0], config)}"
            yield Mistake(inside[0].place, reason)
        elif inside:
            functions = ", ".join(dict.fromkeys(b.selector for b in inside))
            reason = f"nothing here has an effect: this run never calls {functions}."
            yield Mistake(file.name, reason)


def _why_unused(binding: Binding, config: Config) -> str:
    if not binding.selector:
        names = {name for other in config.table.values() for name in other.macros}
        hint = did_you_mean(binding.parameter, names) if names else ""
        hint = hint_for(binding.parameter, config) or hint
        return f"nothing uses %{binding.parameter}.{hint}"
    known = gin_internals.configurables()
    name = binding.key[1]
    if binding.scope and name in config.functions:
        return f"nothing is called in scope {binding.scope!r}."
    called = {known[n].name: known[n] for n in config.functions if n in known}
    similar = [
        f"{n}.{binding.parameter}" for n, e in called.items() if binding.parameter in e.parameters
    ]
    never = f"this run never calls {binding.selector}."
    near = did_you_mean(binding.name, similar)
    if "Did you mean" in near:
        return never + near
    # The binding that chose another function with the same result, or all that are called.
    result = annotation(known[name].function, "return")
    is_class = isinstance(result, type) and result.__module__ != "builtins"
    for (_, function, parameter), other in config.table.items() if is_class else ():
        entry = known.get(function)
        if entry and entry.name in called and annotation(entry.function, parameter) is result:
            return f"{never} {other.name} is {other.value!r} ({other.place})."
    return f"{never} It calls {', '.join(sorted(called))}."
