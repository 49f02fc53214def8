"""Loads gin files and bindings into a locked configuration, or reports all mistakes in them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence

import gin

from research_dp.config import coverage_checks, file_order, gin_internals, name_checks, parser
from research_dp.config.parser import Binding, Import, Mistake, Reference
from research_dp.config.reachability import Key, Reached, effective, key, reach
from research_dp.errors import UsageError, message_of

ROOT = "research_dp.training.loop.train"
BUDGET = "planning.plan"  # limits of a plan, which nothing in a run calls
_MODULES = (
    *("compat.artifex", "data", "models", "planning.auto", "planning.limits", "strategies"),
    "training.loop",
)
# Modules that gin files of version 0.1 import, kept for one release.
_MOVED_MODULES = {
    "research_dp.training.optim": "research_dp.training.optimizers",
    "research_dp.planning.budget": "research_dp.planning.limits",
}


class Mistakes(UsageError):
    """Everything that is wrong with a configuration, a line each."""

    def __init__(self, mistakes: Sequence[Mistake]):
        blamed = mistakes[0].binding if len(mistakes) == 1 else None
        super().__init__("\n".join(map(str, mistakes)), binding=blamed)
        self.mistakes = tuple(mistakes)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration that was read, checked and bound.

    Attributes:
        used: The bindings that take effect.
        unused: Those that win but take none, since a component was replaced or a file offers more.
        functions: Full names of the functions that the run calls.
    """

    used: tuple[Binding, ...]
    unused: tuple[Binding, ...]
    functions: tuple[str, ...]

    def origin(self, name: str) -> str | None:
        """Where a parameter is bound, e.g. 'gin/strategies/ddp.gin:12'; None: nowhere.

        Args:
            name: E.g. 'make_mesh.axes'.
        """
        selector, _, parameter = name.rpartition(".")
        where = key(Binding("", selector, parameter, None, ""))
        return next((binding.place for binding in self.used if key(binding) == where), None)


def reset() -> None:
    """Removes all bindings and unlocks the configuration."""
    gin.clear_config()


def register_all() -> None:
    """Imports this package's modules, so that a binding may name any of their functions."""
    for name in _MODULES:
        importlib.import_module(f"research_dp.{name}")


def load(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    allow_unused: bool = False,
    complete: bool = False,
) -> Config:
    """Replaces the configuration by that of files, then bindings, and locks it.

    Args:
        files: Paths; `parser.find` locates them.
        bindings: Text such as 'train.num_steps = 20'.
        imports: Modules that register functions.
        allow_unused: Whether a binding may be without effect.
        complete: Whether this must be a run, with nothing missing and nothing unused.

    Raises:
        Mistakes: Something is wrong; the message has all of it.
    """
    register_all()
    reset()
    statements: list[parser.Statement] = [
        Import(name, f"import {name}", f"--import={name}") for name in imports
    ]
    statements += parser.read(files, bindings)
    mistakes = [item for item in statements if isinstance(item, Mistake)]
    is_readable = not mistakes
    mistakes += _import(item for item in statements if isinstance(item, Import))
    all_bindings = [item for item in statements if isinstance(item, Binding)]
    macros = {b.parameter: b for b in effective(all_bindings).values() if not b.selector}
    invalid = {b: found for b in all_bindings if (found := name_checks.mistakes(b, macros))}
    mistakes += itertools.chain(*invalid.values())
    mistakes += file_order.conflicts(all_bindings)
    valid = [binding for binding in all_bindings if binding not in invalid]
    table = effective(valid)
    more = [item for binding in invalid for item in parser.references(binding.value)]
    if any(name == BUDGET for _, name, _ in table):
        more.append(Reference(BUDGET, False))
    reached = reach(table, ROOT, more=more)
    if not complete:
        mistakes += [m for _, m in coverage_checks.unbound_macros(table, table.values())]
    elif is_readable:
        mistakes += _run_mistakes(valid, invalid, table, reached, allow_unused)
    if mistakes:
        raise Mistakes(list(dict.fromkeys(mistakes)))
    _bind(reached.used if complete and not allow_unused else table.values(), reached.defaults)
    unused = tuple(b for b in table.values() if b not in reached.used)
    return Config(tuple(reached.used), unused, tuple(sorted(reached.names)))


def as_mistake(error: BaseException, config: Config | None) -> str | None:
    """What a command prints about a user's mistake; None if the error is another."""
    mistake = error if isinstance(error, UsageError) else missing_binding(error)
    if mistake is None:
        return None
    if isinstance(mistake, Mistakes):
        return "\n".join(f"error: {line}" for line in mistake.mistakes)
    place = config and mistake.binding and config.origin(mistake.binding)
    return f"error: {message_of(mistake)}" + (f"\n  bound in {place}" if place else "")


def missing_binding(error: BaseException) -> UsageError | None:
    """The mistake behind gin's error about a call's missing parameter; None for other errors.

    `load` checks what gin files refer to. This is about functions that Python code calls.
    """
    names = re.search(r"No values supplied by Gin or caller for arguments: \[(.+?)\]", str(error))
    function = re.search(r"^\s*In call to configurable '(.+?)'", str(error), re.MULTILINE)
    if names and function:
        first = names[1].split(",")[0].strip("' ")
        return UsageError(
            f"{function[1]} needs {names[1]}. Bind e.g. {function[1]}.{first} in a gin file."
        )
    return None


def _run_mistakes(
    valid: Sequence[Binding],
    invalid: Iterable[Binding],
    table: dict[Key, Binding],
    reached: Reached,
    allow_unused: bool,
) -> Iterator[Mistake]:
    yield from (mistake for _, mistake in coverage_checks.unbound_macros(table, reached.used))
    yield from coverage_checks.missing_parameters([*table, *map(key, invalid)], reached)
    if not allow_unused:
        wrong_order = list(file_order.mistakes(valid, table, ROOT))
        yield from wrong_order
        if not wrong_order:
            yield from coverage_checks.left_over(valid, table, reached, ROOT)
        yield from coverage_checks.unused(valid, table, reached, ROOT)


def _import(imports: Iterable[Import]) -> Iterator[Mistake]:
    """Imports modules through gin, which records them in its dumps."""
    for item in imports:
        text = item.text
        if item.module in _MOVED_MODULES:
            new = _MOVED_MODULES[item.module]
            text = f"import {new}"
            warning = f"Warning: {item.place}: {item.module} is now {new}: import that."
            print(warning, file=sys.stderr, flush=True)
        try:
            gin.parse_config(text)
        except Exception as error:  # a user's module may raise anything
            reason = str(error).split("\n")[0] or type(error).__name__
            if isinstance(error, ImportError):
                advice = "It must be in the working directory, in PYTHONPATH, or be installed."
                yield Mistake(item.place, f"{text}: {reason}. {advice}")
            else:
                last = traceback.extract_tb(error.__traceback__)[-1]
                file = getattr(error, "filename", None) or last.filename
                line = getattr(error, "lineno", None) or last.lineno
                message = f"{text}: {type(error).__name__}: {reason} ({file}:{line})."
                yield Mistake(item.place, message)


def _bind(bindings: Iterable[Binding], defaults: Mapping[tuple[str, str], str]) -> None:
    """Passes the bindings to gin, and locks it.

    A default that is a registered function is bound too. Otherwise gin would call the plain
    function, to which no binding applies.
    """
    lines = [str(binding) for binding in bindings]
    known = gin_internals.configurables()
    lines += [
        f"{known[name].name}.{parameter} = @{known[default].name}"
        for (name, parameter), default in defaults.items()
    ]
    gin.parse_config(lines)
    gin.finalize()
