"""Units: the parts of a model whose parameters are gathered together, just before their use.

A model that names units is handed `Units` with its loss, and runs each part of itself through it.
A unit's parameters are made whole when it runs, dropped after it, and made whole again in the
backward pass, at whose end its gradient is scattered; no two units need be whole at once.
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
# (held parameters, their placements) -> whole parameters.
Gather = Callable[[PyTree, PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class Units:
    """Runs the parts of a model.

    Attributes:
        gather: Makes held parameters whole; None: they are.
        layout: Placements, nested like the parameters.
        look_up_split: (held table, its placement, rows=) -> those rows of a table that is split by
            feature; None: a table is gathered to be looked up in.
        keep: Whether what was gathered is kept for the backward pass.
        look_ahead: Whether a stack's next unit is gathered, and the last one's gradient scattered,
            while a unit is computed: faster where communication runs beside compute, for the
            memory of one more unit and of its gradient.
    """

    gather: Gather | None = None
    layout: Any = None
    look_up_split: Callable[..., PyTree] | None = None
    keep: bool = False
    look_ahead: bool = False

    def whole(self, params: PyTree) -> PyTree:
        """All parameters, whole: for a model that names no units."""
        return params if self.gather is None else self.gather(params, self.layout)

    def run(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        params: PyTree,
        *args: Any,
        remat: str,
    ) -> Any:
        """`function(whole parameters of some units by name, *args)`.

        Args:
            function: Pure.
            names: Keys of the units in the model's parameters.
            params: The model's parameters, as they are held.
            *args: What else it takes.
            remat: What is kept for the backward pass: a key of `REMAT`.
        """
        layout = {name: self._layout(name) for name in names}
        held = {name: params[name] for name in names}
        return self._rematerialised(function, layout, remat)(held, *args)

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
            function: (whole parameters of one unit, carry, its part of `each`) -> carry. With
                `look_ahead` it closes over nothing that is differentiated.
            name: Key of the stack in the model's parameters, whose arrays are stacked along dim 0.
            params: The model's parameters, as they are held.
            carry: What the first unit takes.
            each: Further inputs, stacked along dim 0, not differentiated.
            remat: As in `run`.
            unroll: Units in one turn of the loop.

        Raises:
            UsageError: Looking ahead is asked for with another `remat` than 'full'.
        """
        gather, stack = self.gather, params[name]
        layout = jax.tree.map(_of_one, self._layout(name)) if gather else None
        if gather and self.look_ahead and jax.tree.leaves(stack)[0].shape[0] > 1:
            if remat != "full" or unroll != 1:
                raise UsageError(
                    "data_parallel.look_ahead keeps a unit's input alone and takes one at a time: "
                    f"not with remat = {remat!r} and unroll = {unroll}. Bind remat = 'full' and "
                    "unroll = 1, or look_ahead = False.",
                    binding="data_parallel.look_ahead",
                )
            return scan_prefetched(function, lambda held: gather(held, layout), stack, carry, each)
        return self._loop(function, layout, stack, carry, each, remat, unroll)

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
        """Runs a function on one piece of a table's rows after the other, each a unit by itself.

        Args:
            function: (whole rows of the piece, carry, number of the piece) -> carry.
            name: Key of the table in the model's parameters.
            params: The model's parameters, as they are held.
            carry: What the first call takes.
            pieces: How many, of equal size: the last one is filled up with rows of zeros.
            remat: As in `run`.
        """
        table, units, layout = params[name], self, self._layout(name)
        if self.gather is not None and _only(layout).dim == 0:
            # Pieces of a shard would not be shards of a piece.
            table = self.gather(table, layout)
            units, layout = dataclasses.replace(self, gather=None), None

        size = -(-_only(table).shape[0] // pieces)

        def piece_of(place: LeafSharding) -> LeafSharding:
            return dataclasses.replace(place, shape=(size, *place.shape[1:]))

        def cut(x: jax.Array) -> jax.Array:
            missing = pieces * size - x.shape[0]
            padded = jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) if missing else x
            return padded.reshape(pieces, size, *x.shape[1:])

        def on_piece(own: PyTree, carry: Any, number: jax.Array) -> Any:
            return function(_only(own), carry, number)

        layout = jax.tree.map(piece_of, layout)
        return units._loop(
            on_piece, layout, jax.tree.map(cut, table), carry, jnp.arange(pieces), remat, 1
        )

    def look_up(self, name: str, params: PyTree, indices: jax.Array, dtype: Any) -> jax.Array:
        """Rows of a table.

        Where a table is split by feature and has more rows than this device looks up, its columns
        stay where they are: indices are gathered, and rows are exchanged, which is less.

        Args:
            name: Key of the table in the model's parameters: one array (rows, features).
            params: The model's parameters, as they are held.
            indices: (...) integers.
            dtype: dtype of the result; gradients are added up in float32.

        Returns:
            (..., features).
        """
        if self.look_up_split is not None:
            place = _only(self._layout(name))
            if place.dim == 1 and indices.size < place.shape[0]:
                rows = self.look_up_split(params[name], self._layout(name), rows=indices)
                return _only(rows).astype(dtype)

        def take(own: PyTree) -> jax.Array:
            return take_rows(_only(own), indices).astype(dtype)

        return self.run(take, (name,), params, remat="full")

    def _layout(self, name: str) -> PyTree:
        return self.layout[name] if self.gather else None

    def _loop(
        self,
        function: Callable[..., Any],
        layout: PyTree,
        stack: PyTree,
        carry: Any,
        each: Any,
        remat: str,
        unroll: int,
    ) -> Any:
        one = self._rematerialised(function, layout, remat)

        def body(carry: Any, x: tuple[PyTree, Any]) -> tuple[Any, None]:
            held, own = x
            return one(held, carry, own), None

        return lax.scan(body, carry, (stack, each), unroll=unroll)[0]

    def _rematerialised(
        self, function: Callable[..., Any], layout: PyTree, remat: str
    ) -> Callable[..., Any]:
        gather = self.gather
        if gather is None:
            if remat == "none":
                return function
            return jax.checkpoint(function, policy=REMAT[remat])
        policy = REMAT[remat]
        if self.keep:
            policy = functools.partial(keep_gathered, policy)

        def gathered(held: PyTree, *args: Any) -> Any:
            return function(gather(held, layout), *args)

        return jax.checkpoint(gathered, policy=policy)


def _only(tree: PyTree) -> Any:
    """The one leaf of a unit that is a table."""
    (leaf,) = jax.tree.leaves(tree)
    return leaf


def _of_one(stacked: LeafSharding) -> LeafSharding:
    """Where one unit of a stack lies."""
    return dataclasses.replace(
        stacked, shape=stacked.shape[1:], dim=None if stacked.dim is None else stacked.dim - 1
    )
