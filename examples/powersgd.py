"""PowerSGD: gradients averaged as products of two thin matrices, with error feedback.

Vogels et al., 2019, arXiv 1905.13727. The last two dims of an array are a matrix, those before
count matrices: layers of a stack, places of a convolution. What has one dim is averaged as it is.
"""

import math
from typing import ClassVar

import gin
import jax
import jax.numpy as jnp

from research_dp import PLAIN, UsageError, sync_gradients
from research_dp.distributed.boxed import is_box, unboxed, with_value
from research_dp.distributed.buckets import shard_tree
from research_dp.distributed.collectives import takes
from research_dp.distributed.sharding import fitted, is_sharded


@gin.register
class PowerSGD:
    """Averages matrices of gradients at a low rank; what is lost is added to the next gradient.

    Args:
        rank: Of the product; at most the smaller side of a matrix, at which nothing is lost.
        by_unit: Whether gradients are sent as soon as those of a unit are ready, which takes the
            memory of the errors once more.
    """

    algorithm = "gradients are averaged as matrices of low rank, with error feedback"
    # Each device has errors of its own. A basis is that of a gradient, or of a shard of it.
    differs_over: ClassVar = {"error": ("data", "fsdp"), "basis": ("fsdp",)}

    def __init__(self, rank: int = 4, by_unit: bool = False):
        self.rank, self.by_unit = rank, by_unit

    @takes("devices", "stored", "stacked", "key")
    def init(self, params, *, devices, stored, stacked, key):
        """No errors, and random bases; () for what is no matrix, nor one of each layer."""
        if is_sharded(stored) and devices["data"] == 1:
            raise UsageError("PowerSGD has nothing to average after fsdp: use ddp, zero1 or hsdp.")
        leaves, tree = jax.tree.flatten(stored)
        error, basis = [], []
        keys = jax.random.split(key, len(leaves))
        for p, layers, own_key in zip(leaves, jax.tree.leaves(stacked), keys, strict=True):
            shape = p.local_shape  # as gradients come: shards, if they are gathered
            is_matrix = len(shape) > 1 + layers
            size = (*shape[:-2], *shape[-1:], min(self.rank, *shape[-2:]) if is_matrix else 0)
            error.append(jnp.zeros(shape) if is_matrix else ())
            basis.append(jax.random.normal(own_key, size) if is_matrix else ())
        return {"error": tree.unflatten(error), "basis": tree.unflatten(basis)}

    @takes("reduction", "shardings", "stored")
    def apply(self, grads, axis_names, *, state, shardings, stored, reduction=PLAIN):
        """(mean gradients, of low rank; new errors and bases)."""
        boxes, tree = jax.tree.flatten(grads, is_leaf=is_box)
        errors, bases = (tree.flatten_up_to(state[name]) for name in ("error", "basis"))

        def mean(values):
            """Means by number of the gradient, over axes that its box does not name."""
            boxed = {i: with_value(boxes[i], x) for i, x in values.items()}
            return unboxed(sync_gradients(boxed, axis_names, reduction=reduction))

        grads = dict(enumerate(unboxed(boxes)))
        exact = {i: x + errors[i] for i, x in grads.items() if isinstance(bases[i], jax.Array)}
        left = mean({i: x @ bases[i] for i, x in exact.items()})
        left = {i: jnp.linalg.qr(x)[0] for i, x in left.items()}
        own = {i: x.mT @ left[i] for i, x in exact.items()}
        right = mean(own)
        sent = {i: (left[i] @ right[i].mT).astype(grads[i].dtype) for i in exact}
        lost = {i: x - left[i] @ own[i].mT for i, x in exact.items()}

        sent |= mean({i: x for i, x in grads.items() if i not in exact})
        means = tree.unflatten([sent[i] for i in grads])
        if not is_sharded(stored):  # they came whole, and an update may take slices
            means = shard_tree(means, shardings)
        kept = {"error": lost, "basis": right}
        return means, {k: tree.unflatten([x.get(i, ()) for i in grads]) for k, x in kept.items()}

    @takes("stacked")
    def wire_bytes(self, shape, dtype, *, stacked):
        """Bytes of what is all-reduced of a gradient: both thin matrices, in float32."""
        if len(shape) < 2 + stacked:
            return math.prod(shape) * dtype.itemsize
        return 4 * math.prod(shape[:-2]) * sum(shape[-2:]) * min(self.rank, *shape[-2:])

    @takes("stored")
    def pending(self, state, *, stored):
        """What of the mean gradient was not sent yet, given the state of all devices."""

        def one(p, error):
            if isinstance(error, tuple):
                return jnp.zeros(p.shape, p.dtype)
            shards = 1 if p.dim is None else p.axis_size
            parts = error.reshape(-1, shards, *error.shape[1:]).mean(0)
            return fitted(jnp.concatenate(list(parts), p.dim or 0), p.shape)

        return jax.tree.map(one, stored, state["error"])

    @takes("devices", "stored")
    def resize(self, state, *, devices, stored):
        """The mean of the errors is what it was."""
        shards = devices["fsdp"] if is_sharded(stored) else 1
        bases = jax.tree.leaves(state["basis"]) if is_sharded(stored) else []
        old = bases[0].shape[0] if bases else shards
        if old != shards:
            problem = f"PowerSGD keeps errors of {old} shards of a gradient, not of {shards}"
            raise UsageError(f"{problem}: continue with make_mesh.axes = {{'fsdp': {old}, ...}}.")

        def error(x):
            mean = x.reshape(-1, shards, *x.shape[1:]).mean(0)
            return jnp.tile(
                mean, (devices["data"] * devices["fsdp"] // shards, *[1] * (x.ndim - 1))
            )

        def basis(x):
            return x if shards > 1 else jnp.repeat(x[:1], devices["fsdp"], 0)

        return {
            "error": jax.tree.map(error, state["error"]),
            "basis": jax.tree.map(basis, state["basis"]),
        }
