"""A model, data and an optimizer given as objects to `run`, `plan`, `certify` and `compare`."""

import dataclasses
import json

import gin
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp
from research_dp.commands import cli, entries
from research_dp.training import python_objects
from tests.support import programs
from tests.support.own_modules import FEATURES, LinenNet, cross_entropy
from tests.support.runs import records, summary

SCRIPT = '''
import sys

import flax.linen as nn
import jax
import numpy as np
import optax

import research_dp

jax.config.update("jax_num_cpu_devices", 8)


class Net(nn.Module):
    """Somebody's own, with dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(4)(x)


x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
own = {
    "data": research_dp.from_arrays(x, x[:, :4].argmax(1).astype(np.int32)),
    "model": research_dp.from_linen(
        Net(), loss=optax.softmax_cross_entropy_with_integer_labels
    ),
    "optimizer": optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(3e-3, 0, 30))),
}
settings = {"train.num_steps": 20, "train.batch_size": 64, "shard_params.min_weight_size": 64}
summary = research_dp.run("strategies/fsdp.gin", settings, sys.argv[1] + "/fsdp", **own)
assert summary["strategy"] == "fsdp" and summary["devices"] == 8
compared = research_dp.compare(
    gin_files="strategies/fsdp.gin",
    bindings=settings,
    strategies=["single", "fsdp"],
    workdir=sys.argv[1] + "/compared",
    allow_unused=True,
    **own,
)
print("CLEAN", compared.is_clean, *(verdict.kind for verdict in compared.verdicts))
'''


