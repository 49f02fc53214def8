"""Compares tracing and lowering of `fsdp_apply_gradients` with the step written by hand.

Both are a ZeRO step with Adam on a tree of 100 arrays over 8 CPU devices. Gradients and parameters
each use one collective. Prints the median ratio of processor time of pairs (A B A B ...), with
JAX's caches emptied before each. The ratio is measured with and without the check that the
optimizer is elementwise, which the hand-written step lacks. Exits with 1 above the limit.
"""

import gc
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from research_dp import OptaxAdapter, fsdp_apply_gradients, slice_specs, slice_state

LEAVES, DEVICES, PAIRS, LIMIT = 100, 8, 15, 2.5
ADAM = optax.adam(1e-3)


def ours(params, opt_state, grads):
    optimizer = OptaxAdapter(ADAM, opt_state)
    return fsdp_apply_gradients(grads, params, optimizer), optimizer.state


def by_hand(params, opt_state, grads):
    leaves, treedef = jax.tree.flatten(grads)
    shapes = [g.shape for g in leaves]
    widths = [g.size // DEVICES for g in leaves]
    device = lax.axis_index("fsdp")

    def rows(x):
        return x.reshape(DEVICES, x.size // DEVICES)

    # psum_scatter sums over the devices; this division makes the mean.
    joined = jnp.concatenate([rows(g) for g in leaves], axis=1)
    mean = lax.psum_scatter(joined, "fsdp", scatter_dimension=0, tiled=True) / DEVICES
    grads = treedef.unflatten(jnp.split(mean, _ends(widths), axis=1))
    slices = jax.tree.map(lambda p: lax.dynamic_slice_in_dim(rows(p), device, 1), params)
    updates, opt_state = ADAM.update(grads, opt_state, slices)
    joined = jnp.concatenate(jax.tree.leaves(optax.apply_updates(slices, updates)), axis=1)
    gathered = lax.all_gather(joined, "fsdp", axis=0, tiled=True)
    parts = jnp.split(gathered, _ends(widths), axis=1)
    return treedef.unflatten([x.reshape(s) for x, s in zip(parts, shapes, strict=True)]), opt_state


def _ends(widths):
    ends = [0]
    for width in widths:
        ends.append(ends[-1] + width)
    return ends[1:-1]


def seconds(step, specs, *args):
    jax.clear_caches()
    gc.collect()
    mapped = jax.shard_map(
        lambda *a: step(*a),  # a new function each time, so that nothing was traced before
        mesh=jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), specs, P()),
        out_specs=(P(), specs),
        check_vma=False,
    )
    started = time.process_time()
    jax.jit(mapped).trace(*args).lower()
    return time.process_time() - started


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    params = {f"layer_{i}": jnp.full((16, 8 + i % 3), 0.1 * i) for i in range(LEAVES)}
    state = slice_state(ADAM, ADAM.init(params), params, DEVICES)
    specs = slice_specs(ADAM, params, "fsdp", DEVICES)
    arguments = (specs, params, state, params)
    seconds(ours, *arguments), seconds(by_hand, *arguments)
    unchecked = mock.patch.object(OptaxAdapter, "check_slices")
    with_check, without, hand = [], [], []
    for _ in range(PAIRS):
        hand.append(seconds(by_hand, *arguments))
        with_check.append(seconds(ours, *arguments) / hand[-1])
        hand.append(seconds(by_hand, *arguments))
        with unchecked:
            without.append(seconds(ours, *arguments) / hand[-1])
    ratio = statistics.median(with_check)
    print(f"by hand {statistics.median(hand):.3f} s (median of {len(hand)})")
    print(f"fsdp_apply_gradients / by hand: {ratio:.2f} (limit {LIMIT}, median of {PAIRS} pairs)")
    print(f"without the elementwise check: {statistics.median(without):.2f}")
    raise SystemExit(0 if ratio <= LIMIT else 1)


if __name__ == "__main__":
    main()
