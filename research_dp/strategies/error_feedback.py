"""Error feedback: what encoding takes from gradients is added to those of the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from research_dp.distributed.boxed import is_box, value_of, with_value
from research_dp.distributed.codecs import Compression, Encoding
from research_dp.distributed.collectives import Axes, takes
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.distributed.sharding import LeafSharding, fitted, is_sharded
from research_dp.errors import UsageError, binding_error
from research_dp.strategies import slots
from research_dp.types import PyTree


class KeepsErrors:
    """What slots have in common whose state has errors of each device, as `error`."""

    @takes("stored")
    def pending(self, state: Mapping[str, PyTree], *, stored: PyTree) -> PyTree:
        """What of the mean gradient was not sent yet, given the state of all devices."""

        def one(p: LeafSharding, error: Any) -> jax.Array:
            if isinstance(error, tuple):
                return jnp.zeros(p.shape, p.dtype)
            return _mean(p, error).astype(p.dtype)

        return jax.tree.map(one, stored, state["error"])

    @takes("devices", "stored")
    def resize(
        self, state: Mapping[str, PyTree], *, devices: Mapping[str, int], stored: PyTree
    ) -> dict[str, PyTree]:
        """The mean of the errors is what it was."""
        return {**state, "error": resized(state["error"], devices, stored)}


class ErrorFeedback(KeepsErrors):
    """A slot `sync` whose gradients are encoded, with a state of what was lost of each.

    A device sends C(g + e) of its gradient g, and keeps e = g + e - C(g + e), in float32. Where it
    has a part of the mean, it keeps what is lost of that too. So what is sent and what is kept are
    together the gradients, but for the rounding of float32 and of the means to gradients' dtypes.

    Attributes:
        func: A function of slot `sync` that takes `encoding`.
        by_unit: See `slots.Stateful`.
    """

    differs_over: ClassVar = {"error": (DATA_AXIS, FSDP_AXIS)}

    def __init__(self, func: Callable[..., PyTree], compression: Compression):
        self.func, self._compression, self.by_unit = func, compression, compression.by_unit

    @takes("stored")
    def init(self, params: PyTree, *, stored: PyTree) -> dict[str, PyTree]:
        """No errors yet, in the shapes in which gradients come; () for what is not encoded."""
        del params
        if self._compression.sync and is_sharded(stored):
            raise binding_error(
                "compression.error_feedback",
                " = True with compression.sync, where parameters are sharded: the errors of "
                "unsharded gradients would take the memory that sharding saves. Bind False, or "
                "compression.across alone.",
            )
        return {"error": jax.tree.map(self._none_yet, stored)}

    def _none_yet(self, p: LeafSharding) -> PyTree:
        return jnp.zeros(p.local_shape, jnp.float32) if self._compression.takes(p) else ()

    @takes("reduction", "shardings", "encoding")
    def apply(
        self,
        grads: PyTree,
        axis_names: Axes,
        *,
        state: Mapping[str, PyTree],
        encoding: Encoding,
        **offered: Any,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """(mean gradients in their own dtypes, what was lost of this device's own)."""
        flat: Any = jax.tree.flatten(grads, is_leaf=is_box)
        leaves, tree = flat
        errors, losses = tree.flatten_up_to(state["error"]), dict[int, jax.Array]()
        offered["encoding"] = encoding._replace(losses=losses)
        exact = [
            leaf if isinstance(e, tuple) else with_value(leaf, value_of(leaf) + e)
            for leaf, e in zip(leaves, errors, strict=True)
        ]
        options = slots.options_of(self.func, offered)
        means = self.func(tree.unflatten(exact), axis_names, **options)
        means = jax.tree.map(
            lambda m, g: value_of(m).astype(value_of(g).dtype), means, grads, is_leaf=is_box
        )
        # What nobody encodes, as on one device, is sent in full.
        kept = [losses.get(i, jax.tree.map(jnp.zeros_like, e)) for i, e in enumerate(errors)]
        return means, {"error": tree.unflatten(kept)}


def resized(errors: PyTree, devices: Mapping[str, int], stored: PyTree) -> PyTree:
    """Errors of other devices (devices, ...): each has its shard of their mean.

    Raises UsageError if they are of shards that cannot be told apart.
    """
    count = devices[DATA_AXIS] * devices[FSDP_AXIS]

    def one(p: LeafSharding, error: Any) -> Any:
        if isinstance(error, tuple):
            return error
        mean = _mean(p, error)
        if p.dim is None:
            return jnp.broadcast_to(mean, (count, *mean.shape))
        shards = jnp.stack(jnp.split(fitted(mean, p.split_shape), p.axis_size, p.dim))
        return jnp.tile(shards, (count // p.axis_size, *[1] * mean.ndim))

    return jax.tree.map(one, stored, errors)


def _mean(p: LeafSharding, error: jax.Array) -> jax.Array:
    """The mean of a parameter's errors (devices, ...) over devices, unsharded."""
    devices, *shape = error.shape
    apart = [dim for dim, n in enumerate(shape) if n != p.shape[dim]]
    dim = apart[0] if apart else p.dim or 0
    # So many shards have such a length, padded.
    counts = [
        n for n in range(1, devices + 1) if devices % n == 0 and -(-p.shape[dim] // n) == shape[dim]
    ]
    if not apart or p.local_shape == tuple(shape):
        counts = [p.axis_size if apart else 1]
    if len(apart) > 1 or len(counts) != 1:
        raise UsageError(
            f"the errors of {p.path} are of shards of shape {tuple(shape)}, whose number is not "
            f"known: continue with as many devices along axis {FSDP_AXIS!r}."
        )
    parts = error.reshape(-1, counts[0], *shape).mean(0)
    return fitted(jnp.concatenate(list(parts), dim), p.shape)
