"""Frozen parameters: no gradient, no optimizer state; gathered where parameters are sharded."""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest

from research_dp.analysis.comm_lower_bound import min_wire_bytes
from research_dp.analysis.program_cost import collectives_of
from research_dp.certification.certify import certify
from research_dp.certification.compare_steps import gathered
from research_dp.distributed.batch_examples import seed_key
from research_dp.distributed.placement import nbytes
from research_dp.distributed.sharding import by_path, path_name
from research_dp.errors import UsageError
from research_dp.strategies import TrainSpec
from research_dp.strategies.frozen import with_frozen
from tests.support import decoder
from tests.support.certified import BATCH, bench_of, examples, noise, small_model
from tests.support.marks import exhaustive
from tests.support.recipes import recipe
from tests.support.strategies import traffic

# What a device sends over a ring of 8 for each byte of a parameter, in multiples of 7/8. XLA:CPU
# gathers once for both passes of `fsdp`; JAX 0.11's gathers again what the backward pass needs:
# kernels behind the first, as long as something before them is trained.
PASSES = {"single": 0, **dict.fromkeys(("ddp", "zero1", "zero2", "fsdp", "fsdp_keep"), 2)}
GATHERS = ("fsdp", "fsdp_keep", "hsdp", "spmd_fsdp")
HIDDEN = "hidden_.*"
FROZEN = ("hidden_0/bias", "hidden_0/kernel", "hidden_1/bias", "hidden_1/kernel")
SHIPPED = sorted({*PASSES, "hsdp", "spmd", "spmd_fsdp"})


def spec_of(model=None, **options):
    return TrainSpec(
        model=model or small_model(),
        example=noise().example,
        batch_size=BATCH,
        **{"optimizer": optax.adam(1e-2), **options},
    )


def step(strategy, state, seed=0):
    batch = {k: x[strategy.train_rows] for k, x in examples(seed, BATCH).items()}
    return strategy.train_step(state, strategy.place_batch(batch))


@pytest.mark.parametrize("stem", SHIPPED)
def test_only_the_others_train_and_have_optimizer_state(stem):
    strategy = recipe(stem).build(spec_of(frozen=HIDDEN))
    before = strategy.init(seed_key(0))
    first = jax.device_get(with_frozen(before.params, before.model_state))
    plain = recipe(stem).build(spec_of()).init(seed_key(0))
    jax.tree.map(np.testing.assert_array_equal, first, jax.device_get((plain.params, {})))
    state, _ = step(strategy, before)
    state, _ = step(strategy, state, seed=1)
    after = by_path(with_frozen(jax.device_get(state.params), state.model_state)[0])
    assert {k for k, x in by_path(first[0]).items() if (x == after[k]).all()} == set(FROZEN)
    moments = {path.split("/", 2)[-1] for path in by_path(state.opt_state) if "/mu/" in path}
    assert moments == {"head/bias", "head/kernel"}
    gathers = stem in GATHERS
    for x in jax.tree.leaves(state.model_state):
        assert x.is_fully_replicated is not (gathers and x.ndim == 2)
    # Adam's two moments and the count.
    head = sum(x.nbytes for path, x in after.items() if path not in FROZEN)
    assert nbytes(strategy.abstract_state.opt_state)[1] == 2 * head + 4


@pytest.mark.parametrize("stem", SHIPPED)
def test_the_compiled_program_sends_what_the_others_need(stem):
    """As much as a model sends that has no other parameters, and what gathers the frozen ones."""

    def sent(**options):
        strategy = recipe(stem).build(spec_of(**options))
        lowered = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
        found = collectives_of(lowered.compile().as_text(), dict(strategy.mesh.shape))
        return sum(x.wire_bytes for x in found), strategy

    (whole, strategy), (rest, _) = sent(), sent(frozen=HIDDEN)
    slices = {p.path: p for p in jax.tree.leaves(strategy.shardings.slices)}
    assert set(FROZEN) < set(slices)
    if stem in PASSES:
        # Beside it the norm has a flag for each sharded gradient, 4 bytes that are all-reduced.
        frozen = [p for path, p in slices.items() if path in FROZEN]
        share = sum(PASSES[stem] * p.nbytes + 8 * (p.dim is not None) for p in frozen)
        if stem in GATHERS:
            share -= sum(p.nbytes for p in frozen if p.dim is not None)
        devices = strategy.mesh.size
        if stem == "fsdp" and jax.__version_info__ >= (0, 11):
            share += sum(slices[path].nbytes for path in ("hidden_1/kernel", "head/kernel"))
        assert whole - rest == share * (devices - 1) / devices
    else:
        assert (rest < 0.7 * whole) is (whole > 0)


