"""Properties that hold for any tree, dtype and mesh; few examples, for each compiles."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from tests.support.steps import mesh_of, on

AXES = ("dp", "fsdp")
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8), (8, 1)]
few = settings(max_examples=12, deadline=None, derandomize=True)

# Dims that divide and dims that do not; also empty and scalar arrays.
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16]), max_size=4).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int32", "bool", "uint8"])
leaves = st.tuples(shapes, dtypes)
trees = st.recursive(
    leaves, lambda child: st.dictionaries(st.sampled_from("abcd"), child, max_size=3), max_leaves=5
)
float_leaves = st.tuples(
    shapes.filter(lambda shape: 0 not in shape), st.sampled_from(["float32", "bfloat16", "float16"])
)
float_trees = st.dictionaries(
    st.sampled_from("abcd"),
    float_leaves | st.dictionaries(st.sampled_from("xy"), float_leaves, min_size=1),
    min_size=1,
    max_size=3,
)


def mesh(sizes):
    return mesh_of(**dict(zip(AXES, sizes, strict=True)))


def is_leaf(x):
    return isinstance(x, tuple)


def fill(tree, seed):
    """Arrays of any bits, NaN included, in the place of (shape, dtype)."""
    rng = np.random.default_rng(seed)

    def one(leaf):
        shape, dtype = leaf
        count = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        return np.frombuffer(rng.bytes(count), jnp.dtype(dtype)).reshape(shape)

    return jax.tree.map(one, tree, is_leaf=is_leaf)


@few
@given(trees, st.sampled_from([2, 4, 8]), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_gather_after_shard_gives_the_same_bits(tree, devices, threshold, seed):
    arrays = fill(tree, seed)

    def round_trip(arrays):
        held = rdp.shard_params(arrays, "fsdp", threshold)
        for row in rdp.sharding_report(arrays, "fsdp", devices, threshold):
            assert (row.dim is None) == bool(row.reason)
        return rdp.gather_params(held, "fsdp")

    back = on(mesh((1, devices)), round_trip)(arrays)
    assert jax.tree.structure(back) == jax.tree.structure(arrays)
    for x, y in zip(jax.tree.leaves(arrays), jax.tree.leaves(back), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.tobytes() == np.asarray(y).tobytes()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), leaves, min_size=2, max_size=6),
    st.sampled_from([2, 4, 8]),
    st.randoms(use_true_random=False),
)
def test_the_order_of_keys_does_not_matter(tree, devices, random):
    def boxes(tree):
        def function():
            arrays = {name: jnp.zeros(*leaf) for name, leaf in tree.items()}
            return rdp.shard_params(arrays, "fsdp", 4)

        out = jax.eval_shape(on(mesh((1, devices)), function))
        return {k: (getattr(x, "names", None), jax.tree.leaves(x)[0].shape) for k, x in out.items()}

    names = list(tree)
    random.shuffle(names)
    assert boxes({name: tree[name] for name in names}) == boxes(tree)


@few
@given(float_trees, st.sampled_from(MESHES), st.booleans(), st.integers(0, 2**32 - 1))
def test_gradients_are_those_of_one_device(tree, sizes, check_vma, seed):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf[0]), leaf[1]), tree, is_leaf=is_leaf
    )
    x = rng.normal(size=(16,)).astype(np.float32)

    def loss(params, x):
        wide = [w.astype(jnp.float32)[..., None] for w in jax.tree.leaves(params)]
        return (
            sum(jnp.sum(jnp.sin(w * x.reshape((1,) * (w.ndim - 1) + (-1,)))) for w in wide) / x.size
        )

    held = jax.eval_shape(on(mesh(sizes), lambda p: rdp.shard_params(p, "fsdp", 3)), params)
    specs = nn.get_partition_spec(held)

    def function(params, x):
        shards = rdp.shard_params(params, "fsdp", 3)
        value, grads = jax.value_and_grad(lambda p: loss(rdp.gather_params(p, "fsdp"), x))(shards)
        grads = rdp.sync_gradients(grads, AXES, loss=value)
        clipped, norm = rdp.clip_by_global_norm_sharded(grads, 0.1, AXES)
        return grads, clipped, norm

    mapped = on(mesh(sizes), function, (P(), P(AXES)), (specs, specs, P()), check_vma)
    grads, clipped, norm = mapped(params, jnp.asarray(x))
    expected = jax.grad(loss)(params, x)
    whole = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), expected))
    exact = all(g.dtype == jnp.float32 for g in jax.tree.leaves(expected))
    np.testing.assert_allclose(norm, whole, rtol=1e-5 if exact else 1e-2, atol=1e-6)
    for mine, cut, g in zip(*map(jax.tree.leaves, (grads, clipped, expected)), strict=True):
        assert mine.dtype == cut.dtype == g.dtype
        # Sums over devices are made in the gradient's own dtype.
        close = {"float32": (1e-5, 1e-6), "bfloat16": (3e-2, 2e-2), "float16": (4e-3, 2e-3)}
        tolerance = dict(zip(("rtol", "atol"), close[g.dtype.name], strict=True))
        mine, cut, g = (np.asarray(a, np.float32) for a in (mine, cut, g))
        np.testing.assert_allclose(mine, g, **tolerance)
        np.testing.assert_allclose(cut, g * min(1, 0.1 / float(norm)), **tolerance)
