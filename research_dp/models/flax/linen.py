"""Flax Linen modules as pure functions on plain dicts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import lift
from flax.linen.transforms import lift_direct_transform
from flax.traverse_util import flatten_dict

from research_dp.argument_checks import checked
from research_dp.distributed.boxed import is_box, value_of
from research_dp.distributed.collectives import Axes
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError, some_of
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
    return linen_functions_of_inputs(module, None, sown=())


def linen_functions_of_inputs(
    module: nn.Module,
    inputs: calls.Inputs | None,
    *,
    rngs: calls.Streams = (),
    eval_module: nn.Module | None = None,
    sown: tuple[str, ...] = calls.SOWN,
) -> Functions:
    """`linen_functions` on these inputs.

    An argument or field of the module such as `train` or `deterministic` says whether it trains.
    Dropout layers have one mask per example. BatchNorm has the statistics of the global
    micro-batch. With `rngs` each example is called by itself, and these streams draw. What is
    `sown` into these collections is returned with the new state.
    """
    name = type(module).__name__
    call = calls.ModuleCall(module.__call__, name, inputs)

    def in_mode(train: bool) -> nn.Module:
        chosen = module if train or eval_module is None else eval_module
        names = {field.name for field in dataclasses.fields(chosen)}
        fields = [mode for mode in calls.MODES if mode not in call.modes and mode in names]
        options: dict[str, Any] = dict(calls.mode_options(fields, train))
        return chosen.clone(**options) if fields else chosen

    def init(key: jax.Array, x: Any) -> tuple[PyTree, PyTree]:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        given = call.arguments(zeros, train=False)
        keys_of_init = {"params": key, **calls.named_keys(rngs, key)} if rngs else key
        with calls.clear_errors(name, train=False):
            variables = in_mode(False).init(keys_of_init, *given.args, **given.kwargs)
            if eval_module is not None:
                _check_alike(name, variables, module, keys_of_init, given)
        # Boxes would constrain their arrays to a mesh that names their axes: a strategy shards.
        values = jax.tree.map(value_of, dict(variables), is_leaf=is_box)
        state = {kind: x for kind, x in values.items() if kind not in calls.SOWN}
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
        def one(x: Any, keys: Any, axes: Axes, draw: jax.Array | None) -> tuple[Any, PyTree]:
            given = call.arguments(x, train=train, keys=keys, batch_axes=axes)
            mutable = [*(model_state if train else ()), *sown]
            layers = {"dropout": calls.layer_keys(0)} if train else {}
            streams = layers if draw is None else calls.named_keys(rngs, draw, train=train)
            with contextlib.ExitStack() as stack:
                stack.enter_context(calls.clear_errors(name, train=train))
                over_batch = _over_the_batch(keys, axes, own_draws=draw is not None)
                stack.enter_context(nn.intercept_methods(over_batch))
                if units is not None:
                    stack.enter_context(nn.intercept_methods(_in_units(units)))
                y, updates = in_mode(train).apply(
                    {"params": params, **model_state},
                    *given.args,
                    mutable=mutable,
                    rngs=streams,
                    **given.kwargs,
                )
            updates = dict(updates)
            _check_updates(name, model_state, updates)
            many = None if rngs else x
            found = {kind: calls.numbers_sown(updates.pop(kind, {}), many) for kind in sown}
            return y, {**model_state, **updates, **found}

        return calls.called(one, x, keys, batch_axes, train=train, draws=bool(rngs))

    return Functions(init, apply)


def _check_alike(name: str, variables: Any, module: nn.Module, keys: Any, given: Any) -> None:
    """Raises UsageError if the variables of `eval_module` are not those of the module."""
    init = functools.partial(module.init, keys, *given.args, **given.kwargs)
    plain = functools.partial(jax.tree.map, value_of, is_leaf=is_box)
    both = (by_path(plain(x["params"])) for x in (variables, jax.eval_shape(init)))
    here, there = ({(path, x.shape) for path, x in tree.items()} for tree in both)
    if apart := sorted({path for path, _ in here ^ there}):
        problem = f"eval_module has other parameters than {name}: {some_of(apart, 5)}"
        raise UsageError(f"{problem}. {calls.GUIDE}")


def _check_updates(name: str, model_state: PyTree, updates: Mapping[str, PyTree]) -> None:
    """Raises UsageError if a call of a module changed what its state has."""
    for kind, values in updates.items():
        like = model_state.get(kind, values)
        if len({jax.tree.structure(tree) for tree in (values, like)}) > 1:
            raise UsageError(
                f"{name} gives variables {kind!r} another structure at each call. Sow into "
                f"{' or '.join(map(repr, calls.SOWN))}, or keep them in a variable of one shape. "
                f"{calls.GUIDE}"
            )


def _over_the_batch(
    keys: jax.Array | None, axes: Axes, *, own_draws: bool = False
) -> Callable[..., Any]:
    """An interceptor of methods, for layers that compute with several examples.

    `keys` (B,) are the examples' keys, and `axes` the bound axes that the batch is split over.
    `own_draws`: each example is called by itself, so that layers draw as they are.
    """

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, nn.BatchNorm):
            calls.check_batch_norm(options.get("mask"))
            # Modules are frozen, and this one is a copy that Flax made for this `apply`. Whatever
            # axis it names, that of a plain `pmap`, is the batch's.
            object.__setattr__(module, "axis_name", axes or None)
        if own_draws:
            return call(*args, **options)
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
