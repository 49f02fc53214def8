"""Strategies, plans, certificates and dry runs from Python, without touching gin's state."""

import importlib
import inspect
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp
from research_dp.commands import configured
from research_dp.errors import UsageError
from tests.support.repository import ROOT

WIDTH, CLASSES = 64, 4


def _loss(params, model_state, batch, keys, *, train, batch_axes):
    logits = batch["x"] @ params["w"] + params["b"][None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"].astype(jnp.int32))
    mask = batch.get("mask", jnp.ones_like(losses))
    return research_dp.LossOutput(jnp.sum(losses * mask), jnp.sum(mask), model_state, {})


def _init(key, batch):
    return {"w": jax.random.normal(key, (WIDTH, CLASSES)), "b": jnp.zeros(CLASSES)}, {}


def _spec(data):
    model = research_dp.TrainableModel(_init, _loss)
    return research_dp.TrainSpec(
        model=model, optimizer=optax.sgd(0.1), example=data.example, batch_size=32
    )


def _data():
    x = np.random.default_rng(0).normal(size=(96, WIDTH)).astype(np.float32)
    return research_dp.from_arrays(x, np.argmax(x[:, :CLASSES], axis=1).astype(np.int32))


def test_a_strategy_by_name_trains_and_leaves_gin_alone():
    gin.parse_config("shard_params.min_weight_size = 7", skip_unknown=True)
    before = gin.config_str()
    data = _data()
    strategy = research_dp.strategy("fsdp", min_weight_size=100).build(_spec(data))
    assert gin.config_str() == before and not gin.config_is_locked()
    gin.clear_config()  # what it is made of does not read gin any more
    state = strategy.init(0)
    assert state.params["w"].addressable_shards[0].data.size == WIDTH * CLASSES // 8
    assert state.params["b"].sharding.is_fully_replicated
    losses = []
    for batch in research_dp.train_batches(strategy, data, num_steps=8):
        state, metrics = strategy.train_step(state, batch)
        losses.append(research_dp.metric_means(metrics)["loss"])
    assert losses[-1] < losses[0] and len(losses) == 8
    assert set(research_dp.metric_means(metrics)) == {"loss", "grad_norm"}
    single = research_dp.strategy("single").build(_spec(data))
    state_of_one, expected = single.init(0), []
    for batch in research_dp.train_batches(single, data, num_steps=8):
        state_of_one, metrics = single.train_step(state_of_one, batch)
        expected.append(research_dp.metric_means(metrics)["loss"])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    evaluated = [
        research_dp.eval_metrics(*of, data) for of in ((strategy, state), (single, state_of_one))
    ]
    np.testing.assert_allclose(*[x["loss"] for x in evaluated], rtol=1e-5)


def test_batches_of_a_continued_loop_are_the_later_ones_of_another():
    data = _data()
    strategy = research_dp.strategy("ddp").build(_spec(data))
    all_of_them = list(research_dp.train_batches(strategy, data, num_steps=4))
    rest = list(research_dp.train_batches(strategy, data, num_steps=4, first_step=2))
    for batch, expected in zip(rest, all_of_them[2:], strict=True):
        np.testing.assert_array_equal(batch.examples["x"], expected.examples["x"])


def test_a_build_that_shards_nothing_warns_and_names_the_threshold():
    data = _data()
    with pytest.warns(UserWarning, match=r"^fsdp: nothing .*, w: 256 .*min_weight_size 262144"):
        research_dp.strategy("fsdp").build(_spec(data))


def test_options_reach_scopes_files_and_functions_of_evaluated_references():
    config = research_dp.strategy("hsdp", axes={"data": 4, "fsdp": 2}, overlap=False)
    assert dict(config.mesh.shape) == {"data": 4, "fsdp": 2} and not config.overlap
    added = research_dp.strategy("fsdp+bf16_collectives")
    assert added.gather.keywords["gather_dtype"] == "bfloat16"
    mapped = research_dp.strategy("ddp", {"sync_gradients.dtype": jnp.bfloat16})
    assert mapped.sync.keywords == {"dtype": "bfloat16"}
    assert research_dp.strategy("ddp").sync is research_dp.sync_gradients


@pytest.mark.parametrize(
    ("name", "options"),
    [("examples/ddp_error_feedback.gin", {}), ("options/auto.gin", {"min_weight_size": 16})],
)
def test_own_files_slots_with_state_and_choices_work_without_gin(name, options):
    data = _data()
    config = research_dp.strategy(name, **options)
    gin.clear_config()
    built = config.build(_spec(data))
    state = built.init(0)
    for batch in research_dp.train_batches(built, data, num_steps=2):
        state, _ = built.train_step(state, batch)
    assert int(state.step) == 2


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("zero3", {}, r"^strategy\('zero3'\): no shipped file 'zero3'\. Did you mean fsdp\?"),
        ("fsdpp", {}, r"no shipped file .fsdpp.\. Did you mean .*fsdp"),
        ("fsdp", {"min_weight": 3}, "no parameter 'min_weight'. Did you mean min_weight_size"),
        ("ddp", {"min_weight_size": 3}, "It has accumulation_dtype, axes"),
        ("fsdp", {"min_weight_size": "a"}, "^shard_params.min_weight_size = 'a': give an integer"),
        ("all", {}, "give the name of one strategy"),
        ("fsdp", {"axes": {"data": 3}}, "3 devices, but 8 cpu devices"),
    ],
)
def test_mistakes_speak_of_arguments(name, options, message):
    with pytest.raises(UsageError, match=message) as refused:
        research_dp.strategy(name, **options)
    assert "--" not in str(refused.value)


