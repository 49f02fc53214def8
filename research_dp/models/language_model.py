"""Next-token prediction: embedding, a stack of blocks, and the cross-entropy of a head."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.mesh import examples_on_device, note, target_memory, target_platform
from research_dp.distributed.sharding import PART, STACK, TABLE, by_path
from research_dp.distributed.units import Units
from research_dp.errors import binding_error
from research_dp.models.layers import SequenceNorm, fold_in_each, unit_rms
from research_dp.types import Batch, Functions, LossOutput, PyTree, TrainableModel, Work

_LOGITS = 2**23  # that a chunk of the vocabulary has, unless chunks were then more than these
_CHUNKS = 8  # each of which costs three collectives, where the head is sharded
_SHARE = 32  # of the memory that a chunk's float32 logits may take: one of these
ADAPTER = "_lora_"  # between the name of a dense layer and that of its adapter's half: a, b
_UNROLLED = 12  # blocks that a CPU runs without a loop, which fills and copies what it saves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """What a decoder computes; fields as in `transformer`, without None for a size of its own."""

    vocab_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    tied: bool
    kv_heads: int
    head_size: int
    biases: str
    norm: SequenceNorm
    norm_epsilon: float
    norm_after: bool
    query_key_norm: bool
    mlp: str
    scale_embedding: bool
    max_positions: int | None
    rotary_base: float
    rotary_stretch: float
    rotary_length: int
    window: int | None
    window_each: int
    score_scale: float | None
    score_cap: float | None
    logit_cap: float | None
    lora_rank: int
    lora_alpha: float


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model of `tokens`: embedding, a stack of blocks, a norm, and a head.

    Its units are the embedding, each block, the final norm, and chunks of the head's rows. Batches
    have `tokens` (B, S) int32; optionally `weights` (B, S), the weight of each token as a target,
    and `segments` (B, S) int32, the packed sequence that it belongs to: 0 for padding.
    """

    block: Functions  # {'x': (B, S, width), 'positions', 'segments'} -> (B, S, width)
    form: Form
    # As in `transformer`.
    dtype: str
    remat: str
    unroll: int | None
    logits_at_once: int | None

    def trainable(self) -> TrainableModel:
        head = {} if self.form.tied else {"head": TABLE}
        learned = {"positions": TABLE} if self.form.max_positions else {}
        units = {"embed": TABLE, **learned, "blocks": STACK, "norm": PART, **head}
        facts = {"vocab_size": self.form.vocab_size, "transformer": dataclasses.asdict(self.form)}
        bounds = {"tokens": "vocab_size"}
        functions = self.init, self.loss
        options: dict[str, Any] = {"counted": _counted, "decode": self.decode}
        return TrainableModel(*functions, facts, units, self.work, bounds, self.apply, **options)

    def init(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Parameters, with the same bits for Linen and NNX blocks; no model state."""
        assert batch["tokens"].ndim == 2  # no parameter depends on their number
        embed_key, block_key, head_key = jax.random.split(key, 3)
        shapes = by_path(self._block_shapes())
        # Adapters last, so that the others are as without them.
        paths = sorted(shapes, key=lambda path: ADAPTER in path)
        block_keys = jax.random.split(block_key, self.form.depth)
        table, scale = (self.form.vocab_size, self.form.width), self.form.width**-0.5

        def init_block(key: jax.Array) -> PyTree:
            """Normal matrices of variance 1 / fan_in; norms, biases and adapters do nothing."""
            params = {}
            for path, k in zip(paths, jax.random.split(key, len(paths)), strict=True):
                x, (above, _, name) = shapes[path], path.rpartition("/")
                if x.ndim > 1 and not above.endswith(f"{ADAPTER}b"):
                    params[path] = jax.random.normal(k, x.shape, x.dtype) * x.shape[0] ** -0.5
                else:
                    params[path] = self._vector(name, x.shape).astype(x.dtype)
            return unflatten_dict(params, sep="/")

        params = {
            "embed": {"table": scale * jax.random.normal(embed_key, table)},
            "blocks": jax.vmap(init_block)(block_keys),
            "norm": {"scale": self._vector("scale", (self.form.width,))},
        }
        if self.form.norm == "layer":
            params["norm"]["bias"] = self._vector("bias", (self.form.width,))
        if self.form.max_positions:
            key, learned = (
                jax.random.fold_in(embed_key, 1),
                (self.form.max_positions, self.form.width),
            )
            params["positions"] = {"table": scale * jax.random.normal(key, learned)}
        if not self.form.tied:
            params["head"] = {"table": scale * jax.random.normal(head_key, table)}
        return params, {}

    def _vector(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Of a norm or a bias, such that it does nothing."""
        is_one = name == "scale" and self.form.norm != "rms_plus_1"
        return jnp.ones(shape) if is_one else jnp.zeros(shape)

    def loss(
        self,
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        keys: jax.Array | None,
        *,
        train: bool,
        batch_axes: tuple[str, ...] = (),
        units: Units | None = None,
    ) -> LossOutput:
        """Weighted cross-entropy of each next token."""
        units = units or Units()
        if is_weighted := any(name in batch for name in ("weights", "segments", "mask")):
            batch = {**batch, "tokens": jnp.where(_counted(batch, "tokens"), batch["tokens"], 0)}
        x = self._hidden(params, batch, keys, units, train=train, batch_axes=batch_axes)
        tokens = batch["tokens"]
        weights, targets = _target_weights(batch), jnp.roll(tokens, -1, axis=1)
        count = weights.sum() * (tokens.shape[0] // len(weights))
        head = "embed" if self.form.tied else "head"
        scan_rows = functools.partial(units.scan_rows, name=head, params=params)
        chunks = self._chunks(examples_on_device(tokens.size))
        losses = _cross_entropy(
            x, scan_rows, targets, self.form.vocab_size, chunks, self.form.logit_cap
        )
        weight = jnp.broadcast_to(weights, tokens.shape).reshape(-1)
        if is_weighted:
            losses = jnp.where(weight == 0, 0.0, losses)
        total = jnp.sum(losses * weight)
        return LossOutput(total, count, model_state, {})

    def _chunks(self, tokens: int) -> int:
        """In how many chunks of the vocabulary a device has its logits, one after the other."""
        logits, at_once = self.form.vocab_size * tokens, self.logits_at_once
        if at_once is None:
            fits = target_memory() // (4 * _SHARE)
            at_once = max(_LOGITS, min(-(-logits // _CHUNKS), fits))
        least = min(-(-logits // at_once), self.form.vocab_size)
        # A divisor of the vocabulary's size, if one is below twice the least number of chunks.
        divisors = (n for n in range(least, 2 * least) if self.form.vocab_size % n == 0)
        chunks = next(divisors, least)
        if self.logits_at_once is None:
            note("transformer.logits_at_once", f"{at_once} ({chunks} chunks of the vocabulary)")
        return chunks

    def apply(self, params: PyTree, tokens: Any, model_state: PyTree | None = None) -> jax.Array:
        """Logits of each next token: (B, S) int32 -> (B, S, vocab_size) float32."""
        assert not model_state  # it has none
        tokens = jnp.asarray(tokens["tokens"] if isinstance(tokens, Mapping) else tokens)
        x = self._hidden(params, {"tokens": tokens}, None, Units(), train=False, batch_axes=())
        return self._logits(params, x)

    def _logits(self, params: PyTree, x: jax.Array) -> jax.Array:
        """Of what the head takes, (B, S, width)."""
        rows = params["embed" if self.form.tied else "head"]["table"].astype(x.dtype)
        logits = capped(_logits(x.reshape(-1, self.form.width), rows), self.form.logit_cap)
        return logits.reshape(*x.shape[:2], -1)

    def decode(self, params: PyTree, tokens: Any, cache: Any) -> tuple[jax.Array, PyTree]:
        """Logits of what follows, (B, vocab_size) float32, and the cache of all tokens up to there.

        Args:
            params: The parameters, unsharded.
            tokens: (B, n) int32, which follow those of the cache.
            cache: What an earlier call returned; or of how many tokens there will be room.
        """
        tokens = jnp.asarray(tokens)
        if isinstance(cache, int):
            shape = self.form.depth, len(tokens), cache, self.form.kv_heads, self.form.head_size
            none = jnp.zeros(shape, self.dtype)
            cache = {"key": none, "value": none, "length": jnp.int32(0)}
        start, arrays = cache["length"], {name: cache[name] for name in ("key", "value")}
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1])[None], tokens.shape)
        room = arrays["key"].shape[2]
        x = self._embedded(params, tokens, positions, Units(), room)

        def block(x: jax.Array, given: Any) -> tuple[jax.Array, Any]:
            block_params, index, arrays = given
            inputs = {"x": x, "positions": positions, **self._window(index, room)}
            inputs |= {"cache": arrays, "start": start}
            options = {"train": False, "keys": None, "batch_axes": ()}
            found: Any = self.block.apply(block_params, {}, inputs, **options)[0]
            return found

        layers = params["blocks"], jnp.arange(self.form.depth), arrays
        x, arrays = jax.lax.scan(block, x, layers)
        logits = self._logits(params, self._final_norm(params, x[:, -1:]))[:, 0]
        return logits, {**arrays, "length": start + tokens.shape[1]}

    def _hidden(
        self,
        params: PyTree,
        batch: Batch,
        keys: jax.Array | None,
        units: Units,
        *,
        train: bool,
        batch_axes: tuple[str, ...],
    ) -> jax.Array:
        """What the head takes, (B, S, width)."""
        tokens, segments = batch["tokens"], batch.get("segments")
        inputs = {"positions": _positions(tokens, segments)}
        if segments is not None:
            inputs["segments"] = segments

        def block(block_params: PyTree, x: jax.Array, index: jax.Array) -> jax.Array:
            block_keys = None if keys is None else fold_in_each(keys, index)
            options = {"train": train, "keys": block_keys, "batch_axes": batch_axes}
            given = {"x": x, **inputs, **self._window(index, tokens.shape[1])}
            return self.block.apply(block_params, {}, given, **options)[0]

        x = self._embedded(params, tokens, inputs["positions"], units, tokens.shape[1])
        indices = jnp.arange(self.form.depth)
        unroll = self.unroll
        if unroll is None:
            keeps = units.gather is None and self.remat == "none"
            is_short = self.form.depth <= _UNROLLED and target_platform() == "cpu"
            unroll = self.form.depth if keeps and is_short else 1
            note("transformer.unroll", f"{unroll}")
        x = units.scan(block, "blocks", params, x, each=indices, remat=self.remat, unroll=unroll)
        return units.run(self._final_norm, ("norm",), params, x, remat="full")

    def _embedded(
        self, params: PyTree, tokens: jax.Array, positions: jax.Array, units: Units, length: int
    ) -> jax.Array:
        """What the first block takes, of sequences that may have so many tokens."""
        x = units.look_up("embed", params, tokens, self.dtype)
        if self.form.scale_embedding:  # to unit variance; for tying, rows have that of a head
            x = x * math.sqrt(self.form.width)
        if self.form.max_positions:
            if length > self.form.max_positions:
                problem = f" = {self.form.max_positions}, and a sequence has {length} tokens."
                raise binding_error("transformer.max_positions", problem)
            x = x + units.look_up("positions", params, positions, self.dtype)
        return x

    def _window(self, index: jax.Array, length: int) -> dict[str, jax.Array]:
        """The input 'window' of a block, where blocks have different ones."""
        window, each = self.form.window, self.form.window_each
        if window is None or each == 1:
            return {}
        return {"window": jnp.where(index % each == 0, window, length)}

    def _final_norm(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The norm over the last dim, computed in float32."""
        wide, norm = x.astype(jnp.float32), params["norm"]
        if self.form.norm == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = norm["scale"] + 1 if self.form.norm == "rms_plus_1" else norm["scale"]
        y = unit_rms(wide, self.form.norm_epsilon) * scale[None, None]
        return (y + norm["bias"][None, None] if self.form.norm == "layer" else y).astype(x.dtype)

    def work(self, example: Mapping[str, jax.ShapeDtypeStruct]) -> Work:
        """Tokens and model FLOPs of a training example."""
        length = example["tokens"].shape[0]
        matrices = sum(x.size for x in jax.tree.leaves(self._block_shapes()) if x.ndim > 1)
        # A matmul takes 2 FLOPs a weight forward and 4 backward. Attention scores and values take
        # as many for each pair of positions; masked pairs are counted.
        per_token = 6 * (self.form.depth * matrices + self.form.vocab_size * self.form.width)
        per_token += 12 * self.form.depth * self.form.heads * self.form.head_size * length
        return Work(length, float(per_token * length), self.dtype)

    def _block_shapes(self) -> PyTree:
        """Shapes of one block's parameters, which do not depend on the sequence."""
        positions = jax.ShapeDtypeStruct((1, 2), jnp.int32)
        inputs = {
            "x": jax.ShapeDtypeStruct((1, 2, self.form.width), self.dtype),
            "positions": positions,
        }
        return jax.eval_shape(lambda key: self.block.init(key, inputs)[0], seed_key(0))


def _positions(tokens: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Position of each token in its sequence, (B, S) int32."""
    indices = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segments is None:
        return indices
    starts = jnp.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    return indices - jax.lax.cummax(jnp.where(starts, indices, 0), axis=1)


def _target_weights(batch: Batch) -> Any:
    """The next token's weight, float32; 0 if it is missing, masked or in another segment.

    (B, S), or (1, S) where all examples weigh the same, on the host.
    """
    length, segments = batch["tokens"].shape[1], batch.get("segments")
    weights: Any = batch.get("weights", np.ones((1, length), np.float32))[:, 1:]
    if segments is not None:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        weights = weights * same.astype(np.float32)
    if "mask" in batch:
        weights = weights * batch["mask"][:, None]
    xp = weights.__array_namespace__()  # of host arrays or traced ones
    return xp.concatenate([weights, xp.zeros_like(weights, shape=(len(weights), 1))], axis=1)


def _counted(batch: Batch, name: str) -> Any:
    """Where an array counts: to the last token that is a target with a weight, or in such rows."""
    is_target = _target_weights(batch) != 0
    later = is_target[:, ::-1].cumsum(1)[:, ::-1] > 0  # at a token or after it
    if batch[name].shape != batch["tokens"].shape:
        return later.any(1).reshape(-1, *[1] * (batch[name].ndim - 1))
    xp = later.__array_namespace__()
    return xp.concatenate([later[:, :1], later[:, :-1]], axis=1)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Below `cap` in magnitude, smoothly; None: as they are."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _cross_entropy(
    x: jax.Array,
    scan_rows: Callable[..., Any],
    targets: jax.Array,
    vocab_size: int,
    chunks: int,
    cap: float | None,
) -> jax.Array:
    """Cross-entropy of each token, with the logits of one chunk of the vocabulary at a time.

    An online logsumexp is carried from chunk to chunk, as in flash attention. The backward pass
    recomputes the logits (Wijmans et al., arXiv 2411.09009). `scan_rows` is `Units.scan_rows` of
    the head, whose last chunk is padded unless `chunks` divide the vocabulary.
    """
    dtype, target = x.dtype, targets.reshape(-1)
    wide = x.reshape(target.size, -1).astype(jnp.float32)  # accumulates its gradient in float32

    def add_chunk(rows: jax.Array, carry: Any, index: jax.Array) -> Any:
        maximum, total, target_logit = carry
        logits = capped(_logits(wide.astype(dtype), rows.astype(dtype)), cap)
        first = index * rows.shape[0]
        if vocab_size % chunks:
            is_row = first + jnp.arange(rows.shape[0]) < vocab_size
            logits = jnp.where(is_row[None], logits, -jnp.inf)
        # The maximum cancels out of the loss, so it needs no gradient.
        new_maximum = jnp.maximum(maximum, jax.lax.stop_gradient(jnp.max(logits, axis=1)))
        chunk_total = jnp.sum(jnp.exp(logits - new_maximum[:, None]), axis=1)
        total = total * jnp.exp(maximum - new_maximum) + chunk_total
        offset = target - first
        in_chunk = (offset >= 0) & (offset < rows.shape[0])
        column = jnp.clip(offset, 0, rows.shape[0] - 1)[:, None]
        candidate = jnp.take_along_axis(logits, column, axis=1)[:, 0]
        return new_maximum, total, target_logit + jnp.where(in_chunk, candidate, 0.0)

    zeros = jnp.zeros(target.shape, jnp.float32)
    carry = (zeros - jnp.inf, zeros, zeros)
    remat = "full" if chunks > 1 else "none"  # recomputing a single chunk saves no memory
    maximum, total, target_logit = scan_rows(add_chunk, carry=carry, pieces=chunks, remat=remat)
    return jnp.log(total) + maximum - target_logit


@jax.custom_vjp
def _logits(x: jax.Array, rows: jax.Array) -> jax.Array:
    """X (tokens, width) times rows (vocabulary, width) transposed, accumulated in float32.

    The backward matmuls are in x's dtype, as all others; autodiff would run them in float32.
    """
    return jnp.dot(x, rows.T, preferred_element_type=jnp.float32)


def _logits_fwd(x: jax.Array, rows: jax.Array) -> tuple[jax.Array, Any]:
    return _logits(x, rows), (x, rows)


def _logits_bwd(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, rows = saved
    g = g.astype(x.dtype)
    return jnp.dot(g, rows), jnp.dot(g.T, x)


_logits.defvjp(_logits_fwd, _logits_bwd)
