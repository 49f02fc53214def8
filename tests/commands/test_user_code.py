"""Files of a researcher's own, outside this package: listed, shown, trained and certified."""

import os
import re
import sys

import pytest

from research_dp import train
from research_dp.config import load
from research_dp.errors import UsageError
from tests.support.repository import ROOT
from tests.support.runs import summary

STRATEGY = '''"""Averages gradients over one mesh axis after the other."""

import gin
import jax

from research_dp.distributed.buckets import all_mean_tree


@gin.register
def two_level_average(grads, axis_names, *, scale: float = 1.0):
    """Averages inside each group of devices, then across groups."""
    for axis in reversed(axis_names):
        grads = all_mean_tree(grads, (axis,))
    return jax.tree.map(lambda g: g * scale, grads)
'''
GIN = """# Gradients averaged inside groups of devices, then across.
import my_pkg.two_level
include 'base.gin'

data_parallel.name = 'two_level'
data_parallel.sync = @two_level_average
make_mesh.axes = {'data': 2, 'fsdp': -1}
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "my_pkg"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "two_level.py").write_text(STRATEGY)
    (folder / "two_level.gin").write_text(GIN)
    # Beside the file that includes it, wherever the command is started.
    (folder / "base.gin").write_text("# What it builds on.\ninclude 'gin/strategies/ddp.gin'\n")
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.mark.slow
def test_an_own_strategy_is_listed_shown_trained_and_certified(command, package, tmp_path):
    away = {"cwd": tmp_path, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    listed = command("--import=my_pkg.two_level", "--list", **away)
    assert listed.returncode == 0, listed.stderr
    assert "my_pkg\n  two_level_average  Averages inside each group" in listed.stdout
    shown = command("--import=my_pkg.two_level", "--list=two_level_average", **away)
    assert "In my_pkg/two_level.py:9" in shown.stdout, shown.stderr

    flags = ["--gin_file=runs/digits.gin", "--gin_file=my_pkg/two_level.gin", "--cpu_devices=4"]
    dry = command(*flags, "--dry_run", **away)
    assert dry.returncode == 0, dry.stderr
    assert "# my_pkg/two_level.gin:6" in dry.stdout
    assert "two_level_average.scale = 1.0" in dry.stdout
    wrong = command(*flags, "--dry_run", "--gin.two_level_average.scale=many", **away)
    assert wrong.returncode == 2 and "'many': give a number" in wrong.stderr

    small = ["--gin_file=models/mlp.gin", "--gin.train.num_steps=2", f"--workdir={tmp_path / 'w'}"]
    done = command(*flags, *small, **away)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "w")["strategy"] == "two_level"

    quick = ["--gin_file=my_pkg/two_level.gin", "--cpu_devices=4"]
    good = command("--quick", *quick, module="research_dp.certify", **away)
    assert good.returncode == 0, good.stdout + good.stderr
    assert " 0 fail, " in good.stdout
    assert good.stdout.startswith("CERTIFIED: two_level on data 2 x fsdp 2 against single")
    bad = [*quick, "--gin.two_level_average.scale=1.01"]
    done = command(*bad, module="research_dp.conform", **away)
    assert done.returncode == 1
    assert "NOT CERTIFIED" in done.stdout and "First difference: step 0" in done.stdout
    assert "now: python -m research_dp.certify --quick" in done.stderr


def test_a_library_that_is_missing_is_told_with_who_imports_it(package, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (package / "wants.py").write_text("\nimport no_such_library\n")
    with pytest.raises(UsageError, match=r"named 'no_such_library' \(.*my_pkg/wants.py:2\)"):
        load.load(["runs/digits.gin"], imports=["my_pkg.wants"])
    with pytest.raises(UsageError, match=r"named 'my_pkg.nothing'. It must be in the working"):
        load.load(["runs/digits.gin"], imports=["my_pkg.nothing"])


IN_USE = {  # module -> the line that uses JAX, and the module that has it
    "array": ("import jax.numpy as jnp\n\nONES = jnp.ones(3)\n", "array.py:3"),
    "devices": ("import jax\n\n\ndef f():\n    return jax.devices()\n\n\nf()\n", "devices.py:5"),
    "outer": ("import gin\nimport my_pkg.count\n", "count.py:2"),
}


@pytest.mark.parametrize("name", IN_USE)
def test_a_module_that_uses_jax_when_it_is_imported_is_told_with_its_line(command, package, name):
    text, line = IN_USE[name]
    (package / f"{name}.py").write_text(text)
    (package / "count.py").write_text("import jax\nCOUNT = jax.device_count()\n")
    away = {"cwd": package.parent, "PYTHONPATH": f"{ROOT}{os.pathsep}{package.parent}"}
    flags = ["--gin_file=runs/digits.gin", f"--import=my_pkg.{name}", "--workdir=w"]
    told = rf"first used at {re.escape(str(package))}/{re.escape(line)}: call JAX in functions"
    done = command(*flags, "--cpu_devices=4", **away)
    assert done.returncode == 2 and re.search(f"JAX is in use already, .*{told}", done.stderr)
    if name == "outer":
        process = ["--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=1"]
        done = command(*flags, *process, **away)
        assert done.returncode == 2 and re.search(f"cannot join: .*{told}", done.stderr)


BROKEN = {  # what a module does when it is imported -> its line, and what is said
    "import gin\n\nraise KeyError('nothing there')\n": (3, "KeyError: 'nothing there'"),
    "import jax\njax.random.bits(3)\n": (2, "TypeError: JAX encountered invalid PRNG key"),
    "x = 1\nopen('there_is_none')\n": (2, "FileNotFoundError: .*'there_is_none'"),
    "import sys\n\nsys.exit('--data is missing')\n": (3, "SystemExit: --data is missing"),
    "x = (\n": (1, "SyntaxError: '\\(' was never closed"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_whatever_a_module_raises_is_told_with_its_own_line(package, tmp_path, monkeypatch, text):
    monkeypatch.syspath_prepend(tmp_path)
    (package / "broken.py").write_text(text)
    line, said = BROKEN[text]
    with pytest.raises(
        UsageError, match=rf"my_pkg.broken: {said}.* \(.*/my_pkg/broken.py:{line}\)"
    ):
        load.load(["runs/digits.gin"], imports=["my_pkg.broken"])


MODELS = """import flax.linen as nn
import gin
import jax.numpy as jnp

