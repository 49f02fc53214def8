"""Replicas that differ end a run, with the slot or the device to blame, and nothing is saved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import research_dp.training.train  # noqa: F401  (registers `train`)
from research_dp import make_mesh
from research_dp.config import load
from research_dp.errors import RunFailure
from research_dp.training.replica_check import ReplicaCheck
from research_dp.types import TrainableModel
from tests.support import drifting, tiny_run
from tests.support.faults import flip, flipping
from tests.support.marks import exhaustive
from tests.support.processes import start
from tests.support.recipes import recipe
from tests.support.repository import stems
from tests.support.runs import MLP, lines
from tests.support.three_arrays import build, step

MANY = [s for s in stems() if s != "single"]


@pytest.mark.parametrize("stem", [s if s == "ddp" else exhaustive(s) for s in MANY])
def test_a_flipped_bit_is_named(stem):
    strategy = build(stem)
    check = ReplicaCheck(strategy, "Nothing was saved.")
    state, _ = step(strategy, strategy.init(jax.random.key(0)))
    check.check(1, state)
    odd = jax.devices()[5]
    for bit, place in ((0, 0), (31, 2)):
        params = {**state.params, "c": flip(state.params["c"], odd, bit, place)}
        (found,) = check.differences(state._replace(params=params))
        assert (found.kind, found.path, found.devices) == ("parameter", "c", (odd,))
    told = r"step 7: copies of parameter c differ along mesh axis .*: device 5 \(process 0\) comp"
    with pytest.raises(RunFailure, match=told):
        check.check(7, state._replace(params=params))


def test_what_is_sharded_is_compared_with_its_own_replicas_only():
    strategy = build("hsdp", "make_mesh.axes = {'data': 2, 'fsdp': 4}")
    check = ReplicaCheck(strategy)
    state, _ = step(strategy, strategy.init(jax.random.key(0)))
    assert check.differences(state) == []
    moments = state.opt_state[0]
    odd = jax.devices()[6]
    spoilt = moments._replace(nu={**moments.nu, "b": flip(moments.nu["b"], odd)})
    (found,) = check.differences(state._replace(opt_state=(spoilt, *state.opt_state[1:])))
    assert found.kind == "optimizer state" and found.path.endswith("nu/b")
    assert set(found.devices) == {jax.devices()[2], odd}, "of two nobody knows which is right"


def test_what_no_two_devices_share_has_no_checksum():
    assert "b" not in {path for _, path in ReplicaCheck(build("fsdp")).leaves}
    assert ("parameter", "b") in ReplicaCheck(build("zero1")).leaves
    assert not ReplicaCheck(build("single")).leaves


def test_the_state_of_slots_is_compared():
    strategy = build("ddp", slots={"sync": drifting.Counting()})
    check = ReplicaCheck(strategy)
    state, _ = step(strategy, strategy.init(jax.random.key(0)))
    assert check.differences(state) == []
    odd = jax.devices()[3]
    wrong = state._replace(slots={"sync": flip(state.slots["sync"], odd)})
    (found,) = check.differences(wrong)
    assert (found.kind, found.path, found.devices) == ("slot state", "sync", (odd,))


def test_one_device_has_nothing_to_compare(tmp_path):
    status, told = tiny_run.outcome(tmp_path, check_replicas_every=2)
    assert status == 2 and "train.check_replicas_every compares devices, but this run has" in told


# ---- Runs whose replicas drift ----


def on(devices, stem="ddp", bindings=(), **slots):
    """A strategy on the first devices, with other slots."""
    load.reset()
    config = recipe(stem, "shard_params.min_weight_size = 8", *bindings)
    mesh = make_mesh({"data": -1, "fsdp": 2 if stem == "hsdp" else 1}, jax.devices()[:devices])
    return dataclasses.replace(config, mesh=mesh, **slots)


def checkpoints(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


UNSYNCED = "never synchronised over {} by data_parallel.sync = {}."
DRIFTS = {
    "a sync that returns its argument": (
        functools.partial(on, 2, sync=drifting.not_at_all),
        ("parameter b, w ", "axis data (size 2)", UNSYNCED.format("data", "not_at_all")),
    ),
    "a sync over one axis of two": (
        functools.partial(on, 4, "hsdp", sync=drifting.over_data_alone),
        ("parameter b ", "axis fsdp (size 2)", UNSYNCED.format("fsdp", "over_data_alone")),
    ),
    "a sync over the other axis": (
        functools.partial(on, 4, "hsdp", sync=drifting.over_fsdp_alone),
        ("parameter b, w ", "axis data (size 2)", UNSYNCED.format("data", "over_fsdp_alone")),
    ),
    "an update that adds noise": (
        functools.partial(on, 2, update=drifting.with_noise),
        ("parameter b, w ", "in its own way by data_parallel.update = with_noise."),
    ),
    "an update that averages parameters later": (
        functools.partial(on, 2, sync=drifting.not_at_all, update=drifting.EverySecond()),
        ("parameter b, w ", UNSYNCED.format("data", "not_at_all")),
    ),
    "state of a slot that is not declared": (
        functools.partial(on, 2, sync=drifting.Remembering()),
        (
            "slot state sync/b, sync/w ",
            "if they should, declare the axes in `differs_over` of data_parallel.sync = Rem",
        ),
    ),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_what_drifts_ends_the_run_after_its_first_step(name, tmp_path):
    strategy, told = DRIFTS[name]
    status, message = tiny_run.outcome(tmp_path, strategy=strategy())
    assert status == 1 and message.startswith("step 1: copies of "), message
    assert all(part in message for part in told), message
    assert message.endswith(f"The checkpoints in {tmp_path} are as they were.")
    assert checkpoints(tmp_path) == [] and not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize(
    ("options", "found", "saved"),
    [
        ({}, 4, ["2"]),  # before a save
        ({"check_replicas_every": 5, "checkpoint_every": 5}, 10, ["5"]),
        ({"check_replicas_every": 3, "checkpoint_every": None}, 9, []),
    ],
)
def test_what_drifts_later_is_found_at_the_next_comparison(tmp_path, options, found, saved):
    strategy = flipping(strategy=on(4), device=2, step=found - 1)
    options = {"num_steps": 20, "log_every": 1, **options}
    status, message = tiny_run.outcome(tmp_path, strategy=strategy, **options)
    assert status == 1 and f"step {found}: copies of parameter b differ along mesh axis" in message
    assert "device 2 (process 0) computes wrongly: leave it out, or updated by each" in message
    assert checkpoints(tmp_path) == saved
    assert max(lines(tmp_path, "train")) <= found


def test_of_two_devices_either_may_be_wrong(tmp_path):
    strategy = flipping(strategy=on(2), device=1, step=3)
    _, message = tiny_run.outcome(tmp_path, strategy=strategy)
    assert "in its own way by data_parallel.update = apply_gradients, or a device comp" in message


def test_model_state_of_each_device_ends_a_run_that_does_not_accept_it(tmp_path):
    def loss(params, model_state, batch, keys, **options):
        out = tiny_run.MODEL.loss(params, model_state, batch, keys, **options)
        axes = options["batch_axes"] if options["train"] else ()
        first = batch["x"][0] if axes else model_state["first"]
        return out._replace(model_state={"first": jax.lax.stop_gradient(first)})

    def init(key, batch):
        return tiny_run.MODEL.init(key, batch)[0], {"first": jnp.zeros(tiny_run.DIM)}

    settings = {"model": TrainableModel(init, loss), "strategy": on(2)}
    status, message = tiny_run.outcome(tmp_path, **settings)
    assert status == 1 and "copies of model state first differ along mesh axis data" in message
    assert "or train.loss_over = 'device' accepts it." in message and checkpoints(tmp_path) == []


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_run_of_a_module_that_drifts_ends_with_status_1(api, main, tmp_path):
    flags = [f"--gin.mlp.api={api}", "--gin.train.accumulation_steps=2", f"--workdir={tmp_path}"]
    done = main(*MLP, *DRIFTING, *flags)
    assert done.returncode == 1
    assert "error: step 1: copies of parameter head/bias, head/kernel" in done.stderr
    assert UNSYNCED.format("data", "not_at_all") in done.stderr
    assert checkpoints(tmp_path) == []


DRIFTING = [
    "--gin_file=strategies/ddp.gin",
    "--import=tests.support.drifting",
    "--gin.data_parallel.sync=@not_at_all",
    "--gin.train.num_steps=3",
]


@pytest.mark.slow
def test_all_processes_end_with_the_same_error(command, tmp_path):
    flags = [*DRIFTING, "--cpu_devices=1", f"--workdir={tmp_path}"]
    both = start(command, 2, *flags)
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [1, 1], outputs
    for output in outputs:
        assert "step 1: copies of parameter head/bias, head/kernel" in output
        assert UNSYNCED.format("data", "not_at_all") in output
    assert checkpoints(tmp_path) == []
