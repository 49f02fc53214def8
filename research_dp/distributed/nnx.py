"""Flax NNX modules as pure functions on plain dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from research_dp.argument_checks import checked
from research_dp.errors import UsageError
from research_dp.types import Functions, PyTree


@checked
def nnx_functions(factory: Callable[..., nnx.Module]) -> Functions:
    """Pure `init` and `apply` of an NNX module.

    `factory` is (input shape, rngs) -> module, whose `__call__` takes (x, *, train, keys,
    batch_axes). Variables other than `nnx.Param` are model state. Random state (`nnx.Dropout`),
    which would depend on the device, raises UsageError.
    """

    def build(x: PyTree, rngs: nnx.Rngs) -> nnx.Module:
        return factory(jax.tree.map(lambda a: tuple(a.shape[1:]), x), rngs)

    def abstract(x: PyTree) -> nnx.Module:
        module = nnx.eval_shape(lambda: build(x, nnx.Rngs(0)))
        if jax.tree.leaves(nnx.state(module, nnx.RngState)):
            raise UsageError(
                f"{type(module).__name__} has random state of its own, so its dropout would "
                "depend on the device. Draw with `keys` instead, one key an example."
            )
        return module

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        abstract(x)  # refuses a module with random state before anything is drawn
        params, state = nnx.state(build(x, nnx.Rngs(key)), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    def apply(
        params: PyTree, model_state: PyTree, x: Any, *, train: bool, **options: Any
    ) -> tuple[jax.Array, PyTree]:
        graphdef, variables = nnx.split(abstract(x))
        merged = flatten_dict(params) | flatten_dict(model_state)
        nnx.replace_by_pure_dict(variables, unflatten_dict(merged))
        module = nnx.merge(graphdef, variables)
        options = {"keys": None, "batch_axes": (), **options}
        y = module(x, train=train, **options)
        return y, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    return Functions(init, apply)
