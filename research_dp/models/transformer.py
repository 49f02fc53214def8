"""A decoder transformer for text, its blocks stacked, and its attention."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import gin
import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.distributed.differentiable_gather import Remat
from research_dp.distributed.mesh import target_platform
from research_dp.errors import UsageError
from research_dp.models.language_model import LanguageModel
from research_dp.models.layers import Api, Layers, dropout, network_functions
from research_dp.types import TrainableModel

Implementation = Literal["auto", "cudnn", "chunked", "xla"]
_CHUNK = 256  # queries whose scores are computed at a time by 'chunked'
_ROTARY_BASE = 10_000.0


@gin.register(module="models")
@checked
def transformer(
    *,
    api: Api = "linen",
    vocab_size: Count = gin.REQUIRED,
    width: Count = 128,
    depth: Count = 4,
    heads: Count = 4,
    mlp_width: Count = 512,
    tied: bool = False,
    dropout_rate: DropoutRate = 0.0,
    dtype: Dtype = "float32",
    remat: Remat = "full",
    unroll: Count | None = None,
    attention: Implementation = "auto",
    logits_at_once: Count | None = None,
) -> TrainableModel:
    """A decoder of pre-norm blocks: RMSNorm, rotary positions, causal attention, gated MLP.

    As in Llama (Touvron et al., arXiv 2302.13971), without biases; query, key and value are one
    matrix, and so are gate and up.

    Args:
        api: 'linen' and 'nnx' have the same parameters.
        vocab_size: Number of tokens.
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Attention heads; they divide `width`.
        mlp_width: Hidden features of the gated MLP.
        tied: Whether the embedding is the head too.
        dropout_rate: Dropout on what each half of a block adds.
        dtype: Compute dtype; parameters are float32.
        remat: What a block saves for its backward pass besides its input: 'full' nothing, 'dots'
            matmul outputs, 'none' everything but, on accelerators, elementwise results.
        unroll: Blocks in one iteration of the loop over them; None: 1, or all of at most 12 on a
            CPU that neither gathers nor recomputes them.
        attention: 'cudnn' is flash attention; 'chunked' has the scores of 256 queries at a time.
        logits_at_once: Upper bound on the logits of a chunk of the vocabulary, in the loss; None:
            an eighth of them, or as many as fit in a 32nd of an accelerator's memory; at least
            2**23, and so many on CPUs and unknown devices.

    Raises:
        UsageError: `heads` does not divide `width`, or a head has an odd number of features.
    """
    if width % heads or (width // heads) % 2:
        raise UsageError(
            f"transformer.width = {width} over heads = {heads}: a head needs an even number of "
            "features.",
            binding="transformer.heads",
        )
    block = network_functions(api, Block(width, heads, mlp_width, dropout_rate, attention), dtype)
    sizes = vocab_size, width, depth, tied
    return LanguageModel(block, *sizes, dtype, remat, unroll, logits_at_once).trainable()


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of the transformer; fields as in `transformer`."""

    width: int
    heads: int
    mlp_width: int
    dropout_rate: float
    attention: Implementation

    def __call__(self, layers: Layers, inputs: dict[str, jax.Array]) -> jax.Array:
        dense = functools.partial(layers.dense, use_bias=False)
        x = inputs["x"]
        y = layers.rms_norm("attention_norm")(x)
        qkv = dense("qkv", 3 * self.width)(y).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        query, key = (rotate(x, inputs["positions"]) for x in (query, key))
        y = attention(query, key, value, inputs.get("segments"), implementation=self.attention)
        y = dense("out", self.width)(y.reshape(x.shape))
        x = x + dropout(y, self.dropout_rate, layers.keys, layer=0)
        y = layers.rms_norm("mlp_norm")(x)
        # SwiGLU (Shazeer, arXiv 2002.05202)
        y = dense("gate_up", 2 * self.mlp_width)(y)
        if target_platform() == "cuda":
            # Else the gradient's two halves are concatenated for each of the matmuls that take it.
            y = jax.lax.optimization_barrier(y)
        gate, up = jnp.split(y, 2, axis=-1)
        y = jax.nn.silu(gate) * up
        return x + dropout(dense("down", self.width)(y), self.dropout_rate, layers.keys, layer=1)


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
    that each token belongs to, None: one sequence. 'cudnn' is for NVIDIA GPUs in bfloat16 or
    float16; 'auto' is cuDNN where it is supported, else 'chunked' for long sequences or 'xla', on
    CPUs without most of the scores that the mask drops.
    """
    if query.dtype == jnp.float16 and target_platform() == "cpu":
        # XLA:CPU has no float16 matmul with float32 accumulation, which scores need.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        output = attention(query, key, value, segments, implementation=implementation)
        return output.astype(jnp.float16)
    if implementation == "auto":
        long = query.shape[1] > 2 * _CHUNK and query.shape[1] % _CHUNK == 0
        features, half = query.shape[-1], query.dtype in (jnp.bfloat16, jnp.float16)
        # Limits of cuDNN's flash attention on every GPU.
        flash = target_platform() == "cuda" and half and features % 8 == 0 and features <= 128
        implementation = "cudnn" if flash else "chunked" if long else "xla"
        if implementation == "xla" and target_platform() == "cpu":
            return _of_earlier_keys(query, key, value, segments)
    if implementation == "chunked":
        return _chunked(query, key, value, segments)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, implementation=implementation
    )


def _of_earlier_keys(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | np.ndarray | None
) -> jax.Array:
    """Quarters of the queries, each with the keys up to its own: 5/8 of the scores."""
    length = query.shape[1]
    size, positions = -(-length // 4), jnp.arange(length)
    parts = []
    for start in range(0, length, size):
        own, earlier = slice(start, start + size), slice(0, start + size)
        mask = (positions[own, None] >= positions[None, earlier])[None, None]
        if segments is not None:
            mask = mask & (segments[:, None, own, None] == segments[:, None, None, earlier])
        arrays = query[:, own], key[:, earlier], value[:, earlier]
        parts.append(jax.nn.dot_product_attention(*arrays, mask=mask, implementation="xla"))
    return jnp.concatenate(parts, axis=1)


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
        mask = ((start + jnp.arange(size))[:, None] >= positions[None, :])[None, None]
        if segments is not None:
            chunk_segments = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
            mask = mask & (chunk_segments[:, None, :, None] == segments[:, None, None, :])
        return jax.nn.dot_product_attention(queries, key, value, mask=mask, implementation="xla")

    chunks = jax.lax.map(chunk, jnp.arange(0, length, size))
    return chunks.swapaxes(0, 1).reshape(batch, length, heads, features)
