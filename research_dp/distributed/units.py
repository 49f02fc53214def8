"""Units: the parts of a model whose parameters are gathered together, just before their use.

A model that names units gets `Units` with its loss, and runs each part of itself through it. A
unit's parameters are gathered when it runs and dropped after it. The backward pass gathers them
again, and scatters their gradient at its end. No two units need be unsharded at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from research_dp.distributed.embedding import take_rows
from research_dp.distributed.overlap import scan_prefetched
from research_dp.distributed.remat import REMAT, keep_gathered
from research_dp.distributed.sharding import LeafSharding
from research_dp.errors import UsageError

PyTree = Any
# (local shards, their shardings) -> unsharded parameters.
Gather = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class Units:
    """Runs the parts of a model.

    Attributes:
        gather: Gathers shards; None: parameters are replicated.
        shardings: `LeafSharding`s, nested like the parameters.
        look_up_sharded: (sharded table, its sharding, rows=) -> those rows of a table that is
            sharded by feature; None: a table is gathered to be looked up in.
        keep: Whether gathered parameters are kept for the backward pass.
        prefetch: Whether a stack's next unit is gathered, and the last one's gradient scattered,
            while a unit is computed. That is faster where communication runs beside compute, and
            takes the memory of one more unit and of its gradient.
    """

    gather: Gather | None = None
    shardings: Any = None
    look_up_sharded: Callable[..., PyTree] | None = None
    keep: bool = False
    prefetch: bool = False

    def gather_all(self, params: PyTree) -> PyTree:
        """All parameters, unsharded: for a model that names no units."""
        return params if self.gather is None else self.gather(params, self.shardings)

    def run(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        params: PyTree,
        *args: Any,
        remat: str,
    ) -> Any:
        """`function(unsharded parameters of some units by name, *args)`.

        `params` are the model's parameters, as this device has them; `remat`, a key of `REMAT`,
        says what is kept for the backward pass.
        """
        shardings = {name: self._shardings(name) for name in names}
        shards = {name: params[name] for name in names}
        return self._rematerialised(function, shardings, remat)(shards, *args)

    def scan(
        self,
        function: Callable[..., Any],
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
        `each` has further inputs, stacked along dim 0 and not differentiated; `unroll` units are
        one turn of the loop.
        """
        gather, stack = self.gather, params[name]
        shardings = jax.tree.map(_of_one, self._shardings(name)) if gather else None
        if gather and self.prefetch and jax.tree.leaves(stack)[0].shape[0] > 1:
            if remat != "full" or unroll != 1:
                raise UsageError(
                    "prefetch keeps a unit's input alone and takes one at a time: "
                    f"not with remat = {remat!r} and unroll = {unroll}. Bind remat = 'full' and "
                    "unroll = 1, or prefetch = False.",
                    binding="data_parallel.prefetch",
                )
            return scan_prefetched(
                function, lambda shards: gather(shards, shardings), stack, carry, each
            )
        return self._loop(function, shardings, stack, carry, each, remat, unroll)

    def scan_rows(
        self,
        function: Callable[..., Any],
        name: str,
        params: PyTree,
        carry: Any,
        *,
        pieces: int,
        remat: str,
    ) -> Any:
        """Runs a function on a table's rows in `pieces` of equal size, each a unit by itself.

        `function` is (unsharded rows of the piece, carry, number of the piece) -> carry. The last
        piece is padded with rows of zeros.
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
            lambda p: dataclasses.replace(p, shape=(size, *p.shape[1:])), shardings
        )
        table = jax.tree.map(cut, table)
        return units._loop(on_piece, shardings, table, carry, jnp.arange(pieces), remat, 1)

    def look_up(self, name: str, params: PyTree, indices: jax.Array, dtype: Any) -> jax.Array:
        """Rows of a table (rows, features): (..., features), for integers `indices` (...).

        A table that is sharded by feature, and has more rows than this device looks up, is not
        gathered: indices are gathered, and rows are exchanged, which is less. Gradients are added
        up in float32, whatever `dtype` the result has.
        """
        if self.look_up_sharded is not None:
            sharding = _only(self._shardings(name))
            if sharding.dim == 1 and indices.size < sharding.shape[0]:
                rows = self.look_up_sharded(params[name], self._shardings(name), rows=indices)
                return _only(rows).astype(dtype)

        def take(table: PyTree) -> jax.Array:
            return take_rows(_only(table), indices).astype(dtype)

        return self.run(take, (name,), params, remat="full")

    def _shardings(self, name: str) -> PyTree:
        return self.shardings[name] if self.gather else None

    def _loop(
        self,
        function: Callable[..., Any],
        shardings: PyTree,
        stack: PyTree,
        carry: Any,
        each: Any,
        remat: str,
        unroll: int,
    ) -> Any:
        one = self._rematerialised(function, shardings, remat)

        def body(carry: Any, x: tuple[PyTree, Any]) -> tuple[Any, None]:
            shards, inputs = x
            return one(shards, carry, inputs), None

        return lax.scan(body, carry, (stack, each), unroll=unroll)[0]

    def _rematerialised(
        self, function: Callable[..., Any], shardings: PyTree, remat: str
    ) -> Callable[..., Any]:
        gather, policy = self.gather, REMAT[remat]
        if gather is None:
            return function if remat == "none" else jax.checkpoint(function, policy=policy)
        if self.keep:
            policy = functools.partial(keep_gathered, policy)

        def gathered(shards: PyTree, *args: Any) -> Any:
            return function(gather(shards, shardings), *args)

        return jax.checkpoint(gathered, policy=policy)


def _only(tree: PyTree) -> Any:
    """The one leaf of a unit that is a table."""
    (leaf,) = jax.tree.leaves(tree)
    return leaf


def _of_one(stacked: LeafSharding) -> LeafSharding:
    """The sharding of one unit of a stack."""
    dim = None if stacked.dim is None else stacked.dim - 1
    return dataclasses.replace(stacked, shape=stacked.shape[1:], dim=dim)
