"""Every shipped strategy, as a user runs it: the same loss as `single`, the same first weights."""

import json

import pytest

from tests.support.repository import stems

pytestmark = pytest.mark.slow

VARIANTS = {
    "linen": [],
    "nnx, accumulation and clipping": [
        "--gin_file=gin/models/convnet_nnx.gin",
        "--gin.train.accumulation_steps=4",
        "--gin.train.max_grad_norm=0.5",
    ],
}


@pytest.fixture(scope="module")
def summary(command, tmp_path_factory):
    """Runs a strategy (once for each variant); returns its summary."""
    done = {}

    def run(stem, variant, num_steps=40):
        key = (stem, variant, num_steps)
        if key not in done:
            folder = tmp_path_factory.mktemp(stem)
            finished = command(
                "--gin_file=gin/runs/digits.gin",
                f"--gin_file=gin/strategies/{stem}.gin",
                *VARIANTS[variant],
                f"--gin.train.num_steps={num_steps}",
                "--gin.train.log_every=1",
                "--cpu_devices=8",
                f"--workdir={folder}",
            )
            assert finished.returncode == 0, finished.stderr
            done[key] = json.loads((folder / "summary.json").read_text())
        return done[key]

    return run


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stem", [s for s in stems() if s != "single"])
def test_forty_steps_end_with_the_loss_of_single(summary, stem, variant):
    loss = summary(stem, variant)["train"]["loss"]
    assert loss == pytest.approx(summary("single", variant)["train"]["loss"], abs=1e-4)


@pytest.mark.parametrize("stem", [s for s in stems() if s != "single"])
def test_runs_begin_with_the_same_bits(summary, stem):
    born = summary(stem, "linen", 0)["params_fingerprint"]
    assert born == summary("single", "linen", 0)["params_fingerprint"]
