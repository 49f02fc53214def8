"""A decoder transformer for text, in Linen and in NNX, its blocks stacked."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
from flax import nnx

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.distributed.remat import Remat
from research_dp.errors import UsageError
from research_dp.models.attention import Implementation, attention, rotate
from research_dp.models.classification import Api, choose_api
from research_dp.models.dropout import dropout
from research_dp.models.language_model import LanguageModel
from research_dp.types import TrainableModel


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block.

    Attributes:
        width: Features of the residual stream.
        heads: Attention heads, of width / heads features each.
        mlp_width: Hidden features of the gated MLP.
        dropout_rate: Dropout on what each half of the block adds.
        dtype: Compute dtype.
        attention: Implementation of the attention, see `models.attention`.
    """

    width: int
    heads: int
    mlp_width: int
    dropout_rate: float
    dtype: Dtype
    attention: Implementation


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
        remat: What a block keeps for its backward pass: 'full' (nothing but its input), 'dots'
            (products of matrices), 'none' (everything).
        unroll: Blocks in one turn of the loop over them.
        attention: 'auto', 'cudnn' (flash attention), 'chunked' or 'xla'.
        logits_at_once: Logits that exist at a time on a device, at most: the vocabulary is cut for
            the loss.

    Raises:
        UsageError: A size or a name makes no sense.
    """
    if width % heads or (width // heads) % 2:
        raise UsageError(
            f"transformer.width = {width} over heads = {heads}: a head needs an even, whole number "
            "of features.",
            binding="transformer.heads",
        )
    config = BlockConfig(width, heads, mlp_width, dropout_rate, dtype, attention)
    block = choose_api(
        api,
        "transformer.api",
        lambda: LinenBlock(config),
        lambda shape, rngs: NnxBlock(config, rngs=rngs),
    )
    return LanguageModel(
        block,
        vocab_size=vocab_size,
        width=width,
        depth=depth,
        tied=tied,
        dtype=dtype,
        remat=remat,
        unroll=unroll,
        logits_at_once=logits_at_once,
    ).trainable()


class LinenBlock(nn.Module):
    """One block in Linen; parameters as in `NnxBlock`."""

    config: BlockConfig

    @nn.compact
    def __call__(
        self,
        inputs: dict[str, jax.Array],
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        del train, batch_axes  # nothing here depends on them
        c, x = self.config, inputs["x"]

        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=c.dtype, name=name)

        y = nn.RMSNorm(dtype=c.dtype, name="attention_norm")(x)
        y = _attend(dense(3 * c.width, "qkv")(y), inputs, c)
        x = x + dropout(dense(c.width, "out")(y), c.dropout_rate, keys, layer=0)
        y = nn.RMSNorm(dtype=c.dtype, name="mlp_norm")(x)
        y = _gate(dense(2 * c.mlp_width, "gate_up")(y))
        return x + dropout(dense(c.width, "down")(y), c.dropout_rate, keys, layer=1)


class NnxBlock(nnx.Module):
    """One block in NNX; parameters as in `LinenBlock`."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.config = c = config

        def dense(fan_in: int, features: int) -> nnx.Linear:
            return nnx.Linear(fan_in, features, use_bias=False, dtype=c.dtype, rngs=rngs)

        self.attention_norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.qkv, self.out = dense(c.width, 3 * c.width), dense(c.width, c.width)
        self.mlp_norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.gate_up, self.down = dense(c.width, 2 * c.mlp_width), dense(c.mlp_width, c.width)

    def __call__(
        self,
        inputs: dict[str, jax.Array],
        *,
        train: bool,
        keys: jax.Array | None = None,
        batch_axes: tuple[str, ...] = (),
    ) -> jax.Array:
        del train, batch_axes  # nothing here depends on them
        c, x = self.config, inputs["x"]
        y = _attend(self.qkv(self.attention_norm(x)), inputs, c)
        x = x + dropout(self.out(y), c.dropout_rate, keys, layer=0)
        y = _gate(self.gate_up(self.mlp_norm(x)))
        return x + dropout(self.down(y), c.dropout_rate, keys, layer=1)


def _attend(qkv: jax.Array, inputs: dict[str, jax.Array], config: BlockConfig) -> jax.Array:
    """Attention on (B, S, 3 * width): (B, S, width)."""
    batch, length, _ = qkv.shape
    split = qkv.reshape(batch, length, 3, config.heads, -1)
    query, key, value = split[:, :, 0], split[:, :, 1], split[:, :, 2]
    query, key = (rotate(x, inputs["positions"]) for x in (query, key))
    y = attention(query, key, value, inputs.get("segments"), implementation=config.attention)
    return y.reshape(batch, length, config.width)


def _gate(gate_up: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, arXiv 2002.05202) on (..., 2 * hidden): (..., hidden)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
