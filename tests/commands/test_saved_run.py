"""From a run's folder back to its model, parameters and metrics, on other devices."""

import json
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import research_dp
from research_dp import checkpoints
from research_dp.commands import main as command_line
from research_dp.distributed.sharding import by_path
from research_dp.errors import UsageError
from research_dp.runs import checkpoint_files
from tests.support import runs
from tests.support.repository import ROOT

# A module whose batch statistics are a part of what it predicts, by functions without annotations.
PACKAGE = """
import flax.linen as nn
import gin
import numpy as np
import optax
import research_dp


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(self.width)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))
        return nn.Dense(8)(x) * self.param("scale", nn.initializers.ones, ())


@gin.register
def net(width=32):
    return research_dp.from_linen(
        Net(width), loss=optax.softmax_cross_entropy_with_integer_labels
    )


@gin.register
def blobs(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 8, 200).astype(np.int32)
    x = ((np.eye(16)[y] * 3 + 1 + rng.normal(size=(200, 16))) * scale).astype(np.float32)
    return research_dp.from_arrays(x, y, eval=(x[:75], y[:75]))
"""
GIN = """
import saved_pkg
include 'gin/strategies/zero1.gin'
include 'gin/optim/adamw_cosine.gin'
train.model = @net()
train.data = @blobs()
train.num_steps = 6
train.batch_size = 16
train.eval_every = 2
train.checkpoint_every = 2
shard_params.min_weight_size = 16
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with an own module, and the run `zero1` on eight devices."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "saved_pkg.py").write_text(PACKAGE)
    (folder / "run.gin").write_text(GIN)
    sys.path.insert(0, str(folder))
    research_dp.run(folder / "run.gin", workdir=folder / "zero1")
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def run(folder):
    return folder / "zero1"


def test_what_a_function_without_annotations_returns_is_checked(folder):
    with pytest.raises(UsageError, match=r"train\.model = a DataSet: give a TrainableModel"):
        research_dp.dry_run(folder / "run.gin", {"train.model": "@blobs()"})


def records(run):
    return {line["step"]: line["loss"] for line in runs.records(run, "eval")}


def test_an_evaluation_gives_the_bits_that_the_run_recorded(run, monkeypatch):
    assert research_dp.evaluate(run)["eval"] == {"loss": records(run)[6]}
    init = research_dp.Strategy.__init__

    def without_init(strategy, **fields):  # neither compiled, nor in memory with the optimizer's
        init(strategy, **{**fields, "init": pytest.fail})

    monkeypatch.setattr(research_dp.Strategy, "__init__", without_init)
    result = research_dp.evaluate(run, 2)
    assert result["eval"] == {"loss": records(run)[2]} and result["step"] == 2
    assert (result["strategy"], result["mesh"]) == ("zero1", {"data": 1, "fsdp": 8})


OTHERS = [
    "single",
    "hsdp",
    *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("ddp", "hsdp_zero1")),
]


@pytest.mark.parametrize("files", OTHERS)
def test_an_evaluation_under_another_strategy_gives_the_same_numbers(run, files):
    result = research_dp.evaluate(run, gin_files=f"strategies/{files}.gin")
    assert result["strategy"] == files
    assert result["eval"]["loss"] == pytest.approx(records(run)[6], rel=1e-6)


def test_an_evaluation_on_other_data_by_a_binding(run):
    other = research_dp.evaluate(run, bindings={"blobs.seed": 1})["eval"]["loss"]
    assert abs(other - records(run)[6]) > 1e-3


def test_loaded_parameters_predict_what_the_run_evaluated(run, folder):
    import saved_pkg

    model, params = research_dp.load(run)
    assert {len(x.devices()) for x in jax.tree.leaves(params)} == {1}
    (batch,) = _eval_batch(saved_pkg.blobs())
    logits = model.apply(params, batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    expected = records(run)
    assert float(losses.mean()) == pytest.approx(expected[6], rel=1e-5)
    loaded = research_dp.load(run, step=4)
    assert loaded.step == 4 and loaded.model_state["batch_stats"]
    logits = jax.jit(loaded.model.apply)(loaded.params, batch["x"])
    others = loaded.model_state, research_dp.load(run, step=2).model_state
    for inputs in (batch["x"], dict(batch)):
        given = [loaded.model.apply(loaded.params, inputs, state) for state in (None, *others)]
        np.testing.assert_allclose(given[0], logits, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(given[0], given[1])
        assert np.abs(given[0] - given[2]).max() > 1e-3
    with pytest.raises(UsageError, match=r"apply: the inputs \['image'\] lack 'x'"):
        loaded.model.apply(loaded.params, {"image": batch["x"]})
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    assert float(losses.mean()) == pytest.approx(expected[4], rel=1e-5)


def _eval_batch(data):
    return data.evaluate(research_dp.EvalOrder(batch_size=75, rows=np.arange(75)))


def test_parameters_are_loaded_onto_the_shardings_of_a_strategy(run):
    import saved_pkg

    data, model = saved_pkg.blobs(), saved_pkg.net()
    spec = research_dp.TrainSpec(
        model=model, optimizer=optax.sgd(0.1), example=data.example, batch_size=16
    )
    fsdp = research_dp.strategy("fsdp", min_weight_size=16).build(spec)
    loaded = research_dp.load(run, strategy=fsdp)
    kernel = loaded.params["Dense_0"]["kernel"]
    assert kernel.sharding == fsdp.abstract_state.params["Dense_0"]["kernel"].sharding
    state = fsdp.init(0)._replace(params=loaded.params, model_state=loaded.model_state)
    metrics = research_dp.eval_metrics(fsdp, state, data)
    assert metrics["loss"] == pytest.approx(records(run)[6], rel=1e-6)


def test_bfloat16_parameters_are_loaded_and_exported_as_they_are(folder):
    files = [folder / "run.gin", "precision/bf16_params.gin"]
    research_dp.run(files, {"train.num_steps": 2}, workdir=folder / "bf16")
    _, params = research_dp.load(folder / "bf16")
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    research_dp.export(folder / "bf16", folder / "bf16.safetensors")
    from safetensors.flax import load_file

    arrays = load_file(folder / "bf16.safetensors")
    kernel = arrays["params/Dense_0/kernel"]
    np.testing.assert_array_equal(kernel, params["Dense_0"]["kernel"])
    assert "model_state/batch_stats/BatchNorm_0/mean" in arrays
    assert {k.removeprefix("params/"): x.shape for k, x in arrays.items() if "params/" in k} == {
        path: x.shape for path, x in by_path(params).items()
    }
    assert arrays["params/scale"].shape == ()


def test_the_command_exports_a_step(run, folder, capfd):
    file = folder / "step2.safetensors"
    assert checkpoints.main([str(run), f"--export={file}", "--step=2"]) == 0
    assert capfd.readouterr().out == f"Exported step 2: {file}\n"
    from safetensors.numpy import load_file

    kernel = load_file(file)["params/Dense_0/kernel"]
    np.testing.assert_array_equal(kernel, research_dp.load(run, 2).params["Dense_0"]["kernel"])
    assert checkpoints.main([str(run), f"--export={folder / 'new' / 'x.safetensors'}"]) == 0
    assert (folder / "new" / "x.safetensors").is_file()
    capfd.readouterr()
    before = file.read_bytes()
    for below in ("", "x.safetensors", "a_folder"):
        assert checkpoints.main([str(run), f"--export={file / below}"]) == 2
        message = capfd.readouterr().err
        assert ("cannot be written" if below else "exists: give a new name") in message
        assert message.startswith(f"error: --export={file}") and "Warning" not in message
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step=2"], "add --export=FILE"),
        (["--verify", "--export=x.safetensors"], "leave out --verify"),
        (["--export=x.safetensors", "--step=-1"], "'-1' is not a whole number of at least 0"),
    ],
)
def test_flags_without_effect_are_refused(run, capfd, flags, message):
    try:
        status = checkpoints.main([str(run), *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capfd.readouterr().err


def test_the_command_lists_and_verifies(run, tmp_path, capfd):
    assert checkpoints.main([str(run)]) == 0
    assert capfd.readouterr().out.count("not verified") == 3
    assert checkpoints.main([str(run), "--verify"]) == 0
    assert len(re.findall(r"intact: \d+ arrays", capfd.readouterr().out)) == 3
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "checkpoints" / "4" / "state" / "manifest.ocdbt").unlink()
    assert checkpoints.main([str(copy), "--verify"]) == 1
    assert "damaged: " in capfd.readouterr().out
    assert checkpoints.main([str(tmp_path / "elsewhere")]) == 2
    assert "there are no checkpoints in" in capfd.readouterr().err


def test_mistakes_say_what_there_is(run, tmp_path):
    for folder, message in (
        (tmp_path / "none", "there is no such folder"),
        (tmp_path, r"has no config.gin: give the folder of a run"),
    ):
        with pytest.raises(UsageError, match=message):
            research_dp.load(folder)
    with pytest.raises(UsageError, match=r"^step=3: .* has checkpoints of steps 2, 4, 6"):
        research_dp.load(run, step=3)
    with pytest.raises(
        UsageError, match=r"another model: params/BatchNorm_0/bias is \(32,\) in it"
    ):
        research_dp.evaluate(run, bindings={"net.width": 16})
    with pytest.raises(UsageError, match=r"same task; .*\n  bound in bindings$"):
        research_dp.evaluate(
            run, bindings={"train.model": "@mlp()", "mlp.num_classes": 8, "mlp.widths": (8,)}
        )
    for unused in ({"mlp.dropout_rate": 0.3}, {"WIDTH": 3}):
        with pytest.raises(UsageError, match=r"(never calls mlp|nothing uses %WIDTH)"):
            research_dp.evaluate(run, bindings=unused)
    begun = tmp_path / "begun"
    (begun / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "config.gin", begun)
    with pytest.raises(UsageError, match="has no checkpoint: give the folder of a run"):
        research_dp.load(begun)
    (begun / "checkpoints" / "nothing_saved_yet").touch()
    with pytest.raises(UsageError, match=r"has saved no checkpoint yet. A run saves at its end"):
        research_dp.load(begun)
    with pytest.raises(UsageError, match=f"^to={begun} exists: give a new name"):
        research_dp.export(run, begun)


def test_a_damaged_checkpoint_is_reported_with_those_that_are_intact(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints" / "6" / "state").rglob("d/*"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UsageError, match=r"step 6 .* is damaged(.|\n)*steps 2, 4: give step"):
        research_dp.load(copy)
    assert research_dp.load(copy, step=4).step == 4
    assert checkpoint_files.steps_in(copy / "checkpoints") == [2, 4, 6]  # nothing was moved


def test_a_checkpoint_that_a_running_run_removes_is_not_missed(run, tmp_path, monkeypatch):
    copy, read = tmp_path / "copy", checkpoint_files.read_fields
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "6").rename(tmp_path / "6")

    def read_late(folder, *fields):
        if folder.name == "4":  # meanwhile the run saves a newer one, and prunes this
            shutil.rmtree(folder)
            (tmp_path / "6").rename(copy / "checkpoints" / "6")
        return read(folder, *fields)

    monkeypatch.setattr(checkpoint_files, "read_fields", read_late)
    assert research_dp.load(copy).step == 6


def test_the_command_prints_its_result(run, capsys):
    assert command_line.main(["evaluate", f"--workdir={run}", "--step=4"]) == 0
    assert capsys.readouterr().out == f"eval  step 4  loss {records(run)[4]:.4g}\n"
    flags = [f"--workdir={run}", "--json", "--gin.blobs.scale=4e37"]
    assert command_line.main(["evaluate", *flags]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["eval"] == {"loss": None}
    with pytest.raises(SystemExit):
        command_line.main(["evaluate"])
    assert "--workdir=DIR is required" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bare_process_with_other_devices_evaluates_loads_and_reads_exports(run, folder, command):
    away = {"cwd": folder, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    flags = [f"--workdir={run}", "--cpu_devices=2", "--json"]
    done = command(*flags, module="research_dp.evaluate", **away)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval"]["loss"] == pytest.approx(records(run)[6], rel=1e-6)
    alone = command(*flags, module="research_dp.evaluate")
    assert alone.returncode == 2
    assert "config.gin:3: import saved_pkg: No module named 'saved_pkg'" in alone.stderr

    exported = folder / "exported"
    research_dp.export(run, exported)
    code = f"""
