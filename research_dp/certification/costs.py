"""What a strategy sends and stores, compared with the table of strategies."""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from research_dp.analysis.comm_lower_bound import min_wire_bytes
from research_dp.argument_types import is_floating_dtype
from research_dp.distributed.optimizer import map_state
from research_dp.distributed.placement import nbytes
from research_dp.strategies import Strategy, TrainSpec, jaxpr_collectives
from research_dp.strategies.frozen import with_frozen

_COSTS = importlib.resources.files("research_dp.certification") / "costs.toml"
# A strategy's 'wire_bytes', a formula; how a device stores 'params' and 'opt_state'. P are the
# sharded parameters; the few that stay replicated are all-reduced, 2 P f.
TABLE = tomllib.loads(_COSTS.read_text())
_METRICS = 256  # bytes that metrics may add


class Cost(NamedTuple):
    """A cost and its limit, in bytes of each device."""

    name: str
    measured: float
    limit: float | None  # None: the table has none
    source: str  # of the limit

    @property
    def passed(self) -> bool | None:
        return None if self.limit is None else self.measured <= self.limit

    @property
    def message(self) -> str:
        limit = "" if self.limit is None else f" of at most {self.limit:,.0f}"
        return f"{self.measured:,.0f}{limit} ({self.source})"


def costs(strategy: Strategy, spec: TrainSpec) -> Iterator[Cost]:
    """The costs of a strategy that was built for the user's own optimizer.

    Bytes sent are counted in the traced program, so those of collectives that the compiler inserts
    are left out.
    """
    sent, limit = jaxpr_collectives.of_step(strategy), None
    row = TABLE.get(strategy.name, {})
    source = f"the table has no row {strategy.name!r}" if sent else "by the compiler; not counted"
    if row:
        try:
            limit = min_wire_bytes(strategy, spec) + _other_bytes(strategy, spec)
            source = f"{row['wire_bytes']} of the table"
        except NotImplementedError:
            source = "a slot is bound in a gin scope of its own; not compared with the table"
    own, others = (sum(x.wire_bytes for x in sent if x.of_model is of) for of in (True, False))
    yield Cost("bytes sent a step", others, limit, source)
    if own:
        yield Cost("bytes of the model's own", own, None, "gather_examples, global_mean")
    if branches := sum(x.wire_bytes for x in sent if x.in_branch):
        yield Cost("bytes in branches", branches, None, "of lax.cond; counted as if taken")
    shardings = strategy.shardings
    for name, part, tree in (
        ("parameters", "params", shardings.params),
        ("optimizer state", "opt_state", shardings.slices),
    ):
        (measured, total), limit = strategy.nbytes(part), None
        leaves = jax.tree.leaves(tree)
        shard = sum(p.nbytes_per_device for p in leaves) / sum(p.nbytes for p in leaves)
        sharding = row.get(part)
        if sharding is not None:
            other = _of_other_shapes(strategy) if part == "opt_state" else 0
            limit = (shard if sharding == "sharded" else 1.0) * (total - other) + other + _METRICS
        source = f"{sharding}, of {total:,} in all" if sharding else f"of {total:,} in all"
        yield Cost(f"{name} a device", measured, limit, source)


def _of_other_shapes(strategy: Strategy) -> int:
    """Bytes of optimizer state that has another shape than its parameter, so is replicated."""
    other = map_state(
        lambda x, p: None if x.shape == p.shape else x,
        strategy.logical_state.opt_state,
        strategy.shardings.slices,
    )
    return nbytes(other)[1]


def _other_bytes(strategy: Strategy, spec: TrainSpec) -> float:
    """At most so many bytes are sent for anything but parameters and gradients."""
    state = strategy.abstract_state
    # The norm is all-reduced with a flag for each gradient, 4 bytes twice around the ring.
    norm = 8 * (len(jax.tree.leaves(state.params)) + 1)
    norm *= strategy.config.reduction.logical_shards or 1  # one norm for each logical shard
    _, batch_statistics = with_frozen(state.params, state.model_state)
    floating = [x for x in jax.tree.leaves(batch_statistics) if is_floating_dtype(x.dtype)]
    # Batch statistics: forward, forward again for the backward pass, and backward.
    statistics = 3 * 2 * nbytes(floating)[1]
    return _METRICS + norm + statistics * spec.accumulation_steps


def unnamed_dtypes(strategy: Strategy, dtypes: Iterable[str]) -> list[str]:
    """Floating-point dtypes on the wire that neither a parameter has nor `dtypes` names."""
    params = {str(x.dtype) for x in jax.tree.leaves(strategy.abstract_state.params)}
    known = {"float32", *params, *(str(jnp.dtype(x)) for x in dtypes)}
    sent = {one.dtype for one in jaxpr_collectives.of_step(strategy)}
    return sorted(d for d in sent - known if is_floating_dtype(d))
