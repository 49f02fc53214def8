"""Every strategy computes what `single` computes, at the bytes that its row of the table says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from research_dp.config import load
from research_dp.distributed.optimizer import with_master_weights
from research_dp.errors import UsageError
from research_dp.models import convnet, mlp, resnet
from research_dp.strategies import TrainSpec
from research_dp.strategies import strategy as keys
from research_dp.types import TrainableModel
from tests.support import decoder, programs
from tests.support.certified import (
    EXAMPLE,
    RUN_STEPS,
    assert_follows_single,
    assert_near,
    batches,
    small_model,
    trace,
)
from tests.support.marks import exhaustive
from tests.support.repository import stems
from tests.support.strategies import BATCH, WIRE, build, one_matrix, recipe, run_steps, traffic


def run(strategy, steps=RUN_STEPS, change=lambda batch: batch):
    return trace(strategy, [change(batch) for batch in batches()[:steps]])


# Strategies see functions on trees, whatever library they come from: APIs take turns.
TURNS = [(s, ("linen", "nnx")[i % 2]) for i, s in enumerate(s for s in stems() if s != "single")]
OTHERS = [exhaustive(s, "nnx" if api == "linen" else "linen") for s, api in TURNS]


@pytest.mark.parametrize(("stem", "api"), TURNS + OTHERS)
def test_follows_single_with_dropout_clipping_and_accumulation(stem, api):
    assert_follows_single(recipe(stem), api)


@pytest.mark.parametrize("stem", ["ddp", "fsdp", "spmd_fsdp"])
def test_batch_norm_sees_the_global_micro_batch(stem):
    model = convnet(features=(8,), hidden=16, num_classes=10, norm="batch")
    expected = run(build("single", model, accumulation=2), steps=2)
    load.reset()
    found = run(build(stem, model, accumulation=2), steps=2)
    assert_near(found, expected, "losses", atol=2e-6)
    for name in ("evaluation loss", "examples counted"):
        assert_near(found, expected, name, rtol=1e-3)
    assert_near(found, expected, "parameters", atol=2e-4)


@functools.cache
def small_resnet(api):
    model = resnet(api=api, stages=(1, 1), width=8, num_classes=10)
    expected = run(build("single", model), steps=2)
    load.reset()
    return model, expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stem", "api"), TURNS)
def test_resnet_with_batch_norm_follows_single(stem, api):
    model, expected = small_resnet(api)
    found = run(build(stem, model), steps=2)
    assert found["initial parameters"] == expected["initial parameters"]
    assert_near(found, expected, "losses", atol=1e-5)


def test_masked_examples_do_not_count_wherever_they_lie():
    def mask(batch):
        return {**batch, "mask": (np.arange(BATCH) % 8 < 3).astype(np.float32)}

    model = mlp(widths=(16,), num_classes=10)
    expected = run(build("single", model), change=mask)
    load.reset()
    found = run(build("fsdp", model), change=mask)
    assert_near(found, expected, "losses", atol=2e-6)
    assert_near(found, expected, "gradient norms", rtol=1e-5)
    assert_near(found, expected, "parameters", atol=2e-5)


@pytest.mark.parametrize("stem", ["single", "fsdp"])
def test_gradients_are_clipped_by_the_norm_of_the_mean_over_valid_examples(stem):
    """Against a step of JAX and optax alone; SGD, for Adam hides a factor."""
    model, limit = mlp(widths=(16,), num_classes=10), 0.1
    batch = {**batches()[0], "mask": (np.arange(BATCH) % 8 < 3).astype(np.float32)}
    strategy = build(stem, model, optimizer=optax.sgd(1.0), clip=limit)
    state = strategy.init(jax.random.key(0))
    params = jax.device_get(state.params)
    local = {name: x[strategy.train_rows] for name, x in batch.items()}
    new, _ = strategy.train_step(state, strategy.place_batch(local))

    def loss(params):
        keys = jax.random.split(jax.random.key(0), BATCH)
        out = model.loss(params, {}, batch, keys, train=True, batch_axes=())
        return out.total / batch["mask"].sum()

    grads = jax.grad(loss)(params)
    norm = optax.tree.norm(grads)
    assert norm > 2 * limit, "nothing was clipped"
    expected = jax.tree.map(lambda p, g: p - g * limit / norm, params, grads)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-6),
        jax.device_get(new.params),
        expected,
    )


def test_fsdp_holds_an_eighth_of_what_is_sharded():
    strategy = build("fsdp", small_model("linen"))
    state = strategy.init(jax.random.key(0))
    device = jax.devices()[0]

    def held(tree):
        return sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for shard in leaf.addressable_shards
            if shard.device == device
        )

    placements = jax.tree.leaves(strategy.shardings.params)
    sharded = sum(p.nbytes for p in placements if p.dim is not None)
    whole = sum(p.nbytes for p in placements if p.dim is None)
    assert sharded > 5 * whole
    assert held(state.params) == sharded // 8 + whole
    assert held(state.opt_state) == 2 * (sharded // 8 + whole) + 4


def test_initialisation_never_holds_the_whole_model_on_a_device():
    strategy = build("fsdp", mlp(widths=(1024, 1024), num_classes=10))
    program = strategy.init.lower(jax.random.key(0)).compile().memory_analysis()
    state = strategy.abstract_state
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
    assert program.output_size_in_bytes < 1.1 * whole / 8
    assert program.temp_size_in_bytes < 1.1 * whole / 8, "more than the shards was held on the way"


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stem", sorted(WIRE))
def test_wire_bytes_are_those_of_the_table(stem, accumulation):
    # One matrix after another, so that every parameter is sharded and needed on the way back.
    strategy = build(stem, one_matrix(), accumulation=accumulation)
    found = traffic(strategy)
    params = sum(p.nbytes for p in jax.tree.leaves(strategy.shardings.params))
    expected = WIRE[stem](accumulation) * params * 7 / 8
    measured = sum(c.wire_bytes for c in found if c.nbytes > 64)
    assert measured == pytest.approx(expected)


def test_hsdp_keeps_big_collectives_inside_its_groups():
    strategy = build("hsdp", one_matrix())
    params = sum(p.nbytes for p in jax.tree.leaves(strategy.shardings.params))
    inside = [c for c in traffic(strategy) if c.axes == ("fsdp",) and c.nbytes > 64]
    across = [c for c in traffic(strategy) if c.axes == ("data",) and c.nbytes > 64]
    assert dict(strategy.mesh.shape) == {"data": 2, "fsdp": 4}
    assert sum(c.wire_bytes for c in inside) == pytest.approx(3 * params * 3 / 4)
    assert sum(c.wire_bytes for c in across) == pytest.approx(2 * params / 4 * 1 / 2)


def test_random_keys_differ_by_purpose_seed_step_and_place_and_by_nothing_else():
    places = np.arange(4, dtype=np.int32)

    def drawn(seed, step, places=places):
        return jax.random.key_data(keys.example_keys(seed, jnp.int32(step), places)).tolist()

    all_keys = [tuple(key) for seed in (0, 1) for step in (0, 1) for key in drawn(seed, step)]
    all_keys += [tuple(jax.random.key_data(keys.init_key(seed)).tolist()) for seed in (0, 1)]
    assert len(set(all_keys)) == len(all_keys) == 2 * 2 * 4 + 2
    # On whatever device and in whatever order an example lies.
    assert drawn(0, 1, places[::-1]) == drawn(0, 1)[::-1]


def test_a_seed_changes_dropout():
    losses = []
    for seed in (3, 4):
        load.reset()
        strategy = build("ddp", small_model("linen"), seed=seed)
        losses.append(run(strategy, steps=1)["losses"])
    assert losses[0] != losses[1]


def test_casts_and_transposes_of_gathered_parameters_are_not_kept_for_the_backward_pass():
    strategy = build("fsdp", one_matrix(jnp.bfloat16))
    params = sum(p.nbytes for p in jax.tree.leaves(strategy.shardings.params))
    measured = sum(c.wire_bytes for c in traffic(strategy) if c.nbytes > 64)
    assert measured == pytest.approx(3 * params * 7 / 8)


def test_one_device_sends_nothing():
    for stem in ("ddp", "fsdp", "zero1", "hsdp"):
        load.reset()
        mesh = ["data_parallel.mesh = @one_device_mesh()"]
        assert traffic(build(stem, one_matrix(), bindings=mesh)) == []


@pytest.mark.parametrize("stem", ["fsdp", "spmd"])
def test_programs_on_a_split_cpu_begin_when_the_one_before_has_ended(stem):
    """The devices share threads: XLA deadlocks in an own loop whose steps overlap."""
    one = one_matrix()

    def loss(params, state, batch, keys, **options):  # takes about 0.1 s a device
        slow = jax.lax.fori_loop(0, 30_000, lambda _, a: jnp.tanh(a @ a), params["a"])
        output = one.loss(params, state, batch, keys, **options)
        return output._replace(total=output.total + 0 * jax.lax.stop_gradient(slow).sum())

    strategy = build(stem, TrainableModel(one.init, loss))
    batch = {name: x[strategy.train_rows] for name, x in batches()[0].items()}
    rows = {name: x[strategy.eval_rows] for name, x in batches()[0].items()}
    state = strategy.init(0)
    assert state.step.is_ready()
    state, first = strategy.train_step(state, strategy.place_batch(batch))
    assert not first["loss"].is_ready(), "too fast to tell"
    second = strategy.eval_step(state, strategy.place_eval_batch(rows))
    assert first["loss"].is_ready()
    strategy.train_step(state, strategy.place_batch(batch))
    assert second["loss"].is_ready()


@pytest.mark.parametrize("stem", ["zero1", "fsdp", "spmd_fsdp"])
def test_state_of_optimizers_for_some_parameters_each_is_sharded(stem):
    parts = {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1, momentum=0.9)}
    optimizer = optax.multi_transform(parts, {"a": "adam", "b": "sgd"})
    strategy = build(stem, one_matrix(), optimizer=optimizer)
    state = run_steps(strategy, 1).opt_state
    sharded = [x for x in jax.tree.leaves(state) if x.shape == (16, 16)]
    assert len(sharded) == 3
    assert {x.sharding.shard_shape(x.shape) for x in sharded} == {(16, 2)}


def test_slots_that_an_engine_does_not_have_are_refused():
    with pytest.raises(UsageError, match=r"data_parallel\.gather = gather_params"):
        build("spmd", small_model("linen"), bindings=["data_parallel.gather = @gather_params"])
    with pytest.raises(UsageError, match=r"data_parallel\.gather: it takes no `mesh`"):
        build("spmd_fsdp", small_model("linen"), bindings=["data_parallel.gather = @shard_params"])
    for given in ("grad_scatter_dtype = 'bfloat16'", "bucket_bytes = 1024"):
        with pytest.raises(UsageError, match=rf"gather_params\.{given.split()[0]}: the compiler"):
            build("spmd_fsdp", small_model("linen"), bindings=[f"gather_params.{given}"])
    build("spmd_fsdp", small_model("linen"), bindings=["gather_params.pre_divide = True"])
    load.reset()
    with pytest.raises(UsageError, match=r"use one of \['step', 'micro_batch'\]"):
        build("ddp", small_model("linen"), bindings=["data_parallel.sync_each = 'epoch'"])


@pytest.mark.parametrize(
    ("stem", "binding", "told"),
    [
        ("ddp", "data_parallel.sync = None", "nothing averages the gradients of parameters"),
        ("zero1", "data_parallel.sync = @sync_gradients", "sync leaves gradients"),
        ("zero1", "data_parallel.sync = None", "nothing averages the gradients of parameters"),
        ("fsdp_keep", "data_parallel.sync_each = 'micro_batch'", "Use 'step'"),
        (
            "ddp",
            "data_parallel.reshard_after_forward = False",
            "calls no gather. Leave it at True",
        ),
        ("zero1", "data_parallel.reshard_after_forward = False", "calls no gather"),
        ("spmd", "data_parallel.sync_each = 'micro_batch'", "calls no sync. Leave it at 'step'"),
    ],
)
def test_slots_that_do_not_fit_each_other_are_refused(stem, binding, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        build(stem, small_model("linen"), bindings=[binding])


def test_a_batch_that_does_not_divide_is_refused_with_the_equation():
    spec = TrainSpec(
        model=small_model("linen"),
        optimizer=optax.sgd(0.1),
        example=EXAMPLE,
        batch_size=100,
        accumulation_steps=3,
    )
    message = r"100 does not divide over data 8 x fsdp 1 = 8 devices x accumulation_steps 3 = 24"
    with pytest.raises(UsageError, match=message) as caught:
        recipe("ddp").build(spec)
    assert caught.value.binding == "TrainSpec.batch_size"


@pytest.mark.parametrize(
    ("binding", "kind", "dtype"),
    [
        ("gather_params.gather_dtype = 'bfloat16'", "all-gather", "bfloat16"),
        ("gather_params.grad_scatter_dtype = 'bfloat16'", "reduce-scatter", "bfloat16"),
    ],
)
def test_precision_options_change_what_travels(binding, kind, dtype):
    strategy = build("fsdp", one_matrix(), bindings=[binding])
    assert {c.dtype for c in traffic(strategy) if c.kind == kind} == {dtype}


@pytest.mark.parametrize("stem", ["ddp", "spmd_fsdp"])
def test_a_batch_that_is_not_placed_or_another_is_refused_in_words(stem):
    strategy = build(stem, mlp(widths=(8,), num_classes=10))
    state = strategy.init(0)
    batch = {name: x[strategy.train_rows] for name, x in batches()[0].items()}
    placed = strategy.place_batch(batch)
    image = batch["image"]
    for call, message in {
        lambda: strategy.train_step(state, batch): "train_step: place the batch first: strategy.p",
        lambda: strategy.eval_step(state, placed): "strategy.place_eval_batch",
        lambda: strategy.place_batch(placed): "placed already. Give it to train_step",
        lambda: strategy.place_batch(image): "Give a dict of arrays: image, label",
        lambda: strategy.place_batch({"image": image}): "the batch has no 'label', only image",
        lambda: strategy.place_batch({**batch, "image": image[1:]}): (
            rf"'image' has shape \({BATCH - 1}, .* Give \({BATCH}, "
        ),
        lambda: strategy.place_eval_batch({**batch, "image": image[:, 1:]}): r"Give \(rows, ",
    }.items():
        with pytest.raises(UsageError, match=message):
            call()
    strategy.train_step(state, placed)  # what was refused did not use up the state


@pytest.mark.parametrize("stem", ["ddp", "fsdp"])
def test_the_optimizer_keeps_parameters_and_moments_in_the_models_own_dtype(stem):
    narrow = build(stem, one_matrix(), bindings=["data_parallel.param_dtype = 'bfloat16'"])
    state = narrow.abstract_state
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    dtypes = [x.dtype for x in jax.tree.leaves(state.opt_state) if x.shape]
    assert dtypes == 6 * [jnp.dtype("float32")]  # the parameters, and two moments of each


def test_weights_decay_as_the_optimizer_keeps_them_and_not_as_they_are_rounded():
    decay = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5))
    optimizer, wide = with_master_weights(decay), {"w": jnp.float32([1 + 2**-9, 3.3])}
    expected, _ = decay.update({"w": jnp.zeros(2)}, decay.init(wide), wide)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    zeros = jax.tree.map(jnp.zeros_like, narrow)
    _, state = optimizer.update(zeros, optimizer.init(wide), narrow)
    np.testing.assert_array_equal(state.master["w"], wide["w"] + expected["w"])


INITIAL = """
import functools, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from research_dp.config import load
from research_dp.strategies.state import init_state
from research_dp.training.train import configured

