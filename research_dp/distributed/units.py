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

        Args:
            function: Pure.
            names: Keys of the units in the model's parameters.
            params: The model's parameters, as this device has them.
            *args: What else it takes.
            remat: What is kept for the backward pass: a key of `REMAT`.
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
        """Runs a stack: units of one shape, one after the other.

        Args:
            function: (unsharded parameters of one unit, carry, its part of `each`) -> carry. With
                `prefetch` it closes over nothing that is differentiated.
            name: Key of the stack in the model's parameters, whose arrays are stacked along dim 0.
            params: As in `run`.
            carry: What the first unit takes.
            each: Further inputs, stacked along dim 0, not differentiated.
            remat: As in `run`.
            unroll: Units in one turn of the loop.

        Raises:
            UsageError: `prefetch` with another `remat` than 'full'.
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
        """Runs a function on a table's rows in pieces, each a unit by itself.

        Args:
            function: (unsharded rows of the piece, carry, number of the piece) -> carry.
            name: Key of the table in the model's parameters.
            params: As in `run`.
            carry: What the first call takes.
            pieces: How many, of equal size; the last one is padded with rows of zeros.
            remat: As in `run`.
        """
        table, units, shardings = params[name], self, self._shardings(name)
        if self.gather is not None and _only(shardings).dim == 0:
            # Pieces of a shard would not be shards of a piece.
            table = self.gather(table, shardings)
            units, shardings = dataclasses.replace(self, gather=None), None

        size = -(-_only(table).shape[0] // pieces)

        def piece_of(sharding: LeafSharding) -> LeafSharding:
            return dataclasses.replace(sharding, shape=(size, *sharding.shape[1:]))

        def cut(x: jax.Array) -> jax.Array:
            missing = pieces * size - x.shape[0]
            padded = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) if missing else x
            return padded.reshape(pieces, size, *x.shape[1:])

        def on_piece(rows: PyTree, carry: Any, number: jax.Array) -> Any:
            return function(_only(rows), carry, number)

        shardings = jax.tree.map(piece_of, shardings)
        return units._loop(
            on_piece, shardings, jax.tree.map(cut, table), carry, jnp.arange(pieces), remat, 1
        )

    def look_up(self, name: str, params: PyTree, indices: jax.Array, dtype: Any) -> jax.Array:
        """Rows of a table.

        A table that is sharded by feature, and has more rows than this device looks up, is not
        gathered: indices are gathered, and rows are exchanged, which is less.

        Args:
            name: Key of the table in the model's parameters: one array (rows, features).
            params: As in `run`.
            indices: (...) integers.
            dtype: dtype of the result; gradients are added up in float32.

        Returns:
            (..., features).
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
        gather = self.gather
        if gather is None:
            if remat == "none":
                return function
            return jax.checkpoint(function, policy=REMAT[remat])
        policy = REMAT[remat]
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
    return dataclasses.replace(
        stacked, shape=stacked.shape[1:], dim=None if stacked.dim is None else stacked.dim - 1
    )
