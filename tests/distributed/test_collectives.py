"""The primitives: means, dtypes on the wire, buckets, norms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.distributed import buckets, norms, vma
from research_dp.distributed.mesh import make_mesh
from research_dp.distributed.sharding import ShardDecision, choose_dim, infer_sharding
from research_dp.strategies.jaxpr_collectives import collectives as read
from tests.support.steps import mesh_of

AXES = ("data", "fsdp")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1, "fsdp": 8})


def mapped(mesh, function, in_specs, out_specs):
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(sharded)


def rule(path, shape, size):
    return choose_dim(shape, size, 0)


@pytest.mark.parametrize("bucket_bytes", [2**25, 200, 0])
def test_trees_travel_in_buckets_and_come_back_as_they_were(mesh, bucket_bytes):
    # Small whole numbers, so that the mean of eight equal ones is exact.
    tree = {
        "a": jnp.arange(48.0).reshape(3, 16),
        "b": jnp.arange(120.0).reshape(24, 5),
        "c": jnp.arange(64, dtype=jnp.bfloat16).reshape(4, 8, 2),
        "d": jnp.ones((7,)),
    }
    layout = infer_sharding(tree, rule, 8)
    assert [layout[k].dim for k in "abcd"] == [1, 0, 1, None]

    def there_and_back(tree):
        scattered = buckets.scatter_mean_tree(tree, layout, bucket_bytes=bucket_bytes)
        for name, leaf in scattered.items():
            assert leaf.dtype == tree[name].dtype
        sliced = buckets.shard_tree(tree, layout)
        same = jax.tree.map(lambda x, y: jnp.all(x == y), scattered, sliced)
        return buckets.gather_tree(scattered, layout, bucket_bytes=bucket_bytes), same

    back, same = mapped(mesh, there_and_back, P(), P())(tree)
    assert all(jax.tree.leaves(jax.tree.map(bool, same)))
    jax.tree.map(np.testing.assert_array_equal, back, tree)


LEAVES = [jax.ShapeDtypeStruct((10,), jnp.float32)] * 10
LEAVES.insert(3, jax.ShapeDtypeStruct((20,), jnp.bfloat16))
REPLICATED = infer_sharding(LEAVES, None, 8)


@pytest.mark.parametrize(
    ("bucket_bytes", "count"), [(2**25, [1, 1]), (201, [2, 1]), (200, [2, 1]), (0, [10, 1])]
)
@pytest.mark.parametrize(
    "mean",
    [
        rdp.all_mean_tree,
        rdp.sync_gradients,
        functools.partial(rdp.scatter_gradients, shardings=REPLICATED),
    ],
    ids=["all_mean_tree", "sync_gradients", "scatter_gradients"],
)
def test_ten_leaves_make_few_collectives_of_each_dtype(mesh, mean, bucket_bytes, count):
    tree = [jnp.ones(x.shape, x.dtype) for x in LEAVES]

    def of_tree(tree):
        return mean(tree, AXES, bucket_bytes=bucket_bytes)

    found = read(mapped(mesh, of_tree, P(), P()), tree)
    assert {c.kind for c in found} == {"all-reduce"}
    sent = {dtype: [c.nbytes for c in found if c.dtype == dtype] for dtype in DTYPES}
    assert [len(sizes) for sizes in sent.values()] == count
    assert [sum(sizes) for sizes in sent.values()] == [400, 40]


def test_no_array_on_the_wire_has_slices_without_end(mesh):
    tree = [jnp.full(3, float(i)) for i in range(70)]
    mean = mapped(mesh, functools.partial(buckets.all_mean_tree, axes=AXES), P(), P())
    assert [c.nbytes for c in read(mean, tree)] == [12 * 32, 12 * 32, 12 * 6]
    jax.tree.map(np.testing.assert_array_equal, mean(tree), tree)


@pytest.mark.parametrize("devices", [2, 8])
def test_buckets_do_not_grow_with_the_number_of_devices(devices):
    tree = [jnp.ones(64) for _ in range(6)]  # of 256 bytes: two fill a bucket
    layout = infer_sharding(tree, rule, devices)

    def there_and_back(tree):
        shards = buckets.scatter_mean_tree(tree, layout, bucket_bytes=512)
        return buckets.gather_tree(shards, layout, bucket_bytes=512)

    found = read(mapped(mesh_of(fsdp=devices), there_and_back, P(), P()), tree)
    assert [c.kind for c in found] == 3 * ["reduce-scatter"] + 3 * ["all-gather"]


def test_clip_factor():
    assert float(norms.clip_factor(jnp.float32(4.0), 1.0)) == 0.25
    assert float(norms.clip_factor(jnp.float32(0.5), 1.0)) == 1.0
    assert float(norms.clip_factor(jnp.float32(9.0), None)) == 1.0
    assert float(norms.clip_factor(jnp.float32(9.0), 10**100)) == 1.0


def test_traffic_multiplies_loops_and_knows_ring_factors(mesh):
    def step(x):
        def body(carry, _):
            return carry + jax.lax.psum(x, "fsdp"), None

        total, _ = jax.lax.scan(body, x, length=3)
        return jax.lax.all_gather(total, "fsdp", tiled=True)

    found = read(mapped(mesh, step, P("fsdp"), P()), jnp.ones(64, jnp.bfloat16))
    assert [(c.kind, c.times, c.nbytes, c.dtype) for c in found] == [
        ("all-reduce", 3, 16, "bfloat16"),
        ("all-gather", 1, 128, "bfloat16"),
    ]
    assert found[0].wire_bytes == 3 * 2 * 16 * 7 / 8
    assert found[1].wire_bytes == 128 * 7 / 8


@pytest.mark.parametrize("has_name", [True, False])
def test_bound_axes_are_found_by_public_means_too(has_name, monkeypatch):
    if not has_name:
        monkeypatch.delattr(vma.extend_core, "unsafe_get_axis_names_DO_NOT_USE")
    seen = []

    def look(x):
        seen.append(vma.bound_axes())
        return x

    jax.shard_map(look, mesh=mesh_of(dp=2, r=2), in_specs=P(), out_specs=P())(jnp.ones(2))
    jax.pmap(look, axis_name="p")(jnp.ones(8))
    look(jnp.ones(2))
    assert seen == [("dp", "r"), ("p",), ()]


def test_stacks_are_gathered_in_place_as_they_are_all_at_once(mesh):
    tree = {"a": jnp.arange(3 * 16 * 5.0).reshape(3, 16, 5), "b": jnp.arange(64.0)}
    layout = infer_sharding(tree, lambda path, *_: ShardDecision(1 if path == "a" else 0), 8)
    specs = jax.tree.map(lambda p: p.spec, layout)

    def whole(shards):
        old = jax.tree.map(jnp.zeros_like, tree)
        return buckets.gather_tree(shards, layout, bucket_bytes=100, into=old)

    function = mapped(mesh, whole, (specs,), P())
    found = read(function, tree)
    assert sorted((c.kind, c.times) for c in found) == [("all-gather", 1), ("all-gather", 3)]
    jax.tree.map(np.testing.assert_array_equal, function(tree), tree)


@pytest.mark.parametrize(
    ("dtype", "value"), [("int32", 400_000_000), ("int8", 100), ("int16", 30_000), ("bool", True)]
)
def test_means_of_integers_do_not_overflow(mesh, dtype, value):
    x = jnp.full(8, value, dtype)

    def means(x):
        trees = buckets.all_mean_tree([x], "fsdp"), rdp.sync_gradients({"w": x}, "fsdp")
        scattered = rdp.scatter_mean(jnp.broadcast_to(x, 8), 0, "fsdp")
        reduced = rdp.reduce_gradients_across_devices({"w": x}, "mean", "fsdp")
        several = [rdp.all_mean(x, "fsdp"), *jax.tree.leaves((trees, scattered, reduced))]
        weighed = rdp.weighted_mean(x[0], jnp.ones((), dtype), "fsdp")
        return jnp.stack([*(one[0] for one in several), weighed])

    found = mapped(mesh, means, P("fsdp"), P())(x)
    np.testing.assert_allclose(found, np.full(6, float(value)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int16", "bfloat16", "float16"])
def test_weights_of_narrow_dtypes_are_added_in_float32(mesh, dtype):
    """2,000 items on 8 devices: beyond int8, and beyond what bfloat16 counts one by one."""
    large = 8_001 if dtype == "int16" else 100 if dtype == "int8" else 251
    weights = jnp.full(8, large, dtype)
    exact = float(np.asarray(weights, np.float64).sum())

    def run(weight):
        total = jnp.full((), exact / 8)
        options = weight[0], "fsdp"
        return jnp.stack([rdp.weighted_mean(total, *options), rdp.weighted_loss(total, *options)])

    np.testing.assert_allclose(mapped(mesh, run, P("fsdp"), P())(weights), 1.0, rtol=1e-6)


def test_weights_may_add_up_to_less_than_one(mesh):
    def run(weight):
        given = 3 * weight[0], weight[0], "fsdp"
        return jnp.stack([rdp.weighted_mean(*given), rdp.weighted_loss(*given)])

    weights = jnp.full(8, 1 / 64)
    np.testing.assert_allclose(mapped(mesh, run, P("fsdp"), P())(weights), 3.0, rtol=1e-6)
