"""Codecs by themselves, and what devices make of each other's bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp import UsageError
from research_dp.distributed import encoded
from research_dp.distributed.codecs import (
    Compression,
    fp8,
    int4,
    int8,
    sign,
    top_k,
)
from research_dp.distributed.collectives import Wire
from research_dp.distributed.sharding import LeafSharding
from tests.support.codecs import FloatBytes
from tests.support.marks import exhaustive

ALL = {
    "int8": int8(),
    "int4": int4(),
    "hadamard": int4(hadamard=True),
    "fp8": fp8(),
    "sign": sign(),
    "scaled": sign(scaled=True),
    "top_k": top_k(),
    "top_k_2_bits": top_k(bits=2),
    "own": FloatBytes(),
}
ROUND = {name: ALL[name] for name in ("int8", "int4", "fp8")}
TINY = np.finfo(np.float32).tiny


def decoded(codec, x, **options):
    return np.asarray(codec.decode(codec.encode(jnp.asarray(x, jnp.float32), **options)))


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def adversarial(size):
    rng = np.random.default_rng(1)
    one_huge = rng.normal(size=size)
    one_huge[3] = 3e38
    return {
        "zeros": np.zeros(size),
        "one huge": one_huge,
        "denormals": rng.normal(size=size) * 1e-39,
        "small": rng.normal(size=size) * 1e-36,
        "equal": np.full(size, -0.3),
        "many sizes": rng.normal(size=size) * 10.0 ** rng.integers(-30, 30, size),
        "uniform": rng.uniform(size=size),
    }


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_block_takes_the_bytes_that_it_says(name):
    codec = ALL[name]
    sent = codec.encode(jnp.asarray(noise(3, codec.block)))
    assert sent.shape == (3, codec.nbytes(codec.block)) and sent.dtype == jnp.uint8
    assert codec.decode(sent).shape == (3, codec.block)
    assert codec.decode(sent).dtype == jnp.float32


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("kind", sorted(adversarial(8)))
def test_an_element_is_off_by_half_of_the_scale_at_most(name, kind):
    codec = ROUND[name]
    x = adversarial(codec.block)[kind].astype(np.float32)
    scale = max(float(np.abs(x).max()) / codec.largest, TINY)
    off = np.abs(decoded(codec, x).astype(np.float64) - x)
    assert off.max() <= scale / 2 * (1 + 1e-4)


@pytest.mark.parametrize("kind", sorted(adversarial(8)))
def test_fp8_is_off_by_a_sixteenth_of_the_element(kind):
    x = adversarial(256)[kind].astype(np.float32)
    scale = max(float(np.abs(x).max()) / 448, TINY)
    off = np.abs(decoded(fp8(), x).astype(np.float64) - x)
    # Below the least normal number an element is 0.
    assert np.all(off <= np.maximum(np.abs(x) / 16, scale * 2.0**-10) * (1 + 1e-4) + TINY)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", sorted(ALL))
def test_what_is_not_finite_stays_so_in_its_own_block(name, wrong):
    codec = ALL[name]
    x = noise(2, codec.block)
    x[0, 5] = wrong
    found = decoded(codec, x)
    assert not np.isfinite(found[0]).all() and np.isfinite(found[1]).all()


@pytest.mark.parametrize("codec", [int8(rounding="stochastic"), int4(rounding="stochastic")])
def test_stochastic_rounding_is_unbiased(codec):
    x, times = noise(codec.block), 4000
    keys = jax.vmap(jax.random.key)(jnp.arange(times))
    draws = jax.vmap(lambda key: jax.random.uniform(key, (codec.block,)))(keys)
    found = decoded(codec, np.broadcast_to(x, (times, codec.block)), draws=draws)
    scale = np.abs(x).max() / codec.largest
    # Of one element the mean of so many draws is off by scale / 2 / sqrt(times), 5 times at most.
    assert np.abs(found.mean(0) - x).max() < 5 * scale / 2 / np.sqrt(times)
    assert np.abs(found[0] - x).max() > scale / 2, "it is not to the nearest"


def test_hadamard_spreads_a_large_element():
    x = noise(128) * 0.01
    x[7] = 1.0
    plain, turned = (np.abs(decoded(c, x) - x) for c in (int4(), int4(hadamard=True)))
    others = np.arange(128) != 7
    assert np.median(turned[others]) < 2 * np.median(plain[others])
    assert np.linalg.norm(turned) < 1.5 * np.linalg.norm(plain)
    np.testing.assert_allclose(decoded(FloatBytes(), x), x, rtol=0, atol=0)


def test_a_vote_of_zeros_moves_nothing_and_draws_are_drawn():
    codec = sign()
    assert not decoded(codec, np.zeros(codec.block)).any()
    x = np.zeros(codec.block, np.float32)
    x[::2] = noise(codec.block // 2)
    draws = jax.random.uniform(jax.random.key(0), (codec.block,))
    found = decoded(codec, x, draws=draws)
    np.testing.assert_array_equal(found[::2], np.sign(x[::2]))
    assert abs(found[1::2].mean()) < 0.2


def test_top_k_sends_the_largest():
    codec = top_k(block=64, kept=4)
    x = noise(64)
    found = decoded(codec, x)
    largest = np.argsort(-np.abs(x))[:4]
    assert set(np.flatnonzero(found)) == set(largest)
    np.testing.assert_allclose(found[largest], x[largest], rtol=1 / 256)


# ---- Gathers ----


def on(devices, function, x, spec_in, spec_out):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec_in, out_specs=spec_out, check_vma=False
    )
    return np.asarray(jax.jit(mapped)(jax.device_put(x, NamedSharding(mesh, spec_in))))


def padded(x, dim, devices):
    missing = -x.shape[dim] % devices
    return np.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)])


SHAPES = [(48, 80), (7, 1000), exhaustive((3, 50, 64)), exhaustive((64,)), (5, 16, 250)]


@pytest.mark.parametrize("name", ["int4", exhaustive("int8"), exhaustive("fp8"), "own"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_gathered_has_the_same_bits_on_any_number_of_devices(name, shape):
    codec, x = ALL[name], noise(*shape)
    expected, worst = encoded.alone(jnp.asarray(x), codec)
    assert worst <= {"int8": 1 / 254, "int4": 1 / 14, "fp8": 1 / 16, "own": 0}[name] * 1.001
    whole = tuple(map(slice, shape))
    for devices in (2, 3, 8):
        for dim in range(len(shape)):
            spec = PartitionSpec(*(None,) * dim, "fsdp")
            for moves, spec_out in ((True, PartitionSpec()), (False, spec)):

                def gather(part, dim=dim, moves=moves):
                    return encoded.gather(part, dim, ("fsdp",), codec, shape, moves=moves)

                found = on(devices, gather, padded(x, dim, devices), spec, spec_out)[whole]
                np.testing.assert_array_equal(found, expected, err_msg=f"{devices}, {dim}")


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((2048, 8192), 256, (16, 16)),
        ((32768, 2048), 128, (8, 16)),
        ((50257, 100), 256, (64, 4)),  # 47 rows are added, no columns
        ((4096, 3), 256, (256, 1)),
        ((1000,), 256, (1, 256)),
    ],
)
def test_tiles_have_the_least_padding(shape, block, expected):
    assert encoded.tile(shape, block) == expected


# ---- Sums ----

AXES = ("data", "fsdp")
MESHES = [(2, 4), (8, 1), (1, 8)]


def summed(wire, x, mesh, dim=None):
    """(mean, what each device lost), of a row for each device."""
    mesh = Mesh(np.array(jax.devices()).reshape(mesh), AXES)

    def one(row):
        if dim is None:
            return tuple(a[None] for a in wire.mean_and_loss(row[0], AXES))
        return tuple(a[None] for a in wire.shard_and_loss(row[0], dim, AXES))

    spec = PartitionSpec(AXES)
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return tuple(
        np.asarray(a) for a in jax.jit(mapped)(jax.device_put(x, NamedSharding(mesh, spec)))
    )


WIRES = {
    "int8": Wire(codec=int8()),
    "int8, int4 across": Wire(codec=int8(), across=int4(hadamard=True)),
    "int4 across alone": Wire(across=int4()),
    "top_k": Wire(codec=top_k(block=64, kept=4)),
    "signs": Wire(codec=sign(block=64, scaled=True, rounding="nearest")),
    "stochastic": Wire(codec=int8(rounding="stochastic"), key=jax.random.key(1)),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(WIRES))
def test_what_is_received_and_what_is_lost_are_the_mean(name, mesh):
    x = noise(8, 1000)
    mean, lost = summed(WIRES[name], x, mesh)
    assert (mean == mean[0]).all(), "all devices have the same"
    np.testing.assert_allclose(mean[0] + lost.mean(0), x.mean(0), atol=2e-6)
    is_plain = name == "int4 across alone" and mesh[0] == 1
    assert bool(lost.any()) is not is_plain


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", sorted(WIRES))
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_and_what_is_lost_are_the_mean(name, mesh, dim):
    x = noise(8, 48, 24)
    shards, lost = summed(WIRES[name], x, mesh, dim)
    mean = np.concatenate(list(shards), dim)
    np.testing.assert_allclose(mean + lost.mean(0), x.mean(0), atol=2e-6)


def test_each_device_bucket_and_hop_draws_its_own():
    wire = WIRES["stochastic"]
    x = np.broadcast_to(noise(1, 1000), (8, 1000))
    lost = [summed(w, x, (2, 4))[1] for w in (wire, wire.of_bucket(0), wire.of_bucket(1))]
    assert len({row.tobytes() for rows in lost for row in rows}) == 24


@pytest.mark.parametrize("mesh", MESHES)
def test_float16_sums_without_a_codec_are_divided_before(mesh):
    x = noise(8, 1000) + np.float32(3e4)
    wire = Wire(dtype="float16", pre_divide=True, across=int8())
    mean, _ = summed(wire, x, mesh)
    assert np.abs(mean[0] - x.mean(0)).max() < 3e4 / 100


@pytest.mark.parametrize("mesh", MESHES)
def test_a_codec_that_changes_nothing_adds_in_the_order_of_devices(mesh):
    x = noise(8, 1000)
    mean, lost = summed(Wire(codec=FloatBytes()), x, mesh)
    groups = [np.add.reduce(g, 0) for g in x.reshape(*mesh, -1)]  # one row after the other
    np.testing.assert_array_equal(mean[0], np.add.reduce(np.stack(groups), 0) / np.float32(8))
    assert not lost.any()


# ---- Which arrays ----


def leaf(path="a/kernel", shape=(512, 512), dtype=np.float32, **options):
    return LeafSharding(path, shape, np.dtype(dtype), None, "", 8, **options)


def test_small_and_exempt_arrays_are_not_encoded():
    given = Compression(sync=int8(), exempt=["embed/.*"])
    assert given.takes(leaf()) and not given.takes(leaf("embed/table"))
    assert not given.takes(leaf(shape=(256, 256))) and given.takes(leaf(shape=(256, 257)))
    assert not given.takes(leaf(dtype=np.int32)) and not given.takes(leaf(dtype=np.complex64))
    # What counts is a layer.
    assert not given.takes(leaf(shape=(48, 2048), stacked=True))
    assert given.takes(leaf(shape=(48, 2048)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gather": sign()}, "compression.gather: .* rounds each element"),
        ({"update": int4(hadamard=True)}, "compression.update: .* rounds each element"),
        ({"gather": int8(rounding="stochastic")}, "to the nearest"),
        ({}, "names no codec"),
        ({"error_feedback": True}, "no gradients are encoded"),
        ({"sync": int8(), "by_unit": True}, "by_unit = True without error_feedback"),
        ({"sync": sign(), "by_unit": True, "error_feedback": True}, "which are of a step"),
        ({"sync": "int8"}, "compression.sync"),
        ({"min_size": -1}, "compression.min_size"),
    ],
)
def test_a_compression_that_cannot_be_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        Compression(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: int4(block=33),
        lambda: int4(block=48, hadamard=True),
        lambda: sign(block=12),
        lambda: top_k(block=8, kept=9),
        lambda: int8(block=0),
        lambda: int8(rounding="up"),
    ],
)
def test_a_codec_that_cannot_be_is_refused(make):
    with pytest.raises(UsageError):
        make()
