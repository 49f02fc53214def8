"""Flax Linen modules as pure functions on plain dicts."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import lift
from flax.linen.transforms import lift_direct_transform
from flax.traverse_util import flatten_dict

from research_dp.argument_checks import checked
from research_dp.distributed.collectives import Axes
from research_dp.errors import UsageError
from research_dp.models.flax import module_calls as calls
from research_dp.models.flax.module_units import Leaves, UnitCalls
from research_dp.types import Functions, PyTree


@checked
def linen_functions(module: nn.Module) -> Functions:
    """Pure `init` and `apply` of a Linen module.

    `research_dp.from_linen`, which adds a loss, says what is accepted. The module's `__call__`
    takes x, an array or a tree. It may take `keys`, one random key per example, (B,), or None in
    evaluation; and `batch_axes`, the bound mesh axes that the batch is split over. Variables
    besides `params` are model state, updated while training. Boxes (`nn.Partitioned`) are removed.
    """
    return linen_functions_of_inputs(module, None)


def linen_functions_of_inputs(module: nn.Module, inputs: calls.Names | None) -> Functions:
    """`linen_functions` on the input of this name, or on a tuple of several inputs.

    An argument or field of the module such as `train` or `deterministic` says whether it trains.
    Dropout layers have one mask per example. BatchNorm has the statistics of the global
    micro-batch.
    """
    name = type(module).__name__
    call = calls.ModuleCall(module.__call__, name, inputs)
    names = {field.name for field in dataclasses.fields(module)}
    fields = [mode for mode in calls.MODES if mode not in call.modes and mode in names]

    def in_mode(train: bool) -> nn.Module:
        options: dict[str, Any] = dict(calls.mode_options(fields, train))
        return module.clone(**options) if fields else module

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        given = call.arguments(zeros, train=False)
        with calls.clear_errors(name, train=False):
            variables = in_mode(False).init(key, *given.args, **given.kwargs)
        state = dict(nn.meta.unbox(variables))
        return state.pop("params", {}), state

    def apply(
        params: PyTree,
        model_state: PyTree,
        x: Any,
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: Axes = (),
        units: UnitCalls | None = None,
    ) -> tuple[jax.Array, PyTree]:
        given = call.arguments(x, train=train, keys=keys, batch_axes=batch_axes)
        variables = {"params": params, **model_state}
        mutable = list(model_state) if train else []
        rngs = {"dropout": calls.layer_keys(0)} if train else {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(calls.clear_errors(name, train=train))
            stack.enter_context(nn.intercept_methods(_over_the_batch(keys, batch_axes)))
            if units is not None:
                stack.enter_context(nn.intercept_methods(_in_units(units)))
            y, updates = in_mode(train).apply(
                variables, *given.args, mutable=mutable, rngs=rngs, **given.kwargs
            )
        for kind, values in updates.items():
            if len({jax.tree.structure(tree) for tree in (values, model_state[kind])}) > 1:
                raise UsageError(
                    f"{name} gives variables {kind!r} another structure at each call, as `sow` "
                    "does. Return them, or keep them in a variable of one shape."
                )
        return y, {**model_state, **updates}

    return Functions(init, apply)


def _over_the_batch(keys: jax.Array | None, axes: Axes) -> Callable[..., Any]:
    """An interceptor of methods, for layers that compute with several examples.

    `keys` (B,) are the examples' keys, and `axes` the bound mesh axes that the batch is split over.
    """

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if context.method_name == "__call__" and isinstance(module, nn.BatchNorm):
            calls.check_batch_norm(module.axis_name, axes, options.get("mask"))
            # Modules are frozen, and this one is a copy that Flax made for this `apply`.
            object.__setattr__(module, "axis_name", axes or None)
        if getattr(module, "attention_fn", None) is nn.dot_product_attention:
            by_example = calls.example_attention(nn.dot_product_attention, keys)
            object.__setattr__(module, "attention_fn", by_example)
        if type(module).__call__ is nn.Dropout.__call__ and context.method_name == "__call__":
            return _dropout(module, keys, *args, **options)
        return call(*args, **options)

    return intercept


def _in_units(units: UnitCalls) -> Callable[..., Any]:
    """An interceptor of methods that makes the calls of units programs of their own."""
    running: list[str] = []

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        path = "" if module.scope is None else "/".join(module.path)
        own = inspect.unwrap(getattr(type(module), name, _in_units))
        # Else a function of the user that a transform of Linen calls with the module.
        is_method = own is inspect.unwrap(context.orig_method.func) and name != "setup"
        if path in running or not is_method or not units.is_unit(module, path):
            return call(*args, **options)
        leaves = flatten_dict(module.variables.get("params", {}))

        def in_unit(method: Callable[..., Any], scopes: Any, *args: Any, **options: Any) -> Any:
            def run(opened: Any, closed: Any, groups: Any, rngs: Any) -> Any:
                def computed(inner: Leaves) -> Any:
                    by_id = {id(leaves[k]): x for k, x in inner.items()}
                    scopes = opened(jax.tree.map(lambda x: by_id.get(id(x), x), groups), rngs)
                    running.append(path)
                    try:
                        return method(scopes, *args, **options), closed(scopes)
                    finally:
                        running.remove(path)

                return units.run(path, computed, leaves)

            return lift.pack(run, (True,), (True,), (True,), name="unit")(scopes)

        def method(module: nn.Module, *args: Any, **options: Any) -> Any:
            return getattr(module, name)(*args, **options)

        return lift_direct_transform(in_unit, (method,), module, *args, **options)

    return intercept


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
    return calls.layer_dropout(inputs, module.rate, keys, layer_key, module.broadcast_dims)
