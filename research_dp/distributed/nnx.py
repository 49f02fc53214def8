"""Flax NNX modules as pure functions on plain dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.errors import UsageError
from research_dp.types import Functions

PyTree = Any


@checked
def nnx_functions(factory: Callable[..., nnx.Module]) -> Functions:
    """Pure `init` and `apply` of an NNX module.

    Args:
        factory: (input shape, rngs) -> module, whose `__call__` takes
            (x, *, train, keys, batch_axes). Variables other than `nnx.Param` are model state.

    Raises:
        UsageError: The module has random state (`nnx.Dropout`), which would depend on the device.
    """

    def abstract(shape: tuple[int, ...]) -> nnx.Module:
        module = nnx.eval_shape(lambda: factory(shape, nnx.Rngs(0)))
        if jax.tree.leaves(nnx.state(module, nnx.RngState)):
            raise UsageError(
                f"{type(module).__name__} has random state of its own, so its dropout would "
                "depend on the device. Draw with `keys` instead, one key an example."
            )
        return module

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        shape = _shape(x)
        abstract(shape)  # refuses a module with random state before anything is drawn
        module = factory(shape, nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(module, nnx.Param)), _model_state(module)

    def apply(
        params: PyTree,
        model_state: PyTree,
        x: jax.Array,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> tuple[jax.Array, PyTree]:
        module = abstract(_shape(x))
        graphdef, variables = nnx.split(module)
        nnx.replace_by_pure_dict(variables, _merged(params, model_state))
        module = nnx.merge(graphdef, variables)
        y = module(x, train=train, keys=keys, batch_axes=batch_axes)
        return y, _model_state(module)

    return Functions(init, apply)


def _shape(x: PyTree) -> PyTree:
    """Shapes of one example of each input."""
    return jax.tree.map(lambda a: tuple(a.shape[1:]), x)


def _model_state(module: nnx.Module) -> PyTree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


def _merged(a: PyTree, b: PyTree) -> PyTree:
    """Two nested dicts as one; they have no leaf in common."""
    merged = dict(a)
    for name, value in b.items():
        merged[name] = _merged(a[name], value) if name in a else value
    return merged
