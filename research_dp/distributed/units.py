"""Units: the parts of a model whose parameters are gathered together, and lookups in tables.

A unit's parameters are gathered when it runs and dropped after it. The backward pass gathers them
again, and scatters their gradient at its end. No two units need be unsharded at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from research_dp.distributed import collectives, differentiable_gather
from research_dp.distributed.differentiable_gather import GatherOptions, with_gradient
from research_dp.distributed.mesh import target_platform
from research_dp.distributed.overlap import scan_prefetched
from research_dp.distributed.sharding import of_one, unit_of
from research_dp.distributed.unit_order import Order
from research_dp.errors import UsageError
from research_dp.types import PyTree

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Units:
    """Runs the parts of a model on its parameters, as this device has them."""

    # (local shards, their shardings) -> unsharded parameters; None: all are replicated.
    gather: Callable[[PyTree, PyTree], PyTree] | None = None
    shardings: Any = None  # `LeafSharding`s, nested like the parameters
    # (sharded table, its sharding, rows=) -> those rows of a table that is sharded by feature;
    # None: a table is gathered to be looked up in.
    look_up_sharded: Callable[..., PyTree] | None = None
    keep: bool = False  # gathered parameters for the backward pass
    # Whether the next unit is gathered, and the last one's gradient scattered, while a unit is
    # computed, which takes the memory of one more unit and its gradient. None: those of stacks are
    # not.
    prefetch: bool | None = None
    order: Order = dataclasses.field(default_factory=Order)  # of this call of the loss
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of units, by their paths

    def run(
        self, function: Function, names: tuple[str, ...], params: PyTree, *args: Any, remat: str
    ) -> Any:
        """`function(unsharded parameters of some units by name, *args)`; `remat`: see `REMAT`."""
        shardings = {name: self._shardings(name) for name in names}
        shards = {name: params[name] for name in names}
        if self.gather is None:
            return self._rematerialised(function, shardings, remat)(shards, *args)
        policy = differentiable_gather.REMAT[remat]
        return self.run_shards(lambda full: function(full, *args), shards, shardings, policy)

    def run_shards(
        self,
        function: Function,
        shards: PyTree,
        shardings: PyTree,
        policy: Callable[..., bool] = differentiable_gather.drop_gathered,
    ) -> Any:
        """`function(unsharded parameters)`, gathered in their turn; it may close over anything.

        `policy` says what is saved for the backward pass, see `jax.checkpoint`.
        """
        gather = self.gather
        assert gather is not None
        return self.order.run(
            function,
            gather,
            shards,
            shardings,
            policy=policy,
            ahead=self.prefetch is not False,
            keep=self.keep,
        )

    def scan(
        self,
        function: Function,
        name: str,
        params: PyTree,
        carry: Any,
        *,
        each: Any,
        remat: str,
        unroll: int = 1,
    ) -> Any:
        """Runs a stack: units of one shape, stacked along dim 0, one after the other.

        `function` is (unsharded parameters of one unit, carry, its part of `each`) -> carry. With
        `prefetch`, which needs `remat` 'full', it closes over nothing that is differentiated.
        `each` has further inputs, not differentiated; `unroll` units are one turn of the loop.
        """
        gather, stack = self.gather, params[name]
        shardings = jax.tree.map(of_one, self._shardings(name))
        if gather and self.prefetch and jax.tree.leaves(stack)[0].shape[0] > 1:
            if remat != "full" or unroll != 1:
                raise UsageError(
                    "prefetch keeps a unit's input alone and takes one at a time: "
                    f"not with remat = {remat!r} and unroll = {unroll}. Bind remat = 'full' and "
                    "unroll = 1, or prefetch = False.",
                    binding="prefetch",
                )
            return scan_prefetched(function, gather, shardings, stack, carry, each)
        return _loop(self._rematerialised(function, shardings, remat), stack, carry, each, unroll)

    def scan_rows(
        self, function: Function, name: str, params: PyTree, carry: Any, *, pieces: int, remat: str
    ) -> Any:
        """Runs a function on a table's rows in `pieces` of equal size, the last padded with zeros.

        `function` is (unsharded rows of the piece, carry, number of the piece) -> carry.
        """
        table, units, shardings = params[name], self, self._shardings(name)
        if self.gather is not None and _only(shardings).dim == 0:
            # Pieces of a shard would not be shards of a piece.
            table = self.gather(table, shardings)
            units, shardings = dataclasses.replace(self, gather=None), None

        size = -(-_only(table).shape[0] // pieces)

        def cut(x: jax.Array) -> jax.Array:
            missing = pieces * size - x.shape[0]
            padded = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) if missing else x
            return padded.reshape(pieces, size, *x.shape[1:])

        def on_piece(rows: PyTree, carry: Any, number: jax.Array) -> Any:
            return function(_only(rows), carry, number)

        shardings = jax.tree.map(
            lambda p: dataclasses.replace(p, shape=(size, *p.shape[1:]), table=p.shape), shardings
        )
        one = units._rematerialised(on_piece, shardings, remat)
        return _loop(one, jax.tree.map(cut, table), carry, jnp.arange(pieces))

    def look_up(self, name: str, params: PyTree, indices: jax.Array, dtype: Any) -> jax.Array:
        """Rows of a table (rows, features): (..., features), for integers `indices` (...).

        A table that is sharded by feature, and has more rows than this device looks up, is not
        gathered: rows are exchanged, which is less. Gradients are added up in float32.
        """
        if self.look_up_sharded is not None:
            sharding = _only(self._shardings(name))
            if sharding.dim == 1 and indices.size < sharding.shape[0]:
                rows = self.look_up_sharded(params[name], self._shardings(name), rows=indices)
                return _only(rows).astype(dtype)

        def take(table: PyTree) -> jax.Array:
            return take_rows(_only(table), indices).astype(dtype)

        return self.run(take, (name,), params, remat="full")

    def with_others(self, params: PyTree) -> PyTree:
        """Parameters of which those of no unit are unsharded, until the backward pass ends."""
        others = {
            k: x
            for k, x in flatten_dict(params).items()
            if not unit_of("/".join(map(str, k)), self.kinds)
        }
        if self.gather is None or not others:
            return params
        shardings = {k: p for k, p in flatten_dict(self.shardings).items() if k in others}
        return unflatten_dict(flatten_dict(params) | self.gather(others, shardings))

    def _shardings(self, name: str) -> PyTree:
        return self.shardings[name] if self.gather else None

    def _rematerialised(self, function: Function, shardings: PyTree, remat: str) -> Function:
        gather, policy = self.gather, differentiable_gather.REMAT[remat]
        if gather is None:
            keeps_all = remat == "none" and target_platform() == "cpu"
            return function if keeps_all else jax.checkpoint(function, policy=policy)
        if self.keep:
            policy = functools.partial(differentiable_gather.keep_gathered, policy)

        def gathered(shards: PyTree, *args: Any) -> Any:
            return function(gather(shards, shardings), *args)

        return jax.checkpoint(gathered, policy=policy)


def _loop(function: Function, stack: PyTree, carry: Any, each: Any, unroll: int = 1) -> Any:
    def body(carry: Any, x: tuple[PyTree, Any]) -> tuple[Any, None]:
        shards, inputs = x
        return function(shards, carry, inputs), None

    return lax.scan(body, carry, (stack, each), unroll=unroll)[0]


def _only(tree: PyTree) -> Any:
    """The one leaf of a unit that is a table."""
    (leaf,) = jax.tree.leaves(tree)
    return leaf


@jax.custom_vjp
def take_rows(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows (..., features) of an unsharded table; their gradients are added up in float32."""
    return table[indices]