import jax, sys
jax.config.update("jax_num_cpu_devices", 3)
import orbax.checkpoint as ocp
tree = ocp.StandardCheckpointer().restore({str(exported)!r})
assert set(tree) == {{"params", "model_state"}} and "research_dp" not in sys.modules
print(float(abs(tree["params"]["Dense_0"]["kernel"]).sum()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    _, params = research_dp.load(run)
    expected = float(abs(np.asarray(params["Dense_0"]["kernel"])).sum())
    assert float(done.stdout) == pytest.approx(expected, rel=1e-6)


def test_of_another_version_is_used_what_this_one_knows(folder, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(folder / "zero1", run)
    text = (run / "config.gin").read_text()
    older = "data_parallel.keep_gathered = True\nold_schedule.length = 3\n"
    (run / "config.gin").write_text(text + older)
    capsys.readouterr()
    assert research_dp.load(run).step == 6
    assert capsys.readouterr().err.count("left out, as this version has no such thing: ") == 2
    expected = json.loads((run / "summary.json").read_text())["eval"]["loss"]
    with pytest.raises(UsageError, match="another version of research_dp wrote it"):
        research_dp.evaluate(run)
    found = research_dp.evaluate(run, gin_files=["strategies/single.gin"])
    assert found["eval"]["loss"] == pytest.approx(expected, rel=1e-6)
    (run / "config.gin").write_text(text + "net.depth = 2\n")  # the model would be another
    for read in (research_dp.load, research_dp.evaluate):
        with pytest.raises(UsageError, match="net has no parameter 'depth'"):
            read(run)
