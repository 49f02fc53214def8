"""Refuses files in an order in which a later one undoes what an earlier one is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from research_dp.config.name_checks import missing
from research_dp.config.parser import Binding, File, Macro, Mistake, references
from research_dp.config.reachability import Key, key
from research_dp.errors import some_of


def mistakes(
    bindings: Sequence[Binding], table: dict[Key, Binding], root: str
) -> Iterator[Mistake]:
    """Mistakes in the order of files, and complete runs beside each other.

    Args:
        bindings: All valid ones, in order.
        table: Those that win.
        root: Full name of the function that the command calls.
    """
    runs = _complete_runs(bindings, root)
    given = [file for file in runs if file.parent is None]
    if len(given) > 1:
        yield Mistake(
            given[-1].name,
            f"this is a complete run, and so is {given[0].name}. Give one of them, and files that "
            "change parts of it; or write one that includes what you want of both.",
        )
        return
    for file, replaced in _replaced(bindings, table).items():
        changed = {
            binding: later
            for binding, later in replaced.items()
            if repr(binding.value) != repr(table[key(binding)].value)
        }
        undone = {
            binding: later
            for binding, later in changed.items()
            if later in runs or _undoes_macro(binding, file, later, bindings)
        }
        if changed and len(replaced) == sum(file in b.files for b in bindings):
            yield _wrong_order(file, changed, "every binding of it", "Leave it out, or give")
        elif undone:
            yield _wrong_order(file, undone, some_of([str(b) for b in undone], 3), "Give")


def conflicts(bindings: Sequence[Binding]) -> Iterator[Mistake]:
    """Parameters to which one file gives two values, the second perhaps by an include."""
    first: dict[tuple[File, Key], Binding] = {}
    for binding in bindings:
        where = key(binding)
        for file in binding.files:
            before = first.get((file, where))
            if before is None or repr(before.value) == repr(binding.value):
                continue
            if file is binding.file:
                yield Mistake(
                    binding.place,
                    f"{binding}: {before.place} in the same file says {before.value!r}. Leave one "
                    "out.",
                )
            else:
                yield Mistake(
                    before.place,
                    f"{before}: {binding.place}, which is included below it, replaces it with "
                    f"{binding.value!r}. Move the include above it, or leave one out.",
                )
        if binding.file:
            first.setdefault((binding.file, where), binding)


def _replaced(
    bindings: Sequence[Binding], table: dict[Key, Binding]
) -> dict[File, dict[Binding, File]]:
    """File -> its bindings that a later file beside it replaces, each with that file.

    Files are beside each other on the command line, or if the same file includes them.
    """
    replaced: dict[File, dict[Binding, File]] = {}
    for binding in bindings:
        winner = table[key(binding)]
        for file, later in zip(binding.files, winner.files, strict=False):
            if file is not later:
                replaced.setdefault(file, {})[binding] = later
                break
    return replaced


def _undoes_macro(binding: Binding, file: File, later: File, bindings: Sequence[Binding]) -> bool:
    """Whether a file sets a macro for others, and a later one sets and uses it itself."""

    def uses(one: File) -> bool:
        inside = (b for b in bindings if one in b.files)
        return any(Macro(binding.name) in references(b.value) for b in inside)

    return not binding.selector and uses(later) and not uses(file)


def _wrong_order(file: File, replaced: dict[Binding, File], what: str, advice: str) -> Mistake:
    later = [other.name for other in dict.fromkeys(replaced.values())]
    if file.parent:
        order = ", then ".join(f"include {name!r}" for name in (*later, file.name))
    else:
        order = " ".join(f"--gin_file={name}" for name in (*later, file.name))
    return Mistake(
        file.name,
        f"{' and '.join(later)} replaces {what}, since the last file wins. {advice} {order} in "
        "this order.",
    )


def _complete_runs(bindings: Sequence[Binding], root: str) -> list[File]:
    """The files that bind, with what they include, all that the root requires."""
    bound: dict[File, set[str]] = {}
    for binding in bindings:
        _, function, parameter = key(binding)
        if function == root:
            for file in binding.files:
                bound.setdefault(file, set()).add(parameter)
    return [file for file, names in bound.items() if not missing(root, names, evaluated=False)]
