"""Compares tracing and lowering of the functions on boxes with the same written by hand.

python experiments/seed_functions/trace_time.py [--leaves=100] [--pairs=15]

`by hand` is the code for a model whose shardings are known: slices, a custom gradient with
`all_gather` and `psum_scatter`, `pmean`, in loops over leaves. A B A B; nothing cached or compiled.
"""

import argparse
import functools
import gc
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import research_dp

AXIS, WIDTH = "fsdp", 64


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(x, dim):
    return lax.all_gather(x, AXIS, axis=dim, tiled=True)


def forward(x, dim):
    return gather(x, dim), None


def backward(dim, _, g):
    # psum_scatter sums over the devices; this division makes the mean.
    total = lax.psum_scatter(g, AXIS, scatter_dimension=dim, tiled=True)
    return (total / lax.axis_size(AXIS),)


gather.defvjp(forward, backward)


def shard_by_hand(params):
    def one(x):
        if x.size <= 2**10:
            return x
        dim = max(range(x.ndim), key=lambda d: (x.shape[d], d))
        block = x.shape[dim] // lax.axis_size(AXIS)
        shard = lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * block, block, dim)
        return nn.Partitioned(shard, (None,) * dim + (AXIS,) + (None,) * (x.ndim - dim - 1))

    return jax.tree.map(one, params)


def is_box(x):
    return isinstance(x, nn.Partitioned)


def gather_by_hand(params):
    return jax.tree.map(
        lambda x: gather(x.value, x.names.index(AXIS)) if is_box(x) else x, params, is_leaf=is_box
    )


def sync_by_hand(grads):
    # pmean averages unsharded gradients; those of shards are already means.
    return jax.tree.map(lambda g: g if is_box(g) else lax.pmean(g, AXIS), grads, is_leaf=is_box)


def module(dense, layers):
    """Returns the gradient function of a Linen model of dense layers of this class."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(layers):
                x = dense(WIDTH, name=f"layer_{i}")(x)
            return x

    def loss(params):
        return jnp.sum(Model().apply({"params": params}, jnp.ones((1, WIDTH))))

    return jax.grad(loss)


def sharded_by_hand(dense):
    return nn.map_variables(
        dense, "params", trans_in_fn=gather_by_hand, trans_out_fn=shard_by_hand, mutable=True
    )


def differentiated(function):
    """Also traces the backward pass of a gather."""

    def total(params):
        return sum(jnp.sum(x) for x in jax.tree.leaves(function(params)))

    return jax.grad(total)


def traced_and_lowered(function, mesh, specs, params):
    """Returns the seconds to lower a new function, so that nothing was traced before."""
    mapped = jax.shard_map(
        lambda p: function(p), mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    gc.collect()
    start = time.perf_counter()
    jax.jit(mapped).lower(params)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--leaves", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=15)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    replicated = {  # kernels are sharded, biases are not
        f"layer_{i}": jax.ShapeDtypeStruct((64, 128) if i % 2 == 0 else (128,), jnp.float32)
        for i in range(flags.leaves)
    }
    shards = {
        name: nn.Partitioned(x, (None, AXIS)) if len(x.shape) == 2 else x
        for name, x in replicated.items()
    }
    specs = nn.get_partition_spec(shards)
    layers = {
        f"layer_{i}": {
            "kernel": nn.Partitioned(
                jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), (None, AXIS)
            ),
            "bias": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
        }
        for i in range(flags.leaves // 2)
    }
    in_layers = (nn.get_partition_spec(layers), layers)
    ours_gather = functools.partial(research_dp.gather_params, axis_name=AXIS)
    cases = {
        "shard_params": (
            functools.partial(research_dp.shard_params, axis_name=AXIS, min_weight_size=2**10),
            shard_by_hand,
            (P(), replicated),
        ),
        "gather_params": (ours_gather, gather_by_hand, (specs, shards)),
        "gather_params and its gradient": (
            differentiated(ours_gather),
            differentiated(gather_by_hand),
            (specs, shards),
        ),
        "sync_gradients": (
            functools.partial(research_dp.sync_gradients, axis_names=(AXIS,)),
            sync_by_hand,
            (specs, shards),
        ),
    }
    dense = research_dp.shard_module_params(nn.Dense, AXIS, 2**10)
    cases |= {
        "gather_array_with_mean_grads": (
            lambda tree: [
                research_dp.gather_array_with_mean_grads(x, x.ndim - 1, AXIS)
                for x in jax.tree.leaves(tree)
            ],
            lambda tree: [gather(x, x.ndim - 1) for x in jax.tree.leaves(tree)],
            (P(), replicated),
        ),
        "shard_module_params, differentiated": (
            module(dense, flags.leaves // 2),
            module(sharded_by_hand(nn.Dense), flags.leaves // 2),
            in_layers,
        ),
        "reduce_gradients_across_devices": (
            functools.partial(research_dp.reduce_gradients_across_devices, axis_name=AXIS),
            lambda grads: jax.tree.map(lambda g: lax.pmean(g, AXIS), grads),
            (P(), replicated),
        ),
        "reduce_gradient_tree": (
            research_dp.reduce_gradient_tree,
            lambda grads: jax.tree.map(jnp.mean, grads),
            (P(), replicated),
        ),
    }
    print(f"{flags.leaves} leaves, median of {flags.pairs} pairs")
    for name, (ours, by_hand, (specs_in, params)) in cases.items():
        times = [
            [traced_and_lowered(f, mesh, specs_in, params) for f in (ours, by_hand)]
            for _ in range(flags.pairs + 1)
        ][1:]
        ratio = statistics.median(a / b for a, b in times)
        ours_ms, hand_ms = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name}: {ours_ms:.1f} ms, by hand {hand_ms:.1f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
