"""The decoder: its numbers by hand, under every strategy, unit by unit, in both libraries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp.analysis.program_cost import read
from research_dp.analysis.topologies import topology
from research_dp.distributed.mesh import noting
from research_dp.distributed.sharding import (
    STACK,
    TABLE,
    ShardDecision,
    infer_sharding,
    largest_dim,
)
from research_dp.distributed.units import Units
from research_dp.errors import UsageError
from research_dp.models import language_model
from research_dp.models.transformer import rotate
from research_dp.training.throughput import Throughput
from tests.support.decoder import BATCH, LENGTH, LOOK_AHEAD, VOCAB, batch, build, model, oracle, run
from tests.support.marks import exhaustive
from tests.support.repository import stems

QUICK = ("ddp", "hsdp", "spmd_fsdp")  # the others are much like one of them
CASES = [(s, False) if s in QUICK else exhaustive(s, False) for s in stems() if s != "single"]
CASES += [exhaustive("ddp", True), ("fsdp", True)]


@pytest.mark.parametrize(("stem", "tied"), CASES)
def test_every_strategy_follows_single(stem, tied):
    born, numbers = run(build(stem, model(tied=tied, dropout_rate=0.1)))
    assert born == oracle(tied)[0]
    np.testing.assert_allclose(numbers, oracle(tied)[1], rtol=2e-5)


CUTS = [
    ({"api": "nnx"}, ()),
    ({"api": "nnx"}, (LOOK_AHEAD,)),
    exhaustive({"unroll": 3}, ()),
    exhaustive({"logits_at_once": 2**20}, (LOOK_AHEAD,)),
]


@pytest.mark.parametrize(("changes", "bindings"), CUTS)
def test_linen_and_nnx_and_any_cut_of_the_work_compute_the_same(changes, bindings):
    strategy = build("fsdp", model(dropout_rate=0.1, **changes), *bindings)
    born, numbers = run(strategy)
    assert born == oracle(False)[0]
    np.testing.assert_allclose(numbers, oracle(False)[1], rtol=2e-5)


@pytest.mark.parametrize("remat", ["dots", exhaustive("none")])
def test_what_is_kept_for_the_backward_pass_changes_no_number(remat):
    _, numbers = run(build("fsdp", model(dropout_rate=0.1, remat=remat)))
    np.testing.assert_allclose(numbers, oracle(False)[1], rtol=2e-5)


@pytest.mark.parametrize("stem", ["fsdp", exhaustive("fsdp_keep"), exhaustive("zero2")])
def test_micro_batches_are_averaged_by_weight_not_by_number(stem):
    _, numbers = run(build(stem, model(dropout_rate=0.1), accumulation=2))
    np.testing.assert_allclose(numbers, oracle(False)[1], rtol=2e-5)


def test_loss_is_the_mean_cross_entropy_over_weighted_tokens_of_one_segment():
    tiny = model(depth=1)
    params, state = tiny.init(jax.random.key(0), shapes(batch(0)))
    examples = batch(0)
    out = tiny.loss(params, state, examples, None, train=False)
    total = weight = 0.0
    logits = np.asarray(reference_logits(params, jax.tree.map(jnp.asarray, examples)))
    for row in range(BATCH):
        for at in range(LENGTH - 1):
            segment = examples["segments"][row]
            if segment[at] != segment[at + 1] or segment[at + 1] == 0:
                continue
            own = logits[row, at]
            loss = np.log(np.sum(np.exp(own - own.max()))) + own.max()
            loss -= own[examples["tokens"][row, at + 1]]
            total += loss * examples["weights"][row, at + 1]
            weight += examples["weights"][row, at + 1]
    assert weight > 0
    np.testing.assert_allclose(out.weight, weight, rtol=1e-5)
    np.testing.assert_allclose(out.total, total, rtol=1e-4)


def test_logits_for_inference_are_those_of_the_loss():
    tiny, tokens = model(depth=1), batch(0)["tokens"]
    params, _ = tiny.init(jax.random.key(0), shapes(batch(0)))
    examples = {"tokens": jnp.asarray(tokens), "segments": jnp.ones_like(tokens)}
    expected = reference_logits(params, examples)
    np.testing.assert_allclose(tiny.apply(params, tokens), expected, rtol=1e-4, atol=1e-5)
    of_batch = tiny.apply(params, {"tokens": tokens})
    np.testing.assert_array_equal(of_batch, tiny.apply(params, tokens))


def shapes(examples):
    return {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in examples.items()}


def reference_logits(params, examples):
    """The model of depth 1 written down plainly: whole logits, scores by loops over heads."""
    blocks = jax.tree.map(lambda x: x[0], params["blocks"])
    tokens, segments = examples["tokens"], examples["segments"]
    x = params["embed"]["table"][tokens] * 4.0  # the square root of the width

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale[None, None]

    begins = segments[:, :, None] == segments[:, None, :]
    places = jnp.sum(jnp.tril(begins), axis=2) - 1
    y = norm(x, blocks["attention_norm"]["scale"]) @ blocks["qkv"]["kernel"]
    query, key, value = jnp.split(y.reshape(BATCH, LENGTH, 3, 2, 8), 3, axis=2)
    query, key = (rotate(z[:, :, 0], places) for z in (query, key))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(8.0)
    scores = jnp.where(jnp.tril(begins)[:, None], scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value[:, :, 0])
    x = x + mixed.reshape(BATCH, LENGTH, 16) @ blocks["out"]["kernel"]
    gate, up = jnp.split(
        norm(x, blocks["mlp_norm"]["scale"]) @ blocks["gate_up"]["kernel"], 2, axis=-1
    )
    x = x + (gate * jax.nn.sigmoid(gate) * up) @ blocks["down"]["kernel"]
    return norm(x, params["norm"]["scale"]) @ params["head"]["table"].T


@pytest.mark.parametrize("stem", [exhaustive("zero1"), "fsdp", "ddp"])
def test_bfloat16_parameters_follow_float32_ones_that_the_optimizer_keeps(stem):
    kept = "data_parallel.param_dtype = 'bfloat16'"
    bf16 = model(dtype="bfloat16")
    expected = run(build("single", bf16, kept))[1]
    strategy = build(stem, bf16, kept)
    np.testing.assert_allclose(run(strategy)[1], expected, rtol=2e-2)
    state = strategy.init(jax.random.key(0))
    for seed in range(2):
        state, _ = strategy.train_step(state, strategy.place_batch(batch(seed)))
    dtypes = {str(x.dtype) for x in jax.tree.leaves(state.params)}
    assert dtypes == {"bfloat16"}
    for held, wide in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state.master), strict=True
    ):
        assert wide.dtype == jnp.float32
        np.testing.assert_array_equal(held, wide.astype(jnp.bfloat16))


def test_looking_ahead_is_refused_where_no_unit_is_gathered():
    with pytest.raises(UsageError, match="gathers no unit"):
        build("ddp", model(), LOOK_AHEAD)


def test_looking_ahead_refuses_what_it_would_not_keep():
    with pytest.raises(UsageError, match=r"prefetch.*remat = 'dots'") as caught:
        build("fsdp", model(remat="dots"), LOOK_AHEAD)
    assert caught.value.binding == "data_parallel.prefetch"


def test_rows_taken_often_are_added_up_in_float32():
    table = jnp.ones((4, 2), jnp.bfloat16)
    indices = jnp.zeros((1000,), jnp.int32)
    units = Units()
    grads = jax.grad(lambda t: jnp.sum(units.look_up("t", {"t": t}, indices, jnp.float32)))(table)
    assert float(grads[0, 0]) == pytest.approx(1000, rel=0.01)  # bfloat16 would stop at 256


@pytest.mark.parametrize("stem", [exhaustive("single"), "fsdp"])
def test_a_vocabulary_without_divisors_is_cut_and_filled_up(stem):
    whole = run(build("single", model(vocab_size=67, logits_at_once=2**20)), steps=2)
    strategy = build(stem, model(vocab_size=67))
    born, numbers = run(strategy, steps=2)
    assert born == whole[0]
    np.testing.assert_allclose(numbers, whole[1], rtol=2e-5)
    tokens = BATCH * LENGTH // (1 if stem == "single" else 8)
    text = str(
        jax.make_jaxpr(strategy.train_step)(strategy.abstract_state, strategy.abstract_batch)
    )
    pieces = -(-67 * tokens // 600)
    assert f"f32[{tokens},{-(-67 // pieces)}]" in text, "no piece of the logits"
    assert f"f32[{tokens},67]" not in text, "all logits at once"


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "memory", "chunks"),
    [
        (256, 2**15, 80e9, 1),
        (2048, 2**15, 80e9, 8),
        (16384, 2**15, 80e9, 8),  # 64 of 2**23 cost 192 collectives, and no memory less
        (16384, 2**15, 0, 64),  # of a device whose memory is not known
        (16384, 2**15, 16e9, 8),
        (2**17, 2**15, 16e9, 64),  # an eighth of the logits would not fit
        (2048, 128256, 80e9, 8),
    ],
)
def test_the_vocabulary_is_cut_by_tokens_and_memory(
    monkeypatch, tokens, vocabulary, memory, chunks
):
    monkeypatch.setattr(language_model, "target_memory", lambda: int(memory))
    made = model(vocab_size=vocabulary, logits_at_once=None)
    with noting() as choices:
        assert made.loss.__self__._chunks(tokens) == chunks
    assert f"({chunks} chunks of the vocabulary)" in choices["transformer.logits_at_once"]


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_a_tuning_looks_ahead_where_blocks_are_recomputed_in_full(remat):
    tuned = ["data_parallel.tuning = @tuning()", "tuning.prefetch = True"]
    options = "tuning.gather_options = {'xla_cpu_enable_fast_min_max': False}"
    config = build("fsdp", model(remat=remat), *tuned, options).config
    assert config.prefetch is (True if remat == "full" else None)
    assert bool(config.compiler_options) is (remat == "full")


def test_what_is_chosen_is_that_of_the_step_and_not_of_its_examination():
    built = build("fsdp", model(depth=3, remat="none", logits_at_once=None))
    assert built.choices["transformer.unroll"] == "1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads"),
        ({"remat": "some"}, "remat"),
        ({"api": "keras"}, "api"),
        ({"depth": 0}, "depth"),
        ({"heads": 0}, "heads"),
        ({"mlp_width": -1}, "mlp_width"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        model(**changes)


def test_work_is_what_the_program_multiplies_and_is_told_by_hand():
    sizes = {"width": 16, "depth": 3, "mlp_width": 32}
    matrices = 3 * (16 * 48 + 16 * 16 + 16 * 64 + 32 * 16) + VOCAB * 16
    per_token = 6 * matrices + 12 * 3 * 16 * LENGTH
    tiny = model(**sizes, remat="none", logits_at_once=2**20)
    example = {"tokens": jax.ShapeDtypeStruct((LENGTH,), np.int32)}
    work = tiny.work(example)
    assert work == (LENGTH, per_token * LENGTH, "float32")

    strategy = build("single", tiny)
    compiled = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch).compile()
    counted = read(compiled, strategy.mesh, topology("cpu:1")).flops
    dropped = 3 / 8 * 12 * 3 * 16 * LENGTH**2  # scores of later keys that CPUs leave out
    assert counted == pytest.approx(BATCH * (work.flops - dropped), rel=0.01)


def test_rates_are_in_tokens_and_in_shares_of_the_peak(monkeypatch):
    work = model().work({"tokens": jax.ShapeDtypeStruct((LENGTH,), np.int32)})
    now = iter([0.0, 2.0, 2.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Throughput(32, work, peak=32 * work.flops * 10)
    clock.start()
    for _ in range(4):
        clock.count_step()
    rates = clock.rates()
    assert rates["tokens_per_second"] == 2 * 32 * LENGTH
    assert rates["mfu"] == pytest.approx(0.2)


def test_a_rule_of_ones_own_is_followed_whatever_the_dim_is_used_for():
    def last(path, shape, size):
        return (
            ShardDecision(len(shape) - 1)
            if shape[-1] % size == 0
            else ShardDecision(None, "does not divide")
        )

    tree = {"blocks": {"w": jnp.zeros((3, 16, 32))}, "embed": {"table": jnp.zeros((64, 16))}}
    kinds = {"blocks": STACK, "embed": TABLE}
    assert [p.dim for p in jax.tree.leaves(infer_sharding(tree, last, 8, kinds))] == [2, 1]
    by_default = infer_sharding(tree, functools.partial(largest_dim, min_weight_size=1), 8, kinds)
    assert [p.dim for p in jax.tree.leaves(by_default)] == [1, 1]
    first = infer_sharding(
        tree, lambda path, shape, size: ShardDecision(0), 8, {"embed": TABLE, "blocks": STACK}
    )
    assert first["embed"]["table"].dim == 0
