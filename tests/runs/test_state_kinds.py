"""What a state may contain: trained, compared, saved, restored elsewhere, or refused at build."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp as rdp
from research_dp.commands import saved_run
from research_dp.distributed.placement import fingerprint
from research_dp.errors import UsageError
from research_dp.runs.checkpoint import Checkpoints, read_saved
from research_dp.runs.checkpoint_files import verify
from research_dp.runs.manifest import Progress
from research_dp.strategies import TrainSpec
from research_dp.training.nonfinite import NonfiniteCheck
from research_dp.training.replica_check import ReplicaCheck
from research_dp.types import LossOutput, TrainableModel
from tests.support.recipes import recipe

EXAMPLE = {"x": jax.ShapeDtypeStruct((16,), np.float32)}
BATCH = {"x": np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)}
PROGRESS = Progress(batch_size=16, seed=0, order="", window={})
GOOD = {
    "key": lambda: jax.random.key(3),
    "keys": lambda: jax.random.split(jax.random.key(3, impl="rbg"), 8),
    "words": lambda: jax.random.PRNGKey(3),
    "bool": lambda: jnp.array([True, False]),
    "int8": lambda: jnp.arange(8, dtype=jnp.int8),
    "uint32": lambda: jnp.uint32(2**32 - 1),
    "float8": lambda: jnp.ones((2, 8), jnp.float8_e4m3fn),
    "bfloat16": lambda: jnp.ones(3, jnp.bfloat16),
    "float64": lambda: np.ones(3),  # of NumPy: float32
    "complex": lambda: jnp.full(3, 1 + 2j),
    "empty": lambda: jnp.zeros((0,)),
    "long and empty": lambda: jnp.zeros((16, 0, 3), jnp.int32),
    "number": lambda: 3,
    "none": lambda: None,
}
NO_STATE = {
    "text": (lambda: "abc", "'abc', no array"),
    "object": (lambda: np.array(["a"]), "an array of shape .*, no array"),
    "float0": (lambda: np.zeros(3, jax.dtypes.float0), "an array of shape .* float0, no array"),
    "int4": (lambda: jnp.ones(4, jnp.int4), "of dtype int4. Give elements a byte"),
    "uint4": (lambda: jnp.ones(4, jnp.uint4), "of dtype uint4. Give"),
    "float4": (lambda: jnp.ones(4, jnp.float4_e2m1fn), "of dtype float4_e2m1fn. Give"),
}
NO_PARAMETERS = {name: GOOD[name] for name in ("key", "bool", "int8", "float8", "number")}


class Slot:
    """`sync_gradients` with a state."""

    def __init__(self, make, differs_over):
        self.make, self.differs_over = make, differs_over

    def init(self, params):
        return self.make()

    def apply(self, grads, axes, *, state):
        return rdp.sync_gradients(grads, axes), state

    def resize(self, state, devices):
        raise AssertionError("the number of devices is the same")


def built(stem, *, params=dict, model_state=dict, opt_state=dict, slot=None, step=lambda x: x):
    """A linear model with these parts of its state, each the result of a function."""

    def init(key, batch):
        return {"w": jnp.ones((16, 8)), **params()}, model_state()

    def loss(params, state, batch, keys, *, train, batch_axes):
        y = batch["x"] @ params["w"]
        return LossOutput(jnp.sum(y**2), jnp.float32(len(y)), step(state) if train else state, {})

    own = optax.GradientTransformation(lambda p: opt_state(), lambda g, s, p=None: (g, s))
    config = recipe(stem)
    if slot is not None:
        config = dataclasses.replace(config, sync=slot)
    optimizer = optax.chain(optax.adam(1e-2), own)
    options = {"optimizer": optimizer, "example": EXAMPLE, "skip_nonfinite": True}
    return config.build(TrainSpec(model=TrainableModel(init, loss), batch_size=16, **options))


def everything():
    return {name: make() for name, make in GOOD.items()}


def of_parameters():
    return {"empty": jnp.zeros((16, 0)), "narrow": jnp.ones(3, jnp.bfloat16), "number": 2.5}


def through_all(first, second, folder):
    """Trains, compares, evaluates, saves; restores under another strategy, and goes on."""
    state = first.init(0)
    state, _ = first.train_step(state, first.place_batch(BATCH))
    NonfiniteCheck((), "stop", "", print).check_state(1, state)
    check = ReplicaCheck(first)
    assert not check.leaves or not check.differences(state)
    restored_check = ReplicaCheck(second)
    first.eval_step(state, first.place_eval_batch(BATCH))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(state, 1, PROGRESS, {})
    checkpoints.close()
    verify(folder / "checkpoints" / "1")
    saved = read_saved(folder)
    for tree, expected in ((saved.params, state.params), (saved.model_state, state.model_state)):
        assert fingerprint(tree) == fingerprint(expected)
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
        assert all(x.dtype == y.dtype for x, y in pairs)
    restored, _ = Checkpoints(folder / "checkpoints").restore(second)
    assert fingerprint(restored) == fingerprint(state)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(second.abstract_state), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert not restored_check.leaves or not restored_check.differences(restored)
    second.train_step(restored, second.place_batch(BATCH))


@pytest.mark.parametrize(("first", "second"), [("single", "fsdp"), ("zero1", "single")])
def test_what_a_state_may_contain_is_saved_and_restored_elsewhere(first, second, tmp_path):
    parts = {"params": of_parameters, "model_state": everything, "opt_state": everything}
    through_all(built(first, **parts), built(second, **parts), tmp_path)


@pytest.mark.parametrize("differs_over", [(), ("data", "fsdp")])
def test_so_is_the_state_of_a_slot(differs_over, tmp_path):
    slot = Slot(everything, differs_over)
    through_all(built("ddp", slot=slot), built("hsdp", slot=slot), tmp_path)


PLACES = {
    "params": "model: parameter a/b",
    "model_state": "model: model state a/b",
    "opt_state": "optimizer: state 1/a/b",
    "slot": "sync: state a/b",
}


@pytest.mark.parametrize("name", NO_STATE)
@pytest.mark.parametrize("part", PLACES)
def test_what_a_state_cannot_contain_is_refused_by_its_path(part, name):
    make, problem = NO_STATE[name]
    is_narrow = "Give" in problem
    problem = "of dtype .*, which is not trained" if part == "params" and is_narrow else problem

    def whole():
        return {"a": {"b": make()}}

    given = {part: Slot(whole, ()) if part == "slot" else whole}
    with pytest.raises(UsageError, match=f"{PLACES[part]} is {problem}"):
        built("ddp", **given)


@pytest.mark.parametrize("name", NO_PARAMETERS)
def test_a_parameter_that_is_not_trained_is_refused(name):
    with pytest.raises(UsageError, match=r"parameter v is of dtype .*Return it as model state"):
        built("single", params=lambda: {"v": NO_PARAMETERS[name]()})


@pytest.mark.parametrize(
    ("start", "step", "problem"),
    [
        (lambda: 0, lambda x: x + 0.5, r"v float32\[\] instead of v int32\[\]"),
        (lambda: jnp.ones(3), lambda x: x.astype(jnp.bfloat16), r"v bfloat16\[3\] instead of"),
        (lambda: jnp.ones(3), lambda x: jnp.concatenate([x, x]), r"v float32\[6\] instead of"),
        (GOOD["key"], jax.random.key_data, r"v uint32\[2\] instead of v key<fry>\[\]"),
    ],
)
def test_a_model_state_that_changes_its_type_is_refused(start, step, problem):
    with pytest.raises(UsageError, match=f"model: its new state has {problem}"):
        built(
            "single", model_state=lambda: {"v": start()}, step=lambda state: {"v": step(state["v"])}
        )


def test_a_key_of_another_implementation_is_another_model(tmp_path):
    first, second = (
        built("single", model_state=lambda name=name: {"v": jax.random.key(0, impl=name)})
        for name in ("rbg", "unsafe_rbg")
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(first.init(0), 1, PROGRESS, {})
    checkpoints.wait()
    with pytest.raises(UsageError, match=r"model_state/v is key<urbg>\[\] here and key<rbg>\[\]"):
        checkpoints.restore(second)
    checkpoints.close()


class Net(nn.Module):
    """A key that draws noise, and what a state rarely has."""

    @nn.compact
    def __call__(self, x, train):
        key = self.variable("own", "key", lambda: jax.random.key(1, impl="rbg"))
        count = self.variable("own", "count", lambda: 0)
        self.variable("own", "empty", lambda: jnp.zeros((0, 3)))
        y = nn.Dense(8)(x) + jax.random.normal(key.value, (1, 8))
        if train:
            key.value, count.value = jax.random.split(key.value)[0], count.value + 1
        return y


def test_a_run_with_a_key_is_continued_evaluated_loaded_and_exported(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(64, 16)).astype(np.float32), "y": np.arange(64) % 8}
    objects = {
        "model": rdp.from_linen(Net(), loss=optax.softmax_cross_entropy_with_integer_labels),
        "data": rdp.from_arrays(arrays, eval=arrays),
        "optimizer": optax.sgd(0.1),
    }

    def run(stem, steps, folder, **bindings):
        bindings = {"train.num_steps": steps, "train.batch_size": 16, **bindings}
        return rdp.run(f"strategies/{stem}.gin", bindings, workdir=tmp_path / folder, **objects)

    run("single", 1, "run")
    run("fsdp", 2, "run", **{"train.check_replicas_every": 1})
    model_state = read_saved(tmp_path / "run").model_state["own"]
    key = jax.random.key(1, impl="rbg")
    for _ in range(2):
        key = jax.random.split(key)[0]
    assert model_state["count"] == 2 and model_state["empty"].shape == (0, 3)
    np.testing.assert_array_equal(*map(jax.random.key_data, (model_state["key"], key)))
    placed = saved_run.place(model_state, jax.tree.map(jnp.asarray, model_state))
    assert fingerprint(placed) == fingerprint(model_state)
    for name in ("arrays.safetensors", "folder"):
        assert rdp.export(tmp_path / "run", tmp_path / name) == 2
        begun = {"train.initial": "@initial_params()", "initial_params.path": tmp_path / name}
        run("ddp", 1, f"from {name}", **begun)
    bindings = {"train.num_steps": 2, "train.batch_size": 16}
    certificate = rdp.certify("strategies/fsdp.gin", bindings, steps=2, **objects)
    assert certificate.certified, certificate