@pytest.mark.parametrize(
    ("stem", "api"), [exhaustive("ddp", "nnx"), ("fsdp", "linen"), exhaustive("zero2", "nnx")]
)
def test_strategies_are_certified_with_frozen_parameters(stem, api):
    spec = {"frozen": ".*hidden.*", "model": small_model(api), "accumulation_steps": 2}
    done = certify(bench_of(stem, spec=spec), noise(), steps=2)
    assert done.certified, done.first_difference


def losses(stem, *bindings, more=(), **options):
    strategy = recipe(stem, *bindings, more=more).build(
        dataclasses.replace(decoder.spec_of(decoder.model()), max_grad_norm=None, **options)
    )
    state, found = strategy.init(seed_key(0)), []
    for seed in range(3):
        state, metrics = strategy.train_step(state, strategy.place_batch(decoder.batch(seed)))
        found.append(metrics["loss"][0] / metrics["loss"][1])
    return np.asarray(found), strategy


@functools.cache
def expected_losses(frozen):
    """All parameters have gradients, and the optimizer leaves the frozen ones as they are."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda k, x: "frozen" if re.fullmatch(frozen, path_name(k)) else "trained", params
        )

    transforms = {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}
    return losses("single", optimizer=optax.multi_transform(transforms, labels))[0]


LAYERS, IN_PART = "blocks/.*", "embed/.*|blocks/(qkv|out|mlp).*"


@pytest.mark.parametrize(
    ("stem", "frozen", "bindings", "more"),
    [
        exhaustive("ddp", LAYERS, (), ()),
        exhaustive("ddp", IN_PART, (), ()),
        exhaustive("zero2", IN_PART, (), ()),
        exhaustive("fsdp", LAYERS, (), ()),
        exhaustive("fsdp", IN_PART, (), ()),
        ("fsdp", IN_PART, (decoder.LOOK_AHEAD,), ()),
        exhaustive("fsdp", IN_PART, (), ("options/deterministic.gin",)),
        exhaustive("spmd_fsdp", LAYERS, (), ()),
    ],
)
def test_units_of_the_decoder_with_frozen_parts(stem, bindings, more, frozen):
    found, strategy = losses(stem, *bindings, more=more, frozen=frozen)
    np.testing.assert_allclose(found, expected_losses(frozen), rtol=2e-5)
    if stem in ("ddp", "fsdp") and not more:
        sent = sum(c.wire_bytes for c in traffic(strategy) if c.nbytes > 512)
        assert sent <= min_wire_bytes(strategy, strategy.spec)


def test_a_state_of_the_name_of_frozen_parameters_is_refused():
    model = small_model()

    def init(key, batch):
        return model.init(key, batch)[0], {"frozen_params": {}}

    with pytest.raises(UsageError, match=r"^TrainSpec.frozen: the model has a state of the name"):
        recipe("ddp").build(spec_of(dataclasses.replace(model, init=init), frozen=HIDDEN))


@pytest.mark.parametrize(
    ("frozen", "problem"),
    [
        (
            "hidden",
            "the regular expression 'hidden' matches none of the parameters: head/bias, head/k",
        ),
        ([".*"], r"\['.*'\]: they match all of the parameters"),
        (["head/.*", "("], "'\\(' is no regular expression: missing \\)"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(frozen, problem):
    with pytest.raises(UsageError, match=rf"^TrainSpec.frozen.*{problem}"):
        recipe("ddp").build(spec_of(frozen=frozen))


def test_codecs_gather_frozen_parameters_and_may_leave_them_out():
    exempt = "compression.exempt = ['hidden_0/kernel']"
    strategy = recipe("compressed/fsdp_q8", "compression.min_size = 64", exempt).build(
        spec_of(frozen=HIDDEN)
    )
    state = strategy.init(0)
    computed_with = by_path(gathered(strategy, state))
    assert set(computed_with) == {"head/bias", "head/kernel"}
    (sharding,) = (p for p in strategy.shardings.frozen["hidden_0"].values() if p.dim is not None)
    assert sharding.frozen and not strategy.config.compression.takes(sharding)
    _, metrics = step(strategy, state)
    assert np.isfinite(metrics["loss"]).all()


def test_a_frozen_base_is_stored_in_shards_and_gathered_as_the_table_says():
    """Of matrices alone, so that all can be sharded: an eighth on each of 8 devices."""
    bindings = ("shard_params.min_weight_size = 0", decoder.LOOK_AHEAD)
    found, strategy = losses("fsdp", *bindings, frozen=IN_PART)
    np.testing.assert_allclose(found, expected_losses(IN_PART), rtol=2e-5)
    here, total = nbytes(strategy.abstract_state.model_state)
    assert here <= 1.02 / 8 * total
    sent = sum(c.wire_bytes for c in traffic(strategy) if c.nbytes > 512)
    assert sent <= min_wire_bytes(strategy, strategy.spec)
