"""Causal attention over packed sequences, by the fastest implementation available."""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_checks import checked
from research_dp.distributed.mesh import target_platform

Implementation = Literal["auto", "cudnn", "chunked", "xla"]
_CHUNK = 256  # queries whose scores are computed at a time by 'chunked'
_ROTARY_BASE = 10_000.0


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of (B, S, heads, even features)."""
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


@checked
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | np.ndarray | None = None,
    *,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention: a token attends to itself and to earlier tokens of its segment.

    `query`, `key` and `value` are (B, S, heads, features); `segments` (B, S) int32 is the sequence
    that each token belongs to, None: one sequence. Implementations: 'cudnn' is flash attention, on
    NVIDIA GPUs in bfloat16 or float16; 'chunked' computes scores of 256 queries at a time, 'xla'
    all at once; 'auto' is cuDNN where it is supported, else 'chunked' for long sequences or 'xla'.
    """
    if query.dtype == jnp.float16 and target_platform() == "cpu":
        # XLA:CPU has no float16 matmul with float32 accumulation, which scores need.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        output = attention(query, key, value, segments, implementation=implementation)
        return output.astype(jnp.float16)
    if implementation == "auto":
        long = query.shape[1] > 2 * _CHUNK and query.shape[1] % _CHUNK == 0
        implementation = "cudnn" if _supported_by_cudnn(query) else "chunked" if long else "xla"
    if implementation == "chunked":
        return _chunked(query, key, value, segments)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=implementation
    )


def _supported_by_cudnn(query: jax.Array) -> bool:
    """Whether cuDNN's flash attention takes this dtype and head size on every GPU."""
    features = query.shape[-1]
    dtype = query.dtype in (jnp.bfloat16, jnp.float16)
    return target_platform() == "cuda" and dtype and features % 8 == 0 and features <= 128


def _chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | np.ndarray | None
) -> jax.Array:
    """Scores of `_CHUNK` queries at a time, recomputed in the backward pass."""
    batch, length, heads, features = query.shape
    size = math.gcd(length, _CHUNK)
    positions = jnp.arange(length)

    @jax.checkpoint
    def chunk(start: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(query, start, size, axis=1)
        mask = (start + jnp.arange(size))[:, None] >= positions[None, :]
        mask = mask[None, None]
        if segments is not None:
            chunk_segments = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
            mask = mask & (chunk_segments[:, None, :, None] == segments[:, None, None, :])
        return jax.nn.dot_product_attention(queries, key, value, mask=mask, implementation="xla")

    chunks = jax.lax.map(chunk, jnp.arange(0, length, size))
    return chunks.swapaxes(0, 1).reshape(batch, length, heads, features)