def test_data_of_other_arrays_than_the_strategy_was_built_for_are_refused():
    strategy = research_dp.strategy("ddp").build(_spec(_data()))
    x = np.zeros((64, WIDTH), np.float32)
    for data, message in (
        (research_dp.from_arrays(x[:, :3], np.zeros(64, np.int32)), r"'x' .* float32\[3\], but"),
        (research_dp.from_arrays(x, np.zeros(64, np.float32)), r"'y' .* float32\[\], but int32"),
    ):
        with pytest.raises(UsageError, match=message):
            next(research_dp.train_batches(strategy, data, num_steps=1))
        with pytest.raises(UsageError, match=message):
            research_dp.eval_metrics(strategy, strategy.init(0), data)


@pytest.mark.parametrize("steps", [{"loss": [1.0, 2.0]}, [{"loss": [[1.0], 2]}], {"loss": 3}])
def test_means_of_what_is_no_metric_are_refused(steps):
    with pytest.raises(UsageError, match=r"'loss' is .*Give what train_step or eval_step returned"):
        research_dp.metric_means(steps)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            (_loss, [_loss], research_dp.TrainSpec, lambda: 1),
            "Decorate it with @gin.register, and .*'@n",
        ),
        (
            (research_dp.TrainableModel(_init, _loss), optax.adam(1), {_init}),
            r"a function that returns it with @gin.register, and give '@name\(\)'",
        ),
    ],
)
def test_functions_and_objects_in_bindings_are_refused_in_words(values, said):
    for value in values:
        with pytest.raises(UsageError, match=rf"^bindings: .*{said}"):
            research_dp.dry_run("runs/digits.gin", {"train.model": value})


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--gin.train.x: train.x = 3: no", "train.x = 3: no"),
        ("bad\n  bound in --gin.make_mesh.axes", "bad\n  bound in bindings"),
        ("Continue with --gin.train.on_nonfinite=skip or", "train.on_nonfinite = skip or"),
        ("--gin_file=a.gin: no such file", "gin_files=a.gin: no such file"),
        ("Use another --workdir, or", "Use another workdir, or"),
        ("a -- b, c--d", "a -- b, c--d"),
    ],
)
def test_flags_of_messages_become_arguments(flags, arguments):
    assert configured.in_arguments(flags).endswith(arguments)


FILES = ["runs/digits.gin", "models/mlp.gin"]
SMALL = {"mlp.widths": (32,), "shard_params.min_weight_size": 64}


def test_a_dry_run_is_an_object_with_the_text_of_the_command():
    dry = research_dp.dry_run(FILES, {**SMALL, "train.seed": 5})
    assert dry.config["train.seed = 5"] == "bindings"
    assert dry.config["train.accumulation_steps = 1"] == "default"
    per_device, total = dry.nbytes["params"]
    assert total / 8 < per_device < total / 2
    assert dry.strategy.shardings.params["hidden_0"]["kernel"].dim is not None
    assert {one.kind for one in dry.collectives}
    assert "Parameters under fsdp" in str(dry)


def test_a_plan_is_the_json_of_the_command():
    plan = research_dp.plan(FILES, SMALL, topology="cpu:8", strategies=["ddp", "fsdp"])
    assert list(plan["strategies"]) == ["ddp", "fsdp"] and plan["exceeded"] == []
    with pytest.raises(UsageError, match=r"^strategies: no shipped file 'fsdq'"):
        research_dp.plan(FILES, SMALL, topology="cpu:8", strategies="fsdq")


@pytest.mark.slow
def test_a_certificate_prints_what_the_command_prints():
    certificate = research_dp.certify(FILES, SMALL, steps=3)
    assert certificate.certified and certificate.first_difference is None
    assert "CERTIFIED" in str(certificate)
    with pytest.raises(UsageError, match="leave out against and steps"):
        research_dp.certify("strategies/ddp.gin", quick=True, steps=3)


NAMES = ("plan", "certify", "evaluate")


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_doorway_is_the_function(name):
    module = importlib.import_module(f"research_dp.{name}")
    assert module is getattr(research_dp, name) and inspect.isfunction(module) and module.main


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import research_dp.{0}", "from research_dp import {0}", ""])
def test_functions_stay_functions_whatever_is_imported(first):
    code = "import research_dp\n" + "".join(
        f"{first.format(name)}\nassert research_dp.{name}.__name__ == {name!r}\n"
        f"import research_dp.{name} as again\nassert again.__name__ == {name!r} and again.main\n"
        for name in NAMES
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_modules_of_these_names_are_still_commands(name):
    words = [sys.executable, "-m", f"research_dp.{name}", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"research_dp.{name}" in done.stdout, done.stderr


def test_a_file_that_could_be_written_is_left_as_it_was(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    configured.check_outputs(json_file=link)
    assert link.is_symlink() and not target.exists()
    target.write_text("kept")
    configured.check_outputs(json_file=link)
    assert target.read_text() == "kept"
