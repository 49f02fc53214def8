"""The packages in examples/ as their users run them, and a package without annotations.

Where commands run in this process, pages in docs/ run the same ones in processes of their own.
"""

import pytest

from tests.support.repository import ROOT
from tests.support.runs import lines, summary

pytestmark = pytest.mark.slow
MODEL = "--gin_file=examples/own_model/{}.gin"
SHORT = ["--gin.train.num_steps=30", "--gin.train.log_every=10"]
STRATEGY = "--gin_file=gin/strategies/{}.gin"


@pytest.mark.parametrize(("api", "stems"), [("linen", ("ddp", "zero1")), ("nnx", ("fsdp", "spmd"))])
def test_the_model_trains_on_eight_devices_as_on_one(main, tmp_path, api, stems):
    def run(stem):
        folder = tmp_path / stem
        flags = [MODEL.format(api), STRATEGY.format(stem), *SHORT, "--cpu_devices=8"]
        done = main(*flags, f"--workdir={folder}")
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stdout
        return [record["loss"] for record in lines(folder, "train").values()], summary(folder)

    expected, one = run("single")
    assert len(expected) == 3 and one["devices"] == 1
    for stem in stems:
        losses, eight = run(stem)
        assert losses == pytest.approx(expected, abs=2e-4)
        assert eight["eval"]["loss"] == pytest.approx(one["eval"]["loss"], abs=2e-3)
        assert eight["devices"] == 8
    evaluated = main(f"--workdir={tmp_path / 'single'}", name="evaluate")
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"loss {one['eval']['loss']:.4g}" in evaluated.stdout


def test_a_source_and_a_builder_of_ones_own_train(main, tmp_path):
    data = "--gin_file=examples/own_data/{}.gin"
    runs = {
        "source": [MODEL.format("linen"), data.format("source")],
        "builder": [data.format("builder"), f"--gin.tfds_data.data_dir={tmp_path}"],
    }
    for name, flags in runs.items():
        folder = tmp_path / name
        done = main(*flags, "--cpu_devices=8", f"--workdir={folder}")
        assert done.returncode == 0, done.stderr
        assert summary(folder)["eval"]["accuracy"] > 0.9
    assert list((tmp_path / "discs_and_squares" / "1.0.0").glob("*.array_record*"))


PARTS = """
import flax.linen as nn
import gin
import numpy as np
import optax
import research_dp

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[:, 0]

@gin.register
def net(scale=1.0):
    return research_dp.from_linen(Net(), loss=lambda output, y: scale * (output - y) ** 2)

@gin.register
def line(slope=2.0):
    x = np.linspace(-1, 1, 200)[:, None]
    return research_dp.from_arrays(x, slope * x[:, 0])

@gin.register
def descent(rate=0.1):
    return optax.chain(optax.clip(1.0), optax.sgd(rate))
"""
RUN = """
import mine.parts
include 'gin/strategies/ddp.gin'
train.model = @net()
train.data = @line()
train.optimizer = @descent()
descent.rate = 0.2
train.num_steps = 100
train.batch_size = 32
"""


def test_functions_without_annotations_are_taken(command, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "parts.py").write_text(PARTS)
    (tmp_path / "mine" / "run.gin").write_text(RUN)
    (tmp_path / "gin").symlink_to(ROOT / "gin")
    flags = ["--gin_file=mine/run.gin", "--cpu_devices=2", "--workdir=out"]
    done = command(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "out")["eval"]["loss"] < 1e-3
    wrong = command(*flags, "--gin.train.model=@line()", cwd=tmp_path)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert "train.model" in wrong.stderr and "DataSet" in wrong.stderr
