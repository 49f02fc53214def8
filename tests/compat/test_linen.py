"""`shard_module_params`: acceptance cases 14, 16 and 17, modules that shard themselves."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import research_dp
from tests.support.compilers import AS_USERS_COMPILE
from tests.support.steps import abstract, mesh_of, on

# Mesh A of the cases.
A = mesh_of(data=8)


class MLP(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x, train=False):
        dense = nn.Dense
        if self.axis:
            dense = research_dp.shard_module_params(nn.Dense, self.axis, 16)
        x = nn.relu(dense(512, name="input")(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return dense(10, name="output")(x)


@pytest.fixture(scope="module")
def initialised():
    """(key, abstract boxes, sharded parameters) of the MLP, made inside the map."""
    key, x = jax.random.key(0), jnp.zeros((1, 784))

    def init(key):
        return MLP("data").init(key, x)["params"]

    boxes = abstract(A, init, key)
    specs = nn.get_partition_spec(boxes)
    return key, specs, on(A, init, P(), specs)(key)


def test_case_14_modules_shard_themselves_and_train_alike(initialised):
    key, specs, params = initialised
    assert specs == {
        "input": {"kernel": P("data", None), "bias": P("data")},
        "output": {"kernel": P("data", None), "bias": P()},
    }
    # The same bits where both are compiled as users compile them: not as the tests' other programs.
    x = jnp.zeros((1, 784))
    whole = jax.jit(lambda key: MLP().init(key, x)["params"], compiler_options=AS_USERS_COMPILE)(
        key
    )
    born = on(A, lambda key: MLP("data").init(key, x)["params"], P(), specs)
    born = jax.tree.leaves(jax.jit(born, compiler_options=AS_USERS_COMPILE)(key))
    jax.tree.map(np.testing.assert_array_equal, born, jax.tree.leaves(whole))
    params = jax.tree.unflatten(jax.tree.structure(params), born)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 784)).astype(np.float32), rng.integers(0, 10, 32)
    optimizer = optax.adamw(1e-3)

    def train(model, steps, dropout):
        def function(params, x, y):
            def loss(params, step):
                keys = {"dropout": jax.random.fold_in(key, step * 8 + jax.lax.axis_index("data"))}
                logits = model.apply({"params": params}, x, dropout, rngs=keys)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

            def one(carry, step):
                params, state, _ = carry
                grads = research_dp.sync_gradients(jax.grad(loss)(params, step), ("data",))
                updates, state = optimizer.update(grads, state, params)
                return (optax.apply_updates(params, updates), state, grads), None

            start = (params, optimizer.init(params), params)
            (params, _, grads), _ = jax.lax.scan(one, start, jnp.arange(steps))
            return params, grads

        return function

    def run(model, params, specs, steps, dropout):
        function = train(model, steps, dropout)
        mapped = on(A, function, (specs, P("data"), P("data")), (specs, specs))
        return [jax.tree.leaves(tree) for tree in mapped(params, x, y)]

    def loss_of_all(params):
        logits = MLP().apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    _, grads = run(MLP("data"), params, specs, 1, False)
    single = jax.tree.leaves(jax.jit(jax.grad(loss_of_all))(whole))
    for a, b in zip(grads, single, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    fsdp, _ = run(MLP("data"), params, specs, 15, True)
    ddp, _ = run(MLP(), whole, P(), 15, True)
    for a, b, start in zip(fsdp, ddp, jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs(np.asarray(b) - start).max() > 1e-3  # something was learnt


def test_case_16_batch_norm():
    """Its scan is in test_modules.py."""
    wrapped = research_dp.shard_module_params(nn.BatchNorm, "data", 0)
    x = jnp.zeros((4, 16))
    boxes = abstract(A, lambda k: wrapped(use_running_average=False).init(k, x), jax.random.key(0))
    specs = nn.get_partition_spec(boxes)
    assert specs["params"] == {"scale": P("data"), "bias": P("data")}
    assert specs["batch_stats"] == {"mean": P(), "var": P()}


def test_case_17_optimizer_state_lies_as_its_parameters(initialised):
    _, specs, params = initialised
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    adam = nn.get_partition_spec(state)[0]
    assert adam.mu == adam.nu == specs
    assert adam.count == P()


def test_an_instance_is_no_class():
    with pytest.raises(Exception, match="Dense"):
        abstract(A, lambda: research_dp.shard_module_params(nn.Dense(3), "data")(jnp.ones((1, 2))))
