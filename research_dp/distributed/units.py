"""Units: the parts of a model whose parameters are gathered together, just before their use.

A model that names units is handed `Units` with its loss, and runs each part of itself through it.
A unit's parameters are made whole when it runs, dropped after it, and made whole again in the
backward pass, at whose end its gradient is scattered; no two units need be whole at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from research_dp.distributed.collectives import drop_gathered
from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import Placement

PyTree = Any
# (held parameters, their placements) -> whole parameters.
Gather = Callable[[PyTree, PyTree], PyTree]


def _dots(prim: Any, *args: Any, **params: Any) -> bool:
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *args, **params)


# What the forward pass of a unit keeps for the backward pass, besides its inputs. Gathered
# parameters are never kept.
REMAT: Mapping[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
    "none": drop_gathered,
}


def check_remat(remat: str, binding: str) -> None:
    """Raises UsageError for an unknown policy."""
    if remat not in REMAT:
        raise UsageError(f"{binding} = {remat!r}: use one of {list(REMAT)}.", binding=binding)


@dataclasses.dataclass(frozen=True)
class Units:
    """Runs the parts of a model.

    Attributes:
        gather: Makes held parameters whole; None: they are.
        layout: Placements, nested like the parameters.
    """

    gather: Gather | None = None
    layout: Any = None

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
        each: Any = None,
        remat: str,
        unroll: int = 1,
    ) -> Any:
        """Runs units of one shape one after the other; their parameters are stacked along dim 0.

        Args:
            function: (whole parameters of one unit, carry, its part of `each`) -> carry.
            name: Key of the stack in the model's parameters.
            params: The model's parameters, as they are held.
            carry: What the first unit takes.
            each: Further inputs, stacked along dim 0.
            remat: As in `run`.
            unroll: Units in one turn of the loop.
        """
        layout = jax.tree.map(_of_one, self._layout(name)) if self.gather else None
        one = self._rematerialised(function, layout, remat)

        def body(carry: Any, x: tuple[PyTree, Any]) -> tuple[Any, None]:
            held, own = x
            return one(held, carry, own), None

        return jax.lax.scan(body, carry, (params[name], each), unroll=unroll)[0]

    def _layout(self, name: str) -> PyTree:
        return self.layout[name] if self.gather else None

    def _rematerialised(
        self, function: Callable[..., Any], layout: PyTree, remat: str
    ) -> Callable[..., Any]:
        gather = self.gather
        if gather is None:
            if remat == "none":
                return function
            return jax.checkpoint(function, policy=REMAT[remat])

        def gathered(held: PyTree, *args: Any) -> Any:
            return function(gather(held, layout), *args)

        return jax.checkpoint(gathered, policy=REMAT[remat])


def _of_one(stacked: Placement) -> Placement:
    """Where one unit of a stack lies."""
    return dataclasses.replace(
        stacked, shape=stacked.shape[1:], dim=None if stacked.dim is None else stacked.dim - 1
    )
