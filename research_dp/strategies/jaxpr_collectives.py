"""Counts the collectives of a traced program and the bytes that they put on the wire.

Read from the jaxpr, before any compiler changed a dtype or merged two collectives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from research_dp.strategies import Strategy

# Primitive -> (kind, wire bytes a device of a ring as a multiple of (n - 1) / n of the full array).
_KINDS = {
    "psum": ("all-reduce", 2),
    "psum_invariant": ("all-reduce", 2),
    "pmax": ("all-reduce", 2),
    "pmin": ("all-reduce", 2),
    "reduce_scatter": ("reduce-scatter", 1),
    "all_gather": ("all-gather", 1),
    "all_gather_invariant": ("all-gather", 1),
    "all_to_all": ("all-to-all", 1),
    "ppermute": ("permute", 1),
}
# Primitives that name mesh axes and send nothing.
_SILENT = {"axis_index", "pvary", "pcast", "preduced"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
        kind: 'all-reduce', 'reduce-scatter', 'all-gather', 'all-to-all' or 'permute'.
        axes: Mesh axes.
        devices: Number of devices that take part.
        dtype: Element type on the wire.
        nbytes: Bytes of the full array.
        times: How often it runs (loops are multiplied out).
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    dtype: str
    nbytes: int
    times: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends over a ring, all times together."""
        if self.kind == "permute":
            return float(self.nbytes * self.times)
        factor = next(f for kind, f in _KINDS.values() if kind == self.kind)
        return factor * self.nbytes * (self.devices - 1) / self.devices * self.times


def of_step(strategy: Strategy) -> list[Collective]:
    """The collectives of a strategy's training step."""
    return collectives(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)


def collectives(function: Callable[..., Any], *args: Any) -> list[Collective]:
    """The collectives of a function, traced for these arguments.

    Args:
        function: E.g. `Strategy.train_step`.
        *args: Arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        NotImplementedError: It has a collective that this reader does not know, or one in a loop
            whose length the program does not say.
    """
    # A jitted function is traced as it is: with compiler options it cannot be part of another.
    trace = getattr(function, "trace", jax.jit(function).trace)
    jaxpr = trace(*args).jaxpr.jaxpr
    # Every compiler drops what no result needs, such as the primal of a gradient that is wanted
    # alone.
    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return list(_walk(used, {}, 1))


def _walk(jaxpr: Any, sizes: Mapping[str, int], times: int) -> Iterator[Collective]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in _KINDS:
            yield from _read(equation, sizes, times)
            continue
        if name not in _SILENT and _axes(equation) & sizes.keys():
            raise NotImplementedError(f"collective {name!r} over {_axes(equation)} is not counted")
        inner_sizes = dict(params["mesh"].shape) if name == "shard_map" else sizes
        inner_times = times * (params["length"] if name == "scan" else 1)
        for inner in jaxprs_in_params(params):
            found = list(_walk(inner, inner_sizes, inner_times))
            if found and name == "while":
                raise NotImplementedError("collectives in a loop of unknown length: use scan")
            yield from found


def _axes(equation: Any) -> set[str]:
    """The mesh axes that an operation names."""
    named = equation.params.get("axes", equation.params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    return {axis for axis in named if isinstance(axis, str)}


def _read(equation: Any, sizes: Mapping[str, int], times: int) -> Iterator[Collective]:
    axes = tuple(axis for axis in sizes if axis in _axes(equation))
    groups = equation.params.get("axis_index_groups")
    devices = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    kind, _ = _KINDS[equation.primitive.name]
    # The full array goes into a reduction, and comes out of a gather.
    arrays = equation.outvars if kind == "all-gather" else equation.invars
    for array in arrays:
        aval = array.aval
        nbytes = math.prod(aval.shape) * aval.dtype.itemsize
        yield Collective(kind, axes, devices, str(aval.dtype), nbytes, times)
