"""The least bytes that a strategy must communicate: its table's, parameter by parameter.

Nothing is read from the step that is judged, but from its slots' bindings and the model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.distributed import matrices
from research_dp.distributed.codecs import Codec
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS, batch_devices
from research_dp.distributed.optimizer import apply_in_step
from research_dp.distributed.sharding import TABLE, LeafSharding, unit_of
from research_dp.distributed.units import Units, take_rows
from research_dp.strategies import Strategy, TrainSpec, slots
from research_dp.strategies.jaxpr_collectives import collectives
from research_dp.strategies.strategy import example_keys

PyTree = Any

_INDEX_BYTES = 4  # rows are looked up by int32
# A unit is used in full, gathered to look up rows, or its rows are exchanged.
_USES = ("full", "lookup", "row")


def min_wire_bytes(strategy: Strategy, spec: TrainSpec, *, widest: int = 8) -> float:
    """Bytes that a device sends in a step over rings, by the table of strategies.

    For a table that is sharded by feature, the rows that are looked up count where they are fewer
    than its own. Reductions of metrics and norms come on top. Elements take the bytes of the dtypes
    that are bound, or `widest` if that is less; or those of a slot's own `wire_bytes`.

    Raises:
        NotImplementedError: A slot is a gin reference in a scope, whose bindings have no public
            name.
    """
    config, mesh = strategy.config, strategy.mesh
    shards, replicas = mesh.shape[FSDP_AXIS], mesh.shape[DATA_AXIS]
    replicas = 1 if config.outer else replicas  # that a step averages over
    # How many passes gather sharded parameters and scatter their gradients; how often gradients are
    # synchronised; whether a backward pass gathers again; whether each unit is gathered where it is
    # used, or everything beforehand.
    passes, syncs, regather, per_use = 1, 1, False, False
    if config.reduction.logical_shards is None:  # else one sum over all logical shards
        micro_batches, regather = spec.accumulation_steps, config.reshard_after_forward
        passes = micro_batches if regather else 1
        syncs = micro_batches if config.sync_each == "micro_batch" else 1
        per_use = bool(spec.model.units) and (regather or micro_batches == 1)
    # `sync` takes sums of micro-batches in the dtype they were accumulated in; a gradient that is
    # scattered once for all of them is in the parameter's dtype again.
    scattered_once = config.gather is not None and not config.reshard_after_forward
    accumulates = config.sync_each == "step" and spec.accumulation_steps > 1
    accumulated = config.accumulation_dtype if accumulates and not scattered_once else None
    dtypes = [slots.bound_value(config.gather, n) for n in ("gather_dtype", "grad_scatter_dtype")]
    dtypes.append(slots.bound_value(config.sync, "dtype") or accumulated)
    uses, total = _unit_uses(strategy, spec), _outer_bytes(strategy) + _update_bytes(strategy)
    params, slices, frozen = map(jax.tree.leaves, strategy.shardings)
    for param, update in zip(params + frozen, slices + frozen, strict=True):
        size, width = math.prod(update.split_shape), min(widest, param.dtype.itemsize)
        gather, scatter, sync = (
            width if dtype is None else min(widest, jnp.dtype(dtype).itemsize) for dtype in dtypes
        )
        offered = {"devices": dict(mesh.shape), "stacked": param.stacked, "sharding": param}
        of_row, of_row_grad = gather, scatter  # not encoded
        gather = _own(config.gather, param, offered) or gather
        own = _own(config.sync, param, offered)
        sync = across = last = own or sync
        codecs = config.compression
        if codecs and codecs.takes(param):
            gather = _rate(codecs.gather, gather)
            scatter, sync = (_rate(codecs.sync, x) for x in (scatter, sync))
            of_groups = codecs.across if replicas > 1 else None
            across = _rate(of_groups, sync)
            last = _rate(of_groups or codecs.sync, last)  # the mean is encoded once more, gathered
            width = _rate(codecs.update, width)
        if param.frozen:
            scatter = sync = across = last = of_row_grad = 0
        reduced = size * (across + last)  # a ring all-reduce sends everything twice
        if param.dim is not None:
            unit = _unit(param.path, spec.model.units)
            full, lookups, rows = (uses[unit, how] for how in _USES) if per_use else (1, 0, 0)
            # A lookup gathers once: its gradient does not need the table.
            gathers = full * (2 if regather else 1) + lookups
            communicated = size * (gathers * gather + (full + lookups) * scatter)
            row = param.shape[-1] * (of_row + of_row_grad) + shards * _INDEX_BYTES
            total += passes * _ring(communicated + rows * row, shards)
            if update.axis_size > param.axis_size:  # scattered, and gathered once it is updated
                reduced = size * (syncs * across + width) / syncs
            total += syncs * _ring(reduced / shards, replicas)
        elif update.dim is not None:
            total += _ring(size * (syncs * (2 * own or sync) + width), shards)
            total += syncs * _ring(reduced / shards, replicas)
        else:
            total += syncs * (_ring(size * sync, shards) + _ring(size * across / shards, replicas))
            total += syncs * _ring(size * last, shards * replicas)
    return total


def _rate(codec: Codec | None, otherwise: float) -> float:
    """Bytes an element, scales included."""
    return codec.nbytes(codec.block) / codec.block if codec else otherwise


def _own(slot: Any, param: LeafSharding, offered: Mapping[str, Any]) -> float:
    """Bytes an element by a slot's own `wire_bytes`; 0: it has none."""
    formula, shape = slots.attribute(slot, "wire_bytes"), param.local_shape
    if formula is None:
        return 0.0
    options = slots.options_of(formula, offered)
    return formula(shape, param.dtype, **options) / max(1, math.prod(shape))


