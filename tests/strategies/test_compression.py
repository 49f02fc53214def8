"""Strategies whose collectives are encoded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp import UsageError
from research_dp.certification import harness
from research_dp.certification.certify import AFTER, certify
from research_dp.certification.noise import train_batches
from research_dp.config import gin_internals, load
from research_dp.distributed import collectives, encoded
from research_dp.distributed.codecs import int4, int8
from research_dp.distributed.mesh import build_mesh
from research_dp.strategies import error_feedback
from research_dp.strategies.jaxpr_collectives import of_step
from research_dp.strategies.state import resize_slots
from tests.support import decoder
from tests.support.certified import batches, bench_of, noise, small_model, spec_of
from tests.support.codecs import FloatBytes
from tests.support.marks import exhaustive
from tests.support.recipes import recipe
from tests.support.strategies import build, one_matrix, run_steps

ON = ["data_parallel.compression = @compression()", "compression.min_size = 0"]
SHIPPED = ["fsdp_q8", "ddp_q8", "zero1_q4", "ddp_sign", "hsdp_powersgd"]
EXACT = "data_parallel.reduction = @tree_reduction()"
FEEDBACK = "compression.error_feedback = True"


def codecs(*fields, codec="@float_bytes()"):
    return [*ON, *(f if "=" in f else f"compression.{f} = {codec}" for f in fields)]


def gradients(stem, *bindings, states=None):
    """(the gradients that an optimizer gets in two steps, from these states or its own; states)."""
    load.reset()
    bench = dataclasses.replace(bench_of(stem), config=recipe(stem, *bindings))
    strategy = bench.strategy
    first = strategy.logical(harness.to_host(strategy.init(jax.random.key(0))))
    found, given, states = [], states, [first]
    for i, batch in enumerate(train_batches(bench, noise(), 2)):
        start = states[-1] if given is None else given[i]
        result = harness.run_step(strategy, harness.with_slots(strategy, start), batch)
        found += jax.tree.leaves(harness.gradients_of(result.state))
        states.append(result.state)
    return found, states


PLACES = [
    exhaustive("ddp", ["sync"]),
    ("ddp", ["sync", FEEDBACK]),
    ("zero1", ["sync", "update"]),
    exhaustive("zero2", ["sync"]),
    exhaustive("fsdp", ["gather"]),
    ("fsdp", ["gather", "sync"]),
    exhaustive("fsdp_keep", ["gather", "sync"]),
    ("hsdp", ["across", FEEDBACK]),
    exhaustive("hsdp", ["gather", "sync", "across"]),
    exhaustive("hsdp_zero1", ["gather", "across"]),
]


@pytest.mark.parametrize(("stem", "places"), PLACES)
def test_a_codec_that_changes_nothing_gives_the_plain_gradients(stem, places):
    plain, states = gradients(stem)
    if "update" in places:  # the optimizer keeps parameters of its own
        states = None
    found, _ = gradients(stem, *codecs(*places), states=states)
    for x, y in zip(plain, found, strict=True):
        # XLA:CPU adds over examples in an order that the reader of the sum, and the CPU, decide.
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8)


def of_shipped(name, *bindings, mesh=None):
    load.load(
        [f"strategies/compressed/{name}.gin"], ["shard_params.min_weight_size = 64", *bindings]
    )
    config = gin_internals.value_of("train.strategy")
    if mesh:
        sizes = dict(zip(("data", "fsdp"), mesh, strict=True))
        config = dataclasses.replace(config, mesh=build_mesh(sizes, jax.devices()))
    return config


def small(name):
    return "power_sgd.min_size = 64" if name == "hsdp_powersgd" else "compression.min_size = 64"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_ones_send_bytes_and_say_that_they_are_others(name):
    mesh = (2, 4) if name == "ddp_q8" else None
    strategy = of_shipped(name, small(name), mesh=mesh).build(spec_of(small_model("linen")))
    assert strategy.algorithm
    large = {c.dtype for c in of_step(strategy) if c.nbytes > 300}
    expected = {"hsdp_powersgd": {"float32"}, "fsdp_q8": {"uint8", "bfloat16"}}
    assert large == expected.get(name, {"uint8"})
    assert np.isfinite(jax.tree.leaves(run_steps(strategy, 2).params)[0]).all()


def certificate(name, *bindings, mesh=None):
    config = of_shipped(name, small(name), *bindings, mesh=mesh)
    return certify(dataclasses.replace(bench_of("ddp"), config=config), noise(), steps=AFTER + 2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("fsdp_q8", None),
        ("ddp_q8", (2, 4)),
        ("zero1_q4", None),
        exhaustive("ddp_sign", None),
        exhaustive("ddp_q8", None),
        exhaustive("hsdp_powersgd", (2, 4)),
        exhaustive("hsdp_powersgd", (4, 2)),
    ],
)
def test_shipped_ones_keep_their_invariants_also_on_fewer_devices(name, mesh):
    done = certificate(name, mesh=mesh)
    assert done.algorithm and done.is_right and not done.certified, str(done)
    checks = {check.name: check.passed for check in done.checks}
    assert checks["saved and restored"] and checks["copies"]
    moved = [passed for what, passed in checks.items() if f"moved to {name}" in what]
    assert moved and all(moved)
    if name in ("ddp_q8", "hsdp_powersgd"):
        assert checks["sent and pending"] and len(moved) == 2
    if name == "fsdp_q8":
        assert checks["gathered"]


def wrong_sign(monkeypatch):
    apply = error_feedback.ErrorFeedback.apply

    def negated(self, grads, axes, *, state, **options):
        return apply(self, grads, axes, state=jax.tree.map(jnp.negative, state), **options)

    negated.takes = apply.takes
    monkeypatch.setattr(error_feedback.ErrorFeedback, "apply", negated)


def forgotten(monkeypatch):
    monkeypatch.setattr(
        error_feedback, "resized", lambda errors, devices, stored: jax.tree.map(
            lambda x: jnp.zeros((devices["data"] * devices["fsdp"], *x.shape[1:])), errors
        )
    )  # fmt: skip


def not_sent_twice(monkeypatch):
    """What is lost of the mean, on the device that encodes it, is not kept."""
    encode = collectives.Wire._encoded

    def lossless(self, rows, codec, axes):
        sent, lost = encode(self, rows, codec, axes)
        return sent, lost if len(rows) > 1 else jnp.zeros_like(lost)

    monkeypatch.setattr(collectives.Wire, "_encoded", lossless)


def local_scale(monkeypatch):
    monkeypatch.setattr(
        encoded, "_most_of_all", lambda blocks, *_, **__: jnp.abs(blocks).max(-1, keepdims=True)
    )


def blocks_of_shards(monkeypatch):
    gather = encoded.gather

    def of_shard(x, dim, axes, codec, shape, reduction=None, *, moves=True):
        own = gather(x, None, (), codec, x.shape)
        return collectives.gather(own, dim, axes) if axes and moves else own

    monkeypatch.setattr(encoded, "gather", of_shard)


@pytest.mark.parametrize(
    ("name", "bug", "named"),
    [
        ("ddp_q8", wrong_sign, "sent and pending"),
        ("ddp_q8", not_sent_twice, "sent and pending"),
        ("ddp_q8", forgotten, "pending, moved to"),
        ("fsdp_q8", local_scale, "gathered"),
        ("fsdp_q8", blocks_of_shards, "gathered"),
    ],
)
def test_planted_bugs_are_named(monkeypatch, name, bug, named):
    bug(monkeypatch)
    done = certificate(name)
    failed = [check.name for check in done.checks if check.passed is False]
    assert failed and failed[0].startswith(named), str(done)


def test_error_feedback_that_a_restore_forgets_is_named(monkeypatch):
    resize = harness.Checkpoints.restore

    def restored(self, strategy):
        found = resize(self, strategy)
        state = found[0]
        return (state._replace(slots=jax.tree.map(jnp.zeros_like, state.slots)), *found[1:])

    monkeypatch.setattr(harness.Checkpoints, "restore", restored)
    done = certificate("ddp_q8")
    failed = {check.name for check in done.checks if check.passed is False}
    assert "saved and restored" in failed


@pytest.mark.parametrize(
    ("stem", "bindings", "said"),
    [
        ("ddp", codecs("gather"), "compression.gather has no effect"),
        ("ddp", codecs("update"), "compression.update has no effect"),
        ("fsdp", codecs("update"), "compression.update has no effect"),
        ("spmd", codecs("gather"), "compression.gather has no effect"),
        ("fsdp", codecs("gather", "across"), "compression.across has no effect"),
        (
            "hsdp",
            [*codecs("sync"), "data_parallel.sync = @power_sgd()", FEEDBACK],
            "state of its own",
        ),
        ("ddp", ON, "compression names no codec"),
        ("zero2", codecs("sync", FEEDBACK), "the weight of a step is not known"),
        ("ddp", [*codecs("sync"), "compression.exempt = 'embd/.*'"], "matches none"),
        ("ddp", [*codecs("sync"), "compression.exempt = '['"], "no regular expression"),
        ("spmd_fsdp", codecs("gather"), "engine 'compiled'"),
        ("fsdp", codecs("sync", FEEDBACK), "the memory that sharding saves"),
        ("fsdp", codecs("sync", codec="@sign()"), "no random key"),
        ("ddp", [*codecs("sync"), EXACT], "compression.sync with exact sums"),
        ("zero1", [*codecs("update"), EXACT], "compression.update with exact sums"),
        (
            "ddp",
            [*codecs("sync", codec="@sign()"), "make_mesh.axes = {'data': 2, 'fsdp': 4}"],
            "groups would vote",
        ),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(stem, bindings, said):
    bindings = [*bindings, "tree_reduction.logical_shards = 8"]
    with pytest.raises(UsageError, match=said):
        recipe(stem, *bindings).build(spec_of(small_model("linen")))


def test_exact_sums_take_encoded_gathers_and_keep_the_bits_of_one_device():
    exact = [EXACT, "tree_reduction.logical_shards = 8"]
    bits = set()
    for devices in (1, 2, 8):
        load.reset()
        config = recipe("fsdp", *codecs("gather", codec="@int8()"), *exact)
        mesh = build_mesh({"data": 1, "fsdp": devices}, jax.devices()[:devices])
        strategy = dataclasses.replace(config, mesh=mesh).build(spec_of(small_model("linen")))
        state = strategy.logical(run_steps(strategy, 2))
        bits.add(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state.params)))
    assert len(bits) == 1


def test_on_one_device_what_waited_is_sent_in_full():
    """A run that continues on one device has no errors any more, and adds them once."""
    config = recipe("ddp", *codecs("sync", FEEDBACK, codec="@int4()"))
    spec = spec_of(small_model("linen"))
    state = config.build(spec).logical(run_steps(config.build(spec), 2))
    mesh = build_mesh({"data": 1, "fsdp": 1}, jax.devices()[:1])
    alone = dataclasses.replace(config, mesh=mesh).build(spec)
    moved = resize_slots(alone, jax.device_put(jax.tree.map(np.asarray, state), jax.devices()[0]))
    waits = jax.tree.leaves(moved.slots)
    assert any(np.any(x) for x in waits)
    after, _ = harness.take_step(alone, harness.to_devices(alone, moved), batches()[0])
    assert not any(np.any(x) for x in jax.tree.leaves(after.slots))


def test_another_compression_replaces_the_codecs_of_error_feedback():
    config = recipe("ddp", *codecs("sync", FEEDBACK))
    assert isinstance(config.sync, error_feedback.ErrorFeedback)
    assert not hasattr(dataclasses.replace(config, compression=None).sync, "resize")
    other = dataclasses.replace(config.compression, sync=int4())
    assert "int4" in dataclasses.replace(config, compression=other).algorithm


def test_stacked_vectors_are_encoded_layer_by_layer():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256)) * [[1], [10], [100], [1000]])
    decoded, _ = encoded.alone(x, int8(), stacked=True)
    assert np.all(np.abs(decoded - x).max(1) <= np.abs(x).max(1) / 254 * 1.001)


def test_replicated_parameters_keep_their_dtype():
    narrow = ["gather_params.gather_dtype = 'bfloat16'", "shard_params.min_weight_size = 1000000"]
    codec = codecs("gather")
    with pytest.warns(UserWarning, match="nothing is sharded"):
        strategy = build("fsdp", one_matrix(), bindings=[*codec, *narrow])
    text = str(
        jax.make_jaxpr(strategy.train_step.__wrapped__)(
            strategy.abstract_state, strategy.abstract_batch
        )
    )
    assert "bf16" not in text


def test_what_is_exempt_is_sent_as_it_is():
    bindings = [*codecs("sync", codec="@int8()"), "compression.exempt = 'a'"]
    strategy = build("ddp", one_matrix(), bindings=bindings)
    by_dtype = {c.dtype: c.nbytes for c in of_step(strategy) if c.nbytes > 64}
    assert by_dtype["float32"] == 16 * 16 * 4 and "uint8" in by_dtype


def test_parameters_follow_those_that_the_optimizer_keeps():
    """Changes in int4 leave no error that grows: the next change has what the last one lacked."""
    strategy = of_shipped("zero1_q4", small("zero1_q4")).build(spec_of(small_model("linen")))
    state, apart, moved = strategy.init(jax.random.key(0)), [], None
    first = jax.tree.map(np.asarray, strategy.logical(state).params)
    for batch in [*batches()] * 5:
        state, _ = harness.take_step(strategy, state, batch)
        logical = strategy.logical(state)
        distance = jax.tree.map(
            lambda a, b: np.abs(np.asarray(a) - b).max(), logical.params, logical.opt_state.master
        )
        apart.append(max(jax.tree.leaves(distance)))
        moved = max(
            np.abs(np.asarray(a) - b).max()
            for a, b in zip(*map(jax.tree.leaves, (logical.params, first)), strict=True)
        )
    assert 0 < max(apart) < 0.01 and moved > 5 * apart[-1]


@pytest.mark.parametrize("stem", ["ddp", "zero1"])
def test_with_error_feedback_by_unit_the_mean_is_kept(stem):
    """Unit by unit, and micro-batches, the same sums: what was sent and what waits."""
    bindings = [*codecs("sync", FEEDBACK, codec="@int8()"), "shard_params.min_weight_size = 128"]
    found = []
    for more in ([], ["compression.by_unit = True"]):
        load.reset()
        config = dataclasses.replace(recipe(stem, *bindings, *more), overlap=True)
        strategy = config.build(decoder.spec_of(decoder.model()))
        state, numbers = strategy.init(0), []
        for seed in range(3):
            batch = strategy.place_batch(decoder.batch(seed))
            state, metrics = strategy.train_step(state, batch)
            numbers += [float(metrics["loss"][0]), float(metrics["grad_norm"][0])]
        found.append(numbers)
    np.testing.assert_allclose(*found, rtol=2e-2)


def test_gathered_tables_are_looked_up_as_they_are_decoded():
    """Rows that are exchanged are those of the decoded table, as if it were gathered."""
    spec = decoder.spec_of(decoder.model())
    losses = []
    for exchanges in (True, False):
        load.reset()
        config = recipe("fsdp", *codecs("gather", codec="@int4()"))
        reduction = dataclasses.replace(config.reduction, exchanges_rows=exchanges)
        strategy = dataclasses.replace(config, reduction=reduction).build(spec)
        batch = strategy.place_batch(decoder.batch(0))
        _, metrics = strategy.train_step(strategy.init(0), batch)
        losses.append(float(metrics["loss"][0]))
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_an_own_codec_needs_one_class():
    assert FloatBytes().nbytes(64) == 256
    strategy = build("hsdp", small_model("nnx"), bindings=codecs("gather", "across"))
    assert strategy.algorithm is None
