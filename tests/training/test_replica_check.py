"""One flipped bit on one device is found, and named with its array, its device and its step."""

import jax
import jax.numpy as jnp
import pytest

import research_dp.training.train  # noqa: F401  (registers `train`)
from research_dp import sync_gradients
from research_dp.errors import RunFailure, UsageError
from research_dp.training.replica_check import ReplicaCheck
from tests.support.faults import flip
from tests.support.marks import slow
from tests.support.repository import stems
from tests.support.runs import MLP, lines
from tests.support.three_arrays import build, step

MANY = [s for s in stems() if s != "single"]


@pytest.mark.parametrize("stem", [s if s in ("ddp", "pmap") else slow(s) for s in MANY])
def test_a_flipped_bit_is_named(stem):
    strategy = build(stem)
    check = ReplicaCheck(strategy)
    state, _ = step(strategy, strategy.init(jax.random.key(0)))
    assert check.differences(check.checksums(state)) == []
    odd = jax.devices()[5]
    for bit, place in ((0, 0), (31, 2)):
        params = {**state.params, "c": flip(state.params["c"], odd, bit, place)}
        (found,) = check.differences(check.checksums(state._replace(params=params)))
        assert (found.path, found.devices) == ("params c", (odd,))
    with pytest.raises(RunFailure, match=r"step 7: replicas differ: params c on device 5 \(proc"):
        check.check(7, check.checksums(state._replace(params=params)))


def test_what_is_sharded_is_compared_with_its_own_replicas_only():
    strategy = build("hsdp", "make_mesh.axes = {'data': 2, 'fsdp': 4}")
    check = ReplicaCheck(strategy)
    state, _ = step(strategy, strategy.init(jax.random.key(0)))
    assert check.differences(check.checksums(state)) == []
    moments = state.opt_state[0]
    odd = jax.devices()[6]
    spoilt = moments._replace(nu={**moments.nu, "b": flip(moments.nu["b"], odd)})
    (found,) = check.differences(
        check.checksums(state._replace(opt_state=(spoilt, *state.opt_state[1:])))
    )
    assert found.path.startswith("opt_state") and found.path.endswith("nu/b")
    assert set(found.devices) == {jax.devices()[2], odd}, "of two nobody knows which is right"


class Counting:
    """A `sync` whose state is the same on all devices: how often it was called, three times."""

    differs_over = ()

    def init(self, params):
        return jnp.zeros(3, jnp.int32)

    def apply(self, grads, axis_names, *, state):
        return sync_gradients(grads, axis_names), state + 1

    def resize(self, state, devices):
        return state


def test_the_state_of_slots_is_compared():
    strategy = build("ddp", slots={"sync": Counting()})
    check = ReplicaCheck(strategy)
    state, _ = step(strategy, strategy.init(jax.random.key(0)))
    assert check.differences(check.checksums(state)) == []
    odd = jax.devices()[3]
    wrong = state._replace(slots={"sync": flip(state.slots["sync"], odd)})
    (found,) = check.differences(check.checksums(wrong))
    assert (found.path, found.devices) == ("slots sync", (odd,))


def test_one_device_has_nothing_to_compare():
    with pytest.raises(UsageError, match=r"check_replicas_every compares devices"):
        ReplicaCheck(build("single"))


@pytest.mark.slow
def test_a_run_ends_at_the_comparison_after_a_flip(command, tmp_path):
    done = command(
        *MLP,
        "--gin_file=gin/strategies/ddp.gin",
        "--import=tests.support.faults",
        "--gin.train.strategy=@flipping()",
        "--gin.flipping.strategy=@data_parallel()",
        "--gin.flipping.device=2",
        "--gin.flipping.step=7",
        "--gin.train.check_replicas_every=5",
        "--gin.train.checkpoint_every=5",
        "--gin.train.log_every=1",
        "--gin.train.num_steps=40",
        "--cpu_devices=4",
        f"--workdir={tmp_path}",
    )
    assert done.returncode == 1
    told = "error: step 10: replicas differ: params head/bias on device 2 (process 0)"
    assert told in done.stderr
    # What is saved at step 10 already is looked at first.
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["5"]
    assert max(lines(tmp_path, "train")) <= 11
