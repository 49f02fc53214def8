"""One order of additions: the same bits from every strategy, on any number of devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from research_dp.deterministic import sum as tree
from research_dp.deterministic.reduction import tree_reduction
from research_dp.deterministic.step import norm_by_blocks
from research_dp.distributed.sharding import choose_dim, infer_sharding
from research_dp.errors import UsageError
from research_dp.models import convnet, mlp, transformer
from research_dp.strategies.jaxpr_collectives import collectives
from research_dp.training.muon import muon
from tests.support.certified import EXAMPLE, TOKENS, batches
from tests.support.compilers import AS_USERS_COMPILE
from tests.support.exact import AS_USERS_DO, BATCH, bits, build
from tests.support.marks import exhaustive, slow
from tests.support.steps import mesh_of, on

APIS = ("linen", "nnx")


def case(cell, option, api, mark=pytest.mark.exhaustive):
    """A cell is (strategy, devices on axis data, devices on axis fsdp)."""
    return pytest.param(cell, option, api, id="-".join(map(str, (*cell, option, api))), marks=mark)


# A strategy meets each accumulation, and 2 devices, which split other arrays than 4 and 8 do: these
# two and the APIs, which are the same pure functions before a strategy sees them, take turns.
CELLS = [
    case(("ddp", 2, 1), 2, "nnx", pytest.mark.slow),
    case(("ddp", 8, 1), 1, "linen"),
    case(("zero1", 1, 2), 1, "nnx"),
    case(("zero1", 1, 4), 2, "linen"),
    case(("zero2", 1, 2), 1, "linen"),
    case(("zero2", 1, 8), 2, "nnx", pytest.mark.slow),
    case(("fsdp", 1, 2), 2, "linen"),
    case(("fsdp", 1, 4), 1, "nnx", pytest.mark.slow),
    case(("fsdp_keep", 1, 1), 2, "linen"),
    case(("fsdp_keep", 1, 8), 1, "nnx"),
    case(("hsdp", 2, 4), 1, "linen", pytest.mark.slow),
    case(("hsdp", 4, 2), 2, "nnx"),
]


def model_of(api):
    # Odd widths: leaves that some meshes split, along other dims than others, and some do not.
    return mlp(api=api, widths=(33, 24), num_classes=10, dropout_rate=0.3)


def decoder(api):
    sizes = {"vocab_size": 64, "width": 16, "depth": 2, "heads": 2, "mlp_width": 24}
    return transformer(api=api, tied=True, dropout_rate=0.1, **sizes)


# As a loop, which compiles sixteen shards on one device as fast as two on eight.
LOOP = ("tree_reduction.loop = True",)


@functools.cache
def single(api, steps, bindings=()):
    return bits(build("single", 1, 1, model_of(api), bindings=bindings), batches(steps=steps))


EIGHT = ("tree_reduction.logical_shards = 8",)


def test_the_same_bits_from_two_strategies_on_eight_and_on_four_devices():
    cells = [("hsdp", 4, 2), ("ddp", 4, 1)]
    found = [bits(build(*c, model_of("linen"), bindings=EIGHT), batches()) for c in cells]
    assert found[0] == found[1]


# Each way to add with an all-reduce, a scatter and both; CELLS has the APIs.
WRITTEN_OUT = [
    exhaustive(("ddp", 8, 1), 0),
    exhaustive(("ddp", 8, 1), 2**20),
    exhaustive(("zero1", 1, 4), 0),
    exhaustive(("zero2", 1, 8), 2**20),
    exhaustive(("fsdp", 1, 2), 2**20),
    exhaustive(("hsdp", 2, 4), 0),
    slow(("hsdp", 2, 4), 2**20),
]


@pytest.mark.parametrize(("cell", "halved_bytes"), WRITTEN_OUT)
def test_the_same_bits_as_on_one_device_with_shards_written_out(cell, halved_bytes, monkeypatch):
    monkeypatch.setattr(tree, "_HALVED_BYTES", halved_bytes)
    bindings = (*AS_USERS_DO, *EIGHT)
    found = bits(build(*cell, model_of("nnx"), bindings=bindings), batches(steps=30))
    assert found == single("nnx", 30, bindings)


@pytest.mark.parametrize(("cell", "accumulation", "api"), CELLS)
def test_the_same_bits_whatever_strategy_mesh_and_accumulation(cell, accumulation, api):
    bindings = (*AS_USERS_DO, *LOOP)
    strategy = build(*cell, model_of(api), accumulation=accumulation, bindings=bindings)
    assert bits(strategy, batches(steps=30)) == single(api, 30, bindings)


@pytest.mark.slow
def test_it_is_the_order_that_makes_the_bits():
    cells = [("ddp", 2, 1), ("ddp", 8, 1)]
    found = [bits(build(*cell, model_of("linen"), exact=False), batches()) for cell in cells]
    assert found[0] != found[1]


# Two shards a device and one, which is a loop too; at most two written out, which compile long.
ALONE, ON_TWO, ON_FOUR = ("single", 1, 1), ("zero1", 1, 2), ("zero1", 1, 4)
ON_EIGHT = [("ddp", 8, 1), ("fsdp", 1, 8)]


@pytest.mark.parametrize(
    ("shards", "loop", "apis", "cells"),
    [
        exhaustive(8, False, ("linen", "nnx"), [ON_FOUR, *ON_EIGHT]),
        slow(16, True, ("nnx", "linen"), [ALONE, ON_TWO, ON_EIGHT[1]]),
    ],
)
def test_the_same_bits_of_a_model_of_units_and_of_convolutions(shards, loop, apis, cells):
    rng = np.random.default_rng(1)
    text = [{"tokens": rng.integers(0, 64, (BATCH, 16)).astype(np.int32)} for _ in range(4)]
    sizes = {"features": (8,), "hidden": 17, "num_classes": 10}
    bound = (f"logical_shards = {shards}", f"loop = {loop}")
    options = {"bindings": (*AS_USERS_DO, *(f"tree_reduction.{one}" for one in bound))}
    for model, example, data in (
        (decoder(apis[0]), TOKENS, text),
        (convnet(api=apis[1], **sizes), EXAMPLE, batches()),
    ):
        found = [bits(build(*cell, model, example=example, **options), data) for cell in cells]
        assert all(one == found[0] for one in found)


def test_replicated_state_of_any_structure_is_updated():
    options = {"more": {"optimizer": optax.flatten(optax.adam(1e-2))}, "bindings": EIGHT}
    on4, on8 = (bits(build("ddp", n, 1, model_of("linen"), **options), batches()) for n in (4, 8))
    assert on4 == on8


# Updates of wholes, of slices, of shards, of shards in groups: fsdp_keep updates as fsdp does.
MIXED = [("ddp", 2, 1), ("zero1", 1, 4), ("fsdp", 1, 2), ("hsdp", 2, 4)]
OPTIMIZERS = {
    "muon": muon(1e-2, matrices={".*kernel": (0, 1)}),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "bfloat16": optax.chain(
        optax.clip_by_block_rms(0.1),
        optax.stateless(lambda g, _: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g)),
    ),
}


@pytest.mark.parametrize(
    "name", [slow(x) if x in ("muon", "bfloat16") else exhaustive(x) for x in OPTIMIZERS]
)
def test_the_same_bits_from_optimizers_that_mix_elements(name):
    cells = MIXED if name == "muon" else [("ddp", 4, 1), ("fsdp", 1, 8)]
    options = {"more": {"optimizer": OPTIMIZERS[name]}, "bindings": (*AS_USERS_DO, *LOOP)}
    model = model_of(APIS[len(name) % 2])
    expected = bits(build("single", 1, 1, model, **options), batches())
    for cell in cells:
        assert bits(build(*cell, model, **options), batches()) == expected, cell


@pytest.mark.parametrize(
    ("bindings", "options", "told"),
    [
        (["tree_reduction.logical_shards = 12"], {}, "give a power of two"),
        (["tree_reduction.logical_shards = 4"], {}, "cannot be shared by 8 devices"),
        ([], {"accumulation": 4}, "8 devices x accumulation_steps 4 = 32"),
        (["tree_reduction.logical_shards = 64"], {}, "cannot be cut in 64 logical shards"),
        (
            ["data_parallel.prefetch = True"],
            {"model": decoder("linen"), "example": TOKENS},
            "all is gathered before the first",
        ),
        (["data_parallel.accumulation_dtype = 'bfloat16'"], {}, "added up in float32"),
        (["gather_params.gather_dtype = 'bfloat16'"], {}, "parameters in bfloat16"),
        (["data_parallel.param_dtype = 'bfloat16'"], {}, "parameters in bfloat16"),
        (["gather_params.grad_scatter_dtype = 'bfloat16'"], {}, "adds in float32, not in bf"),
        ([], {"model": convnet(features=(8,), num_classes=10, norm="batch")}, "over the batch"),
    ],
)
def test_what_cannot_be_exact_is_refused(bindings, options, told):
    options = {"model": model_of("linen"), **options}
    with pytest.raises(UsageError, match=told):
        build("fsdp", 1, 8, options.pop("model"), bindings=bindings, **options)


def test_sums_left_to_the_compiler_are_refused():
    with pytest.raises(UsageError, match="leaves sums to the compiler"):
        build("spmd", 8, 1, model_of("linen"))


def test_a_loss_that_knows_other_examples_is_refused():
    whole = model_of("linen")

    def loss(*args, batch_axes, **options):
        out = whole.loss(*args, batch_axes=batch_axes, **options)
        return out._replace(total=jax.lax.pmean(out.total, batch_axes))

    with pytest.raises(UsageError, match="statistics over the batch"):
        build("ddp", 8, 1, dataclasses.replace(whole, loss=loss))


@pytest.mark.parametrize("halved_bytes", [0, 2**20])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stem", ["ddp", "zero1", "zero2", "fsdp", "fsdp_keep", "hsdp"])
def test_no_more_bytes_than_the_plain_reduction_sends(
    stem, accumulation, halved_bytes, monkeypatch
):
    monkeypatch.setattr(tree, "_HALVED_BYTES", halved_bytes)
    sizes = {"ddp": (8, 1), "hsdp": (2, 4)}.get(stem, (1, 8))
    # Sizes that eight divides: otherwise a bucket is padded, by seven elements at most.
    model = mlp(widths=(128, 128), num_classes=16)

    def sent(exact):
        strategy = build(stem, *sizes, model, accumulation=accumulation, exact=exact)
        found = collectives(strategy.train_step, strategy.abstract_state, strategy.abstract_batch)
        return sum(one.wire_bytes for one in found)

    assert sent(exact=True) <= 1.005 * sent(exact=False)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("halved_bytes", "gathered_bytes", "platform", "over_gloo", "kind"),
    [
        (2**20, 0, "cpu", False, "all-to-all"),
        (2**20, 2**20, "cpu", False, "all-to-all"),
        (0, 0, "cpu", False, "reduce-scatter"),
        (0, 0, "cpu", True, "all-to-all"),
        (0, 0, "tpu", False, "all-to-all"),
    ],
)
def test_additions_are_those_of_one_tree_on_whatever_devices(
    halved_bytes, gathered_bytes, platform, over_gloo, kind, check_vma, monkeypatch
):
    monkeypatch.setattr(tree, "_HALVED_BYTES", halved_bytes)
    monkeypatch.setattr(tree, "_GATHERED_BYTES", gathered_bytes)
    monkeypatch.setattr(tree, "target_platform", lambda: platform)
    monkeypatch.setattr(tree, "over_gloo", lambda: over_gloo)
    # Numbers whose sum depends on the order: only ((a + b) + (c + d)) + ... has these bits.
    x = np.random.default_rng(0).normal(size=(8, 24)).astype(np.float32)
    x *= 10.0 ** np.arange(8, dtype=np.float32)[:, None]
    x[:, :3] = -0.0
    pairs = x
    while len(pairs) > 1:
        pairs = pairs[0::2] + pairs[1::2]
    assert not np.array_equal(pairs[0], functools.reduce(np.add, x))
    how = tree_reduction(logical_shards=8)
    for axes in ({"data": 8}, {"data": 2, "fsdp": 4}, {"data": 4, "fsdp": 2}):
        mesh, names = mesh_of(**axes), tuple(axes)

        def both(x, names=names):
            scattered = x[0]
            for name in reversed(names):
                scattered = how.reduce_scatter(scattered, name, 0)
            return jax.tree.map(
                tree.without_negative_zero, (how.all_reduce(x[0], names), scattered)
            )

        function = on(mesh, both, P(names), (P(), P(names[::-1])), check_vma)
        assert {one.kind for one in collectives(function, x)} == {kind, "all-gather"}
        every, parts = function(x)
        for found in (every, parts):
            expected = np.where(pairs[0] == 0, np.float32(0), pairs[0])
            np.testing.assert_array_equal(
                np.asarray(found).view(np.uint32), expected.view(np.uint32)
            )


def test_devices_of_a_vmap_add_as_others(monkeypatch):
    monkeypatch.setattr(tree, "_HALVED_BYTES", 0)
    x = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    how = tree_reduction(logical_shards=4)
    found = jax.vmap(lambda x: how.all_reduce(x, ("data",)), axis_name="data")(x)
    np.testing.assert_array_equal(found, np.tile((x[0] + x[1]) + (x[2] + x[3]), (4, 1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64"])
def test_a_fence_changes_nothing(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)) * 3).astype(dtype)
    fenced = jax.jit(lambda x, step: tree.fence({"x": x}, tree.unknown_zero(step)))(x, 7)["x"]
    np.testing.assert_array_equal(fenced, x)
    program = str(jax.make_jaxpr(lambda x, step: tree.fence(x, tree.unknown_zero(step)))(x, 7))
    assert " xor " in program


@pytest.mark.parametrize("halved_bytes", [0, 2**20])
def test_a_fence_keeps_a_multiplication_out_of_the_sum(halved_bytes, monkeypatch):
    monkeypatch.setattr(tree, "_HALVED_BYTES", halved_bytes)
    x, y = np.random.default_rng(0).normal(size=(2, 8, 4096)).astype(np.float32)
    expected = x * y
    while len(expected) > 1:
        expected = expected[0::2] + expected[1::2]
    how = tree_reduction(logical_shards=8)

    def of_product(x, y, zero):
        return how.reduce_scatter(tree.fence(x[0] * y[0], tree.unknown_zero(zero)), "data", 0)

    every = on(mesh_of(data=8), of_product, (P("data"), P("data"), P()), P("data"))
    arguments = (x, y, np.int32(0))
    # As users compile: tests leave out LLVM's passes, which fuse multiplications with additions.
    found = every.lower(*arguments).compile(AS_USERS_COMPILE)(*arguments)
    np.testing.assert_array_equal(found, expected[0])


def test_a_tree_over_three_devices_is_refused():
    how = tree_reduction(logical_shards=8)
    mesh = Mesh(np.asarray(jax.devices()[:3]), ("data",))
    with pytest.raises(UsageError, match="over 3 devices of axis 'data': take a power of two"):
        on(mesh, lambda x: how.reduce_scatter(x, "data", 0), P(), P("data"))(np.ones(6, np.float32))


def test_the_norm_of_shards_has_the_bits_of_the_norm_of_wholes():
    rng = np.random.default_rng(0)
    shapes = {"a": (24, 40), "b": (40, 24), "c": (7,), "d": (3, 3, 16)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found = set()
    for n in (1, 2, 4, 8):
        layout = infer_sharding(params, lambda path, shape, n: choose_dim(shape, n, 8), n)
        mesh = mesh_of(data=1, fsdp=n)

        def norm(held, layout=layout):
            return norm_by_blocks(held, layout, 8, jnp.int32(0))[0]

        found.add(float(on(mesh, norm, (jax.tree.map(lambda p: p.spec, layout),))(params)).hex())
    assert len(found) == 1
    whole = np.sqrt(sum(np.sum(np.square(x.astype(np.float64))) for x in params.values()))
    assert float.fromhex(found.pop()) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_a_sum_starts_with_nothing_that_changes_a_sign(count, loop):
    @jax.jit
    def total(zero):
        return tree.add_up_pairs(lambda *_: jnp.full(2, -0.0), count, zero, loop=loop)

    assert np.signbit(total(jnp.int32(0))).all()
