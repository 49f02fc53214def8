"""What the functions on boxes offer beyond the seed: rules, bytes, reports, initialisation."""

import functools
import subprocess
import sys

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.analysis.traffic import collectives as read
from research_dp.distributed.errors import UsageError

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def on(mesh, function, in_specs=P(), out_specs=P(), check_vma=False):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped)


def names(mesh, tree, *args, **options):
    boxes = jax.eval_shape(on(mesh, lambda t: rdp.shard_params(t, "data", *args, **options)), tree)
    return {k: getattr(leaf, "names", None) for k, leaf in boxes.items()}


def test_a_threshold_in_bytes(mesh):
    tree = {"f32": jnp.zeros((8, 4)), "bf16": jnp.zeros((8, 4), jnp.bfloat16)}
    kept = names(mesh, tree, 0, min_weight_bytes=64)
    assert kept == {"f32": ("data", None), "bf16": None}
    assert names(mesh, tree, 0, min_weight_bytes=63)["bf16"] == ("data", None)


def test_a_rule_chooses_by_path(mesh):
    tree = {"a": jnp.zeros((8, 16)), "b": jnp.zeros((8, 16)), "c": jnp.zeros((8, 16))}
    rule = functools.partial(
        rdp.dim_by_path,
        dims={"a": -2, "b": None},
        otherwise=functools.partial(rdp.largest_dim, min_weight_size=0),
    )
    assert names(mesh, tree, rule=rule) == {"a": ("data", None), "b": None, "c": (None, "data")}


@pytest.mark.parametrize(
    ("leaf", "options", "message"),
    [
        (
            (6, 8),
            {"rule": lambda *_: rdp.Choice(0)},
            r"rule chose dim 0 of w \(6, 8\)",
        ),
        (
            nn.Partitioned(jnp.zeros((8, 8)), ("tp", None)),
            {"rule": lambda *_: rdp.Choice(0)},
            r"dim 0 of w \(8, 8\), which \('tp',\) splits",
        ),
        ((8, 8), {"rule": rdp.largest_dim, "min_weight_bytes": 1}, "both decide"),
    ],
)
def test_rules_that_do_not_fit_are_refused(mesh, leaf, options, message):
    leaf = jnp.zeros(leaf) if isinstance(leaf, tuple) else leaf
    with pytest.raises(UsageError, match=message):
        names(mesh, {"w": leaf}, **options)


def test_gin_reaches_the_functions(mesh):
    gin.parse_config("shard_params.min_weight_size = 15")
    function = gin.get_configurable("shard_params")
    assert jax.eval_shape(on(mesh, lambda: function(jnp.zeros(16), "data"))).names == ("data",)


