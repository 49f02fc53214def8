"""Flax Linen modules as pure functions on plain dicts."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from research_dp.argument_checks import checked
from research_dp.errors import UsageError
from research_dp.types import Functions, PyTree


@checked
def linen_functions(module: nn.Module) -> Functions:
    """Pure `init` and `apply` of a Linen module.

    Its `__call__` takes (x, *, train, keys, batch_axes). Variables besides `params` are model
    state, updated while training. Boxes (`nn.Partitioned`) are removed. `apply` raises UsageError
    if the module draws from an RNG stream (`nn.Dropout`): masks would depend on the device.
    """

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        state = dict(nn.meta.unbox(module.init(key, zeros, train=False)))
        return state.pop("params"), state

    def apply(
        params: PyTree, model_state: PyTree, x: Any, *, train: bool, **options: Any
    ) -> tuple[jax.Array, PyTree]:
        variables = {"params": params, **model_state}
        options = {"train": train, "keys": None, "batch_axes": (), **options}
        mutable = list(model_state) if train else []
        try:
            y, updates = module.apply(variables, x, mutable=mutable, **options)
        except InvalidRngError as error:
            raise UsageError(
                f"{type(module).__name__} draws from an RNG stream of Flax, so its dropout would "
                "depend on the device. Draw with `keys` instead, one key an example."
            ) from error
        return y, {**model_state, **updates}

    return Functions(init, apply)
