"""A decoder transformer for text, its blocks stacked, and its attention.

A block is a choice of attention, norms, positions and feed-forward; with others it is the decoder
of GPT-2, Llama, Mistral, Qwen or Gemma (gin/models, docs/fine_tune.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import gin
import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import BelowOne, Count, CountOrZero, Dtype, Positive
from research_dp.distributed.differentiable_gather import Remat
from research_dp.distributed.mesh import target_platform
from research_dp.errors import binding_error
from research_dp.models.language_model import ADAPTER, Form, LanguageModel, capped
from research_dp.models.layers import Api, Layers, SequenceNorm, dropout, network_functions
from research_dp.types import TrainableModel

Implementation = Literal["auto", "cudnn", "chunked", "xla"]
Biases = Literal["none", "qkv", "all"]
Mlp = Literal["swiglu", "geglu", "gelu"]
_CHUNK = 256  # queries whose scores are computed at a time by 'chunked'


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
    kv_heads: Count | None = None,
    head_size: Count | None = None,
    biases: Biases = "none",
    norm: SequenceNorm = "rms",
    norm_epsilon: Positive = 1e-6,
    norm_after: bool = False,
    query_key_norm: bool = False,
    mlp: Mlp = "swiglu",
    scale_embedding: bool = True,
    max_positions: Count | None = None,
    rotary_base: Positive = 10_000.0,
    rotary_stretch: Positive = 1.0,
    rotary_length: Count = 8192,
    window: Count | None = None,
    window_each: Count = 1,
    score_scale: Positive | None = None,
    score_cap: Positive | None = None,
    logit_cap: Positive | None = None,
    lora_rank: CountOrZero = 0,
    lora_alpha: Positive = 16.0,
    dropout_rate: BelowOne = 0.0,
    dtype: Dtype = "float32",
    remat: Remat = "full",
    unroll: Count | None = None,
    attention: Implementation = "auto",
    logits_at_once: Count | None = None,
) -> TrainableModel:
    """A decoder of pre-norm blocks: RMSNorm, rotary positions, causal attention, gated MLP.

    By default as in Llama (Touvron et al., arXiv 2302.13971). Query, key and value are one matrix,
    and so are gate and up. A batch has `tokens`, (rows, length) int32; `segments` and `weights` of
    that shape are optional (docs/own_text.md).

    Args:
        api: 'linen' and 'nnx' have the same parameters.
        vocab_size: Number of tokens.
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Attention heads.
        mlp_width: Hidden features of the MLP.
        tied: Whether the embedding is the head too.
        kv_heads: Heads of keys and values, which divide `heads`: each is of several queries
            (Ainslie et al., arXiv 2305.13245); None: `heads`.
        head_size: Features of a head, even; None: `width` / `heads`.
        biases: Of which dense layers: 'none', 'qkv' (of query, key and value), 'all'.
        norm: 'rms'; 'rms_plus_1', whose scale is 1 plus its parameter; 'layer', with a bias.
        norm_epsilon: Added to the variance, or to the mean square.
        norm_after: Whether what each half of a block adds has a norm too.
        query_key_norm: Whether queries and keys have a norm, over the features of a head.
        mlp: 'swiglu' and 'geglu' are gated, by SiLU and GELU (Shazeer, arXiv 2002.05202); 'gelu' is
            not. GELU is its approximation by tanh.
        scale_embedding: Whether embeddings are times the root of `width`.
        max_positions: Number of positions that have a learned embedding; None: rotary positions.
        rotary_base: The longest rotary wavelength, over 2 pi.
        rotary_stretch: Factor of rotary wavelengths beyond `rotary_length`, from none at a quarter
            of it (Llama 3.1, arXiv 2407.21783).
        rotary_length: Positions that the model was trained on before it was stretched.
        window: Number of tokens that a token attends to, itself included; None: all before it.
        window_each: Blocks with a `window` are the first of each so many.
        score_scale: Factor of attention scores; None: one over the root of `head_size`.
        score_cap: Attention scores x become cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118).
        logit_cap: The same for logits.
        lora_rank: Rank of the adapters of the dense layers of blocks (Hu et al., arXiv 2106.09685),
            which add nothing at first; 0: none. That of query, key and value is one.
        lora_alpha: What adapters add is times this over `lora_rank`.
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
        UsageError: A head has an odd number of features, or `kv_heads` do not divide `heads`.
    """
    given = dict(locals())
    if head_size is None and width % heads:
        raise binding_error("transformer.heads", f" = {heads} do not divide width = {width}.")
    if (size := head_size or width // heads) % 2 and not max_positions:
        problem = f" = {size}: rotary positions need an even number of features."
        raise binding_error("transformer.head_size", problem)
    if heads % (kv_heads or heads):
        raise binding_error("transformer.kv_heads", f" = {kv_heads} do not divide heads = {heads}.")
    if attention == "cudnn" and (score_cap or (window and window_each > 1)):
        problem = " = 'cudnn' caps no scores, and has the same window in all blocks: bind 'auto'."
        raise binding_error("transformer.attention", problem)
    given |= {"kv_heads": kv_heads or heads, "head_size": size}
    form = Form(**{field.name: given[field.name] for field in dataclasses.fields(Form)})
    block = network_functions(api, Block(form, dropout_rate, attention), dtype)
    return LanguageModel(block, form, dtype, remat, unroll, logits_at_once).trainable()


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding; fields as in `transformer`, `rotary_` before their names."""

    base: float = 10_000.0
    stretch: float = 1.0
    length: int = 8192

    def frequencies(self, half: int) -> jax.Array:
        """Of pairs of features, the highest first."""
        plain = self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if self.stretch == 1:
            return plain
        turns = self.length * plain / (2 * math.pi)  # in the length: 1 and 4, as Llama 3 has it
        kept = jnp.clip((turns - 1) / 3, 0, 1)
        return plain * (kept + (1 - kept) / self.stretch)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What attention scores are made of; fields as in `transformer`."""

    scale: float | None = None
    cap: float | None = None
    window: Any = None  # a number, or 0-d int32


_ROTARY, _PLAIN = Rotary(), Scores()


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of the transformer; fields as in `transformer`."""

    form: Form
    dropout_rate: float
    attention: Implementation

    def __call__(self, layers: Layers, inputs: dict[str, Any]) -> Any:
        """Of 'x' (B, S, width) the same; with 'cache' also the cache with keys and values of x."""
        x = inputs["x"]
        y, cache = self._attention(layers, self._norm(layers, "attention_norm")(x), inputs)
        x = x + self._added(layers, "attention_norm", y, 0)
        y = self._mlp(layers, self._norm(layers, "mlp_norm")(x))
        x = x + self._added(layers, "mlp_norm", y, 1)
        return (x, cache) if "cache" in inputs else x

    def _norm(self, layers: Layers, name: str) -> Callable[[jax.Array], jax.Array]:
        return layers.sequence_norm(name, self.form.norm, self.form.norm_epsilon)

    def _dense(
        self, layers: Layers, name: str, features: int, use_bias: bool
    ) -> Callable[[jax.Array], jax.Array]:
        """A dense layer, with an adapter beside it if there are any."""
        dense, rank = layers.dense(name, features, use_bias=use_bias), self.form.lora_rank
        if not rank:
            return dense
        narrow = layers.dense(f"{name}{ADAPTER}a", rank, use_bias=False)
        wide = layers.dense(f"{name}{ADAPTER}b", features, use_bias=False)
        return lambda x: dense(x) + wide(narrow(x)) * (self.form.lora_alpha / rank)

    def _added(self, layers: Layers, name: str, y: jax.Array, number: int) -> jax.Array:
        """What a half of the block adds."""
        if self.form.norm_after:
            y = self._norm(layers, f"{name}_after")(y)
        return dropout(y, self.dropout_rate, layers.keys, layer=number)

    def _attention(
        self, layers: Layers, x: jax.Array, inputs: dict[str, Any]
    ) -> tuple[jax.Array, Any]:
        form, heads = self.form, self.form.heads
        rest = heads + form.kv_heads
        features = (rest + form.kv_heads) * form.head_size
        qkv = self._dense(layers, "qkv", features, form.biases != "none")(x)
        if form.kv_heads == heads:
            qkv = qkv.reshape(*x.shape[:2], 3, heads, -1)
            query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        else:
            qkv = qkv.reshape(*x.shape[:2], -1, form.head_size)
            query, key, value = qkv[:, :, :heads], qkv[:, :, heads:rest], qkv[:, :, rest:]
        if form.query_key_norm:
            query = self._norm(layers, "query_norm")(query)
            key = self._norm(layers, "key_norm")(key)
        if form.max_positions is None:
            rotary = Rotary(form.rotary_base, form.rotary_stretch, form.rotary_length)
            query, key = (rotate(x, inputs["positions"], rotary) for x in (query, key))
        window = inputs.get("window", form.window if form.window_each == 1 else None)
        scores = Scores(form.score_scale, form.score_cap, window)
        cache = inputs.get("cache")
        if cache is not None:
            start, new = inputs["start"], {"key": key, "value": value}
            cache = {
                name: jax.lax.dynamic_update_slice_in_dim(cache[name], x, start, axis=1)
                for name, x in new.items()
            }
            own, others = (jnp.arange(y.shape[1]) for y in (query, cache["key"]))
            y = _attend(
                query, cache["key"], cache["value"], _seen(start + own, others, scores), scores
            )
        else:
            options: dict[str, Any] = {"implementation": self.attention, "scores": scores}
            y = attention(query, key, value, inputs.get("segments"), **options)
        y = y.reshape(*x.shape[:2], -1)
        return self._dense(layers, "out", form.width, form.biases == "all")(y), cache

    def _mlp(self, layers: Layers, x: jax.Array) -> jax.Array:
        dense = functools.partial(self._dense, layers, use_bias=self.form.biases == "all")
        if self.form.mlp == "gelu":
            return dense("down", self.form.width)(jax.nn.gelu(dense("up", self.form.mlp_width)(x)))
        y = dense("gate_up", 2 * self.form.mlp_width)(x)
        if target_platform() == "cuda":
            # Else the gradient's two halves are concatenated for each of the matmuls that take it.
            y = jax.lax.optimization_barrier(y)
        gate, up = jnp.split(y, 2, axis=-1)
        activation = jax.nn.silu if self.form.mlp == "swiglu" else jax.nn.gelu
        return dense("down", self.form.width)(activation(gate) * up)