load.load(sys.argv[1:])
config, spec, *_ = configured()
strategy = config.build(spec)
found = strategy.init(7)
plain = jax.jit(functools.partial(init_state, strategy.config, strategy.spec))(7)
different = jax.tree.map(lambda a, b: int((jax.device_get(a) != jax.device_get(b)).sum()),
                         found.params, plain.params)
print(sum(jax.tree.leaves(different)), "of", sum(x.size for x in jax.tree.leaves(plain.params)))
"""


@pytest.mark.parametrize(
    "files",
    [
        ["runs/digits.gin"],
        ["runs/lm_stdlib.gin", "strategies/single.gin"],
        pytest.param(["runs/digits.gin", "models/resnet_nnx.gin"], marks=pytest.mark.exhaustive),
    ],
)
def test_initial_parameters_are_the_bits_of_the_default_compilation(files):
    done = programs.run(INITIAL, *files)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0 of \d{5,}\n", done.stdout)


def test_initialisation_can_be_traced_on_one_device():
    strategy = build("single", one_matrix())
    traced = jax.jit(lambda seed: strategy.init(seed).params)(3)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(close, traced, strategy.init(3).params)


@pytest.mark.parametrize("stem", ["ddp", "spmd"])
def test_options_reach_the_compiler_of_the_training_step(stem, tmp_path):
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    strategy = build(stem, one_matrix(), bindings=[f"data_parallel.compiler_options = {options}"])
    step = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
    step.compile()
    assert [path.name for path in tmp_path.glob("*jit_train*")], list(tmp_path.iterdir())


@pytest.mark.parametrize("stem", stems())
def test_each_strategy_takes_of_a_tuning_what_concerns_it(stem):
    """So a file of options can be compared under all of them."""
    every, of_gathers = {"xla_cpu_enable_fast_math": False}, {"xla_cpu_enable_fast_min_max": False}
    tuned = [
        "data_parallel.tuning = @tuning()",
        "tuning.prefetch = True",
        f"tuning.compiler_options = {every}",
        f"tuning.gather_options = {of_gathers}",
    ]
    found = decoder.build(stem, decoder.model(), *tuned).config
    gathers_units = stem in ("fsdp", "hsdp", "hsdp_zero1")
    assert found.prefetch is (True if gathers_units else None)
    expected = {**every, **(of_gathers if gathers_units else {})}
    assert found.compiler_options == expected


def test_what_a_strategy_binds_itself_comes_before_its_tuning():
    own = {"xla_cpu_enable_fast_math": True}
    bindings = [
        "data_parallel.prefetch = False",
        f"data_parallel.compiler_options = {own}",
        "data_parallel.tuning = @tuning()",
        "tuning.prefetch = True",
        "tuning.compiler_options = {'xla_cpu_enable_fast_math': False}",
    ]
    found = decoder.build("fsdp", decoder.model(), *bindings).config
    assert (found.prefetch, found.compiler_options) == (False, own)


@pytest.mark.parametrize(
    "name", ["tuning.compiler_options", "tuning.gather_options", "data_parallel.compiler_options"]
)
def test_an_option_that_the_compiler_does_not_know_is_named_with_its_binding(name):
    unknown = f"{name} = {{'xla_of_another': True}}"
    tuned = ["data_parallel.tuning = @tuning()", "tuning.prefetch = True"]
    with pytest.raises(UsageError, match=rf"{re.escape(name)} on cpu: .*xla_of_another"):
        decoder.build("fsdp", decoder.model(), *tuned, unknown)
