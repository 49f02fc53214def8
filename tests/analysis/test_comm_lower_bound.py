"""The least that a strategy must send, against what its traced step sends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp.deterministic.reduction  # noqa: F401  (registers `tree_reduction`)
from research_dp.analysis.comm_lower_bound import min_wire_bytes, narrow_file
from research_dp.config import gin_internals, load
from research_dp.distributed.collectives import Wire
from research_dp.strategies import PowerSGD, TrainSpec, gather_params
from research_dp.types import LossOutput, TrainableModel
from tests.support import decoder
from tests.support.certified import spec_of
from tests.support.repository import ROOT
from tests.support.strategies import WIRE, build, one_matrix, recipe, traffic

BF16 = [
    "gather_params.gather_dtype = 'bfloat16'",
    "gather_params.grad_scatter_dtype = 'float32'",
    "sync_gradients.dtype = 'bfloat16'",
    "scatter_gradients.dtype = 'bfloat16'",
]


def sent(strategy):
    """Wire bytes of a traced step but for metrics and norms."""
    return sum(c.wire_bytes for c in traffic(strategy) if c.nbytes > 64)


CODECS = ["data_parallel.compression = @compression()", "compression.min_size = 0"]


@pytest.mark.parametrize(
    ("stem", "codecs"),
    [
        ("ddp", ["sync = @int8()"]),
        ("ddp", ["sync = @sign()"]),
        ("fsdp", ["gather = @int8()", "sync = @int4()"]),
        ("zero1", ["sync = @int8()", "update = @int4()"]),
        ("hsdp", ["across = @int4()", "error_feedback = True"]),
        ("hsdp_zero1", ["across = @int4()"]),
    ],
)
def test_it_counts_what_codecs_send(stem, codecs):
    bindings = [*CODECS, *(f"compression.{codec}" for codec in codecs)]
    strategy = build(stem, wide(), bindings=bindings)
    least = min_wire_bytes(strategy, spec_of(wide()))
    assert least == pytest.approx(sent(strategy), rel=0.02)


def wide():
    """A model of matrices that blocks of the codecs divide."""

    def init(key, batch):
        keys = jax.random.split(key, 2)
        return {
            "a": jax.random.normal(keys[0], (16, 4096)),
            "b": jax.random.normal(keys[1], (4096, 16)),
        }, {}

    def loss(params, state, batch, keys, *, train, batch_axes):
        x = jnp.tanh(batch["image"].reshape(-1, 16) @ params["a"])
        x = jnp.tanh(jnp.tanh(x @ params["b"]) @ params["a"])  # both are needed on the way back
        total = jnp.sum(jnp.square(x))
        return LossOutput(total, jnp.float32(len(x)), state, {})

    return TrainableModel(init, loss)


@pytest.mark.parametrize("stem", ["ddp", "zero1", "hsdp"])
def test_a_slots_own_formula_knows_layers_and_thin_matrices(stem):
    spec = decoder.spec_of(decoder.model())
    config = recipe(stem, "shard_params.min_weight_size = 128")
    strategy = dataclasses.replace(config, sync=PowerSGD(rank=20, min_size=0)).build(
        spec
    )  # some have 16 rows
    assert min_wire_bytes(strategy, spec) == pytest.approx(sent(strategy), rel=0.03)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stem", [*sorted(WIRE), "hsdp"])
def test_it_is_what_a_strategy_sends_of_parameters_that_are_sharded(stem, accumulation):
    strategy = build(stem, one_matrix(), accumulation=accumulation)
    least = min_wire_bytes(strategy, spec_of(one_matrix(), accumulation))
    assert least == pytest.approx(sent(strategy))


@pytest.mark.parametrize("stem", ["fsdp", "ddp", "zero1"])
def test_it_is_counted_in_the_dtypes_that_are_bound(stem):
    strategy = build(stem, one_matrix(), bindings=BF16)
    elements = sum(p.nbytes for p in jax.tree.leaves(strategy.shardings.params)) / 4
    # fsdp gathers twice; zero1 gathers new parameters in their own dtype.
    each = {"fsdp": 2 + 2 + 4, "ddp": 2 + 2, "zero1": 2 + 4}[stem]
    least = min_wire_bytes(strategy, spec_of(one_matrix()))
    assert least == pytest.approx(each * elements * 7 / 8)


@pytest.mark.parametrize("stem", ["ddp", "fsdp", "fsdp_keep", "hsdp", "zero1", "spmd_fsdp"])
def test_the_file_that_is_named_gives_the_bytes_of_narrow_dtypes(stem):
    """So float32 collectives do not look like the least that there is."""
    spec = spec_of(one_matrix())
    wide = build(stem, one_matrix())
    least, most = (min_wire_bytes(wide, spec, widest=n) for n in (2, 8))
    load.reset()
    narrow = recipe(stem, more=[narrow_file(wide)]).build(spec)
    assert min_wire_bytes(narrow, spec) == least == most / 2


def test_where_no_narrower_dtypes_can_be_bound_no_file_is_named():
    assert narrow_file(build("spmd", one_matrix())) is None
    load.reset()
    exact = recipe("fsdp", more=["options/deterministic.gin"]).build(spec_of(one_matrix()))
    assert narrow_file(exact) is None  # exact sums refuse narrower ones


def test_a_mistake_in_what_travels_is_no_part_of_it(monkeypatch):
    right = min_wire_bytes(build("ddp", one_matrix(), bindings=BF16), spec_of(one_matrix()))
    mean = Wire._mean

    def wide(wire, *args):
        return mean(dataclasses.replace(wire, dtype=np.float32), *args)

    monkeypatch.setattr(Wire, "_mean", wide)
    wrong = build("ddp", one_matrix(), bindings=BF16)
    assert min_wire_bytes(wrong, spec_of(one_matrix())) == right
    assert sent(wrong) == pytest.approx(2 * right)


def test_gradients_travel_as_they_were_added_up():
    bindings = ["data_parallel.param_dtype = 'bfloat16'"]
    bindings += ["data_parallel.accumulation_dtype = 'float32'"]
    for stem in ("ddp", "zero1", "fsdp_keep", "fsdp", "hsdp"):
        strategy = build(stem, one_matrix(), bindings=bindings, accumulation=2)
        least = min_wire_bytes(strategy, spec_of(one_matrix(), 2))
        assert least == pytest.approx(sent(strategy)), stem


def test_a_function_with_arguments_of_its_own_is_read():
    base = recipe("fsdp")
    for gather in (
        functools.partial(gather_params, gather_dtype="bfloat16"),
        lambda *args, gather_dtype="bfloat16", **kw: gather_params(
            *args, gather_dtype=gather_dtype, **kw
        ),
    ):
        built = dataclasses.replace(base, gather=gather).build(spec_of(one_matrix()))
        assert min_wire_bytes(built, spec_of(one_matrix())) == pytest.approx(sent(built))


@pytest.mark.parametrize("stem", ["ddp", "fsdp", "hsdp"])
def test_sums_of_logical_shards_are_sent_once(stem):
    bindings = ["data_parallel.reduction = @tree_reduction()", "tree_reduction.logical_shards = 16"]
    strategy = build(stem, one_matrix(), bindings=bindings, accumulation=2)
    least = min_wire_bytes(strategy, spec_of(one_matrix(), 2))
    big = sum(c.wire_bytes for c in traffic(strategy) if c.nbytes > 64)
    assert least == pytest.approx(big)


def test_a_decorated_function_of_ones_own_is_not_in_a_scope():
    @functools.wraps(own_gather)
    def gather(*args, **kw):
        return own_gather(*args, **kw)

    built = dataclasses.replace(recipe("fsdp"), gather=gather).build(spec_of(one_matrix()))
    assert min_wire_bytes(built, spec_of(one_matrix())) == pytest.approx(sent(built))


def own_gather(*args, gather_dtype="bfloat16", **kw):
    return gather_params(*args, gather_dtype=gather_dtype, **kw)


def test_a_slot_in_a_scope_is_not_guessed():
    strategy = build("fsdp", one_matrix(), bindings=["data_parallel.gather = @x/gather_params"])
    with pytest.raises(NotImplementedError, match="gather_params: in a gin scope of its own"):
        min_wire_bytes(strategy, spec_of(one_matrix()))


def language(stem, *bindings, batch=8, length=32, accumulation=1):
    """A small language model under a strategy: (strategy, spec)."""
    sizes = {"vocab_size": 512, "width": 64, "depth": 2, "heads": 4, "mlp_width": 128}
    load.load(
        [str(ROOT / "gin" / f) for f in ("models/lm_tiny.gin", f"strategies/{stem}.gin")],
        [
            *(f"transformer.{name} = {value}" for name, value in sizes.items()),
            "shard_params.min_weight_size = 64",
            *bindings,
        ],
    )
    spec = TrainSpec(
        model=gin_internals.value_of("train.model"),
        optimizer=optax.sgd(1e-2),
        example={"tokens": jax.ShapeDtypeStruct((length,), np.int32)},
        batch_size=batch * accumulation,
        accumulation_steps=accumulation,
    )
    return gin_internals.value_of("train.strategy").build(spec), spec


SLOW = pytest.mark.slow


@pytest.mark.parametrize("length", [32, 1024])  # rows are exchanged; the table is gathered
@pytest.mark.parametrize(
    ("stem", "accumulation", "tied"),
    [
        ("fsdp", 1, True),
        pytest.param("fsdp", 2, False, marks=SLOW),
        pytest.param("fsdp_keep", 1, True, marks=SLOW),
        pytest.param("fsdp_keep", 2, False, marks=SLOW),
    ],
)
def test_tables_count_as_they_are_used(stem, accumulation, tied, length):
    strategy, spec = language(
        stem, f"transformer.tied = {tied}", *BF16, accumulation=accumulation, length=length
    )
    assert min_wire_bytes(strategy, spec) == pytest.approx(sent(strategy), rel=0.01)
