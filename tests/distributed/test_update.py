"""Sharded updates: the same numbers as one device, in every kind of map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from research_dp import (
    OptaxAdapter,
    UsageError,
    fsdp_apply_gradients,
    fsdp_update,
    slice_specs,
    slice_state,
    unsharded_state,
)
from research_dp.distributed import collectives as primitives
from research_dp.strategies.jaxpr_collectives import collectives
from tests.support.steps import KINDS, SHAPES, mesh_of

# Epsilon is large enough for the scale of gradients to matter.
ADAM = optax.adam(1e-2, eps=1e-3)


def close(one, other, tolerance=1e-6):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), one, other
    )


def model():
    rng = np.random.default_rng(0)
    shapes = {"w": (6, 5), "v": (5, 8), "b": (5,), "scale": ()}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(16, 6)), jnp.float32)


def loss(params, x):
    y = jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"]
    return jnp.mean((params["scale"] * y - 1.0) ** 2)


def one_device(transform, params, x, steps):
    """(parameters, norms) after some steps, clipped as `train` does it."""
    transform = optax.chain(optax.clip_by_global_norm(0.5), transform)
    state, norms = transform.init(params), []

    @jax.jit
    def step(params, state):
        gradients = jax.grad(loss)(params, x)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(gradients)

    for _ in range(steps):
        params, state, norm = step(params, state)
        norms.append(float(norm))
    return params, norms


def train(mesh, params, x, steps, *, transform=ADAM, check_vma=False, **options):
    """(parameters, norms) after some steps under `shard_map`, state carried from step to step."""
    fsdp = options.get("fsdp_group") or mesh.axis_names
    shards = int(np.prod([mesh.shape[a] for a in primitives.flat_axes(fsdp)]))
    specs = slice_specs(transform, params, fsdp, shards)

    def step(params, state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return fsdp_update(gradients, params, transform, state, max_norm=0.5, loss=value, **options)

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), specs, P(mesh.axis_names)),
            out_specs=(P(), specs, P()),
            check_vma=check_vma,
        )
    )
    state, norms = OptaxAdapter(transform).init(params, shards), []
    for _ in range(steps):
        params, state, norm = step(params, state, x)
        norms.append(float(norm))
    return params, norms


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"r": 8}, {}),
        ({"dp": 2, "r": 4}, {"fsdp_group": "r", "dp_group": "dp"}),
        ({"dp": 2, "r": 4}, {"fsdp_group": ("dp", "r")}),
        ({"r": 1}, {}),
    ],
)
def test_shard_map_with_and_without_replication_checks(axes, options, check_vma):
    params, x = model(), batch()
    expected = one_device(ADAM, params, x, 3)
    assert max(expected[1]) > 0.5, "nothing was clipped"
    close(train(mesh_of(**axes), params, x, 3, check_vma=check_vma, **options), expected)


def test_gradients_that_autodiff_summed_are_not_reduced_again():
    params, x = model(), batch()

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(ADAM), loss=value)

    mapped = jax.shard_map(step, mesh=mesh_of(r=8), in_specs=(P(), P("r")), out_specs=P())
    kinds = {c.kind for c in collectives(mapped, params, x)}
    assert kinds == {"all-reduce", "all-gather"}  # the sum is autodiff's


def test_of_mixed_gradients_only_those_are_reduced_that_autodiff_did_not_sum():

    def step(params, x):
        gradients = {
            "summed": jax.grad(lambda w: jnp.sum(w * x[0]))(params["summed"]),
            "own": jnp.full((4,), x[0]),
        }
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(optax.sgd(1.0)), loss=x[0])

    params = {"summed": jnp.zeros(4), "own": jnp.zeros(4)}
    mapped = jax.shard_map(step, mesh=mesh_of(r=4), in_specs=(P(), P("r")), out_specs=P())
    close(jax.jit(mapped)(params, jnp.arange(4.0)), {k: np.full(4, -1.5) for k in params})
    scattered = [c for c in collectives(mapped, params, jnp.arange(4.0)) if c.kind == KINDS[0]]
    assert [c.nbytes for c in scattered] == [params["own"].nbytes]


def test_gradients_of_a_loss_that_was_averaged_before_are_not_divided():
    params, x = model(), batch()

    def step(params, x):
        def averaged(params):
            # pmean sums over ranks and divides; autodiff then sums gradients of the mean.
            return jax.lax.pmean(loss(params, x), "r")

        value, gradients = jax.value_and_grad(averaged)(params)
        optimizer = OptaxAdapter(ADAM)
        return fsdp_apply_gradients(gradients, params, optimizer, max_norm=0.5, loss=value)

    mapped = jax.shard_map(step, mesh=mesh_of(r=4), in_specs=(P(), P("r")), out_specs=P())
    out, norm = jax.jit(mapped)(params, x)
    expected, (true_norm,) = one_device(ADAM, params, x, 1)
    close(out, expected)
    np.testing.assert_allclose(norm, true_norm, rtol=1e-6)


def test_a_gradient_that_would_be_divided_twice_is_refused():
    def step(params, x):
        value = jax.lax.pmean(x[0], "r")
        return fsdp_apply_gradients(params, params, OptaxAdapter(ADAM), loss=value)

    mapped = jax.shard_map(step, mesh=mesh_of(r=4), in_specs=P("r"), out_specs=P("r"))
    with pytest.raises(UsageError, match=r"gradient w \(1,\), .* would be divided twice"):
        mapped({"w": jnp.ones(4)}, jnp.ones(4))


def test_how_to_sum_comes_too_late_where_autodiff_has_summed():
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        options = {"loss": value, "dtype": "bfloat16"}
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(ADAM), **options)

    mapped = jax.shard_map(step, mesh=mesh_of(r=8), in_specs=(P(), P("r")), out_specs=P())
    with pytest.raises(UsageError, match=r"gradient b \(5,\) was summed over .* come too late"):
        mapped(model(), batch())


def one_step(params, x):
    optimizer = OptaxAdapter(ADAM)  # its state is made here, of slices
    params, norm = fsdp_apply_gradients(jax.grad(loss)(params, x), params, optimizer, max_norm=0.5)
    return params, norm, optimizer.state[0].mu["w"]


@pytest.mark.parametrize(
    ("mapping", "slice_shape"),
    [
        (lambda f: jax.pmap(f, axis_name="r", in_axes=(None, 0)), (8, 1, 4)),
        (lambda f: jax.pmap(f, in_axes=(None, 0)), (8, 1, 4)),
        (lambda f: jax.vmap(f, axis_name="r", in_axes=(None, 0)), (8, 1, 4)),
        (lambda f: jax.jit(jax.vmap(f, axis_name="r", in_axes=(None, 0))), (8, 1, 4)),
        (lambda f: lambda p, x: jax.tree.map(lambda y: y[None], f(p, x.reshape(16, 6))), None),
    ],
    ids=["pmap", "pmap without a name", "vmap", "jit of vmap", "no map"],
)
def test_other_maps(mapping, slice_shape):
    params, x = model(), batch()
    out, norm, moments = mapping(one_step)(params, x.reshape(8, 2, 6))
    assert moments.shape == (slice_shape or (1, 6, 5))  # 30 elements, padded to 32
    expected, (norm_of_one,) = one_device(ADAM, params, x, 1)
    for rank in range(norm.shape[0]):
        close(jax.tree.map(lambda p, i=rank: p[i], out), expected)
    close(norm, np.full(norm.shape, norm_of_one))


def test_vmap_in_vmap_is_two_groups_or_one():
    params, x = model(), batch()

    def step(params, x, **groups):
        gradients = jax.grad(loss)(params, x)
        optimizer = OptaxAdapter(ADAM)
        return fsdp_apply_gradients(gradients, params, optimizer, max_norm=0.5, **groups)[0]

    def both(**groups):
        inner = jax.vmap(functools.partial(step, **groups), (None, 0), axis_name="in")
        return jax.jit(jax.vmap(inner, (None, 0), axis_name="out"))(params, x.reshape(2, 4, 2, 6))

    expected, _ = one_device(ADAM, params, x, 1)
    close(jax.tree.map(lambda p: p[1, 2], both(fsdp_group="in", dp_group="out")), expected)
    close(jax.tree.map(lambda p: p[1, 2], both(fsdp_group=("in", "out"))), expected)
    with pytest.raises(UsageError, match=r"order is \('out', 'in'\). Write \('in', 'out'\)"):
        both()


def test_optimizers_that_go_by_rank_see_the_rank():
    def matrices(tree):
        return jax.tree.map(lambda p: p.ndim > 1, tree)

    transform = optax.adamw(1e-2, weight_decay=0.5, mask=matrices)
    params, x = model(), batch()
    close(
        train(mesh_of(r=8), params, x, 3, transform=transform), one_device(transform, params, x, 3)
    )


def test_an_optimizer_that_waits_for_several_gradients_can_be_split():
    transform, params, x = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2), model(), batch()
    expected, state = params, transform.init(params)
    for _ in range(4):
        gradients = jax.grad(loss)(expected, x)
        factor = 0.5 / max(0.5, optax.tree.norm(gradients))
        gradients = jax.tree.map(lambda g, f=factor: g * f, gradients)
        updates, state = transform.update(gradients, state, expected)
        expected = optax.apply_updates(expected, updates)
    close(train(mesh_of(r=4), params, x, 4, transform=transform)[0], expected)


def test_masked_and_labelled_state_is_sliced_and_made_whole():
    transform = optax.multi_transform(
        {"adam": ADAM, "sgd": optax.sgd(0.1, momentum=0.9)},
        {"w": "adam", "v": "sgd", "b": "sgd", "scale": "adam"},
    )
    params, x = model(), batch()
    close(
        train(mesh_of(r=4), params, x, 3, transform=transform), one_device(transform, params, x, 3)
    )
    state = transform.init(params)
    sliced = slice_state(transform, state, params, 4)
    back = unsharded_state(transform, sliced, params, 4)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, state)


LEAVES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.tuples(SHAPES, st.sampled_from(["float32", "bfloat16"]), st.booleans()),
    min_size=1,
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    leaves=LEAVES,
    ranks=st.sampled_from([2, 4, 8]),
    size=st.sampled_from([2**25, 60, 0]),
    max_norm=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 99),
)
def test_update_is_that_of_one_device(leaves, ranks, size, max_norm, seed):
    """Random trees, some leaves frozen; gradients are whole numbers, whose means are exact."""
    rng = np.random.default_rng(seed)
    params = {
        k: jnp.asarray(rng.normal(size=shape), dtype) for k, (shape, dtype, _) in leaves.items()
    }
    trained = {k: params[k] for k, (_, _, is_trained) in leaves.items() if is_trained}
    gradients = {
        k: jnp.asarray(rng.integers(-8, 9, (ranks, *p.shape)), p.dtype) for k, p in trained.items()
    }
    transform = optax.adam(0.1, eps=1e-3)
    mean = {k: g.astype(jnp.float32).mean(0) for k, g in gradients.items()}
    norm = optax.tree.norm(mean) if mean else 0.0
    factor = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
    mean = {k: (g * factor).astype(trained[k].dtype) for k, g in mean.items()}
    updates, _ = transform.update(mean, transform.init(trained), trained)
    expected = {**params, **optax.apply_updates(trained, updates)}

    def step(params, gradients):
        gradients = jax.tree.map(lambda g: g[0], gradients)
        result = fsdp_apply_gradients(
            gradients, params, OptaxAdapter(transform), communication_size=size, max_norm=max_norm
        )
        return result if max_norm is None else result[0]

    mapped = jax.shard_map(step, mesh=mesh_of(r=ranks), in_specs=(P(), P("r")), out_specs=P())
    out = jax.jit(mapped)(params, gradients)
    for name, p in params.items():
        assert (out[name].dtype, out[name].shape) == (p.dtype, p.shape)
        tolerance = 1e-2 if p.dtype == jnp.bfloat16 else 1e-5
        close(out[name].astype(np.float32), expected[name].astype(np.float32), tolerance)
