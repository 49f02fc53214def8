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
from jax.extend.core import ClosedJaxpr, Literal

from research_dp.argument_types import path_name
from research_dp.distributed.batch_examples import seed_key
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

    def is_unit(self, module: Any, path: str) -> bool:
        fits = path and any(
            _fits(path, one) if isinstance(one, str) else isinstance(module, one)
            for one in self._selection
        )
        if fits:
            self.found.add(path)
        return bool(fits)

    def run(self, path: str, function: Callable[[Leaves], Any], leaves: Leaves) -> Any:
        """`function(leaves)`, for the unit at this path."""

        def unit(leaves: Leaves) -> Any:
            return function(leaves)

        unit.__name__ = _UNIT + path
        return jax.jit(unit)(leaves)


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
        UsageError: No submodule fits.
    """
    params, state = variables
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

    def uses(train: bool) -> dict[str, list[tuple[str, int] | None]]:
        """Of each parameter, in training or in evaluation."""

        def output(params: PyTree, state: PyTree, x: PyTree, keys: jax.Array) -> Any:
            options = {"train": train, "keys": keys if train else None, "units": calls}
            return functions.apply(params, state, x, **options)[0]

        keys = jax.eval_shape(lambda: jax.random.split(seed_key(0), 1))
        program = jax.make_jaxpr(output)(params, state, inputs, keys).jaxpr
        found: dict[str, list[tuple[str, int] | None]] = {path: [] for path, _ in leaves}
        others = [None] * (len(program.invars) - len(found))
        for path, use in _uses(program, [*found, *others], ()):
            found[path].append(use)
        return found

    trained, evaluated = uses(True), uses(False)
    if not calls.found:
        names = sorted({path.rpartition("/")[0] for path, _ in leaves} - {""})
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        wanted = ", ".join(x if isinstance(x, str) else x.__name__ for x in several)
        raise UsageError(f"units = {wanted}: no submodule fits. With parameters there are {shown}.")
    kinds = {}
    for unit in sorted(calls.found):
        own = [(path, x) for path, x in leaves if unit_of(path, calls.found) == unit]
        outside = any(None in evaluated[path] for path, _ in own)
        kind = None if outside else _kind(unit, [(x.ndim, trained[path]) for path, x in own])
        if kind is not None:
            kinds[unit] = kind
    return kinds


def _uses(
    program: Any, given: Sequence[str | None], within: tuple[str, ...]
) -> Iterator[tuple[str, tuple[str, int] | None]]:
    """Each use of a parameter, by its path: in a unit's call, with its rank there; None: elsewhere.

    `given` are the paths of the program's arguments that are parameters, and `within` the units
    whose calls it is in.
    """
    known = {x: path for x, path in zip(program.invars, given, strict=True) if path is not None}
    for equation in program.eqns:
        paths = [None if isinstance(x, Literal) else known.get(x) for x in equation.invars]
        named = [
            (path, x.aval.ndim) for path, x in zip(paths, equation.invars, strict=True) if path
        ]
        inner, unit = program_of(equation), unit_called(equation)
        if unit is not None:
            yield from ((path, (unit, rank)) for path, rank in named)
        if inner is not None:
            yield from _uses(inner.jaxpr, paths, within if unit is None else (*within, unit))
            for out, place in passed_on(equation).items():
                if (path := paths[place]) is not None:
                    known[equation.outvars[out]] = path
        elif not within:
            yield from ((path, None) for path, _ in named)


def passed_on(equation: Any) -> dict[int, int]:
    """Which results of an operation are one of its arguments, as NNX returns modules."""
    program, params = program_of(equation), equation.params
    if program is None:
        return {}
    origins = {x: i for i, x in enumerate(program.jaxpr.invars)}
    for inner in program.jaxpr.eqns:
        for out, place in passed_on(inner).items():
            x = inner.invars[place]
            if not isinstance(x, Literal) and x in origins:
                origins[inner.outvars[out]] = origins[x]
    outs = enumerate(program.jaxpr.outvars)
    passed = {i: origins[x] for i, x in outs if not isinstance(x, Literal) and x in origins}
    if equation.primitive.name == "scan":  # what each turn is given, stacked again
        carry = params["num_carry"]
        first = params["num_consts"] + carry
        return {out: place for out, place in passed.items() if out >= carry and place >= first}
    return passed


def _kind(unit: str, leaves: Sequence[tuple[int, Sequence[tuple[str, int] | None]]]) -> str | None:
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