def _take_bwd(kept: Any, g: jax.Array) -> tuple[jax.Array, None]:
    indices, like = kept
    return _add_rows(g, indices, like.shape[0]).astype(like.dtype), None


def _take_fwd(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, Any]:
    # The number of rows and the dtype, without the table: it need not be gathered again for them.
    return table[indices], (indices, jnp.zeros((table.shape[0], 0), table.dtype))


take_rows.defvjp(_take_fwd, _take_bwd)


def exchange_rows(block: jax.Array, indices: jax.Array, options: GatherOptions) -> jax.Array:
    """Rows (batch, ..., features) of a table, for this device's columns and indices (batch, ...).

    Each device looks up its columns for all devices, and an all-to-all joins them. The gradient is
    that of the mean over the axis, added up in float32, whatever `reduction` says.

    `block` is (rows, features / devices). Results are in `gather_dtype`, gradients on the wire in
    that of `wire`. Derivatives of higher order are exact. With a codec the table is as it would be
    gathered: rows are sent as they are decoded. Their gradients are not encoded.
    """
    count, dtype = block.shape[0], block.dtype
    devices = collectives.axes_size(collectives.flat_axes(options.axis))

    def rows(block: jax.Array, everyone: jax.Array) -> jax.Array:
        local = options.rounded(block)[everyone].astype(
            collectives.cast_dtype(dtype, options.gather_dtype)
        )
        return lax.all_to_all(local, options.axis, 0, local.ndim - 1, tiled=True)

    def columns(g: jax.Array, everyone: jax.Array) -> jax.Array:
        sent = options.wire.cast(g, dtype)
        received = lax.all_to_all(sent, options.axis, g.ndim - 1, 0, tiled=True)
        total = _add_rows(received, everyone, count)
        # Summed over all devices' examples, and divided here, once: the mean over the axis.
        return (total / devices).astype(dtype)

    everyone = collectives.gather(indices, 0, options.axis, options.wire.reduction)
    return with_gradient(rows, columns)(block, everyone)


def _add_rows(g: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """The gradient of a table of `count` rows, at least float32, from that of the rows taken."""
    wide = jnp.promote_types(g.dtype, jnp.float32)
    zeros = jnp.zeros((count, g.shape[-1]), wide)
    return zeros.at[indices].add(g.astype(wide))
