"""Loads gin files and bindings into a locked configuration, or reports all mistakes in them."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence

import gin

from research_dp.config import binding_checks, gin_internals, parser, run_checks
from research_dp.config.parser import Binding, Import, Key, Mistake, Reference
from research_dp.config.reachability import ROOT, Config, reach
from research_dp.errors import UsageError, first_line, message_of, users_line

BUDGET = "planning.plan"  # limits of a plan, which nothing in a run calls
_MODULES = (
    *("compat.artifex", "data", "deterministic.reduction", "models", "planning.auto"),
    *("planning.limits", "strategies", "training.python_objects", "training.train"),
)
# Modules that gin files of version 0.1 import, kept for one release.
_MOVED_MODULES = {
    "research_dp.training.optim": "research_dp.training.optimizers",
    "research_dp.planning.budget": "research_dp.planning.limits",
}


_OF_ANOTHER_VERSION = (
    "another version of research_dp wrote it. Replace its strategy, e.g. by "
    "--gin_file=strategies/single.gin, or use that version (docs/checkpoints.md)."
)


class Mistakes(UsageError):
    """Everything that is wrong with a configuration, a line each."""

    def __init__(self, mistakes: Sequence[Mistake]):
        blamed = mistakes[0].binding if len(mistakes) == 1 else None
        super().__init__("\n".join(map(str, mistakes)), binding=blamed)
        self.mistakes = tuple(mistakes)


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
    saved: str | None = None,
) -> Config:
    """Replaces the configuration by that of files, then bindings, and locks it.

    Args:
        files: Paths; `parser.find` locates them.
        bindings: Text such as 'train.num_steps = 20'.
        imports: Modules that register functions; they may be in the working directory.
        allow_unused: Whether a binding may be without effect.
        complete: Whether this must be a run, with nothing missing and nothing unused.
        saved: The configuration that a run saved. It comes before `files`, which may replace
            anything of it: bindings in it may be without effect. Those of another version are left
            out, with a note, if nothing that is asked for needs them: see `_left_out`.

    Raises:
        Mistakes: Something is wrong; the message has all of it.
    """
    register_all()
    reset()
    statements: list[parser.Statement] = [
        Import(name, f"import {name}", f"--import={name}") for name in imports
    ]
    statements += parser.read([*([saved] if saved else []), *files], bindings)
    mistakes = [item for item in statements if isinstance(item, Mistake)]
    is_readable = not mistakes
    if failed := list(_import(item for item in statements if isinstance(item, Import))):
        raise Mistakes([*mistakes, *failed])  # others may follow from names that they register
    bindings_read = [item for item in statements if isinstance(item, Binding)]
    macros = {b.key[0]: b for b in bindings_read if not b.selector}
    problems = {b: binding_checks.mistakes(b, macros) for b in bindings_read}
    left_out = _left_out(saved, problems, complete) if saved else []
    notes = [f"left out, as this version has no such thing: {problems[b][0]}" for b in left_out]
    bindings_read = [b for b in bindings_read if b not in left_out]
    problems = {b: problems[b] for b in bindings_read}
    if any(problems.values()):
        in_run = reach(bindings_read)
        problems = {b: binding_checks.with_hint(found, b, in_run) for b, found in problems.items()}
    mistakes += [mistake for one in problems.values() for mistake in one]
    if any(found and _is_of(saved, b) for b, found in problems.items()):
        mistakes.append(Mistake(str(saved), _OF_ANOTHER_VERSION))
    mistakes += run_checks.conflicts(bindings_read)
    valid = [binding for binding in bindings_read if not problems[binding]]
    invalid = [binding for binding in bindings_read if problems[binding]]
    more = [binding.value for binding in invalid]
    if any(binding.key[1] == BUDGET for binding in valid):
        more.append(Reference(BUDGET, False))
    config = reach(valid, more)
    winning = config.table.values()
    if not complete:
        mistakes += run_checks.unbound_macros(config.table, winning).values()
    elif is_readable:
        mistakes += run_checks.mistakes(valid, invalid, config, allow_unused, saved)
    if mistakes:
        raise Mistakes(list(dict.fromkeys(mistakes)))
    # A default that is a registered function is bound too. Otherwise gin would call the plain
    # function, to which no binding applies.
    known = gin_internals.configurables()
    defaults = [
        f"{known[name].name}.{parameter} = @{known[default].name}"
        for (name, parameter), default in config.defaults.items()
    ]
    bound = config.used if complete and not (allow_unused or saved) else winning
    gin.parse_config([*map(str, bound), *defaults])
    gin.finalize()
    config.notes.extend(notes)
    config.notes.extend(binding_checks.replaced_schedules(bindings_read, config))
    return config


def _left_out(
    saved: str, problems: Mapping[Binding, list[Mistake]], complete: bool
) -> list[Binding]:
    """Bindings of a saved configuration that are mistaken, and that nothing asked for needs.

    The strategy of a run is not needed if a later file chose another one. Without `complete` only
    the model is.
    """
    table = {binding.key: binding for binding in problems}
    own = {key for key, binding in table.items() if key[1] == ROOT and _is_of(saved, binding)}
    unneeded = own - {("", ROOT, "model")} if not complete else set[Key]()
    if ("", ROOT, "strategy") not in own:
        unneeded.add(("", ROOT, "strategy"))
    needed = reach(binding for key, binding in table.items() if key not in unneeded).used
    return [b for b, found in problems.items() if found and _is_of(saved, b) and b not in needed]


def _is_of(saved: str | None, binding: Binding) -> bool:
    """Whether the configuration that a run saved has a binding."""
    return saved in [file.name for file in binding.files]


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
    if not names or not function:
        return None
    first = names[1].split(",")[0].strip("' ")
    advice = f"Bind e.g. {function[1]}.{first} in a gin file."
    return UsageError(f"{function[1]} needs {names[1]}. {advice}")


def _import(imports: Iterable[Import]) -> Iterator[Mistake]:
    """Imports modules through gin, which records them in its dumps."""
    if "" not in sys.path:  # the working directory; it may have been removed
        sys.path.insert(0, "")
    for item in imports:
        text, new = item.text, _MOVED_MODULES.get(item.module)
        if new:
            text = f"import {new}"
            warning = f"Warning: {item.place}: {item.module} is now {new}: import that."
            print(warning, file=sys.stderr, flush=True)
        try:
            # Gin's dumps would number the modules of one package: `import a.b as a2`.
            gin.parse_config(re.sub(r"^import ([\w.]+)\.(\w+)$", r"from \1 import \2", text))
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            missing = re.match(r"No module named '([\w.]+)'", str(error))
            if missing and f"{item.module}.".startswith(f"{missing[1]}."):
                advice = "It must be in the working directory, in PYTHONPATH, or be installed."
                yield Mistake(item.place, f"{text}: {first_line(error)}. {advice}")
                continue
            frames = traceback.extract_tb(error.__traceback__)
            place = users_line([error] if isinstance(error, SyntaxError) else frames)
            place = place or f"{frames[-1].filename}:{frames[-1].lineno}"
            problem = f"{type(error).__name__}: {first_line(error)} ({place})."
            yield Mistake(item.place, f"{text}: {problem}")
