"""Acceptance cases 26 to 31: what `fsdp_apply_gradients` must do, in numbers."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from research_dp import (
    OptaxAdapter,
    UsageError,
    fsdp_apply_gradients,
    slice_specs,
    slice_state,
    unsharded_state,
)
from research_dp.strategies.jaxpr_collectives import collectives
from tests.support.steps import KINDS, mesh_of

SGD = optax.sgd(0.1)


def on_ranks(mesh, function):
    """`function(rank, tree)` on each device; what each returns, stacked."""
    axes = mesh.axis_names

    def one(tree):
        rank = jax.lax.axis_index(axes)
        return jax.tree.map(lambda x: x[None], function(rank, tree))

    mapped = jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P(axes), check_vma=False)
    return jax.jit(mapped)


def apply(grad, optimizer=SGD, **options):
    """(rank, params) -> what the function returns for gradients `grad(rank)`, all alike."""

    def function(rank, params):
        gradients = jax.tree.map(lambda p: jnp.full(p.shape, grad(rank), p.dtype), params)
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(optimizer), **options)

    return function


def assert_all(tree, value):
    jax.tree.map(lambda x: np.testing.assert_allclose(x, value, rtol=1e-6), tree)


def test_case_26_mean_step_and_clipping_on_four_ranks():
    mesh = mesh_of(r=4)
    params = {"w1": jnp.ones((40, 8)), "w2": jnp.ones(80)}
    out = on_ranks(mesh, apply(lambda r: 0.1 * (r + 1)))(params)
    assert {k: x.shape for k, x in out.items()} == {"w1": (4, 40, 8), "w2": (4, 80)}
    assert_all(out, 0.975)
    result = on_ranks(mesh, apply(lambda r: 10.0, max_norm=1.0))(params)
    assert isinstance(result, tuple)
    assert result[1].shape == (4,)
    assert_all(result[1], 200.0)
    assert_all(result[0], 1 - 0.1 * 10 / 200)


def test_case_27_hybrid_groups():
    mesh = mesh_of(dp=2, fsdp=2)  # fsdp groups {0,1}, {2,3}; dp groups {0,2}, {1,3}
    params = {"w": jnp.ones(4)}
    step = apply(lambda r: r + 1.0, fsdp_group="fsdp", dp_group="dp", max_norm=100.0)
    out, norm = on_ranks(mesh, step)(params)
    assert_all(out, 0.75)
    assert_all(norm, 5.0)
    # With no dp group the two groups would part: 0.85 and 0.65.
    with pytest.raises(UsageError, match=r"leaves out axis 'dp' of size 2"):
        on_ranks(mesh, apply(lambda r: r + 1.0, fsdp_group="fsdp"))(params)
    apart = on_ranks(mesh, apply(lambda r: r + 1.0, fsdp_group="fsdp", dp_group=()))(params)
    np.testing.assert_allclose(apart["w"][:, 0], [0.85, 0.85, 0.65, 0.65], rtol=1e-6)
    over_both = on_ranks(mesh, apply(lambda r: r + 1.0, fsdp_group=("dp", "fsdp")))(params)
    assert_all(over_both, 0.75)


@pytest.mark.parametrize(
    ("size", "leaves"),
    [(2**25, [10]), (200, [5, 5]), (199, [5, 5]), (201, [6, 4]), (0, [1] * 10), (-1, [1] * 10)],
)
@pytest.mark.parametrize("ranks", [2, 8])
def test_case_28_bucketing(ranks, size, leaves):
    params = [jnp.ones(10) for _ in range(10)]
    step = on_ranks(mesh_of(r=ranks), apply(lambda r: 1.0, communication_size=size))
    found = collectives(step, params)
    assert {c.kind for c in found} == set(KINDS)
    padded = -(-10 // ranks) * ranks
    for kind in KINDS:
        sent = sorted((c.nbytes for c in found if c.kind == kind), reverse=True)
        assert sent == [4 * padded * n for n in leaves]


def test_case_28_hybrid_reduces_slices_in_the_same_buckets():
    params = [jnp.ones(10) for _ in range(10)]
    step = apply(lambda r: 1.0, communication_size=201, fsdp_group="fsdp", dp_group="dp")
    found = collectives(on_ranks(mesh_of(dp=2, fsdp=4), step), params)
    reduced = sorted((c.nbytes for c in found if c.kind == "all-reduce"), reverse=True)
    assert reduced == [6 * 12, 4 * 12]  # 10 elements padded to 12, a quarter of them


@pytest.mark.parametrize("size", [2**25, 0])
def test_case_28_each_parameter_keeps_its_dtype(size):
    params = {"a": jnp.ones(8), "b": jnp.ones(8, jnp.bfloat16), "c": jnp.ones(3)}
    step = apply(lambda r: 1.0, communication_size=size, max_norm=100.0)
    out, norm = on_ranks(mesh_of(r=4), step)(params)
    assert {k: str(x.dtype) for k, x in out.items()} == {
        "a": "float32",
        "b": "bfloat16",
        "c": "float32",
    }
    assert_all({k: out[k] for k in "ac"}, 0.9)
    np.testing.assert_array_equal(out["b"], jnp.asarray(0.9, jnp.bfloat16))
    np.testing.assert_allclose(norm, np.sqrt(19.0), rtol=1e-6)


def test_case_28_float32_gradients_of_bfloat16_parameters():
    def function(rank, params):
        gradients, optimizer = {"a": jnp.full(8, rank + 1.0)}, OptaxAdapter(optax.adam(0.5))
        new = fsdp_apply_gradients(gradients, params, optimizer)
        assert optimizer.state[0].mu["a"].dtype == jnp.bfloat16  # as `init` makes it
        return new

    out = on_ranks(mesh_of(r=2), function)({"a": jnp.ones(8, jnp.bfloat16)})
    assert out["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(out["a"], jnp.asarray(0.5, jnp.bfloat16))


@pytest.mark.parametrize("ranks", [1, 2])
def test_case_29_frozen_parameters_are_matched_by_path(ranks):
    params = {"a": jnp.full(4, 5.0), "b": jnp.ones(4)}

    def function(rank, params):
        return fsdp_apply_gradients({"b": jnp.ones(4)}, params, OptaxAdapter(SGD))

    out = on_ranks(mesh_of(r=ranks), function)(params)
    assert_all(out["a"], 5.0)
    assert_all(out["b"], 0.9)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("shape", [(15,), (3, 4), (3, 5), (), (0, 3), (1, 1, 7)])
def test_case_29_any_shape_goes_round(shape, ranks):
    size = int(np.prod(shape))
    params = {"p": jnp.arange(float(size)).reshape(shape)}
    step = apply(lambda r: r + 1.0, max_norm=1e6)
    out, norm = on_ranks(mesh_of(r=ranks), step)(params)
    mean = (ranks + 1) / 2
    assert out["p"].shape == (ranks, *shape)
    expected = np.broadcast_to(params["p"] - 0.1 * mean, (ranks, *shape))
    np.testing.assert_allclose(out["p"], expected, rtol=1e-6)
    np.testing.assert_allclose(norm, mean * np.sqrt(size), rtol=1e-6)  # padding counts for nothing


def test_case_29_the_order_of_a_dict_does_not_matter():
    """Ranks with other insertion orders run the same program: the same bytes in each collective."""
    # In the order a, b, c a limit of 44 bytes makes the buckets [a, b], [c]; in c, b, a one.
    leaves = {"a": jnp.full(10, 1.0), "b": jnp.full(1, 2.0), "c": jnp.full(1, 3.0)}
    orders = [collections.OrderedDict((k, leaves[k]) for k in order) for order in ("abc", "cba")]
    step = on_ranks(mesh_of(r=2), apply(lambda r: r + 1.0, communication_size=44))
    programs = [collectives(step, params) for params in orders]
    assert programs[0] == programs[1]
    assert len(programs[0]) == 4
    for params in orders:
        out = step(params)
        assert list(out) == list(params)
        for name, x in out.items():
            np.testing.assert_allclose(x[:, 0], leaves[name][0] - 0.15, rtol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_case_29_empty_trees_are_returned_unchanged(ranks):
    def function(rank, params):
        optimizer = OptaxAdapter(SGD)
        result, norm = fsdp_apply_gradients({}, params, optimizer, max_norm=1.0)
        return {**result, "empty": fsdp_apply_gradients({}, {}, optimizer), "norm": norm}

    out = on_ranks(mesh_of(r=ranks), function)({"a": jnp.arange(3.0)})
    assert out["empty"] == {}
    np.testing.assert_array_equal(out["a"], np.tile(np.arange(3.0), (ranks, 1)))
    np.testing.assert_array_equal(out["norm"], np.zeros(ranks))


# ---- Case 30: a step at any world size from the same state on disk ----

ADAM = optax.adam(0.1)
MODEL = {"layer": {"w": jnp.arange(15.0).reshape(3, 5) / 7, "b": jnp.ones(3)}, "s": jnp.ones(())}


@functools.cache
def adam_step(ranks, size):
    """(params, whole state) -> the same after one step on so many ranks; the state sliced too."""
    specs = slice_specs(ADAM, MODEL, "r", ranks)

    def one(params, state):
        # The mean over ranks is the same for any number of them.
        factor = 2 * (jax.lax.axis_index("r") + 1) / (ranks + 1)
        gradients = jax.tree.map(lambda p: (p + 0.3) * factor, params)
        optimizer = OptaxAdapter(ADAM, state)
        new = fsdp_apply_gradients(gradients, params, optimizer, communication_size=size)
        return new, optimizer.state

    mapped = jax.jit(
        jax.shard_map(
            one,
            mesh=mesh_of(r=ranks),
            in_specs=(P(), specs),
            out_specs=(P(), specs),
            check_vma=False,
        )
    )

    def step(params, state):
        params, sliced = mapped(params, slice_state(ADAM, state, params, ranks))
        whole = unsharded_state(ADAM, sliced, params, ranks)
        return jax.device_get(params), jax.device_get(whole), sliced

    return step


def same(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6), one, other)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_case_30_state_is_by_path_portable_and_blind_to_buckets(ranks):
    first = adam_step(2, 2**25)(MODEL, ADAM.init(MODEL))
    _, state, sliced = adam_step(ranks, 0)(MODEL, ADAM.init(MODEL))
    # By path, one array a parameter, in the parameter's shape.
    shapes = {"layer": {"w": (3, 5), "b": (3,)}, "s": ()}
    assert jax.tree.map(np.shape, state[0].mu) == shapes
    np.testing.assert_allclose(state[0].mu["layer"]["w"], 0.1 * (MODEL["layer"]["w"] + 0.3), 1e-6)
    padded = -(-15 // ranks) * ranks
    assert sliced[0].mu["layer"]["w"].shape == (1, padded)
    assert sliced[0].nu["layer"]["w"].sharding.shard_shape((1, padded)) == (1, padded // ranks)
    # The same layout and numbers for any bucket size.
    _, _, other = adam_step(ranks, 2**25)(MODEL, ADAM.init(MODEL))
    assert jax.tree.structure(sliced) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, sliced, other)
    # Saved at world size 2, the next step is that of world size 2.
    expected = adam_step(2, 2**25)(first[0], first[1])
    loaded = adam_step(ranks, 0)(first[0], first[1])
    same(expected[:2], loaded[:2])
    assert int(loaded[1][0].count) == 2


def test_case_30_state_that_was_not_sliced_is_refused_by_path():
    params = {"layer": {"w": jnp.ones((2, 8))}}
    state = ADAM.init(params)

    def function(rank, params):
        return fsdp_apply_gradients(params, params, OptaxAdapter(ADAM, state))

    with pytest.raises(UsageError, match=r"0/mu/layer/w has shape \(2, 8\).*\(1, 8\).*slice_state"):
        on_ranks(mesh_of(r=2), function)(params)


@pytest.mark.parametrize("ranks", [1, 4])
def test_case_31_edge_numerics(ranks):
    mesh, params = mesh_of(r=ranks), {"a": jnp.ones((3, 5)), "b": jnp.ones(4)}
    for grad, max_norm, norm in ((0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (2.0, 0.0, 2 * np.sqrt(19))):
        out, seen = on_ranks(mesh, apply(lambda r, g=grad: g, max_norm=max_norm))(params)
        np.testing.assert_allclose(seen, np.full(ranks, norm), rtol=1e-6)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.ones(x.shape)), out)

    def one_nan(rank, params):
        gradients = {"a": jnp.ones((3, 5)).at[0, 0].set(jnp.nan), "b": jnp.ones(4)}
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(SGD), max_norm=1.0)

    out, norm = on_ranks(mesh, one_nan)(params)
    assert np.isnan(norm).all()
    assert np.isnan(out["b"]).all()  # no step is skipped
