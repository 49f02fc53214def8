"""Counts the collectives of a traced program and the bytes that they put on the wire.

Read from the jaxpr, before any compiler changed a dtype or merged two collectives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from research_dp.distributed.batch_examples import SCOPE
from research_dp.distributed.collectives import share_of_steps
from research_dp.distributed.jaxpr import used_part, walk
from research_dp.strategies import Strategy

_KINDS = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    **{"reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "permute"},
}
# Primitives that name mesh axes and communicate nothing.
_SILENT = {"axis_index", "pvary", "pcast", "preduced"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program, over some mesh axes."""

    kind: str  # a value of `_KINDS`
    axes: tuple[str, ...]
    devices: int  # that take part
    dtype: str  # on the wire
    nbytes: int  # of the full array
    times: int  # that it runs: loops are multiplied out, branches counted as if they were taken
    of_model: bool = False  # of `gather_examples` or `global_mean`, not of the strategy
    in_branch: bool = False  # of `lax.cond`, which a step may not take
    share: float = 1.0  # of steps in which it runs: see `collectives.every`

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends over a ring in a step, all times together, on average."""
        if self.kind == "permute":
            return float(self.nbytes * self.times) * self.share
        passes = 2 if self.kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
        sent = passes * self.nbytes * (self.devices - 1) / self.devices * self.times
        return sent * self.share


def of_step(strategy: Strategy) -> list[Collective]:
    """The collectives of a strategy's training step; with their share those of its outer steps."""
    return [
        dataclasses.replace(collective, share=collective.share * share)
        for program, arguments, share in strategy.programs
        for collective in collectives(program, *arguments)
    ]


def collectives(function: Callable[..., Any], *args: Any) -> list[Collective]:
    """The collectives of a function, traced for these arrays or `jax.ShapeDtypeStruct`s.

    Raises NotImplementedError for a collective that this reader does not know, or one in a loop
    whose length the program does not say.
    """
    # A jitted function is traced as it is: with compiler options it cannot be part of another.
    trace = getattr(function, "trace", jax.jit(function).trace)
    jaxpr = trace(*args).jaxpr.jaxpr
    return [collective for operation in walk(used_part(jaxpr)) for collective in _read(*operation)]


def _read(equation: Any, callers: tuple[Any, ...]) -> Iterator[Collective]:
    """The collectives of one operation, one for each of its arrays."""
    name, params = equation.primitive.name, equation.params
    maps = [caller.params["mesh"] for caller in callers if caller.primitive.name == "shard_map"]
    sizes = dict(maps[-1].shape) if maps else {}
    named = params.get("axes", params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    axes = tuple(axis for axis in sizes if axis in named)
    kind = _KINDS.get(name)
    if kind is None:
        if axes and name not in _SILENT:
            raise NotImplementedError(f"collective {name!r} over {set(axes)} is not counted")
        return
    if any(caller.primitive.name == "while" for caller in callers):
        raise NotImplementedError("collectives in a loop of unknown length: use scan")
    groups = params.get("axis_index_groups")
    devices = len(groups[0]) if groups else math.prod(sizes[axis] for axis in axes)
    times = math.prod(c.params["length"] for c in callers if c.primitive.name == "scan")
    # The full array goes into a reduction, and comes out of a gather.
    for array in equation.outvars if kind == "all-gather" else equation.invars:
        aval = array.aval
        nbytes = aval.size * aval.dtype.itemsize
        path = "/".join(str(e.source_info.name_stack) for e in (*callers, equation))
        branches = sum(caller.primitive.name == "cond" for caller in callers)
        share, in_branch = share_of_steps(path, branches)
        sent = kind, axes, devices, str(aval.dtype), nbytes, times
        yield Collective(*sent, of_model=SCOPE in path, in_branch=in_branch, share=share)