def rotate(x: jax.Array, positions: jax.Array, rotary: Rotary = _ROTARY) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of (B, S, heads, even features)."""
    frequencies = rotary.frequencies(x.shape[-1] // 2)
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
    scores: Scores = _PLAIN,
) -> jax.Array:
    """Causal attention: a token attends to itself and to earlier tokens of its segment.

    `query` is (B, S, heads, features), `key` and `value` may have fewer heads, which divide them;
    `segments` (B, S) int32 is the sequence
    that each token belongs to, None: one sequence. 'cudnn' is for NVIDIA GPUs in bfloat16 or
    float16; 'auto' is cuDNN where it is supported, else 'chunked' for long sequences or 'xla', on
    CPUs without most of the scores that the mask drops.
    """
    is_plain = scores.cap is None and not isinstance(scores.window, jax.Array)
    if query.dtype == jnp.float16 and target_platform() == "cpu":
        # XLA:CPU has no float16 matmul with float32 accumulation, which scores need.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        options: dict[str, Any] = {"implementation": implementation, "scores": scores}
        return attention(query, key, value, segments, **options).astype(jnp.float16)
    if implementation == "auto":
        long = query.shape[1] > 2 * _CHUNK and query.shape[1] % _CHUNK == 0
        features, half = query.shape[-1], query.dtype in (jnp.bfloat16, jnp.float16)
        # Limits of cuDNN's flash attention on every GPU.
        flash = target_platform() == "cuda" and half and features % 8 == 0 and features <= 128
        flash = flash and is_plain
        implementation = "cudnn" if flash else "chunked" if long else "xla"
        if implementation == "xla" and target_platform() == "cpu":
            return _of_earlier_keys(query, key, value, segments, scores)
    if implementation == "chunked":
        return _chunked(query, key, value, segments, scores)
    mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    if is_plain:
        span = None if scores.window is None else (scores.window - 1, 0)
        return jax.nn.dot_product_attention(
            *(query, key, value),
            mask=mask,
            is_causal=True,
            scale=scores.scale,
            local_window_size=span,
            implementation=implementation,
        )
    positions = jnp.arange(query.shape[1])
    seen = _seen(positions, positions, scores)
    return _attend(query, key, value, seen if mask is None else seen & mask, scores)


def _seen(own: jax.Array, others: jax.Array, scores: Scores) -> jax.Array:
    """Whether queries at some positions attend to keys at others: (1, 1, queries, keys)."""
    seen = own[:, None] >= others[None, :]
    if scores.window is not None:
        seen = seen & (own[:, None] - others[None, :] < jnp.reshape(scores.window, (1, 1)))
    return seen[None, None]


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, scores: Scores
) -> jax.Array:
    """Attention where `mask` (B, 1, queries, keys) has it."""
    if scores.cap is None:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=scores.scale, implementation="xla"
        )
    heads, features = key.shape[2:]
    grouped = query.reshape(*query.shape[:2], heads, -1, features)
    found = jnp.einsum("bqkgd,bskd->bkgqs", grouped, key, preferred_element_type=jnp.float32)
    found = capped(found * (scores.scale or features**-0.5), scores.cap)
    shares = jax.nn.softmax(jnp.where(mask[:, :, None], found, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", shares, value).reshape(query.shape)


def _of_earlier_keys(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | np.ndarray | None,
    scores: Scores,
) -> jax.Array:
    """Quarters of the queries, each with the keys up to its own: 5/8 of the scores."""
    length = query.shape[1]
    size, positions = -(-length // 4), jnp.arange(length)
    parts = []
    for start in range(0, length, size):
        own, earlier = slice(start, start + size), slice(0, start + size)
        mask = _seen(positions[own], positions[earlier], scores)
        if segments is not None:
            mask = mask & (segments[:, None, own, None] == segments[:, None, None, earlier])
        parts.append(_attend(query[:, own], key[:, earlier], value[:, earlier], mask, scores))
    return jnp.concatenate(parts, axis=1)


def _chunked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | np.ndarray | None,
    scores: Scores,
) -> jax.Array:
    """Scores of `_CHUNK` queries at a time, recomputed in the backward pass."""
    batch, length, heads, features = query.shape
    size = math.gcd(length, _CHUNK)
    positions = jnp.arange(length)

    @jax.checkpoint
    def chunk(start: jax.Array) -> jax.Array:
        queries = jax.lax.dynamic_slice_in_dim(query, start, size, axis=1)
        mask = _seen(start + jnp.arange(size), positions, scores)
        if segments is not None:
            chunk_segments = jax.lax.dynamic_slice_in_dim(segments, start, size, axis=1)
            mask = mask & (chunk_segments[:, None, :, None] == segments[:, None, None, :])
        return _attend(queries, key, value, mask, scores)

    chunks = jax.lax.map(chunk, jnp.arange(0, length, size))
    return chunks.swapaxes(0, 1).reshape(batch, length, heads, features)