from research_dp import TrainableModel


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, scale):
        return nn.Dense(10)(x.reshape(x.shape[0], -1) + jnp.ones((7, 3)))


def init(key, batch):
    zeros = jnp.zeros((1, 8, 8, 1))
    return Net().init(key, zeros, 1.0)["params"], {}


@gin.register
def wrong_shapes():
    return TrainableModel(init, init)


@gin.register
def missing_argument():
    return TrainableModel(lambda key, batch: (Net().init(key, batch["image"]), {}), init)


@gin.register
def one_result():
    return TrainableModel(lambda key, batch: {}, init)


@gin.register
def few_arguments():
    def takes_a_key(key):
        return {}, {}

    return TrainableModel(takes_a_key, init)


@gin.register
def scalar_loss():
    def loss(params, model_state, batch, keys, train, batch_axes):
        return jnp.sum(params["w"])

    return TrainableModel(lambda key, batch: ({"w": jnp.zeros(3)}, {}), loss)
"""


WRONG = {  # model -> exit status, what is printed
    "wrong_shapes": (1, r"models.py\", line 11, in __call__\n.*incompatible shapes"),
    "missing_argument": (1, r"models.py\", line 26, in .*missing 1 required .* 'scale'"),
    "one_result": (2, r"error: train.model: init returned {}; it must return \(parameters, "),
    "few_arguments": (1, r"error: /.*models.py:\d+: .*takes_a_key\(\) takes 1 .* calls `made ="),
    "scalar_loss": (2, r"error: train.model: its loss returned an array of shape \(\) .* Loss"),
}


def test_a_model_that_is_wrong_is_told_by_the_users_own_lines(
    package, tmp_path, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(tmp_path)
    (package / "models.py").write_text(MODELS)
    flags = ["--gin_file=runs/digits.gin", "--import=my_pkg.models", "--dry_run"]
    for model, (status, said) in WRONG.items():
        assert train.main([*flags, f"--gin.train.model=@{model}()"]) == status
        err = capsys.readouterr().err
        assert re.search(said, err, re.DOTALL), err
        assert " at 0x" not in err and "In call to configurable" not in err
        assert "site-packages" not in err and "JAX has removed" not in err
        assert len(err.splitlines()) <= 16


def test_a_quick_certification_needs_a_strategy(command, main):
    done = command("--gin_file=models/mlp.gin", module="research_dp.conform")
    assert done.returncode == 2 and "%NUM_CLASSES is used and bound nowhere" in done.stderr
    flags = ["--gin_file=models/mlp.gin", "--gin.NUM_CLASSES=10"]
    done = main("--quick", *flags, name="certify")
    assert done.returncode == 2 and "train.strategy is bound nowhere" in done.stderr
    done = main("--quick", "--steps=3", *flags, name="certify")
    assert done.returncode == 2 and "leave out --against and --steps" in done.stderr
