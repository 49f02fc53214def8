"""The task of predicting the next token, around blocks that somebody else defines."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.distributed.sharding import PART, STACK, TABLE
from research_dp.distributed.units import Units
from research_dp.models.dropout import fold_in_each
from research_dp.types import Batch, Functions, LossOutput, TrainableModel, Work

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model of `tokens`: embedding, a stack of blocks, a norm, and a head.

    Its units are the embedding, each block, the last norm, and pieces of the head. Batches have
    `tokens` (B, S) int32; optionally `weights` (B, S), how much each token counts when it is
    predicted, and `segments` (B, S) int32, which of several packed sequences it belongs to: 0 for
    padding.

    Attributes:
        block: Maps `{'x': (B, S, width), 'positions', 'segments'}` to (B, S, width).
        vocab_size: Number of tokens.
        width: Features of the residual stream.
        depth: Number of blocks.
        tied: Whether the embedding is the head too.
        dtype: Compute dtype.
        remat: What a block keeps for its backward pass, see `distributed.remat.REMAT`.
        unroll: Blocks in one turn of the loop over them.
        logits_at_once: Logits that exist at a time on a device, at most.
    """

    block: Functions
    vocab_size: int
    width: int
    depth: int
    tied: bool
    dtype: str
    remat: str
    unroll: int
    logits_at_once: int

    def trainable(self) -> TrainableModel:
        kinds = {"embed": TABLE, "blocks": STACK, "norm": PART}
        if not self.tied:
            kinds["head"] = TABLE
        facts = {"vocab_size": self.vocab_size}
        bounds = {"tokens": "vocab_size"}
        return TrainableModel(self.init, self.loss, facts, kinds, self.work, bounds)

    def init(self, key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Parameters, the same bits whatever library the block is of; no model state."""
        assert batch["tokens"].ndim == 2  # no parameter depends on their number
        embed_key, block_key, head_key = jax.random.split(key, 3)
        one = self._one_block()
        block_keys = jax.random.split(block_key, self.depth)
        table, scale = (self.vocab_size, self.width), self.width**-0.5
        params = {
            "embed": {"table": scale * jax.random.normal(embed_key, table)},
            "blocks": jax.vmap(lambda key: _draw(one, key))(block_keys),
            "norm": {"scale": jnp.ones((self.width,))},
        }
        if not self.tied:
            params["head"] = {"table": scale * jax.random.normal(head_key, table)}
        return params, {}

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
        """Cross-entropy of each next token, weighted."""
        units = units or Units()
        tokens, segments = batch["tokens"], batch.get("segments")
        inputs = {"positions": _positions(tokens, segments)}
        if segments is not None:
            inputs["segments"] = segments

        def one_block(own: PyTree, x: jax.Array, index: jax.Array) -> jax.Array:
            given = {"x": x, **inputs}
            own_keys = None if keys is None else fold_in_each(keys, index)
            options = {"train": train, "keys": own_keys, "batch_axes": batch_axes}
            return self.block.apply(own, {}, given, **options)[0]

        def last_norm(own: PyTree, x: jax.Array) -> jax.Array:
            return _rms_norm(x, own["norm"]["scale"])

        # Scaled, so that a tied embedding suits the head and the blocks see unit variance.
        x = units.look_up("embed", params, tokens, self.dtype) * math.sqrt(self.width)
        each = jnp.arange(self.depth)
        x = units.scan(
            one_block, "blocks", params, x, each=each, remat=self.remat, unroll=self.unroll
        )
        x = units.run(last_norm, ("norm",), params, x, remat="full")
        weights = _weights(batch)
        total = _cross_entropy(
            x,
            functools.partial(units.scan_rows, name=self._head(), params=params),
            jnp.roll(tokens, -1, axis=1),
            weights,
            rows=self.vocab_size,
            pieces=_pieces(self.vocab_size, tokens.size, self.logits_at_once),
        )
        return LossOutput(total, jnp.sum(weights), model_state, {})

    def work(self, example: Mapping[str, jax.ShapeDtypeStruct]) -> Work:
        """Tokens and model FLOPs of a training example."""
        length = example["tokens"].shape[0]
        matrices = sum(x.size for x in jax.tree.leaves(self._one_block()) if x.ndim > 1)
        # A product with a matrix is two operations an element, and its gradients are four; scores
        # and their use are as many over all places, half of which are masked but counted.
        each = 6 * (self.depth * matrices + self.vocab_size * self.width)
        each += 12 * self.depth * self.width * length
        return Work(length, float(each * length), self.dtype)

    def _head(self) -> str:
        return "embed" if self.tied else "head"

    def _one_block(self) -> PyTree:
        """Shapes of the parameters of one block, which do not depend on the sequence."""
        inputs = {
            "x": jax.ShapeDtypeStruct((1, 2, self.width), self.dtype),
            "positions": jax.ShapeDtypeStruct((1, 2), jnp.int32),
        }
        return jax.eval_shape(lambda key: self.block.init(key, inputs)[0], jax.random.key(0))


def _draw(like: PyTree, key: jax.Array) -> PyTree:
    """Matrices of variance 1 / inputs, and vectors of ones: the same bits whatever the library."""
    leaves, treedef = jax.tree.flatten(like)
    drawn = [
        jax.random.normal(k, x.shape, x.dtype) * x.shape[0] ** -0.5
        if x.ndim > 1
        else jnp.ones(x.shape, x.dtype)
        for k, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)


def _pieces(vocab_size: int, tokens: int, logits_at_once: int) -> int:
    """Pieces to cut a vocabulary into: of equal size, if that takes less than twice as many."""
    wanted = min(-(-vocab_size * tokens // logits_at_once), vocab_size)
    fitting = (n for n in range(wanted, 2 * wanted) if vocab_size % n == 0)
    return next(fitting, wanted)


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
    weights = jnp.asarray(batch.get("weights", jnp.ones(tokens.shape, jnp.float32)))
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
    x: jax.Array,
    scan_rows: Callable[..., Any],
    targets: jax.Array,
    weights: jax.Array,
    rows: int,
    pieces: int,
) -> jax.Array:
    """Weighted sum of cross-entropies; logits exist for one piece of the vocabulary at a time.

    The sum over the vocabulary is carried from piece to piece with its largest logit so far, as in
    flash attention, and made again in the backward pass (Wijmans et al., arXiv 2411.09009).

    Args:
        x: (B, S, width).
        scan_rows: `Units.scan_rows` of the head.
        targets: (B, S) int32.
        weights: (B, S) float32.
        rows: Size of the vocabulary.
        pieces: Number of pieces; the last one is filled up, unless `rows` divides.
    """
    dtype, target = x.dtype, targets.reshape(-1)
    wide = x.reshape(target.size, -1).astype(jnp.float32)  # its gradient is added up in float32

    def add(piece: jax.Array, carry: Any, number: jax.Array) -> Any:
        largest, total, chosen = carry
        logits = _logits(wide.astype(dtype), piece.astype(dtype))
        first = number * piece.shape[0]
        if rows % pieces:
            there = first + jnp.arange(piece.shape[0]) < rows
            logits = jnp.where(there[None], logits, -jnp.inf)
        # A constant that cancels out, so nothing is lost by not differentiating it.
        new_largest = jnp.maximum(largest, jax.lax.stop_gradient(jnp.max(logits, axis=1)))
        grown = jnp.sum(jnp.exp(logits - new_largest[:, None]), axis=1)
        total = total * jnp.exp(largest - new_largest) + grown
        place = target - first
        inside = (place >= 0) & (place < piece.shape[0])
        at = jnp.clip(place, 0, piece.shape[0] - 1)[:, None]
        mine = jnp.take_along_axis(logits, at, axis=1)[:, 0]
        return new_largest, total, chosen + jnp.where(inside, mine, 0.0)

    zeros = jnp.zeros(target.shape, jnp.float32)
    carry = (zeros - jnp.inf, zeros, zeros)
    # Logits that exist whole anyway are kept: making them again would be for nothing.
    remat = "full" if pieces > 1 else "none"
    largest, total, chosen = scan_rows(add, carry=carry, pieces=pieces, remat=remat)
    losses = jnp.log(total) + largest - chosen
    return jnp.sum(losses * weights.reshape(-1))


@jax.custom_vjp
def _logits(x: jax.Array, rows: jax.Array) -> jax.Array:
    """X (tokens, width) times rows (vocabulary, width) transposed, in float32.

    Their gradient goes through the products in x's dtype, as every other one does: left to itself
    autodiff would multiply in float32.
    """
    return jnp.dot(x, rows.T, preferred_element_type=jnp.float32)


def _logits_fwd(x: jax.Array, rows: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _logits(x, rows), (x, rows)


def _logits_bwd(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, rows = kept
    g = g.astype(x.dtype)
    return jnp.dot(g, rows), jnp.dot(g.T, x)


_logits.defvjp(_logits_fwd, _logits_bwd)
