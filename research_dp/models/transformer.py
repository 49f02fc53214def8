"""A decoder transformer for text, its blocks stacked."""

from __future__ import annotations

import dataclasses
import functools

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.distributed.remat import Remat
from research_dp.errors import UsageError
from research_dp.models.attention import Implementation, attention, rotate
from research_dp.models.dropout import dropout
from research_dp.models.language_model import LanguageModel
from research_dp.models.layers import Api, Layers, network_functions
from research_dp.types import TrainableModel


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
    unroll: Count = 1,
    attention: Implementation = "auto",
    logits_at_once: Count = 2**23,
) -> TrainableModel:
    """A decoder of pre-norm blocks: RMSNorm, rotary positions, causal attention, gated MLP.

    As in Llama (Touvron et al., arXiv 2302.13971), without biases; query, key and value are one
    matrix, and so are gate and up.

    Args:
        api: 'linen' or 'nnx'; they have the same parameters.
        vocab_size: Number of tokens.
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Attention heads; they divide `width`.
        mlp_width: Hidden features of the gated MLP.
        tied: Whether the embedding is the head too.
        dropout_rate: Dropout on what each half of a block adds.
        dtype: Compute dtype; parameters are float32.
        remat: What a block saves for its backward pass: 'full' (nothing but its input), 'dots'
            (matmul outputs), 'none' (everything).
        unroll: Blocks in one iteration of the loop over them.
        attention: 'auto', 'cudnn' (flash attention), 'chunked' or 'xla'.
        logits_at_once: Upper bound on the logits that a device materializes at a time: the loss
            splits the vocabulary into chunks.

    Raises:
        UsageError: `heads` does not divide `width`, or a head has an odd number of features.
    """
    if width % heads or (width // heads) % 2:
        raise UsageError(
            f"transformer.width = {width} over heads = {heads}: a head needs an even number of "
            "features.",
            binding="transformer.heads",
        )
    block = Block(width, heads, mlp_width, dropout_rate, attention)
    return LanguageModel(
        network_functions(api, block, dtype),
        vocab_size=vocab_size,
        width=width,
        depth=depth,
        tied=tied,
        dtype=dtype,
        remat=remat,
        unroll=unroll,
        logits_at_once=logits_at_once,
    ).trainable()


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
        y = self._attend(dense("qkv", 3 * self.width)(y), inputs)
        x = x + dropout(dense("out", self.width)(y), self.dropout_rate, layers.keys, layer=0)
        y = layers.rms_norm("mlp_norm")(x)
        y = _swiglu(dense("gate_up", 2 * self.mlp_width)(y))
        return x + dropout(dense("down", self.width)(y), self.dropout_rate, layers.keys, layer=1)

    def _attend(self, qkv: jax.Array, inputs: dict[str, jax.Array]) -> jax.Array:
        """Attention on (B, S, 3 * width): (B, S, width)."""
        batch, length, _ = qkv.shape
        split = qkv.reshape(batch, length, 3, self.heads, -1)
        query, key, value = split[:, :, 0], split[:, :, 1], split[:, :, 2]
        query, key = (rotate(x, inputs["positions"]) for x in (query, key))
        y = attention(query, key, value, inputs.get("segments"), implementation=self.attention)
        return y.reshape(batch, length, self.width)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, arXiv 2002.05202) on (..., 2 * hidden): (..., hidden)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