def narrow_file(strategy: Strategy) -> str | None:
    """The shipped file that binds dtypes of two bytes; None: none may, or the compiler does."""
    config, is_chosen = strategy.config, not strategy.batch_axes
    is_exact = config.reduction.logical_shards is not None
    if is_exact or (config.gather is None and is_chosen):
        return None
    return "precision/bf16_collectives.gin"


def _outer_bytes(strategy: Strategy) -> float:
    """Bytes that replicas send when they meet, on average over steps."""
    outer, replicas = strategy.config.outer, strategy.mesh.shape[DATA_AXIS]
    if outer is None:
        return 0.0
    formula = getattr(outer, "wire_bytes", lambda shape, dtype: math.prod(shape) * dtype.itemsize)
    params = jax.tree.leaves(strategy.shardings.params)
    return _ring(2 * sum(formula(p.local_shape, p.dtype) for p in params), replicas) / outer.every


def _update_bytes(strategy: Strategy) -> float:
    """Bytes that an optimizer sends of its own accord (`on_matrices`), counted in its update."""
    slices, state = strategy.shardings.slices, strategy.logical_state
    if strategy.config.outer is not None:  # of one replica
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.opt_state)
        state = state._replace(opt_state=one)
    if strategy.config.reduction.logical_shards is not None:
        return 0.0
    update = functools.partial(apply_in_step, strategy.spec.optimizer)
    with matrices.over(strategy.mesh, slices):
        sent = collectives(update, state.params, state.opt_state, state.params, jnp.float32(0))
    return sum(one.wire_bytes for one in sent)


def _ring(nbytes: float, devices: int) -> float:
    return nbytes * (devices - 1) / devices


@dataclasses.dataclass(frozen=True)
class _RecordingUnits(Units):
    """Units of unsharded parameters, which count each kind of use that the model makes of them."""

    uses: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    exchanges: Callable[[str, int], bool] = lambda name, rows: False

    def scan(self, function: Any, name: str, *args: Any, **options: Any) -> Any:
        self.uses[name, "full"] += 1
        return super().scan(function, name, *args, **options)

    def scan_rows(self, function: Any, name: str, *args: Any, **options: Any) -> Any:
        self.uses[name, "full"] += 1
        return super().scan_rows(function, name, *args, **options)

    def run_shards(self, function: Any, shards: PyTree, shardings: PyTree, *_: Any) -> Any:
        units = {_unit(p.path, self.kinds) for p in jax.tree.leaves(shardings)}
        self.uses.update((unit, "full") for unit in units)
        return function(shards)

    def with_others(self, params: PyTree) -> PyTree:
        for p in jax.tree.leaves(self.shardings):
            if unit_of(p.path, self.kinds) is None:  # gathered once, until the backward pass ends
                self.uses[_unit(p.path, self.kinds), "lookup"] = 1
        return params

    def look_up(self, name: str, params: PyTree, indices: jax.Array, dtype: Any) -> jax.Array:
        exchanged = self.exchanges(name, indices.size)
        self.uses[name, "row" if exchanged else "lookup"] += indices.size if exchanged else 1
        (table,) = jax.tree.leaves(params[name])
        return take_rows(table, indices).astype(dtype)


def _unit(path: str, units: Collection[str]) -> str:
    """What a parameter's uses are counted by: its unit, or else the first name of its path."""
    return unit_of(path, units) or path.split("/")[0]


def _unit_uses(strategy: Strategy, spec: TrainSpec) -> Counter[tuple[str, str]]:
    """How often a device's micro-batch uses each unit how, found by tracing the model's loss."""
    model, config = spec.model, strategy.config
    if not model.units:
        return Counter()
    # Whether this strategy exchanges rows makes no difference: gathering the table is its waste.
    # Exact sums cannot exchange them.
    may_exchange = config.gather is not None and config.reduction.logical_shards is None

    def exchanges(name: str, rows: int) -> bool:
        table: LeafSharding = jax.tree.leaves(strategy.shardings.stored[name])[0]
        by_feature = model.units.get(name) == TABLE and table.dim == 1
        return may_exchange and by_feature and rows < table.shape[0]

    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), strategy.logical_state)
    units = _RecordingUnits(
        lambda shards, shardings: shards,
        strategy.shardings.stored,
        exchanges=exchanges,
        kinds=model.units,
    )
    rows = spec.batch_size // spec.accumulation_steps // batch_devices(strategy.mesh)
    examples = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in spec.example.items()}

    def loss(params: PyTree, model_state: PyTree, examples: Any, position: jax.Array) -> Any:
        keys = example_keys(spec.seed, jnp.int32(0), position)
        options = {"units": units, "train": True, "batch_axes": ()}
        return model.loss(params, model_state, examples, keys, **options).total

    positions = jax.ShapeDtypeStruct((rows,), np.int32)
    jax.eval_shape(loss, state.params, state.model_state, examples, positions)
    return units.uses
