"""States and batches whose memory was given away, arrays of no numbers, and JAX's own switches."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp
from research_dp.errors import UsageError
from research_dp.runs.checkpoint import Checkpoints
from research_dp.runs.manifest import Progress
from tests.support.marks import exhaustive, slow

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 16)).astype(np.float32),
    "y": RNG.integers(0, 8, 16).astype(np.int32),
}
WHOLE = ("single", "ddp", "spmd")  # parameters and optimizer state


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(16)(x)))


def build(stem):
    loss = optax.softmax_cross_entropy_with_integer_labels
    spec = research_dp.TrainSpec(
        model=research_dp.from_linen(Net(), loss=loss),
        optimizer=optax.sgd(0.1),
        example={k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in BATCH.items()},
        batch_size=16,
    )
    options = {} if stem in WHOLE else {"min_weight_size": 8}
    return research_dp.strategy(stem, **options).build(spec)


STATE = r"the state has [\w/]+, which was deleted or given away\. train_step takes the memory"


@pytest.mark.parametrize("stem", ["ddp", "fsdp", exhaustive("single"), exhaustive("spmd_fsdp")])
def test_a_state_that_a_step_took_is_refused_and_its_copy_is_not(stem, tmp_path):
    """The runtime would end the process."""
    strategy = build(stem)
    old, batch = strategy.init(0), strategy.place_batch(BATCH)
    copy = jax.tree.map(jnp.copy, old)
    new, _ = strategy.train_step(old, batch)
    evaluated = strategy.place_eval_batch(BATCH)
    data = research_dp.from_arrays(BATCH, eval=BATCH)
    progress = Progress(batch_size=16, seed=0, order="", window={})
    for function, call in {
        "train_step": lambda: strategy.train_step(old, batch),
        "eval_step": lambda: strategy.eval_step(old, evaluated),
        "eval_step ": lambda: research_dp.eval_metrics(strategy, old, data),
        "save": lambda: Checkpoints(tmp_path).save(old, 1, progress, {}),
    }.items():
        with pytest.raises(UsageError, match=f"^{function.strip()}: {STATE}"):
            call()
    strategy.train_step(copy, batch)
    strategy.eval_step(new, evaluated)
    with pytest.raises(UsageError, match=f"^train_step: {STATE}"):
        strategy.train_step(copy, batch)


def test_a_batch_that_was_deleted_is_named():
    strategy = build("fsdp")
    batch, evaluated = strategy.place_batch(BATCH), strategy.place_eval_batch(BATCH)
    batch.examples["x"].delete()
    evaluated["y"].delete()
    with pytest.raises(UsageError, match=r"^train_step: the batch has examples/x, .*place_batch"):
        strategy.train_step(strategy.init(0), batch)
    with pytest.raises(UsageError, match=r"^eval_step: the batch has y, .*place_batch"):
        strategy.eval_step(strategy.init(0), evaluated)


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a"] * 16),
        np.array([b"a"] * 16),
        np.array([None] * 16),
        np.array(["2020-01-01"] * 16, "datetime64[D]"),
        [[1], [2, 3]] * 8,
    ],
    ids=["text", "bytes", "objects", "dates", "ragged"],
)
def test_arrays_of_no_numbers_are_named(values):
    strategy = build("fsdp")
    for function in ("place_batch", "place_eval_batch"):
        with pytest.raises(UsageError, match=rf"^{function}: 'name' is .* numbers"):
            getattr(strategy, function)({**BATCH, "name": values})


SWITCHES = {
    "leaks": jax.checking_leaks,
    "transfers": lambda: jax.transfer_guard("disallow"),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "checks": lambda: jax.enable_checks(True),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
}
ALONE = {"x64": lambda: jax.enable_x64(True), "disable_jit": jax.disable_jit}


# All switches at once, and those alone, meet each engine (of single, spmd_fsdp and those that are
# mapped), gathers, slices and groups.
UNDER = [slow("spmd_fsdp", None), slow("fsdp", None)]
UNDER += [exhaustive(s, None) for s in ("single", "zero1", "hsdp")]
UNDER += [exhaustive(s, alone) for alone in ALONE for s in ("single", "spmd_fsdp")]
UNDER += [exhaustive("hsdp", "x64"), exhaustive("zero1", "x64"), exhaustive("fsdp", "disable_jit")]


@pytest.mark.parametrize(("stem", "alone"), UNDER)
def test_a_step_is_the_same_under_the_switches_of_jax(stem, alone):
    def loss():
        strategy = build(stem)
        state, losses = strategy.init(0), []
        for _ in range(2):
            state, metrics = strategy.train_step(state, strategy.place_batch(BATCH))
            losses.append(research_dp.metric_means(metrics)["loss"])
        metrics = strategy.eval_step(state, strategy.place_eval_batch(BATCH))
        return [*losses, research_dp.metric_means(metrics)["loss"]]

    with contextlib.ExitStack() as stack:
        for switch in [ALONE[alone]] if alone else SWITCHES.values():
            stack.enter_context(switch())
        found = loss()
    np.testing.assert_allclose(found, loss(), rtol=1e-5)
