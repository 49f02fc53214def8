"""From gin files and bindings to a locked configuration, or all mistakes in them at once."""

from __future__ import annotations

import dataclasses
import itertools
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence

import gin

from research_dp.config import coverage_checks as unused
from research_dp.config import gin_internals, name_checks, parser
from research_dp.config.parser import Binding, Import, Mistake, Reference
from research_dp.config.reachability import key, reach, winners
from research_dp.errors import UsageError, message_of

ROOT = "research_dp.training.loop.train"
BUDGET = "planning.plan"  # a run may say what a plan of it is held to


class Mistakes(UsageError):
    """Everything that is wrong with a configuration, a line each.

    Args:
        mistakes: At least one.
    """

    def __init__(self, mistakes: Sequence[Mistake]):
        blamed = mistakes[0].binding if len(mistakes) == 1 else None
        super().__init__("\n".join(map(str, mistakes)), binding=blamed)
        self.mistakes = tuple(mistakes)


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration that was read, checked and bound.

    Attributes:
        used: The bindings that take effect.
        unused: Those that win but take none: of parts that were swapped, or allowed.
        functions: Whole names of the functions that the run calls.
    """

    used: tuple[Binding, ...]
    unused: tuple[Binding, ...]
    functions: tuple[str, ...]

    def origin(self, name: str) -> str | None:
        """Where a parameter is bound, e.g. 'gin/strategies/ddp.gin:12'; None: nowhere.

        Args:
            name: E.g. 'make_mesh.axes'.
        """
        wanted = key(Binding("", *name.rpartition(".")[::2], None, "")) if "." in name else None
        for binding in self.used:
            if binding.name == name or (wanted and key(binding) == wanted):
                return binding.place
        return None


def reset() -> None:
    """Forgets all bindings and unlocks the configuration."""
    gin_internals.reset()


def register_all() -> None:
    """Imports what this package has, so that a binding may name any of it."""
    import research_dp.compat.artifex
    import research_dp.data
    import research_dp.models
    import research_dp.planning.auto
    import research_dp.planning.limits
    import research_dp.strategies
    import research_dp.training.loop  # noqa: F401


def load(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    allow_unused: bool = False,
    whole: bool = False,
) -> Config:
    """Replaces what is bound by files, then bindings, and locks the configuration.

    Args:
        files: Paths, found as `sources.find` says.
        bindings: Text such as 'train.num_steps = 20'.
        imports: Modules that register functions.
        allow_unused: Whether a binding may be without effect.
        whole: Whether this is to be a run, where nothing is missing and nothing there in vain; or
            a part of one.

    Raises:
        Mistakes: Something is wrong; all that is, is told.
    """
    register_all()
    reset()
    statements: list[parser.Statement] = [
        Import(f"import {name}", f"--import={name}") for name in imports
    ]
    statements += parser.read(files, bindings)
    found = [item for item in statements if isinstance(item, Mistake)]
    is_read = not found
    found += _import(item for item in statements if isinstance(item, Import))
    written = [item for item in statements if isinstance(item, Binding)]
    macros = {b.parameter: b for b in winners(written).values() if not b.selector}
    wrong = {
        binding: told for binding in written if (told := name_checks.mistakes(binding, macros))
    }
    found += [*itertools.chain(*wrong.values()), *name_checks.repeated(written)]
    right = [binding for binding in written if binding not in wrong]
    table = winners(right)
    lost = [item for binding in wrong for item in parser.references(binding.value)]
    budget = [Reference(BUDGET, False)] if any(name == BUDGET for _, name, _ in table) else []
    reached = reach(table, ROOT, more=[*lost, *budget])
    if not whole:
        found += unused.unbound(table, [*reached.unbound, *unused.macros_in(table)])
    elif is_read:
        lacks_none = [where for binding in wrong if (where := key(binding))]
        found += unused.mistakes(right, table, reached, ROOT, lacks_none, allow_unused)
    if found:
        raise Mistakes(list(dict.fromkeys(found)))
    _bind(reached.used if whole and not allow_unused else table.values(), reached.defaults)
    idle = tuple(b for b in table.values() if b not in reached.used)
    return Config(tuple(reached.used), idle, tuple(sorted(reached.names)))


def as_mistake(error: BaseException, config: Config | None) -> str | None:
    """What a command tells its user about an error; None if it is no mistake of theirs."""
    known = error if isinstance(error, UsageError) else missing_binding(error)
    if known is None:
        return None
    if isinstance(known, Mistakes):
        return "\n".join(f"error: {mistake}" for mistake in known.mistakes)
    place = config and known.binding and config.origin(known.binding)
    return f"error: {message_of(known)}" + (f"\n  bound in {place}" if place else "")


def missing_binding(error: BaseException) -> UsageError | None:
    """A call's missing parameter, told as the user's mistake; None if the error is another.

    What gin can know was found before. This is about functions that Python code calls.
    """
    found = re.search(r"No values supplied by Gin or caller for arguments: \[(.+?)\]", str(error))
    function = re.search(r"^\s*In call to configurable '(.+?)'", str(error), re.MULTILINE)
    if found and function:
        first = found[1].split(",")[0].strip("' ")
        return UsageError(
            f"{function[1]} needs {found[1]}. Bind e.g. {function[1]}.{first} in a gin file."
        )
    return None


def _import(imports: Iterable[Import]) -> Iterator[Mistake]:
    """Imports modules, and has gin remember them for the dumps."""
    for item in imports:
        try:
            gin.parse_config(item.text)
        except Exception as error:  # a module of the user's own, with whatever is wrong in it
            reason = str(error).split("\n")[0] or type(error).__name__
            if isinstance(error, ImportError):
                yield Mistake(
                    item.place,
                    f"{item.text}: {reason}. It must lie in the working directory, in PYTHONPATH, "
                    "or be installed.",
                )
            else:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = getattr(error, "filename", None) or last.filename
                line = getattr(error, "lineno", None) or last.lineno
                yield Mistake(
                    item.place, f"{item.text}: {type(error).__name__}: {reason} ({where}:{line})."
                )


def _bind(bindings: Iterable[Binding], defaults: Mapping[tuple[str, str], str]) -> None:
    """Hands over to gin what was decided, and locks it.

    A function that is a parameter's default is bound as if a file had done so: gin would call the
    plain function, to which no binding applies.
    """
    lines = [str(binding) for binding in bindings]
    known = gin_internals.configurables()
    lines += [
        f"{known[name].name}.{parameter} = @{known[default].name}"
        for (name, parameter), default in defaults.items()
    ]
    gin.parse_config(lines)
    gin.finalize()
