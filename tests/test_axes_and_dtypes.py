"""Axes that are named twice and dtypes that cannot carry a sum or a parameter are refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from steps import abstract, mesh_of

import research_dp as rdp
from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.layout import lay_out
from research_dp.strategies import slots

W = jnp.ones((16, 4))
LAYOUT = lay_out([W], lambda *_: rdp.Choice(0), 8)
SLOT = {"axes": ("fsdp",), "reduction": PLAIN}
TWICE = ("fsdp", "fsdp")


def update(**options):
    params = {"w": W}
    optimizer = rdp.OptaxAdapter(optax.sgd(1.0), optax.sgd(1.0).init(params))
    return rdp.fsdp_apply_gradients(params, params, optimizer, **options)


BY_AXES = {
    "shard_params": lambda axes: rdp.shard_params(W, axes, 0),
    "gather_params": lambda axes: rdp.gather_params(nn.Partitioned(W, (axes, None)), axes),
    "gather_array_with_mean_grads": lambda axes: rdp.gather_array_with_mean_grads(W, 0, axes),
    "shard_module_params": lambda axes: rdp.shard_module_params(nn.Dense, axes)(4).init(
        jax.random.key(0), W
    ),
    "shard_nnx_module_params": lambda axes: nnx.state(
        rdp.shard_nnx_module_params(nnx.Linear, axes)(4, 4, rngs=nnx.Rngs(0))
    ),
    "sync_gradients": lambda axes: rdp.sync_gradients(W, axes),
    "reduce_gradients_across_devices": lambda axes: rdp.reduce_gradients_across_devices(
        W, "sum", axes
    ),
    "fsdp_apply_gradients": lambda axes: update(fsdp_group=axes),
    "fsdp_apply_gradients, dp_group": lambda axes: update(fsdp_group=(), dp_group=axes),
    "accumulate_gradients": lambda axes: rdp.accumulate_gradients(
        lambda w, x: jnp.sum(w), W, W[None], axis_names=axes
    ),
    "weighted_mean": lambda axes: rdp.weighted_mean(jnp.ones(()), jnp.ones(()), axes),
    "weighted_loss": lambda axes: rdp.weighted_loss(jnp.ones(()), jnp.ones(()), axes),
    "sharded_global_norm": lambda axes: rdp.sharded_global_norm(W, axes),
    "clip_by_global_norm_sharded": lambda axes: rdp.clip_by_global_norm_sharded(W, 1.0, axes),
    "all_mean": lambda axes: rdp.all_mean(W, axes),
    "scatter_mean": lambda axes: rdp.scatter_mean(W, 0, axes),
    "all_mean_tree": lambda axes: rdp.all_mean_tree([W], axes),
    "scatter_mean_tree": lambda axes: rdp.scatter_mean_tree([W], LAYOUT, axis=axes),
    "gather_tree": lambda axes: rdp.gather_tree([W], LAYOUT, axis=axes),
}


@pytest.mark.parametrize("name", BY_AXES)
@pytest.mark.parametrize("axes", [TWICE, ["fsdp", ("fsdp",)]], ids=["flat", "nested"])
def test_an_axis_that_is_named_twice(name, axes):
    axes = tuple(axes) if "gather_params" in name else axes
    with pytest.raises(rdp.UsageError, match="named twice"):
        abstract(mesh_of(fsdp=8), lambda: BY_AXES[name](axes))


BY_DTYPE = {
    "gather_array_with_mean_grads": lambda **kw: rdp.gather_array_with_mean_grads(
        W, 0, "fsdp", **kw
    ),
    "gather_params": lambda **kw: rdp.gather_params(W, "fsdp", **kw),
    "shard_module_params": lambda **kw: rdp.shard_module_params(nn.Dense, "fsdp", **kw),
    "shard_nnx_module_params": lambda **kw: rdp.shard_nnx_module_params(nnx.Linear, "fsdp", **kw),
    "gather_shards": lambda **kw: slots.gather_shards([W], LAYOUT, reduction=PLAIN, **kw),
    "sync_gradients": lambda dtype: rdp.sync_gradients(W, "fsdp", dtype=dtype),
    "average_gradients": lambda dtype: slots.average_gradients([W], LAYOUT, **SLOT, dtype=dtype),
    "scatter_gradients": lambda dtype: slots.scatter_gradients([W], LAYOUT, **SLOT, dtype=dtype),
    "accumulate_gradients": lambda dtype: rdp.accumulate_gradients(
        lambda w, x: jnp.sum(w), W, W[None], dtype=dtype
    ),
    "fsdp_apply_gradients": lambda dtype: update(dtype=dtype),
    "all_mean": lambda dtype: rdp.all_mean(W, ("fsdp",), dtype=dtype),
    "scatter_mean": lambda dtype: rdp.scatter_mean(W, 0, "fsdp", dtype=dtype),
    "all_mean_tree": lambda dtype: rdp.all_mean_tree([W], ("fsdp",), dtype=dtype),
    "scatter_mean_tree": lambda dtype: rdp.scatter_mean_tree([W], LAYOUT, dtype=dtype),
}
OPTIONS = [
    (name, option)
    for name in BY_DTYPE
    for option in (
        ("gather_dtype", "grad_scatter_dtype") if list(BY_DTYPE).index(name) < 5 else ("dtype",)
    )
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_dtype_that_is_not_floating_point(name, option):
    for dtype in ("int8", jnp.uint32, bool, "complex64", "float33"):
        with pytest.raises(rdp.UsageError, match=rf"{option} = .*: give a floating-point dtype"):
            abstract(mesh_of(fsdp=8), lambda: BY_DTYPE[name](**{option: dtype}))  # noqa: B023


def test_parameters_that_are_integers_are_still_gathered():
    def function():
        return rdp.gather_params(rdp.shard_params(jnp.arange(16), "fsdp", 0), "fsdp")

    assert abstract(mesh_of(fsdp=8), function).dtype == jnp.int32
