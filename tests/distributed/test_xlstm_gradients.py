"""The functions that follow xlstm-jax: acceptance cases 7 to 12, 18 and 19, which average.

Cases 13 and 15 are rows of the table in test_sharded_params.py, and a property in
test_properties.py. `shard_map`'s check is off unless said.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import research_dp
from research_dp.errors import UsageError
from research_dp.strategies.jaxpr_collectives import collectives as read
from tests.support.steps import A, B, abstract, on

DEVICES = P(("dp", "fsdp"))


def index():
    return jax.lax.axis_index(("dp", "fsdp")).astype(jnp.float32)


def test_case_07_gradients_of_gathered_parameters_are_means():
    def loss(w):
        full = research_dp.gather_array_with_mean_grads(w, 0, "data")
        return jnp.sum(full) * (jax.lax.axis_index("data") + 1.0)

    def function(w):
        value, grad = jax.value_and_grad(loss)(w)
        return value[None], grad

    value, grad = on(A, function, P("data"), P("data"))(jnp.arange(16.0))
    np.testing.assert_array_equal(value, 120.0 * np.arange(1, 9))
    np.testing.assert_array_equal(grad, np.full(16, 4.5))


@pytest.mark.parametrize(
    ("dtype", "gather", "scatter", "gathered", "wire"),
    [
        ("float32", None, None, "float32", "float32"),
        ("float32", "bfloat16", None, "bfloat16", "float32"),
        ("float32", None, "bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float16", "bfloat16", "float16"),
        ("bfloat16", None, None, "bfloat16", "bfloat16"),
        ("bfloat16", None, "float32", "bfloat16", "float32"),
    ],
)
def test_case_08_dtypes_on_the_wire(dtype, gather, scatter, gathered, wire):
    def function(w):
        def loss(w):
            full = research_dp.gather_array_with_mean_grads(w, -1, "data", gather, scatter)
            assert full.dtype == gathered
            return jnp.sum(full.astype(jnp.float32) ** 2)

        grad = jax.grad(loss)(w)
        assert grad.dtype == dtype
        return grad

    mapped, w = on(A, function, P("data"), P("data")), jnp.arange(16.0, dtype=dtype)
    kinds = [(c.kind, c.dtype) for c in read(mapped, w)]
    assert kinds == [("all-gather", gathered), ("reduce-scatter", wire)]
    np.testing.assert_array_equal(mapped(w), 2 * w)


def test_case_09_float16_overflows_unless_divided_first():
    def function(w):
        def grad(scatter, pre_divide):
            def loss(w):
                full = research_dp.gather_array_with_mean_grads(
                    w, 0, "data", grad_scatter_dtype=scatter, pre_divide=pre_divide
                )
                return 10000.0 * jnp.sum(full)

            return jax.grad(loss)(w)

        dtypes = ("float32", "bfloat16", "float16")
        return [*(grad(dtype, False) for dtype in dtypes), grad("float16", True)]

    out = on(A, function, P("data"), P("data"))(jnp.ones(8))
    assert [float(x[0]) for x in out] == [10000.0, 9984.0, np.inf, 10000.0]


def test_case_10_types_after_gathering():
    def function():
        x = jnp.zeros((4, 3))
        tree = {
            "data": nn.Partitioned(x, ("data", None)),
            "both": nn.Partitioned(x, ("data", "tp")),
            "raw": x,
            "tp": nn.Partitioned(x, ("tp", None)),
        }
        out = research_dp.gather_params(tree, "data", gather_dtype="bfloat16")
        assert out["raw"] is tree["raw"]
        assert out["tp"] is tree["tp"]
        return out

    out = abstract(A, function)
    assert (out["data"].shape, out["data"].dtype) == ((32, 3), jnp.bfloat16)
    assert out["both"].names == (None, "tp")
    assert (out["both"].value.shape, out["both"].value.dtype) == ((32, 3), jnp.bfloat16)
    assert out["raw"].dtype == out["tp"].value.dtype == jnp.float32


def test_case_11_gradients_are_averaged_over_the_axes_that_do_not_split_them():
    def on_a():
        g = jax.lax.axis_index("data").astype(jnp.float32)[None]
        tree = [g, nn.Partitioned(g, ("data",)), nn.Partitioned(g, (None,))]
        out = research_dp.sync_gradients(tree, ("data",))
        assert out[1] is tree[1]
        return out

    raw, split, whole = on(A, on_a, out_specs=P("data"))()
    assert raw.tolist() == whole.value.tolist() == [3.5] * 8
    assert split.value.tolist() == list(range(8))

    def on_b():
        g = index()[None]
        axes = ("dp", "fsdp")
        boxes = [nn.Partitioned(g, names) for names in (("fsdp",), ("dp",), (axes,))]
        both = research_dp.sync_gradients([g, *boxes], axes)
        one = research_dp.sync_gradients(g, ["fsdp"])
        none = research_dp.sync_gradients(g, ())
        ints = research_dp.sync_gradients(index().astype(jnp.int32)[None], axes)
        return [leaf.value if isinstance(leaf, nn.Partitioned) else leaf for leaf in both] + [
            one,
            none,
            ints,
        ]

    out = [x.tolist() for x in on(B, on_b, out_specs=DEVICES)()]
    by_dp, by_fsdp = [2.0, 3.0, 4.0, 5.0] * 2, [1.5] * 4 + [5.5] * 4
    all_of_them = [float(i) for i in range(8)]
    assert out == [[3.5] * 8, by_dp, by_fsdp, all_of_them, by_fsdp, all_of_them, [3.5] * 8]


def test_case_12_one_axis_by_name_and_unknown_axes_named():
    def by_name():
        g = jax.lax.axis_index("data").astype(jnp.float32)[None]
        tree = [nn.Partitioned(g, ("data",)), nn.Partitioned(g, (None,)), g]
        return [
            x.value if isinstance(x, nn.Partitioned) else x
            for x in research_dp.sync_gradients(tree, "data")
        ]

    out = on(A, by_name, out_specs=P("data"))()
    assert [x.tolist() for x in out] == [list(range(8)), [3.5] * 8, [3.5] * 8]
    for function in (
        lambda: research_dp.sync_gradients(jnp.ones(2), "nope"),
        lambda: research_dp.sync_gradients(nn.Partitioned(jnp.ones(2), ("data",)), ("nope",)),
        lambda: research_dp.shard_params(jnp.ones(16), "nope"),
        lambda: research_dp.gather_array_with_mean_grads(jnp.ones(2), 0, "nope"),
        lambda: research_dp.weighted_mean(jnp.ones(()), 1, "nope"),
        lambda: research_dp.sharded_global_norm(jnp.ones(2), "nope"),
    ):
        with pytest.raises(NameError, match="nope"):
            abstract(A, function)
    with pytest.raises(NameError, match=r"data\. Call this inside shard_map, pmap or vmap"):
        research_dp.gather_array_with_mean_grads(jnp.ones(2), 0, "data")


def test_case_18_the_norm_of_shards_is_the_norm_of_the_whole():
    def function(w, g):
        norm = research_dp.sharded_global_norm(nn.Partitioned(w, ("data",)), "data")
        naive = optax.tree.norm(w)
        tree = {"g": nn.Partitioned(g, ("data",))}
        clipped, before = research_dp.clip_by_global_norm_sharded(tree, 1.0, "data")
        transform = research_dp.clip_by_global_norm(1.0, ("data",))
        updates, _ = transform.update(tree, transform.init(tree))
        mixed = {"w": nn.Partitioned(w, ("data",)), "b": jnp.full((3,), 2.0)}
        both = research_dp.sharded_global_norm(mixed, "data")
        numbers = jnp.stack([norm, naive, before, both])[None]
        return numbers, clipped["g"].value, updates["g"].value

    g = jnp.repeat(jnp.arange(8.0), 2)
    numbers, clipped, updates = on(A, function, P("data"), P("data"))(jnp.ones(16), g)
    expected = [4.0, np.sqrt(2), np.sqrt(280), np.sqrt(28)]
    np.testing.assert_allclose(numbers, np.tile(expected, (8, 1)), rtol=1e-6)
    np.testing.assert_allclose(clipped, g / 16.7332, rtol=1e-5)
    np.testing.assert_array_equal(clipped, updates)


@pytest.mark.parametrize("check_vma", [False, True])
def test_case_19_a_masked_mean_counts_items_not_devices(check_vma):
    x = jnp.arange(16.0)
    valid = (jnp.arange(16) % 2 == 0) | (jnp.arange(16) == 15)

    def loss(w, x, valid):
        return research_dp.weighted_loss(w * jnp.sum(x * valid), jnp.sum(valid), "data")

    def function(w, x, valid):
        value, grad = jax.value_and_grad(loss)(w, x, valid)
        grad = research_dp.sync_gradients(grad, "data", loss=value)
        mean = research_dp.weighted_mean(jnp.sum(x * valid), jnp.sum(valid), "data")
        none = research_dp.weighted_mean(jnp.sum(x), 0, "data")
        means = jax.lax.pmean(jnp.sum(x * valid) / jnp.sum(valid), "data")
        return mean, grad, jax.lax.pmean(value, "data"), none, means

    out = on(A, function, (P(), P("data"), P("data")), P(), check_vma)(jnp.ones(()), x, valid)
    np.testing.assert_allclose(out, [71 / 9, 71 / 9, 71 / 9, 0.0, 7.0625], rtol=1e-6)


def test_a_dim_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match=r"shape \(2,\) has no dim 1"):
        abstract(A, lambda: research_dp.gather_array_with_mean_grads(jnp.ones(2), 1, "data"))
