"""Codecs: what goes over the wire in place of an array's elements, and which arrays they take.

A codec sees blocks of float32 elements and makes bytes of each; it knows of no device. A strategy's
`Compression` names the codecs of its collectives. `distributed.encoded` communicates by them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.distributed.sharding import LeafSharding
from research_dp.errors import UsageError, binding_error, check_patterns

_TINY = float(np.finfo(np.float32).tiny)
_SCALE_BYTES = 4
Rounding = Literal["nearest", "stochastic"]


class Codec:
    """Makes bytes of blocks of elements, and elements of bytes; the base class of all codecs.

    Attributes:
        block: Number of elements that are encoded together.
        shares: Whether a part of a block can be encoded, given the block's largest magnitude: only
            then can parameters be gathered by it.
        rounding: 'stochastic': `encode` is given `draws`.
        loses: Whether decoding gives other values.
    """

    block: int
    shares: ClassVar[bool] = False
    rounding: Rounding = "nearest"
    loses: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """As reports have it."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    def nbytes(self, elements: int) -> int:
        """Bytes of so many elements of a block."""
        raise NotImplementedError

    def encode(
        self, x: jax.Array, most: jax.Array | None = None, draws: jax.Array | None = None
    ) -> jax.Array:
        """float32 (..., block) -> uint8 (..., nbytes(block)).

        Args:
            x: The elements. What is not finite must make something of its block not finite.
            most: (..., 1), the largest magnitude of the block, where `x` is a part of it.
            draws: Like x, uniform in [0, 1).
        """
        raise NotImplementedError

    def decode(self, sent: jax.Array) -> jax.Array:
        """uint8 (..., bytes) -> float32 (..., elements)."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scaled(Codec):
    """Integers or small floats, times a float32 scale of the block, which is sent after them."""

    shares: ClassVar[bool] = True
    largest: ClassVar[float]  # magnitude that a coded element can have
    bits: ClassVar[int] = 8  # of an element

    def nbytes(self, elements: int) -> int:
        return -(-elements * self.bits // 8) + _SCALE_BYTES

    def encode(
        self, x: jax.Array, most: jax.Array | None = None, draws: jax.Array | None = None
    ) -> jax.Array:
        x = self._turned(x)
        if most is None:
            most = jnp.max(jnp.abs(x), -1, keepdims=True)
        # A denormal scale would be flushed to 0. NaN and inf stay: then the block decodes to NaN.
        # Multiplied: XLA makes some divisions by constants multiplications, and not all.
        scale = jnp.maximum(most * np.float32(1 / self.largest), _TINY)
        coded = self._coded(x / scale, draws)
        return jnp.concatenate([coded, lax.bitcast_convert_type(scale, jnp.uint8)[..., 0, :]], -1)

    def decode(self, sent: jax.Array) -> jax.Array:
        coded, scale = jnp.split(sent, [sent.shape[-1] - _SCALE_BYTES], axis=-1)
        scale = lax.bitcast_convert_type(scale[..., None, :], jnp.float32)
        return self._turned(self._values(coded) * scale)

    def _turned(self, x: jax.Array) -> jax.Array:
        return x

    def _coded(self, x: jax.Array, draws: jax.Array | None) -> jax.Array:
        raise NotImplementedError

    def _values(self, coded: jax.Array) -> jax.Array:
        raise NotImplementedError


def _rounded(x: jax.Array, draws: jax.Array | None, largest: float) -> jax.Array:
    """Integers, to the nearest or, with draws, such that the mean is x."""
    whole = jnp.round(x) if draws is None else jnp.floor(x + draws)
    return jnp.clip(whole, -largest, largest)


@gin.register("int8", module="codecs")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(_Scaled):
    """Integers from -127 to 127, with a scale for each block (ZeRO++, arXiv 2306.10209).

    An element is off by half of its block's scale at most, the 254th part of its largest.

    Attributes:
        block: Number of elements of a block.
        rounding: To the nearest, or 'stochastic': on average an element is what it was.
    """

    block: Count = 256
    rounding: Rounding = "nearest"
    largest: ClassVar[float] = 127.0

    def _coded(self, x: jax.Array, draws: jax.Array | None) -> jax.Array:
        whole = _rounded(x, draws, self.largest).astype(jnp.int8)
        return lax.bitcast_convert_type(whole, jnp.uint8)

    def _values(self, coded: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(coded, jnp.int8).astype(jnp.float32)


@gin.register("int4", module="codecs")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(_Scaled):
    """Integers from -7 to 7, two a byte, with a scale for each block (SDP4Bit, arXiv 2410.15526).

    Attributes:
        block: Number of elements of a block, even; with `hadamard` a multiple of 32.
        rounding: As in `int8`.
        hadamard: Whether each 32 elements are turned by a Hadamard matrix before they are rounded,
            and back: one large element then spoils no others. Not for gathers of parameters.
    """

    block: Count = 128
    rounding: Rounding = "nearest"
    hadamard: bool = False
    largest: ClassVar[float] = 7.0
    bits: ClassVar[int] = 4

    @property
    def shares(self) -> bool:  # type: ignore[override]
        return not self.hadamard

    def __post_init__(self) -> None:
        if self.block % (multiple := 32 if self.hadamard else 2):
            raise UsageError(f"int4.block = {self.block}: give a multiple of {multiple}.")

    def _turned(self, x: jax.Array) -> jax.Array:
        if not self.hadamard:
            return x
        # The matrix is symmetric and, divided by the root of its size, its own inverse.
        signs = np.ones((1, 1), np.float32)
        for _ in range(5):
            signs = np.block([[signs, signs], [signs, -signs]])
        parts = x.reshape(*x.shape[:-1], -1, 32)
        turned = jnp.matmul(parts, signs / math.sqrt(32), precision=lax.Precision.HIGHEST)
        return turned.reshape(x.shape)

    def _coded(self, x: jax.Array, draws: jax.Array | None) -> jax.Array:
        whole = (_rounded(x, draws, self.largest) + 8).astype(jnp.uint8)
        whole = jnp.pad(whole, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        low, high = jnp.split(whole, 2, axis=-1)
        return low | (high << 4)

    def _values(self, coded: jax.Array) -> jax.Array:
        both = jnp.concatenate([coded & 15, coded >> 4], -1)
        return both.astype(jnp.float32) - 8


@gin.register("fp8", module="codecs")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8(_Scaled):
    """float8_e4m3fn, times a scale for each block: an element is off by a 16th of itself at most.

    Elements below the 30,000th part of the largest are off by more.

    Attributes:
        block: Number of elements of a block.
    """

    block: Count = 256
    largest: ClassVar[float] = 448.0

    def _coded(self, x: jax.Array, draws: jax.Array | None) -> jax.Array:
        return lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)

    def _values(self, coded: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(coded, jnp.float8_e4m3fn).astype(jnp.float32)


@gin.register("sign", module="codecs")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """One bit an element: its sign; of a block that is not finite NaN, of zeros 0.

    Without a scale a reduction of signs is a vote: devices send signs, and get that of most
    (Bernstein et al., arXiv 1810.05291). With one, the mean magnitude of a block, they keep the
    size of gradients, for error feedback (Karimireddy et al., arXiv 1901.09847).

    Attributes:
        block: Number of elements of a block, a multiple of 8.
        scaled: Whether the mean magnitude is sent, in 4 bytes; otherwise the signs are 1 and -1,
            and one byte says whether the block is finite, and not 0.
        rounding: 'stochastic': the sign of 0, as of a vote that is a draw, is drawn. To the
            'nearest' it is +, which moves parameters on average.
    """

    block: Count = 1024
    scaled: bool = False
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        if self.block % 8:
            raise UsageError(f"sign.block = {self.block}: give a multiple of 8.")

    def nbytes(self, elements: int) -> int:
        return elements // 8 + (_SCALE_BYTES if self.scaled else 1)

    def encode(
        self, x: jax.Array, most: jax.Array | None = None, draws: jax.Array | None = None
    ) -> jax.Array:
        mean = jnp.mean(jnp.abs(x), -1, keepdims=True)
        bits = jnp.packbits(x >= 0 if draws is None else (x > 0) | ((x == 0) & (draws < 0.5)), -1)
        if self.scaled:
            last = lax.bitcast_convert_type(mean, jnp.uint8)[..., 0, :]
        else:
            last = jnp.where(jnp.isfinite(mean), jnp.sign(mean), 2).astype(jnp.uint8)
        return jnp.concatenate([bits, last], -1)

    def decode(self, sent: jax.Array) -> jax.Array:
        bits, last = jnp.split(sent, [self.block // 8], axis=-1)
        signs = jnp.where(jnp.unpackbits(bits, axis=-1) > 0, 1.0, -1.0).astype(jnp.float32)
        if self.scaled:
            return signs * lax.bitcast_convert_type(last[..., None, :], jnp.float32)
        return jnp.where(last > 1, jnp.nan, signs * last)


@gin.register("top_k", module="codecs")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The largest elements of each block, with their places in 2 bytes each; the others are 0.

    To be used with error feedback (Stich et al., arXiv 1809.07599).

    Attributes:
        block: Number of elements of a block, at most 65,536.
        kept: Number of elements of a block that are sent; of 2 bits a multiple of 4.
        bits: 16: elements are sent in bfloat16; 2: signs, and of two magnitudes the nearer one,
            which are means of a block's small and large ones (as SparseLoCo, arXiv 2508.15706).
    """

    block: Count = 1024
    kept: Count = 32
    bits: Literal[2, 16] = 16

    def __post_init__(self) -> None:
        if self.bits == 2 and self.kept % 4:
            raise UsageError(f"top_k.kept = {self.kept} with bits = 2: give a multiple of 4.")
        if not self.kept <= self.block <= 2**16:
            raise UsageError(
                f"top_k keeps {self.kept} of {self.block} elements: keep at most all of a block of "
                "at most 65,536."
            )

    def nbytes(self, elements: int) -> int:
        return 4 * self.kept if self.bits == 16 else 2 * self.kept + self.kept // 4 + 4

    def encode(
        self, x: jax.Array, most: jax.Array | None = None, draws: jax.Array | None = None
    ) -> jax.Array:
        # NaN is the largest there is, so that it is sent.
        _, places = lax.top_k(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)), self.kept)
        values = jnp.take_along_axis(x, places, -1)
        parts = [_bytes_of(places.astype(jnp.uint16))]
        if self.bits == 16:
            return jnp.concatenate([*parts, _bytes_of(values.astype(jnp.bfloat16))], -1)
        size = jnp.abs(values)
        is_large = size > jnp.mean(size, -1, keepdims=True)  # nowhere in a block that has NaN
        means = [
            jnp.sum(jnp.where(own, size, 0), -1) / jnp.maximum(jnp.sum(own, -1), 1)
            for own in (~is_large, is_large)
        ]
        bits = jnp.packbits(jnp.concatenate([values < 0, is_large], -1), -1)
        parts += [bits, _bytes_of(jnp.stack(means, -1).astype(jnp.bfloat16))]
        return jnp.concatenate(parts, -1)

    def decode(self, sent: jax.Array) -> jax.Array:
        places, values = jnp.split(sent, [2 * self.kept], axis=-1)
        if self.bits == 16:
            elements = _of_bytes(values, jnp.bfloat16)
        else:
            bits, means = jnp.split(values, [self.kept // 4], axis=-1)
            is_negative, is_large = jnp.split(jnp.unpackbits(bits, axis=-1), 2, axis=-1)
            small, large = jnp.split(_of_bytes(means, jnp.bfloat16), 2, axis=-1)
            elements = jnp.where(is_large > 0, large, small) * jnp.where(is_negative > 0, -1, 1)
        zeros = jnp.zeros((*sent.shape[:-1], self.block), jnp.float32)
        at = _of_bytes(places, jnp.uint16).astype(jnp.int32)
        put = jnp.put_along_axis
        return put(zeros, at, elements.astype(jnp.float32), -1, inplace=False)


def _bytes_of(x: jax.Array) -> jax.Array:
    """(..., n) of two bytes each -> uint8 (..., 2n)."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _of_bytes(x: jax.Array, dtype: Any) -> jax.Array:
    """uint8 (..., 2n) -> (..., n) of a dtype of two bytes."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), dtype)


int8, int4, fp8, sign, top_k = Int8, Int4, Fp8, Sign, TopK


@gin.register("compression", module="codecs")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """The codecs of a strategy's collectives; None: what is sent is not encoded.

    Attributes:
        gather: Of parameters that are gathered for compute. Each device, also one that has them
            in full, computes with what decoding gives; gradients are those of these parameters.
        sync: Of gradients that are summed. Each device adds what it decodes, in float32, and the
            mean is encoded once more.
        across: Of gradients that are summed over mesh axis `data`, in place of `sync`: across
            hosts, where axis `fsdp` has the devices of one.
        update: Of the change of parameters that an update gathers: each device adds it to what it
            has. The optimizer keeps exact parameters, sharded, so that no error stays.
        error_feedback: Whether a device adds what encoding takes from its gradients to those of the
            next step (Seide et al., 2014; Karimireddy et al., arXiv 1901.09847).
        by_unit: With `error_feedback`: whether gradients are sent as soon as those of a unit are
            ready, which takes the memory of what is kept once more.
        min_size: Parameters of at most so many elements a layer, and their gradients, are not
            encoded.
        exempt: Regular expressions: full paths of what is not encoded either, e.g. 'embed/.*'.
    """

    gin_name: ClassVar[str] = "compression"

    gather: Codec | None = None
    sync: Codec | None = None
    across: Codec | None = None
    update: Codec | None = None
    error_feedback: bool = False
    by_unit: bool = False
    min_size: CountOrZero = 2**16
    exempt: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("gather", "update"):
            codec = getattr(self, name)
            if codec and (not codec.shares or codec.rounding != "nearest"):
                raise binding_error(
                    f"compression.{name}",
                    ": parameters are gathered by a codec that rounds each element of a block by "
                    "itself, to the nearest: @int8(), @fp8(), or @int4() without hadamard.",
                )
        if self.error_feedback and not self.of_gradients:
            raise binding_error(
                "compression.error_feedback",
                " = True, but no gradients are encoded: bind compression.sync, or False.",
            )
        if self.by_unit and (self.draws or not self.error_feedback):
            why = "with draws, which are of a step" if self.draws else "without error_feedback"
            raise binding_error("compression.by_unit", f" = True {why}: bind False.")
        if not (self.gather or self.update or self.of_gradients):
            problem = " names no codec: bind e.g. compression.sync = @int8(), or"
            raise binding_error("compression", f"{problem} leave it out.")
        check_patterns("compression.exempt", self.patterns)

    @property
    def patterns(self) -> Sequence[str]:
        """`exempt`, as a sequence."""
        return [self.exempt] if isinstance(self.exempt, str) else self.exempt

    @property
    def of_gradients(self) -> bool:
        """Whether gradients are encoded."""
        return bool(self.sync or self.across)

    @property
    def draws(self) -> bool:
        """Whether a codec rounds stochastically."""
        return any(c and c.rounding == "stochastic" for c in (self.sync, self.across))

    @property
    def votes(self) -> bool:
        """Whether sums of gradients are votes, of signs without a scale."""
        return any(isinstance(c, Sign) and not c.scaled for c in (self.sync, self.across))

    @property
    def algorithm(self) -> str | None:
        """What a strategy with it computes by design; None: its codecs lose nothing."""
        parts = {
            "parameters are gathered in {}": self.gather,
            "gradients are averaged in {}": self.sync,
            "gradients are averaged across groups in {}": self.across,
            "changes of parameters are gathered in {}": self.update,
        }
        said = [text.format(c.name) for text, c in parts.items() if c and c.loses]
        feeds = ["what is lost is added to the next gradient"] if self.error_feedback else []
        return ", ".join(said + feeds) if said else None

    def takes(self, p: LeafSharding) -> bool:
        """Whether a parameter, and its gradient, is encoded."""
        if not jnp.issubdtype(p.dtype, jnp.floating) or math.prod(p.layer_shape) <= self.min_size:
            return False
        return not any(re.fullmatch(pattern, p.path) for pattern in self.patterns)


class Encoding(NamedTuple):
    """The codecs of a strategy, for the arrays of one call of a slot."""

    compression: Compression
    shardings: Any  # a `LeafSharding` for each array
    key: jax.Array | None = None  # of the step; of gradients
    # Gets what encoding takes of each gradient, by its number, if somebody asks.
    losses: dict[int, jax.Array] | None = None

    @property
    def taken(self) -> list[bool]:
        """Whether each array is encoded."""
        codecs, flat = self.compression, jax.tree.leaves(self.shardings)
        return [codecs.of_gradients and codecs.takes(p) for p in flat]

    def on(self, wire: Any) -> Any:
        """A `Wire` with the codecs of gradients."""
        codecs, feedback = self.compression, self.losses is not None
        given = {"codec": codecs.sync, "across": codecs.across, "key": self.key}
        return dataclasses.replace(wire, **given, feedback=feedback)

    def kept(self, numbers: Sequence[int], encoded: Sequence[Any]) -> list[jax.Array]:
        """Means of gradients; what was lost of each is noted by its number."""
        if self.losses is not None:
            self.losses.update((n, x.lost) for n, x in zip(numbers, encoded, strict=True))
        return [x.mean for x in encoded]


compression = Compression
