"""Flax Linen modules as pure functions on plain dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError

from research_dp.argument_checks import checked
from research_dp.errors import UsageError
from research_dp.models.flax.example_dropout import layer_dropout, layer_keys
from research_dp.models.flax.module_calls import (
    GUIDE,
    MODES,
    ModuleCall,
    check_contract,
    clear_errors,
    mode_options,
)
from research_dp.types import Functions, PyTree


@checked
def linen_functions(module: nn.Module) -> Functions:
    """Pure `init` and `apply` of a Linen module.

    Its `__call__` takes (x, *, train, keys, batch_axes). Variables besides `params` are model
    state, updated while training. Boxes (`nn.Partitioned`) are removed. `apply` raises UsageError
    if the module draws from an RNG stream (`nn.Dropout`): masks would depend on the device.
    `research_dp.from_linen` takes modules with another `__call__`, and with `nn.Dropout`.
    """
    name = type(module).__name__
    check_contract(module.__call__, name, "linen_functions")

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        return _init(module, key, (_zeros(x),), {"train": False})

    def apply(
        params: PyTree, model_state: PyTree, x: Any, *, train: bool, **options: Any
    ) -> tuple[jax.Array, PyTree]:
        options = {"train": train, "keys": None, "batch_axes": (), **options}
        try:
            return _apply(module, params, model_state, (x,), options, train)
        except InvalidRngError as error:
            raise UsageError(
                f"{name} draws from an RNG stream of Flax, so its dropout would depend on the "
                "device. Use research_dp.from_linen, or draw with `keys`, one key an example. "
                f"{GUIDE}"
            ) from error

    return Functions(init, apply)


def plain_linen_functions(module: nn.Module, inputs: Sequence[str]) -> Functions:
    """Pure `init` and `apply` of any Linen module, on a tuple of the inputs with these names.

    An argument or field of the module such as `train` or `deterministic` says whether it trains.
    Dropout layers have one mask per example. BatchNorm has the statistics of the global
    micro-batch. Arguments `keys` and `batch_axes` are as in `linen_functions`, if it has them.
    """
    name = type(module).__name__
    call = ModuleCall(module.__call__, name, inputs)
    names = {field.name for field in dataclasses.fields(module)}
    fields = [mode for mode in MODES if mode not in call.modes and mode in names]

    def in_mode(train: bool) -> nn.Module:
        options: dict[str, Any] = dict(mode_options(fields, train))
        return module.clone(**options) if fields else module

    def init(key: jax.Array, x: tuple[Any, ...]) -> tuple[PyTree, PyTree]:
        given = call.arguments(_zeros(x), train=False)
        with clear_errors(name, train=False):
            return _init(in_mode(False), key, given.args, given.kwargs)

    def apply(
        params: PyTree,
        model_state: PyTree,
        x: tuple[Any, ...],
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: Sequence[str] = (),
    ) -> tuple[jax.Array, PyTree]:
        rngs = {"dropout": layer_keys(0)} if train else {}
        axes = tuple(batch_axes)
        given = call.arguments(x, train=train, keys=keys, batch_axes=axes)
        layers = _over_the_batch(keys, axes)
        with clear_errors(name, train=train), nn.intercept_methods(layers):
            in_this_mode, values = in_mode(train), (params, model_state)
            return _apply(in_this_mode, *values, given.args, given.kwargs, train, rngs)

    return Functions(init, apply)


def _init(
    module: nn.Module, key: jax.Array, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    state = dict(nn.meta.unbox(module.init(key, *args, **options)))
    return state.pop("params", {}), state


def _zeros(x: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)


def _apply(
    module: nn.Module,
    params: PyTree,
    model_state: PyTree,
    x: tuple[Any, ...],
    options: dict[str, Any],
    train: bool,
    rngs: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, PyTree]:
    variables = {"params": params, **model_state}
    mutable = list(model_state) if train else []
    y, updates = module.apply(variables, *x, mutable=mutable, rngs=rngs, **options)
    for name, values in updates.items():
        structures = {jax.tree.structure(x) for x in (values, model_state[name])}
        if len(structures) > 1:
            raise UsageError(
                f"{type(module).__name__} gives variables {name!r} another structure at each call, "
                "as `sow` does. Return them, or keep them in a variable of one shape."
            )
    return y, {**model_state, **updates}


def _over_the_batch(keys: jax.Array | None, axes: tuple[str, ...]) -> Callable[..., Any]:
    """An interceptor of methods, for layers that compute with several examples.

    `keys` (B,) are the examples' keys, and `axes` the bound mesh axes that the batch is split over.
    """

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if context.method_name == "__call__" and isinstance(module, nn.BatchNorm):
            check_batch_norm(module.axis_name, options.get("mask"))
            object.__setattr__(module, "axis_name", axes or None)  # modules are frozen
            try:
                return call(*args, **options)
            finally:
                object.__setattr__(module, "axis_name", None)
        if type(module).__call__ is nn.Dropout.__call__ and context.method_name == "__call__":
            return _dropout(module, keys, *args, **options)
        return call(*args, **options)

    return intercept


def check_batch_norm(axis_name: Any, mask: Any) -> None:
    """Raises UsageError for a BatchNorm whose statistics cannot be those of all devices."""
    if axis_name is not None:
        raise UsageError(
            f"BatchNorm has axis_name = {axis_name!r}. Leave it out: statistics are taken over the "
            f"global micro-batch under every strategy. {GUIDE}"
        )
    if mask is not None:
        raise UsageError(
            "BatchNorm with a mask: devices would have unequal numbers of values, and Flax "
            f"averages their means with equal weights. Leave the mask out. {GUIDE}"
        )


def _dropout(
    module: nn.Dropout,
    keys: jax.Array | None,
    inputs: jax.Array,
    deterministic: bool | None = None,
    rng: jax.Array | None = None,
) -> jax.Array:
    """`nn.Dropout.__call__`, with one mask per example."""
    off = nn.merge_param("deterministic", module.deterministic, deterministic)
    if off or module.rate == 0.0:
        return inputs
    if module.rate == 1.0:
        return jnp.zeros_like(inputs)
    layer_key = module.make_rng(module.rng_collection) if rng is None else rng
    return layer_dropout(inputs, module.rate, keys, layer_key, module.broadcast_dims)
