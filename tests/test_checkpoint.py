"""The same state on disk whatever the strategy."""

import jax
import numpy as np
import pytest
from test_strategies import build, one_matrix, run_steps, small_model

from research_dp.config import gin_config
from research_dp.distributed.placement import fingerprint
from research_dp.training.checkpoint import Checkpoints, Progress

PAIRS = [("fsdp", "ddp"), ("ddp", "hsdp"), ("zero1", "spmd_fsdp"), ("pmap", "fsdp_keep")]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_state_is_the_same_bits_under_another_strategy(first, second, tmp_path):
    strategy = build(first, small_model("linen"))
    state = run_steps(strategy, 2)
    saved = jax.device_get(state)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    progress = Progress(batch_size=32, seed=3, window={"loss": (0.1, 3.0)})
    checkpoints.save(state, 2, progress)
    checkpoints.close()

    gin_config.reset()
    other = build(second, small_model("linen"))
    again = Checkpoints(tmp_path / "checkpoints")
    restored, progress_too = again.restore(other.abstract_state)
    again.close()
    assert progress_too == progress
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), saved)
    expected = jax.tree.map(lambda x: x.sharding, other.abstract_state)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or 1 / 0, restored, expected)
    assert fingerprint(restored.params) == fingerprint(saved.params)


def test_nothing_to_restore(tmp_path):
    strategy = build("single", one_matrix())
    assert Checkpoints(tmp_path / "none").restore(strategy.abstract_state) is None
