"""Causal attention over packed sequences, by the fastest implementation that there is."""

from __future__ import annotations

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from research_dp.distributed.mesh import target_platform
from research_dp.errors import UsageError

Implementation = Literal["auto", "cudnn", "chunked", "xla"]
_QUERIES = 256  # queries whose scores exist at a time, in 'chunked'
_ROTARY_BASE = 10_000.0


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864).

    Args:
        x: (B, S, heads, features), features even.
        positions: (B, S) int32.
    """
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention; a token sees the tokens of its own segment up to itself.

    Args:
        query: (B, S, heads, features), like `key` and `value`.
        key: Keys.
        value: Values.
        segments: (B, S) int32, the sequence that each token belongs to; None: one.
        implementation: 'cudnn': flash attention, on NVIDIA GPUs in bfloat16 or float16. 'chunked':
            scores of a few queries at a time. 'xla': all scores at once. 'auto': cuDNN where it
            runs, else chunked for long sequences.
    """
    if implementation not in get_args(Implementation):
        raise UsageError(
            f"transformer.attention = {implementation!r}: use one of {get_args(Implementation)}.",
            binding="transformer.attention",
        )
    if query.dtype == jnp.float16 and target_platform() == "cpu":
        # XLA:CPU has no products of float16 that are added up in float32, which scores are.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        made = attention(query, key, value, segments, implementation=implementation)
        return made.astype(jnp.float16)
    if implementation == "auto":
        long = query.shape[1] > 2 * _QUERIES and query.shape[1] % _QUERIES == 0
        implementation = "cudnn" if _suits_cudnn(query) else "chunked" if long else "xla"
    if implementation == "chunked":
        return _chunked(query, key, value, segments)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    kind: Literal["cudnn", "xla"] = "cudnn" if implementation == "cudnn" else "xla"
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=kind
    )


def _suits_cudnn(query: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes it on every GPU that has it: dtype, size of a head."""
    features = query.shape[-1]
    dtype = query.dtype in (jnp.bfloat16, jnp.float16)
    return target_platform() == "cuda" and dtype and features % 8 == 0 and features <= 128


def _chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Scores of `_QUERIES` queries at a time, made again in the backward pass."""
    batch, length, heads, features = query.shape
    size = math.gcd(length, _QUERIES)
    places = jnp.arange(length)

    @jax.checkpoint
    def some(start: jax.Array) -> jax.Array:
        own = jax.lax.dynamic_slice_in_dim(query, start, size, axis=1)
        mask = (start + jnp.arange(size))[:, None] >= places[None, :]
        mask = mask[None, None]
        if segments is not None:
            mine = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
            mask = mask & (mine[:, None, :, None] == segments[:, None, None, :])
        return jax.nn.dot_product_attention(own, key, value, mask=mask, implementation="xla")

    chunks = jax.lax.map(some, jnp.arange(0, length, size))
    return chunks.swapaxes(0, 1).reshape(batch, length, heads, features)
