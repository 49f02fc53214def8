"""Which submodules of a module are units, and of which kind: found by tracing it once.

Each unit's call is a program of its own in the traced one, which `on_shards` runs. Parameters that
are computed with elsewhere, such as tied weights, belong to no unit.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from research_dp.argument_types import path_name
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.jaxpr import carry_of
from research_dp.distributed.sharding import PART, SHARED, STACK, unit_of
from research_dp.errors import UsageError
from research_dp.types import Functions, PyTree

# A class of modules, or a pattern of paths such as 'blocks_*'; or several. (): no units.
Selection = type | str | Sequence[type | str]
Leaves = Mapping[tuple[str, ...], Any]  # parameters of a submodule, by path within it

# Submodules of more parameters are units by themselves: a collective of less is mostly latency.
_LARGE = 2**22
_UNIT = "unit "  # and a path: the name of the program of a unit's call


class UnitCalls:
    """Makes the calls of submodules that fit a selection programs of their own."""

    def __init__(self, selection: Collection[type | str]):
        self._selection, self.found = selection, set[str]()
        self.idle = set(selection)  # what fits no submodule yet

    def is_unit(self, module: Any, path: str) -> bool:
        fits = {
            one
            for one in self._selection
            if path and (_fits(path, one) if isinstance(one, str) else isinstance(module, one))
        }
        self.idle -= fits
        if fits:
            self.found.add(path)
        return bool(fits)

    def run(self, path: str, function: Callable[[Leaves], Any], leaves: Leaves) -> Any:
        """`function(leaves)`, for the unit at this path."""
        restore: list[Callable[[Any], Any]] = []

        def unit(leaves: Leaves) -> Any:
            arrays, with_arrays = split_arrays(function(leaves))
            restore.append(with_arrays)
            return arrays

        unit.__name__ = _UNIT + path
        arrays = jax.jit(unit)(leaves)
        return restore[-1](arrays)


def split_arrays(tree: PyTree) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The arrays of a tree, and the function that puts others in their places."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]

    def with_arrays(arrays: Sequence[Any]) -> PyTree:
        new = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(treedef, [new.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], with_arrays


def _fits(path: str, pattern: str) -> bool:
    """Whether a pattern fits a path, name by name: 'blocks_*' is no part of a block."""
    names, patterns = path.split("/"), pattern.split("/")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def find_units(
    functions: Functions, selection: Selection | None, variables: PyTree, inputs: PyTree
) -> dict[str, str]:
    """The units of a module, by paths of its parameters, with their kinds.

    Args:
        functions: Of the module.
        selection: None: the direct submodules of more than 4 million parameters, if there are two.
        variables: Shapes of its parameters and its model state.
        inputs: Shapes of the inputs of one example.

    Raises:
        UsageError: No submodule fits one of the selection, or none of those that fit is a unit.
    """
    params, state = variables
    is_default = selection is None
    leaves = [(path_name(k), x) for k, x in jax.tree_util.tree_leaves_with_path(params)]
    if selection is None:
        sizes: Counter[str] = Counter()
        for path, x in leaves:
            sizes[path.partition("/")[0]] += x.size
        large = [name for name, size in sizes.items() if size > _LARGE]
        selection = large if len(large) > 1 else ()
    several = [selection] if isinstance(selection, type | str) else list(selection)
    if not several:
        return {}
    calls = UnitCalls(several)

    def traced(train: bool) -> Any:
        def output(params: PyTree, state: PyTree, x: PyTree, keys: jax.Array) -> Any:
            options = {"train": train, "keys": keys if train else None, "units": calls}
            return split_arrays(functions.apply(params, state, x, **options)[0])[0]

        keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), 1))
        return jax.make_jaxpr(output)(params, state, inputs, keys).jaxpr

    programs = traced(True), traced(False)
    # Large parameters of the module itself are by default among those that fit no submodule.
    idle = [] if is_default and calls.found else [x for x in several if x in calls.idle]
    if idle:
        wanted = ", ".join((x or "''") if isinstance(x, str) else x.__name__ for x in idle)
        names = sorted({path.rpartition("/")[0] for path, _ in leaves} - {""})
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise UsageError(f"units = {wanted}: no submodule fits. With parameters there are {shown}.")
    kinds = dict.fromkeys(sorted(calls.found), PART)
    while True:  # parameters of a unit that is none belong to the unit around it
        trained, evaluated = (_uses_of(leaves, program, kinds) for program in programs)
        found = {}
        for unit in kinds:
            own = [(path, x) for path, x in leaves if unit_of(path, kinds) == unit]
            outside = any(None in evaluated[path] for path, _ in own)
            kind = None if outside else _kind(unit, [(x.ndim, trained[path]) for path, x in own])
            if kind is not None:
                found[unit] = kind
        if not found and not is_default:
            shown = ", ".join(sorted(calls.found))
            raise UsageError(
                f"units: the parameters of {shown} are used outside of their calls too (tied "
                "weights, say), so none is a unit. Name others, or units=()."
            )
        if found.keys() == kinds.keys():
            return found
        kinds = found


Use = tuple[str, int] | None


def _uses_of(
    leaves: Sequence[tuple[str, Any]], program: Any, units: Collection[str]
) -> dict[str, list[Use]]:
    """The uses of each parameter, of which a program has the first arguments."""
    found: dict[str, list[Use]] = {path: [] for path, _ in leaves}
    others = [None] * (len(program.invars) - len(found))
    for path, use in _uses(program, [*found, *others], units, ()):
        found[path].append(use)
    for place in passed_through(program).values():  # the module returns it
        if place < len(leaves):
            found[leaves[place][0]].append(None)
    return found


def _uses(
    program: Any, given: Sequence[str | None], units: Collection[str], within: tuple[str, ...]
) -> Iterator[tuple[str, Use]]:
    """Each use of a parameter, by its path: in a unit's call, with its rank there; None: elsewhere.

    `given` are the paths of the program's arguments that are parameters, and `within` the units
    whose calls it is in. What each turn of a loop uses anew is gathered before the loop: elsewhere.
    """
    known = {x: path for x, path in zip(program.invars, given, strict=True) if path is not None}
    for equation in program.eqns:
        paths = [None if isinstance(x, Literal) else known.get(x) for x in equation.invars]
        inner, unit, shared = program_of(equation), unit_called(equation), 0
        if equation.primitive.name == "scan":
            _, shared = carry_of(equation)
        for place, (path, x) in enumerate(zip(paths, equation.invars, strict=True)):
            if path is not None and unit is not None and _is_used(inner.jaxpr, place):
                yield path, (unit, x.aval.ndim)
            is_elsewhere = path is not None and unit_of(path, units) not in within
            if is_elsewhere and (inner is None or place < shared):
                yield path, None  # type: ignore[misc]
        if inner is not None:
            again = within if unit is None else (*within, unit)
            yield from _uses(inner.jaxpr, [None] * shared + paths[shared:], units, again)
            for out, place in passed_on(equation).items():
                if (path := paths[place]) is not None:
                    known[equation.outvars[out]] = path


def _is_used(program: Any, place: int) -> bool:
    return any(program.invars[place] in equation.invars for equation in program.eqns)


def passed_on(equation: Any) -> dict[int, int]:
    """Which results of an operation are one of its arguments, as NNX returns modules."""
    program = program_of(equation)
    if program is None:
        return {}
    passed = passed_through(program.jaxpr)
    if equation.primitive.name == "scan":  # what each turn is given, stacked again
        constants, last = carry_of(equation)
        carry = last - constants
        return {out: place for out, place in passed.items() if out >= carry and place >= last}
    return passed


def passed_through(program: Any) -> dict[int, int]:
    """Which results of a program are one of its arguments."""
    origins = {x: i for i, x in enumerate(program.invars)}
    for equation in program.eqns:
        for out, place in passed_on(equation).items():
            x = equation.invars[place]
            if not isinstance(x, Literal) and x in origins:
                origins[equation.outvars[out]] = origins[x]
    outs = enumerate(program.outvars)
    return {i: origins[x] for i, x in outs if not isinstance(x, Literal) and x in origins}


def _kind(unit: str, leaves: Sequence[tuple[int, Sequence[Use]]]) -> str | None:
    """The kind of a unit, by the ranks and uses of its parameters; None: it cannot be one."""
    stacked, calls = set(), 0
    for rank, uses in leaves:
        if None in uses:
            return None
        ranks = Counter(use[1] for use in uses if use is not None and use[0] == unit)
        if ranks:  # the least is that of calls within loops, others are of loops around them
            stacked.add(rank - min(ranks))
            calls = max(calls, ranks[min(ranks)])
    kinds = {frozenset({0}): SHARED if calls > 1 else PART, frozenset({1}): STACK}
    return kinds.get(frozenset(stacked))


def unit_called(equation: Any) -> str | None:
    """The path of the unit whose call an operation is."""
    name = equation.params.get("name", "") if equation.primitive.name in ("jit", "pjit") else ""
    return name.removeprefix(_UNIT) if name.startswith(_UNIT) else None


def program_of(equation: Any) -> Any:
    """The program of an operation that may be given shards, with the same arguments; else None."""
    program = equation.params.get("jaxpr")
    name = equation.primitive.name
    if program is None or not (name in ("jit", "pjit", "scan") or name.startswith("remat")):
        return None
    return program if hasattr(program, "jaxpr") else ClosedJaxpr(program, ())