def test_a_script_trains_an_own_model_under_fsdp_and_compares_it_with_one_device(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = programs.python(tmp_path / "script.py", tmp_path, timeout=300, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert "CLEAN True rounding" in done.stdout, done.stdout
    folders = [tmp_path / "fsdp", *(tmp_path / "compared" / name for name in ("single", "fsdp"))]
    assert [summary(folder)["devices"] for folder in folders] == [8, 1, 8]
    prints = [summary(folder)["params_fingerprint"] for folder in folders]
    assert prints[0] == prints[2]
    losses = [[r["loss"] for r in records(folder)] for folder in folders]
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
    assert losses[1][-1] < losses[1][0]


@pytest.fixture(scope="module")
def own():
    x = np.random.default_rng(0).normal(size=(96, FEATURES)).astype(np.float32)
    return {
        "model": research_dp.from_linen(LinenNet(), loss=cross_entropy),
        "data": research_dp.from_arrays(x, x.argmax(1).astype(np.int32)),
        "optimizer": optax.sgd(0.1),
    }


FSDP, DIGITS = "strategies/fsdp.gin", "runs/digits.gin"
SMALL = {"train.num_steps": 4, "train.batch_size": 32, "shard_params.min_weight_size": 16}


def test_objects_hold_for_their_call_and_gin_is_as_before(tmp_path, own):
    gin.parse_config("shard_params.min_weight_size = 7", skip_unknown=True)
    before = gin.config_str()
    first = research_dp.run(FSDP, SMALL, tmp_path / "a", **own)
    assert gin.config_str() == before and not gin.config_is_locked()
    assert python_objects._objects.get(None) is None
    other = {**own, "optimizer": optax.sgd(0.2)}
    second = research_dp.run(FSDP, SMALL, tmp_path / "b", **other)
    again = research_dp.run(FSDP, SMALL, tmp_path / "c", **own)
    assert first["params_fingerprint"] == again["params_fingerprint"]
    assert first["params_fingerprint"] != second["params_fingerprint"]


def test_objects_replace_what_files_and_bindings_bind(tmp_path, own):
    bindings = {**SMALL, "train.optimizer": "@optax.sgd()", "optax.sgd.learning_rate": 0.1}
    alone = research_dp.run(FSDP, SMALL, tmp_path / "a", **own)
    replaced = research_dp.run([DIGITS, FSDP], SMALL, tmp_path / "b", **own)
    assert alone["params_fingerprint"] == replaced["params_fingerprint"]
    optimizer_in_gin = {k: own[k] for k in ("model", "data")}
    in_part = research_dp.run(FSDP, bindings, tmp_path / "c", **optimizer_in_gin)
    assert alone["params_fingerprint"] == in_part["params_fingerprint"]


def test_a_plan_and_a_certificate_of_objects(own):
    plan = research_dp.plan(FSDP, SMALL, topology="cpu:8", strategies=["ddp", "fsdp"], **own)
    rows = plan["strategies"]
    # A plain all-reduce of all parameters: 2 P f, and of the metrics.
    params = 4 * (FEATURES * 16 + 2 * 16 + 16 * 10 + 10)
    assert params * 2 * 7 / 8 <= rows["ddp"]["wire_bytes"]["total"] < params * 2 * 7 / 8 * 1.4
    certificate = research_dp.certify(FSDP, SMALL, steps=3, **own)
    assert certificate.certified and "against single" in str(certificate)


def test_a_certificate_of_objects_finds_a_wrong_loss(own):
    loss = own["model"].loss

    def of_a_device(params, model_state, batch, keys, **options):
        output = loss(params, model_state, batch, keys, **options)
        return output._replace(total=output.total * jnp.mean(batch["x"]))

    wrong = dataclasses.replace(own["model"], loss=of_a_device)
    certificate = research_dp.certify(FSDP, SMALL, steps=3, **{**own, "model": wrong})
    assert "numbers of an example depend on others" in certificate.cause, certificate


@pytest.fixture(scope="module")
def trained(tmp_path_factory, own):
    """A run of objects, though a file of it binds a model, data and an optimizer too."""
    folder = tmp_path_factory.mktemp("trained")
    research_dp.run([DIGITS, FSDP], {**SMALL, "train.checkpoint_every": 2}, folder / "a", **own)
    return folder / "a"


def test_a_runs_folder_says_what_was_given_as_an_object(trained):
    bindings = json.loads((trained / "run.json").read_text())["bindings"]
    for name in ("model", "data", "optimizer"):
        assert bindings[f"train.{name}"]["value"] == f"@{name}_given_in_python()"
        assert f"train.{name} = @{name}_given_in_python()\n" in (trained / "config.gin").read_text()


def test_a_run_of_objects_continues_with_them_only(trained, own, main):
    longer = {**SMALL, "train.num_steps": 6}
    flags = [f"--gin.{name}={value}" for name, value in longer.items()]
    before = (trained / "metrics.jsonl").read_bytes()
    done = main(f"--gin_file={DIGITS}", f"--gin_file={FSDP}", *flags, f"--workdir={trained}")
    assert done.returncode == 2, done.stderr
    said = f"error: train.model of the run in {trained} was given as a Python object. Continue it "
    assert f"{said}by research_dp.run(..., model=...), or use another --workdir." in done.stderr
    for files in ([DIGITS, FSDP], [trained / "config.gin"]):
        with pytest.raises(research_dp.UsageError, match=r"given as a Python object"):
            research_dp.run(files, longer, trained)
    with pytest.raises(research_dp.UsageError, match=r"^train.optimizer of the run in"):
        in_part = {name: own[name] for name in ("model", "data")}
        research_dp.run([DIGITS, FSDP], longer, trained, **in_part)
    assert (trained / "metrics.jsonl").read_bytes() == before
    assert research_dp.run([DIGITS, FSDP], longer, trained, **own)["step"] == 6


@pytest.mark.parametrize("name", ["evaluate", "load"])
def test_a_command_that_has_only_the_folder_says_what_it_lacks(trained, name):
    with pytest.raises(research_dp.UsageError) as refused:
        getattr(research_dp, name)(trained)
    assert "was given as a Python object, which no file has. Give it again, as" in str(
        refused.value
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda own: research_dp.run(FSDP, SMALL, "w", model=LinenNet()),
            r"^run.model = .*: give a TrainableModel, e.g. of research_dp.from_linen, or None\.",
        ),
        (
            lambda own: research_dp.plan(FSDP, topology="cpu:8", data=np.ones(3)),
            r"^plan.data = .*: give a DataSet, e.g. of research_dp.from_arrays, or None\.",
        ),
        (
            lambda own: research_dp.certify(FSDP, optimizer=optax.adamw),
            r"^certify.optimizer is the function adamw itself. Give an optimizer of Optax",
        ),
        (
            lambda own: research_dp.certify(FSDP, quick=True, **own),
            r"^quick has its own run: leave out model, data and optimizer\.",
        ),
        (
            lambda own: research_dp.compare(["runs/a", "runs/b"], **own),
            "^model, data and optimizer go with strategies, not with folders of runs",
        ),
        (
            lambda own: research_dp.run(FSDP, SMALL, "w", model=own["model"]),
            "train needs 'data', 'optimizer', which nothing binds",
        ),
    ],
)
def test_mistakes_are_refused_in_words(own, call, message):
    with pytest.raises(research_dp.UsageError, match=message):
        call(own)


@pytest.mark.parametrize("name", [name for name in entries.COMMANDS if name != "launch"])
def test_no_command_has_flags_for_objects(name):
    assert not {*python_objects.REFERENCES} & {*cli.parameters(name)}
