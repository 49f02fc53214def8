"""Which submodules of a module are units, and of which kind: found by tracing it once.

A unit's parameters are gathered for its calls (`distributed.units`). Those that are read outside of
them too, such as tied weights, cannot be.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, jaxprs_in_params

from research_dp.argument_types import path_name
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.sharding import PART, SHARED, STACK, unit_of
from research_dp.distributed.units import Leaves
from research_dp.errors import UsageError
from research_dp.types import FoundUnits, Functions, PyTree

# A class of modules, or a pattern of paths such as 'blocks_*'; or several. (): no units.
Selection = type | str | Sequence[type | str]

# Submodules of more parameters are units by themselves: a collective of less is mostly latency.
_LARGE = 2**22
_AGAIN = "*"  # the end of a mark of what is recomputed


class UnitCalls(Protocol):
    """What happens at the calls of submodules: `distributed.units.Units` or `_Finding`."""

    sets_up: bool  # whether parameters can be read before a call, in `setup`

    def is_unit(self, module: Any, path: str) -> bool:
        """Whether this submodule is a unit."""

    def is_one_call(self, path: str, leaves: Leaves) -> bool:
        """Whether parameters have the shapes of one call, not of the loop around it."""

    def run_unit(self, path: str, leaves: Leaves, function: Callable[[Leaves], Any]) -> Any:
        """`function(parameters for compute)`."""


class _Finding:
    """Calls of the submodules that fit a selection; it marks the parameters that they use."""

    sets_up = True

    def __init__(self, selection: Sequence[type | str]):
        self._selection, self.found = selection, set[str]()

    def is_unit(self, module: Any, path: str) -> bool:
        fits = any(
            _fits(path, one) if isinstance(one, str) else isinstance(module, one)
            for one in self._selection
        )
        if fits and path:
            self.found.add(path)
        return fits and bool(path)

    def is_one_call(self, path: str, leaves: Leaves) -> bool:
        return True

    def run_unit(self, path: str, leaves: Leaves, function: Callable[[Leaves], Any]) -> Any:
        return function({k: checkpoint_name(x, f"{path}:{x.ndim}") for k, x in leaves.items()})


def _fits(path: str, pattern: str) -> bool:
    """Whether a pattern fits a path, name by name: 'blocks_*' is no part of a block."""
    names, patterns = path.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def find_units(functions: Functions, selection: Selection | None, inputs: PyTree) -> FoundUnits:
    """The units of a module, by paths of its parameters, with their kinds.

    Args:
        functions: Of the module.
        selection: None: the direct submodules of more than 4 million parameters, if there are two.
        inputs: Shapes of the inputs of one example.

    Raises:
        UsageError: No submodule fits.
    """
    params, state = jax.eval_shape(functions.init, seed_key(0), inputs)
    leaves = [(path_name(k), x) for k, x in jax.tree_util.tree_leaves_with_path(params)]
    if selection is None:
        sizes: Counter[str] = Counter()
        for path, x in leaves:
            sizes[path.partition("/")[0]] += x.size
        large = [name for name, size in sizes.items() if size > _LARGE]
        selection = large if len(large) > 1 else ()
    several = [selection] if isinstance(selection, type | str) else list(selection)
    if not several:
        return FoundUnits({}, frozenset())
    calls = _Finding(several)

    def uses(train: bool) -> dict[str, list[str | None]]:
        """Of each parameter, in training or in evaluation."""

        def output(params: PyTree, state: PyTree, x: PyTree, keys: jax.Array) -> Any:
            options = {"train": train, "keys": keys if train else None, "units": calls}
            return functions.apply(params, state, x, **options)[0]

        keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), 1))
        program = jax.make_jaxpr(output)(params, state, inputs, keys).jaxpr
        found: dict[str, list[str | None]] = {path: [] for path, _ in leaves}
        others = [None] * (len(program.invars) - len(found))
        for path, mark in _uses(program, [*found, *others]):
            found[path].append(mark)
        return found

    trained, evaluated = uses(True), uses(False)
    if not calls.found:
        names = sorted({path.rpartition("/")[0] for path, _ in leaves} - {""})
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        wanted = ", ".join(x if isinstance(x, str) else x.__name__ for x in several)
        raise UsageError(f"units = {wanted}: no submodule fits. With parameters there are {shown}.")
    own: dict[str, list[Any]] = {unit: [] for unit in sorted(calls.found)}
    for path, x in leaves:
        unit = unit_of(path, own)
        if unit is not None and None in evaluated[path]:
            trained[path].append(None)
        if unit is not None:
            own[unit].append((x.ndim, trained[path]))
    kinds = {unit: _kind(unit, of_unit) for unit, of_unit in own.items()}
    units = {unit: kind for unit, kind in kinds.items() if kind is not None}
    marks = {mark for of_all in trained.values() for mark in of_all if mark}
    again = {mark.rpartition(":")[0] for mark in marks if mark.endswith(_AGAIN)}
    return FoundUnits(units, frozenset(again & units.keys()))


def _uses(
    program: Any, given: Sequence[str | None], again: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Each mark that a parameter gets, by its path; None: it is computed with before it gets any.

    `given` are the paths of the program's arguments that are parameters, with ':' once they have a
    mark. Programs inside are entered, such as a loop's, of which one turn's part may be given.
    Marks in one that is recomputed in the backward pass get `again`.
    """
    known = {x: path for x, path in zip(program.invars, given, strict=True) if path is not None}
    unmarked: list[str] = []
    for equation in program.eqns:
        paths = [None if isinstance(x, Literal) else known.get(x) for x in equation.invars]
        inner = list(jaxprs_in_params(equation.params))
        # A conditional's programs lack its first argument.
        extra = {len(paths) - len(x.invars) for x in inner} or {-1}
        if equation.primitive.name == "name" and paths[0] is not None:
            path = paths[0].rstrip(":")
            yield path, equation.params["name"] + again
            known[equation.outvars[0]] = f"{path}:"
        elif extra <= {0, 1} and equation.primitive.name != "while":
            inside = _AGAIN if equation.primitive.name.startswith("remat") else again
            for x in inner:
                yield from _uses(x, paths[len(paths) - len(x.invars) :], inside)
        else:
            unmarked += [path for path in paths if path is not None]
    outputs = (x for x in program.outvars if not isinstance(x, Literal))
    unmarked += [known[x] for x in outputs if x in known]
    yield from ((path, None) for path in unmarked if not path.endswith(":"))


def _kind(unit: str, leaves: Sequence[tuple[int, Sequence[str | None]]]) -> str | None:
    """The kind of a unit, by the ranks and uses of its parameters; None: it cannot be one."""
    stacked, calls = set(), 0
    for rank, marks in leaves:
        if None in marks:
            return None
        split = [mark.rpartition(":") for mark in marks if mark is not None]
        ranks = Counter(int(rank.rstrip(_AGAIN)) for path, _, rank in split if path == unit)
        if ranks:  # the least is that of the calls within loops, others are of loops around them
            stacked.add(rank - min(ranks))
            calls = max(calls, ranks[min(ranks)])
    kinds = {frozenset({0}): SHARED if calls > 1 else PART, frozenset({1}): STACK}
    return kinds.get(frozenset(stacked))