def test_report_says_the_same_before_and_after(mesh):
    tree = {"big": jnp.zeros((8, 16)), "odd": jnp.zeros((7, 9)), "small": jnp.zeros((2,))}
    rows = rdp.sharding_report(tree, "data", 8, 4)
    assert [(r.path, r.dim) for r in rows] == [("big", 1), ("odd", None), ("small", None)]
    assert [r.reason for r in rows] == [
        "",
        "no free dim of (7, 9) is divisible by 8",
        "2 elements, at most min_weight_size 4",
    ]
    assert str(rows[0]) == "big (8, 16) float32: sharded along dim 1"
    after = jax.eval_shape(on(mesh, lambda t: rdp.shard_params(t, "data", 4)), tree)
    assert [(r.path, r.dim, r.reason) for r in rdp.sharding_report(after, "data", 8, 4)] == [
        (r.path, r.dim, r.reason) for r in rows
    ]
    layout = rdp.lay_out(tree, functools.partial(rdp.largest_dim, min_weight_size=4), 8)
    assert rdp.sharding_report(layout) == rows
    with pytest.raises(ValueError, match="big is an array; give axis_name"):
        rdp.sharding_report(tree)


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
    mesh = jax.make_mesh((2, 4), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
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


@pytest.mark.parametrize("check_vma", [False, True])
def test_micro_batches_move_parameters_and_gradients_once(mesh, check_vma):
    def loss(params, x):
        return jnp.mean(jnp.sin(x @ params["w"] + params["b"]))

    def function(w, x):
        params = {"w": nn.Partitioned(w, ("data", None)), "b": jnp.ones((1, 4))}
        gather = functools.partial(rdp.gather_params, axis_name="data")
        value, grads = rdp.accumulate_gradients(
            loss, params, x.reshape(2, 1, 16), axis_names="data", gather=gather, dtype="float32"
        )
        grads = rdp.sync_gradients(grads, "data", loss=value)
        return jax.lax.pmean(value, "data"), grads["w"].value, grads["b"]

    w = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
    step = on(mesh, function, (P("data"), P("data")), (P(), P("data"), P()), check_vma)
    value, w_grad, b_grad = step(w, X)
    whole, grads = jax.value_and_grad(loss)({"w": w, "b": jnp.ones((1, 4))}, X)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    np.testing.assert_allclose(w_grad, grads["w"], atol=1e-6)
    np.testing.assert_allclose(b_grad, grads["b"], atol=1e-6)
    found = read(step, w, X)
    kinds = sorted((c.kind, c.times) for c in found)
    assert kinds == [("all-gather", 1), ("all-reduce", 1), ("all-reduce", 1), ("reduce-scatter", 1)]


def test_clipping_at_the_edges(mesh):
    layout = rdp.lay_out({"w": X, "b": X[0, :3]}, lambda *a: rdp.choose_dim(a[1], a[2], 16), 8)
    assert [p.dim for p in jax.tree.leaves(layout)] == [None, 1]
    on_fsdp = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))

    def function(w, b):
        transform = rdp.clip_by_global_norm(1.0, "fsdp", layout=layout)
        by_layout, _ = transform.update({"w": w, "b": b}, optax.EmptyState())
        boxes = {"w": nn.Partitioned(w, (None, "fsdp")), "b": b}
        by_name, norm = rdp.clip_by_global_norm_sharded(boxes, 1.0, "fsdp")
        nothing, zero = rdp.clip_by_global_norm_sharded({"w": 0 * b}, 0.0, "fsdp")
        broken, _ = rdp.clip_by_global_norm_sharded({"w": b, "b": b * jnp.nan}, 1.0, "fsdp")
        assert by_name["b"].dtype == b.dtype
        whole = (norm, nothing["w"], zero, broken["w"], by_layout["b"])
        return whole, (by_layout["w"], by_name["w"].value)

    w, b = jnp.asarray(X), jnp.asarray(X[0, :3], jnp.bfloat16)
    specs = (P(), P(None, "fsdp"))
    whole, split = on(on_fsdp, function, (P(None, "fsdp"), P()), specs, True)(w, b)
    norm, nothing, zero, broken, by_layout = whole
    expected = np.sqrt(np.sum(X**2) + np.sum(np.asarray(b, np.float32) ** 2))
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    np.testing.assert_allclose(split[0], X / expected, rtol=1e-5)
    np.testing.assert_array_equal(split[0], split[1])
    assert by_layout.dtype == jnp.bfloat16
    assert float(zero) == 0.0
    assert not np.any(nothing)  # and not NaN
    assert np.all(np.isnan(broken))


def test_a_mean_of_whole_numbers_is_a_fraction(mesh):
    def accuracy(right):
        return rdp.weighted_mean(jnp.sum(right), right.size, "data")

    mean = on(mesh, accuracy, P("data"))(jnp.arange(16) < 5)
    assert (mean.dtype, float(mean)) == (jnp.float32, 5 / 16)


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
    with pytest.raises(UsageError, match="takes a class of"):
        rdp.shard_nnx_module_params(Block(rngs=nnx.Rngs(0)), "data")


def test_nnx_is_imported_only_when_used():
    code = "import sys, research_dp; print('flax.nnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "False", done.stderr
