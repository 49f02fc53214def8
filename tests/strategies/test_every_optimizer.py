"""Every optimizer of optax, and of optax.contrib, under strategies that shard.

Numbers are those of one device. All train at once, each its own parameters: one compilation.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from research_dp.analysis.comm_lower_bound import min_wire_bytes
from research_dp.certification.certify import certify
from research_dp.errors import UsageError
from research_dp.strategies import TrainSpec
from research_dp.types import LossOutput, TrainableModel
from tests.support.certified import bench_of, noise
from tests.support.marks import exhaustive, slow
from tests.support.recipes import recipe
from tests.support.repository import ROOT

# Of functions that give way to others, and of noisy_sgd, which is made without a key here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key")
STEPS, BATCH = 5, 16
# Rows, columns, of two dims none that the devices divide, a vector, a number.
SHAPES = {"w": (16, 8), "turned": (7, 24), "odd": (9, 11), "b": (5,), "s": ()}
EXAMPLE = {"x": jax.ShapeDtypeStruct((2,), np.float32)}


def all_of_optax():
    """Each optimizer by its name, made of its defaults, and of a learning rate if that has none."""
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            given = inspect.signature(function).parameters
            needed = {n for n, p in given.items() if p.default is p.empty and p.kind < 2}
            is_one = any("learning_rate" in n for n in given) and not name.startswith("scale_by")
            if is_one and needed <= {"learning_rate"}:
                found[prefix + name] = function(**dict.fromkeys(needed, 1e-2))
    return found


def arrays(seed):
    drawn = np.random.default_rng(seed)
    return {k: jnp.asarray(1 + drawn.random(size=s), jnp.float32) for k, s in SHAPES.items()}


def model_of(names):
    def init(key, batch):
        return {name: arrays(0) for name in names}, {}

    def loss(params, model_state, batch, keys, *, train, batch_axes):
        def of_example(x):
            def of_array(p):
                aim = x[0] * jnp.cos(jnp.arange(p.size)).reshape(p.shape)
                return jnp.sum(jnp.square(p - aim - x[1]))

            return sum(map(of_array, jax.tree.leaves(params)))

        total = jnp.sum(jax.vmap(of_example)(batch["x"]))
        return LossOutput(total, jnp.float32(len(batch["x"])), model_state, {})

    return TrainableModel(init, loss)


def build(stem, optimizers):
    """A strategy that trains one tree of parameters by each optimizer."""

    def labels(params):
        return {name: jax.tree.map(lambda _, n=name: n, tree) for name, tree in params.items()}

    optimizer = optax.partition(optimizers, labels)
    spec = TrainSpec(
        model=model_of(list(optimizers)), optimizer=optimizer, example=EXAMPLE, batch_size=BATCH
    )
    return recipe(stem).build(spec)


def trained(stem, optimizers):
    strategy = build(stem, optimizers)
    state = strategy.init(0)
    for seed in range(STEPS):
        x = np.random.default_rng(seed).normal(size=(BATCH, 2)).astype(np.float32)
        state, _ = strategy.train_step(state, strategy.place_batch({"x": x}))
    return strategy, jax.tree.map(np.asarray, strategy.logical(state).params)


@pytest.fixture(scope="module")
def sorted_out():
    """(accepted, why the others are not)."""
    accepted, refused = {}, {}
    for name, optimizer in all_of_optax().items():
        try:
            build("single", {name: optimizer})
            accepted[name] = optimizer
        except UsageError as error:
            refused[name] = str(error)
    return accepted, refused


@pytest.fixture(scope="module")
def on_one_device(sorted_out):
    return trained("single", sorted_out[0])[1]


@pytest.mark.parametrize(
    "stem", [slow("fsdp"), *map(exhaustive, ("ddp", "zero1", "hsdp", "spmd_fsdp"))]
)
def test_every_optimizer_gives_the_numbers_of_one_device(stem, sorted_out, on_one_device):
    strategy, found = trained(stem, sorted_out[0])
    sharded = [p for p in jax.tree.leaves(strategy.shardings.slices) if p.dim is not None]
    assert len(sharded) == (3 * len(found) if stem != "ddp" else 0)  # `odd` with padding
    for name, params in on_one_device.items():
        for path, p in params.items():
            np.testing.assert_allclose(found[name][path], p, 2e-4, 2e-5, err_msg=f"{name} {path}")
            assert not np.array_equal(p, arrays(0)[path]), f"{name} moves nothing"


@pytest.mark.slow
def test_the_page_names_those_that_work_and_those_that_do_not(sorted_out):
    accepted, refused = sorted_out
    page = (ROOT / "docs" / "own_optimizer.md").read_text()
    table = page.partition("## Every optimizer of Optax")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {True: set(), False: set()}
    for row in rows:
        names, state = row.strip("| ").split(" | ")[:2]
        named["yes" in state] |= set(re.findall(r"`([\w.]+)`", names))
    assert named == {True: set(accepted), False: set(refused)}
    assert len(accepted) >= 40 and len(refused) <= 3


def test_an_update_that_needs_what_no_step_gives_is_refused():
    with pytest.raises(UsageError, match=r"optimizer: its update fails; it is given .*'value_fn'"):
        build("fsdp", {"a": optax.lbfgs()})


def test_the_loss_is_given_to_an_optimizer_that_asks_for_it():
    values = []

    def update(updates, state, params, *, value, grad, **_):
        jax.debug.callback(lambda x: values.append(float(x)), value)
        return jax.tree.map(lambda g: -1e-2 * g, grad), state

    noting = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    _, found = trained("fsdp", {"a": noting})
    _, expected = trained("ddp", {"a": optax.sgd(1e-2)})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, expected)
    jax.effects_barrier()
    assert len(set(values)) == STEPS


def in_order(grads, params):
    return jax.tree.map(lambda x: jnp.sort(x.ravel()).reshape(x.shape), grads)


def test_what_reads_an_optimizer_gives_it_the_loss():
    strategy = build("fsdp", {"a": optax.contrib.momo()})
    assert min_wire_bytes(strategy, strategy.spec) > 0
    optimizer = optax.contrib.momo(0.1)
    assert certify(bench_of("fsdp", spec={"optimizer": optimizer}), noise(), steps=2).certified


@pytest.mark.parametrize("stem", ["zero1", "fsdp"])
def test_optimizers_that_mix_elements_are_right_on_shards(stem):
    optimizers = {
        "muon": optax.contrib.muon(1e-2),
        "by block": optax.chain(optax.clip_by_block_rms(0.01), optax.adam(1e-2)),
        "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-2)),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "sorts": optax.chain(optax.stateless(in_order), optax.sgd(1e-2)),
        "global clip": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    }
    found, expected = (trained(one, optimizers)[1] for one in (stem, "single"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-4, 2e-5), found, expected)
