"""Flax Linen modules as pure functions on plain dicts."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from research_dp.argument_checks import checked
from research_dp.errors import UsageError
from research_dp.types import Functions

PyTree = Any


@checked
def linen_functions(module: nn.Module) -> Functions:
    """Pure `init` and `apply` of a Linen module.

    Args:
        module: Its `__call__` takes (x, *, train, keys, batch_axes). Variables besides `params`
            are model state, updated while training. Boxes (`nn.Partitioned`) are removed.

    Raises:
        UsageError: By `apply`, if the module draws from an RNG stream (`nn.Dropout`), so that its
            masks would depend on the device.
    """

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        variables = module.init(
            key, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x), train=False
        )
        state = dict(nn.meta.unbox(variables))
        return state.pop("params"), state

    def apply(
        params: PyTree,
        model_state: PyTree,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> tuple[jax.Array, PyTree]:
        variables = {"params": params, **model_state}
        mutable = list(model_state) if train else []
        try:
            y, updates = module.apply(
                variables, x, train=train, keys=keys, batch_axes=batch_axes, mutable=mutable
            )
        except InvalidRngError as error:
            raise UsageError(
                f"{type(module).__name__} draws from an RNG stream of Flax, so its dropout would "
                "depend on the device. Draw with `keys` instead, one key an example."
            ) from error
        return y, {**model_state, **updates}

    return Functions(init, apply)
