"""The task of predicting the next token, around blocks that somebody else defines."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.distributed.trainable import Batch, Functions, LossOutput, TrainableModel
from research_dp.distributed.units import Units
from research_dp.models.dropout import fold_in_each

PyTree = Any


def language_model(
    block: Functions,
    *,
    vocab_size: int,
    width: int,
    depth: int,
    tied: bool,
    dtype: str,
    remat: str,
    unroll: int,
    loss_chunk: int,
) -> TrainableModel:
    """A model of `tokens`: embedding, a stack of blocks, a norm, and a head.

    Its units are the embedding, each block, and the head with the last norm (the embedding again,
    if it is tied).

    Args:
        block: Maps `{'x': (B, S, width), 'positions', 'segments'}` to (B, S, width).
        vocab_size: Number of tokens.
        width: Features of the residual stream.
        depth: Number of blocks.
        tied: Whether the embedding is the head too.
        dtype: Compute dtype.
        remat: What a block keeps for the backward pass, see `distributed.units.REMAT`.
        unroll: Blocks in one turn of the loop over them.
        loss_chunk: Tokens whose logits exist at a time.

    Returns:
        A model for batches of `tokens` (B, S) int32; optionally `weights` (B, S), how much each
        token counts when it is predicted, and `segments` (B, S) int32, which of several packed
        sequences it belongs to: 0 for padding.
    """

    def init(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        embed_key, block_key, head_key = jax.random.split(key, 3)
        shape = (1, *batch["tokens"].shape[1:])
        inputs = {
            "x": jax.ShapeDtypeStruct((*shape, width), dtype),
            "positions": jax.ShapeDtypeStruct(shape, jnp.int32),
        }
        blocks = jax.vmap(lambda key: block.init(key, inputs)[0])(
            jax.random.split(block_key, depth)
        )
        scale = width**-0.5
        params = {
            "embed": {"embedding": scale * jax.random.normal(embed_key, (vocab_size, width))},
            "blocks": blocks,
            "head": {"scale": jnp.ones((width,))},
        }
        if not tied:
            params["head"]["kernel"] = scale * jax.random.normal(head_key, (width, vocab_size))
        return params, {}

    def loss(
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        keys: jax.Array | None,
        *,
        train: bool,
        batch_axes: tuple[str, ...] = (),
        units: Units | None = None,
    ) -> LossOutput:
        units = units or Units()
        tokens, segments = batch["tokens"], batch.get("segments")
        inputs = {"positions": _positions(tokens, segments)}
        if segments is not None:
            inputs["segments"] = segments

        def embed(own: PyTree) -> jax.Array:
            # Scaled, so that a tied embedding suits the head and the blocks see unit variance.
            return own["embed"]["embedding"].astype(dtype)[tokens] * math.sqrt(width)

        def one_block(own: PyTree, x: jax.Array, index: jax.Array) -> jax.Array:
            own_keys = None if keys is None else fold_in_each(keys, index)
            made, _ = block.apply(
                own, {}, {"x": x, **inputs}, train=train, keys=own_keys, batch_axes=batch_axes
            )
            return made

        x = units.run(embed, ("embed",), params, remat="full")
        x = units.scan(
            one_block, "blocks", params, x, each=jnp.arange(depth), remat=remat, unroll=unroll
        )
        weights = _weights(batch)
        targets = jnp.roll(tokens, -1, axis=1)

        def head(own: PyTree, x: jax.Array) -> jax.Array:
            kernel = own["embed"]["embedding"].T if tied else own["head"]["kernel"]
            normal = _rms_norm(x, own["head"]["scale"])
            return _cross_entropy(normal, kernel.astype(dtype), targets, weights, loss_chunk)

        names = ("head", "embed") if tied else ("head",)
        total = units.run(head, names, params, x, remat="full")
        return LossOutput(total, jnp.sum(weights), model_state, {})

    stacks = {"embed": False, "blocks": True, "head": False}
    return TrainableModel(init, loss, {"vocab_size": vocab_size}, stacks)


def _positions(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Place of each token in its own sequence, (B, S) int32."""
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segments is None:
        return places
    begins = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def _weights(batch: Batch) -> jax.Array:
    """How much the prediction made at each token counts, (B, S) float32.

    At a token the next one is predicted; it counts if it is there, in the same sequence, and
    neither it nor its example is masked.
    """
    tokens, segments = batch["tokens"], batch.get("segments")
    weights = batch.get("weights", jnp.ones(tokens.shape, jnp.float32))
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        weights = weights.at[:, 1:].multiply(same.astype(jnp.float32))
    if "mask" in batch:
        weights = weights * batch["mask"][:, None]
    return jnp.roll(weights, -1, axis=1).at[:, -1].set(0.0)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """X over its root mean square along the last dim, in float32, times `scale`; x's dtype."""
    wide = x.astype(jnp.float32)
    size = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * size * scale[None, None]).astype(x.dtype)


def _cross_entropy(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int
) -> jax.Array:
    """Weighted sum of cross-entropies; logits exist for `chunk` tokens at a time.

    Args:
        x: (B, S, width).
        kernel: (width, vocabulary).
        targets: (B, S) int32.
        weights: (B, S) float32.
        chunk: Number of tokens.
    """
    tokens = targets.size
    chunk = min(chunk, tokens)
    padding = -tokens % chunk

    def cut(values: jax.Array) -> jax.Array:
        flat = values.reshape(tokens, *values.shape[2:])
        padded = jnp.pad(flat, ((0, padding), *[(0, 0)] * (flat.ndim - 1)))
        return padded.reshape(-1, chunk, *flat.shape[1:])

    @jax.checkpoint
    def add(total: jax.Array, some: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        own, target, weight = some
        logits = jnp.dot(own, kernel, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=1) - chosen
        return total + jnp.sum(losses * weight), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(add, zero, (cut(x), cut(targets), cut(weights)))[0]
