"""What a strategy sends and holds, against the table of README.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.analysis.comm_lower_bound import min_wire_bytes
from research_dp.distributed.placement import nbytes
from research_dp.strategies import Strategy, TrainSpec, jaxpr_collectives

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        formula: As it stands there.
        params: Whether parameters are 'sharded' or 'whole' on each device.
        optimizer: The same of the optimizer's state.
    """

    formula: str
    params: str
    optimizer: str


# What is sharded is P of the table; the little that stays whole is all-reduced, 2 P f.
TABLE = {
    "single": Row("0", "whole", "whole"),
    "ddp": Row("2 P f", "whole", "whole"),
    "pmap": Row("2 P f", "whole", "whole"),
    "zero1": Row("2 P f", "whole", "sharded"),
    "zero2": Row("(k + 1) P f", "whole", "sharded"),
    "fsdp": Row("3 k P f", "sharded", "sharded"),
    "fsdp_keep": Row("2 P f", "sharded", "sharded"),
    "hsdp": Row("3 k P f inside, 2 P / s across", "sharded", "sharded"),
}
_METRICS = 256  # bytes of sums of metrics that come on top


@dataclasses.dataclass(frozen=True)
class Cost:
    """A cost beside what the table says.

    Attributes:
        what: 'bytes sent a step', ...
        measured: Bytes a device.
        most: What the table allows; None: it has no row for the strategy.
        told: Where the bound is from.
    """

    what: str
    measured: float
    most: float | None
    told: str

    @property
    def is_right(self) -> bool:
        return self.most is None or self.measured <= self.most


def costs(strategy: Strategy, spec: TrainSpec) -> Iterator[Cost]:
    """Costs of a strategy that was built for the user's own optimizer.

    Bytes sent are counted in the traced program of engines that write collectives out; those of
    the compiler are left out.
    """
    row = TABLE.get(strategy.name)
    sent = jaxpr_collectives.of_step(strategy)
    if row is None and not sent:
        yield Cost("bytes sent a step", 0.0, None, "by the compiler; not counted")
    else:
        most, told = None, f"the table has no row {strategy.name!r}"
        if row:
            most, told = _most_sent(strategy, spec), f"{row.formula} of the table"
        if row and most is None:
            told = "a slot is bound in a gin scope of its own; not held to the table"
        yield Cost("bytes sent a step", sum(one.wire_bytes for one in sent), most, told)
    shares = {"whole": 1.0, "sharded": _share(strategy)}
    for what, part in (("params", "params"), ("optimizer", "opt_state")):
        held, total = nbytes(getattr(strategy.abstract_state, part))
        lies = getattr(row, what) if row else None
        most = None if lies is None else shares[lies] * total + _METRICS
        told = f"{lies}, of {total:,} in all" if lies else f"of {total:,} in all"
        name = "parameters" if what == "params" else "optimizer state"
        yield Cost(f"{name} a device", held, most, told)


def _most_sent(strategy: Strategy, spec: TrainSpec) -> float | None:
    """Bytes that a step may send, in the dtypes that are bound; None: they cannot be told."""
    try:
        return min_wire_bytes(strategy, spec) + _sums(strategy, spec)
    except NotImplementedError:
        return None


def _sums(strategy: Strategy, spec: TrainSpec) -> float:
    """Bytes of what travels besides parameters and gradients, at most."""
    state = strategy.abstract_state
    # The norm is all-reduced with a flag for each gradient, 4 bytes twice around the ring.
    norm = 8 * (len(jax.tree.leaves(state.params)) + 1)
    norm *= strategy.config.reduction.logical_shards or 1  # by blocks
    # Statistics over the batch: forward, forward again for the backward pass, and backward.
    statistics = (
        3 * 2 * sum(math.prod(x.shape) * x.dtype.itemsize for x in _arrays(state.model_state))
    )
    return _METRICS + norm + statistics * spec.accumulation_steps


def _arrays(tree: PyTree) -> Iterator[jax.ShapeDtypeStruct]:
    return (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))


def unnamed_dtypes(strategy: Strategy, dtypes: Iterable[str]) -> list[str]:
    """Floating-point dtypes that gradients or parameters travel in, and that nothing names."""
    names = {str(x.dtype) for x in jax.tree.leaves(strategy.abstract_state.params)}
    known = {"float32", *names, *(str(jnp.dtype(x)) for x in dtypes)}
    sent = {one.dtype for one in jaxpr_collectives.of_step(strategy)}
    return sorted(d for d in sent - known if jnp.issubdtype(jnp.dtype(d), jnp.floating))


def _share(strategy: Strategy) -> float:
    """The part of what is sharded where it can be that a device holds."""
    places = jax.tree.leaves(strategy.shardings.slices)
    return sum(p.nbytes_per_device for p in places) / sum(p.nbytes for p in places)
