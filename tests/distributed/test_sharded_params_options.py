"""What the functions on boxes offer beyond the seed: rules, bytes, reports, accumulation."""

import functools

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.errors import UsageError
from research_dp.strategies.jaxpr_collectives import collectives as read
from tests.support.steps import X, abstract, mesh_of, on


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
            {"rule": lambda *_: rdp.ShardDecision(2)},
            r"rule chose dim 2 of w \(6, 8\)",
        ),
        (
            nn.Partitioned(jnp.zeros((8, 8)), ("tp", None)),
            {"rule": lambda *_: rdp.ShardDecision(0)},
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
    layout = rdp.infer_sharding(tree, functools.partial(rdp.largest_dim, min_weight_size=4), 8)
    assert rdp.sharding_report(layout) == rows
    with pytest.raises(ValueError, match="big is an array; give axis_name"):
        rdp.sharding_report(tree)


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


@pytest.mark.parametrize("bucket_bytes", [0, 2**20])
def test_gradients_of_float16_overflow_unless_they_are_divided_first(mesh, bucket_bytes):
    def gradient(w, **options):
        def loss(w):
            box = nn.Partitioned(w, ("data",))
            full = rdp.gather_params(box, "data", bucket_bytes=bucket_bytes, **options)
            return jnp.sum(full * 8192)

        return jax.grad(loss)(w)

    for options, expected in (({}, np.inf), ({"pre_divide": True}, 8192)):
        function = functools.partial(gradient, **options)
        found = on(mesh, function, P("data"), P("data"))(jnp.ones(16, jnp.float16))
        np.testing.assert_array_equal(found.astype(np.float32), expected)


def test_clipping_at_the_edges(mesh):
    layout = rdp.infer_sharding(
        {"w": X, "b": X[0, :3]}, lambda *a: rdp.choose_dim(a[1], a[2], 16), 8
    )
    assert [p.dim for p in jax.tree.leaves(layout)] == [None, 1]
    on_fsdp = mesh_of(fsdp=8)

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


@pytest.mark.parametrize("min_bytes", [None, 0])
def test_random_keys_are_returned_as_they_are(min_bytes):
    key = jax.random.key(3)

    def function(w):
        tree = {"w": w, "key": key, "boxed": nn.Partitioned(key, ())}
        sharded = rdp.shard_params(tree, "fsdp", 0, min_weight_bytes=min_bytes)
        gathered = rdp.gather_params(sharded, "fsdp")
        return gathered["w"], jax.random.key_data(gathered["key"])

    w, data = on(mesh_of(fsdp=8), function)(jnp.arange(16.0))
    assert jnp.array_equal(w, jnp.arange(16.0))
    assert jnp.array_equal(data, jax.random.key_data(key))


def test_random_keys_that_would_be_sharded_are_refused_by_path():
    keys = jax.random.split(jax.random.key(3), 16)
    with pytest.raises(rdp.UsageError, match=r"rng/all \(16,\) are random keys, which cannot be"):
        abstract(mesh_of(fsdp=8), lambda: rdp.shard_params({"rng": {"all": keys}}, "fsdp", 0))
