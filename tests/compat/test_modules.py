"""Modules that hold shards, Linen's and NNX's: initialisation, remat, scan, optimizers."""

import functools
import importlib
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.distributed.collectives import EXCHANGED
from research_dp.errors import UsageError
from research_dp.strategies.jaxpr_collectives import collectives as read
from tests.support.steps import X, mesh_of, on


class Layers(nn.Module):
    """A scanned layer and a head; their classes make shards if there is an axis."""

    axis: str | None = "data"

    @nn.compact
    def __call__(self, x):
        dense = rdp.shard_module_params(nn.Dense, self.axis, 16) if self.axis else nn.Dense
        scan = functools.partial(
            nn.scan,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = scan(lambda module, x, _: (module(x), None))(dense(72, name="layers"), x, None)
        return dense(10, name="head")(nn.BatchNorm(use_running_average=False, name="norm")(x))


def test_parameters_are_made_where_they_lie_with_the_same_bits(mesh):
    key, x = jax.random.key(0), jnp.zeros((2, 72))
    made = jax.jit(lambda key, x: rdp.init_sharded(Layers().init, mesh, key, x)).lower(key, x)
    compiled = made.compile()
    text = compiled.as_text()
    assert "f32[2,72,9]" in text  # what a device holds
    assert "72,72]" not in text  # what no device holds
    variables = compiled(key, x)
    whole = jax.jit(Layers(axis=None).init)(key, x)
    for a, b in zip(jax.tree.leaves(variables), jax.tree.leaves(whole), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    specs = nn.get_partition_spec(variables)
    assert specs["params"]["layers"] == {"kernel": P(None, None, "data"), "bias": P(None, "data")}
    assert specs["batch_stats"] == {"norm": {"mean": P(), "var": P()}}
    kernel = variables["params"]["layers"]["kernel"].value
    assert {s.data.shape for s in kernel.addressable_shards} == {(2, 72, 9)}


def test_modules_without_names_keep_their_paths_and_initial_values(mesh):
    class Model(nn.Module):
        dense: type = nn.Dense

        @nn.compact
        def __call__(self, x):
            return self.dense(8)(self.dense(16)(x))

    key, x = jax.random.key(0), jnp.zeros((1, 8))
    dense = rdp.shard_module_params(nn.Dense, "data", 16)
    assert dense.__name__ == "Dense"
    held = rdp.init_sharded(Model(dense).init, mesh, key, x)
    whole = jax.jit(Model().init)(key, x)
    jax.tree.map(np.testing.assert_array_equal, nn.meta.unbox(held), whole)


def test_wrapped_twice_over_two_axes():
    mesh = mesh_of(dp=2, fsdp=4)
    inner = rdp.shard_module_params(nn.Dense, "fsdp", 16)
    both = rdp.shard_module_params(inner, "dp", 16)(512)
    boxes = jax.eval_shape(
        on(mesh, lambda key: both.init(key, jnp.zeros((1, 784)))), jax.random.key(0)
    )
    specs = nn.get_partition_spec(boxes)["params"]
    assert specs == {"kernel": P("fsdp", "dp"), "bias": P("fsdp")}
    assert boxes["params"]["kernel"].value.shape == (196, 256)


def test_remat_outside_gathers_again(mesh):
    def gathers(module):
        def function(w, x):
            def loss(w):
                params = {"params": {"kernel": nn.Partitioned(w, ("data", None))}}
                return jnp.sum(jnp.sin(module.apply(params, jnp.sin(module.apply(params, x)))))

            return jax.grad(loss)(w)

        found = read(on(mesh, function, (P("data"), P("data")), P("data")), jnp.ones((16, 16)), X)
        return [c.kind for c in found].count("all-gather")

    sharded = rdp.shard_module_params(nn.Dense, "data", 16)
    assert gathers(sharded(16, use_bias=False)) == 2
    # The first call's backward pass needs no kernel, for nobody asks for the gradient of x.
    assert gathers(nn.remat(sharded)(16, use_bias=False)) == 2 + 1


class Block(nnx.Module):
    """A residual layer with batch statistics; fails on anything but a whole kernel."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        assert self.linear.kernel.shape == (16, 16)
        self.count[...] += 1
        return x + jnp.sin(self.linear(x))


@pytest.mark.parametrize("check_vma", [False, True])
def test_nnx_modules_under_scan_and_remat(mesh, check_vma):
    sharded = rdp.shard_nnx_module_params(Block, "data", 16)
    assert issubclass(sharded, Block)

    def make(block, **metadata):
        def layers(key):
            vmapped = nnx.vmap(
                lambda rngs: block(rngs=rngs), transform_metadata=metadata.get("names", {})
            )
            return vmapped(nnx.Rngs(params=jax.random.split(key, 3)))

        return layers

    def loss(layers, x, **metadata):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=metadata)
        @nnx.remat
        def forward(block, x):
            return block(x)

        return jnp.mean(jnp.square(forward(layers, x)))

    named = {nnx.PARTITION_NAME: None}
    key = jax.random.key(0)
    init = make(sharded, names=named)
    state = rdp.init_sharded(lambda key: nnx.state(init(key)), mesh, key)
    assert nnx.get_partition_spec(state)["linear"]["kernel"].get_value() == P(None, None, "data")

    def step(state, x):
        layers = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: init(key))), state)
        value, grads = nnx.value_and_grad(functools.partial(loss, **named))(layers, x)
        grads = rdp.sync_gradients(grads, "data", loss=value)
        return nnx.to_pure_dict(grads), layers.count.get_value()

    specs = nnx.to_pure_dict(nnx.get_partition_spec(state))
    outs = ({"linear": specs["linear"]}, P())
    step = on(mesh, step, (nnx.get_partition_spec(state), P("data")), outs, check_vma)
    grads, count = step(state, X)
    single = make(Block)(key)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(nnx.state(single)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    expected = nnx.to_pure_dict(nnx.grad(loss)(single, X))
    np.testing.assert_allclose(grads["linear"]["kernel"], expected["linear"]["kernel"], atol=1e-6)
    np.testing.assert_allclose(grads["linear"]["bias"], expected["linear"]["bias"], atol=1e-6)
    assert count.tolist() == single.count.get_value().tolist() == [1.0] * 3


def test_nnx_optimizers_hold_shards_and_closures_may_call(mesh):
    linear = rdp.shard_nnx_module_params(nnx.Linear, "data", 16)

    class Model(nnx.Module):
        def __init__(self, linear):
            self.norm = nnx.BatchNorm(16, use_running_average=True, rngs=nnx.Rngs(0))
            self.linear = linear(16, 16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.linear(self.norm(x))

    whole_model = rdp.shard_nnx_module_params(Model, "data", 16)

    def train(model, x):
        optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, rdp.sync_gradients(grads, "data") if x.shape[0] == 2 else grads)
        moments = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]["mu"]
        after = jax.jit(lambda x: model(x))(x)  # nothing of the model changes
        return moments["linear"]["kernel"], after

    specs = (P(None, "data"), P("data"))
    # Wrapped twice: the outer class gathers what the inner one holds.
    sharded = on(mesh, lambda x: train(whole_model(linear), x), P("data"), specs)(X)
    for a, b in zip(sharded, train(Model(nnx.Linear), jnp.asarray(X)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("check_vma", [False, True])
def test_nnx_optimizers_clip_by_where_parameters_lie(mesh, check_vma):
    def step(x, linear, clip, axes):
        model = linear(16, 16, rngs=nnx.Rngs(0))
        transform = optax.chain(clip(nnx.state(model, nnx.Param)), optax.sgd(1.0))
        optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((10 * model(x)) ** 2))(model)
        optimizer.update(model, rdp.sync_gradients(grads, axes, loss=value) if axes else grads)
        return model.kernel[...]

    def sharded(x):
        linear = rdp.shard_nnx_module_params(nnx.Linear, "data", 16)
        return step(x, linear, lambda p: rdp.clip_by_global_norm(0.1, "data", layout=p), "data")

    kernel = on(mesh, sharded, P("data"), P(None, "data"), check_vma)(X)
    expected = step(X, nnx.Linear, lambda _: optax.clip_by_global_norm(0.1), None)
    np.testing.assert_allclose(kernel, expected, atol=1e-6)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_one_table_in_and_out(mesh, kind, check_vma):
    """An embedding whose table is the output layer too, by a method that is not `__call__`."""
    options = {"min_weight_size": 16, "methods": ("__call__", "attend")}

    def linen(ids, embed=nn.Embed):
        class Model(nn.Module):
            def setup(self):
                self.table = embed(16, 8)

            def __call__(self, ids):
                return self.table.attend(self.table(ids))

        params = Model().init(jax.random.key(0), ids)
        return params, lambda params: Model().apply(params, ids)

    def in_nnx(ids, embed=nnx.Embed):
        table = embed(16, 8, rngs=nnx.Rngs(0))
        return table, lambda table: table.attend(table(ids))

    make, grad_of, shard, plain = {
        "linen": (linen, jax.value_and_grad, rdp.shard_module_params, nn.Embed),
        "nnx": (in_nnx, nnx.value_and_grad, rdp.shard_nnx_module_params, nnx.Embed),
    }[kind]

    def gradient(ids, embed, axes):
        model, apply = make(ids, embed)
        value, grad = grad_of(lambda model: jnp.mean(jnp.sin(apply(model))))(model)
        (table,) = jax.tree.leaves(rdp.sync_gradients(grad, axes, loss=value) if axes else grad)
        return table

    ids = jnp.arange(16) % 5
    sharded = functools.partial(gradient, embed=shard(plain, "data", **options), axes="data")
    table = on(mesh, sharded, P("data"), P("data"), check_vma)(ids)
    np.testing.assert_allclose(table, gradient(ids, plain, None), atol=1e-6)


def test_nnx_instances_are_refused():
    with pytest.raises(UsageError, match="give a class of"):
        rdp.shard_nnx_module_params(Block(rngs=nnx.Rngs(0)), "data")


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_options_of_a_module_reach_the_functions_that_shard_and_gather(mesh, monkeypatch, kind):
    seen = {}
    module = importlib.import_module(f"research_dp.compat.{kind}")
    for function in (rdp.shard_params, rdp.gather_params):

        def noted(*args, function=function, **given):
            bound = inspect.signature(function).bind(*args, **given)
            seen.update({k: x for k, x in bound.arguments.items() if k != "params"})
            return function(*args, **given)

        monkeypatch.setattr(module, function.__name__, noted)
    of_gather = {"gather_dtype": "bfloat16", "grad_scatter_dtype": "float16", "pre_divide": True}
    options = {**of_gather, "min_weight_bytes": 17, "reduction": EXCHANGED}

    def call(x):
        if kind == "nnx":
            made = rdp.shard_nnx_module_params(nnx.Linear, "data", 5, **options)
            return made(16, 16, rngs=nnx.Rngs(0))(x)
        made = rdp.shard_module_params(nn.Dense, "data", 5, **options)
        return made(16).init_with_output(jax.random.key(0), x)[0]

    jax.eval_shape(on(mesh, call), X)
    assert seen == {**options, "axis_name": "data", "min_weight_size": 5, "rule": None}
