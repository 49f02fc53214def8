"""The packages in examples/ as their users run them.

Where commands run in this process, pages in docs/ run the same ones in processes of their own.
"""

import pytest

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
        "stream": [MODEL.format("linen"), data.format("stream")],
        "builder": [data.format("builder"), f"--gin.tfds_data.data_dir={tmp_path}"],
    }
    for name, flags in runs.items():
        folder = tmp_path / name
        done = main(*flags, "--cpu_devices=8", f"--workdir={folder}")
        assert done.returncode == 0, done.stderr
        assert summary(folder)["eval"]["accuracy"] > 0.9
    assert list((tmp_path / "discs_and_squares" / "1.0.0").glob("*.array_record*"))
