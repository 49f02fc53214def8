"""Every shipped strategy, as a user runs it: the same loss as `single`, the same first weights."""

import functools

import pytest

from tests.support.marks import exhaustive, slow
from tests.support.repository import stems
from tests.support.runs import summary

VARIANTS = {
    "linen": [],
    "nnx, accumulation and clipping": [
        "--gin_file=models/convnet_nnx.gin",
        "--gin.train.accumulation_steps=4",
        "--gin.train.max_grad_norm=0.5",
    ],
}


@pytest.fixture(scope="module")
def summaries(command, tmp_path_factory):
    """Trains all strategies in one process; returns their summaries."""

    @functools.cache
    def train(variant, num_steps=40, names=tuple(stems())):
        folder = tmp_path_factory.mktemp("sweep")
        done = command(
            "--gin_file=runs/digits.gin",
            *VARIANTS[variant],
            f"--gin.train.num_steps={num_steps}",
            "--gin.train.log_every=1",
            "--cpu_devices=8",
            f"--vary_file={','.join(f'strategies/{stem}.gin' for stem in names)}",
            f"--workdir={folder}",
            module="research_dp.sweep",
            timeout=900,
        )
        assert done.returncode == 0, done.stderr
        return {stem: summary(folder / stem) for stem in names}

    return train


@pytest.mark.parametrize("variant", [slow("linen"), exhaustive("nnx, accumulation and clipping")])
def test_forty_steps_end_with_the_loss_of_single(summaries, variant):
    """Strategies take turns: tests/strategies has each with each library, for fewer steps."""
    others = [s for s in stems() if s != "single"][list(VARIANTS).index(variant) :: len(VARIANTS)]
    found = summaries(variant, names=("single", *others))
    losses = {stem: one["train"]["loss"] for stem, one in found.items()}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["single"]), abs=1e-4)


@pytest.mark.exhaustive
def test_runs_begin_with_the_same_bits(summaries):
    born = {one["params_fingerprint"] for one in summaries("linen", 0).values()}
    assert len(born) == 1
