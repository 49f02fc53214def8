"""Sharded updates: the same numbers as one device, in every kind of map; padding; state; errors."""

import functools
import re

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from test_seeds_updates import KINDS, mesh_of

from research_dp import (
    OptaxAdapter,
    UsageError,
    fsdp_apply_gradients,
    fsdp_update,
    pad_to_multiple,
    slice_specs,
    slice_state,
    unpad,
    whole_state,
)
from research_dp.analysis.traffic import collectives
from research_dp.distributed import collectives as primitives
from research_dp.distributed.layout import lay_out_flat

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
        gradients = jax.grad(loss)(params, x)
        return fsdp_update(gradients, params, transform, state, max_norm=0.5, **options)

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


# ---- The same numbers ----


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", [2**25, 100, 0])
def test_twenty_adam_steps_are_those_of_ddp(ranks, size):
    mesh, params, x = mesh_of(r=ranks), model(), batch()

    clipped = optax.chain(optax.clip_by_global_norm(0.5), ADAM)

    def ddp(params, state, x):
        # pmean sums over ranks and divides by their number; the loss is this rank's mean.
        gradients = jax.lax.pmean(jax.grad(loss)(params, x), "r")
        updates, state = clipped.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(ddp, mesh=mesh, in_specs=(P(), P(), P("r")), out_specs=P(), check_vma=False)
    )
    expected, state = params, clipped.init(params)
    for _ in range(20):
        expected, state = step(expected, state, x)
    assert float(jnp.abs(expected["w"] - params["w"]).max()) > 0.05
    close(train(mesh, params, x, 20, communication_size=size)[0], expected)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"r": 8}, {}),
        ({"dp": 2, "r": 4}, {"fsdp_group": "r", "dp_group": "dp"}),
        ({"dp": 2, "r": 4}, {"fsdp_group": ("r", "dp")}),
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
        return fsdp_apply_gradients(jax.grad(loss)(params, x), params, OptaxAdapter(ADAM))

    mapped = jax.shard_map(step, mesh=mesh_of(r=8), in_specs=(P(), P("r")), out_specs=P())
    kinds = {c.kind for c in collectives(mapped, params, x)}
    assert kinds == {"all-reduce", "all-gather"}  # the sum is autodiff's


def test_of_mixed_gradients_only_those_are_reduced_that_autodiff_did_not_sum():

    def step(params, x):
        gradients = {
            "summed": jax.grad(lambda w: jnp.sum(w * x[0]))(params["summed"]),
            "own": jnp.full((4,), x[0]),
        }
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(optax.sgd(1.0)))

    params = {"summed": jnp.zeros(4), "own": jnp.zeros(4)}
    mapped = jax.shard_map(step, mesh=mesh_of(r=4), in_specs=(P(), P("r")), out_specs=P())
    close(jax.jit(mapped)(params, jnp.arange(4.0)), {k: np.full(4, -1.5) for k in params})
    scattered = [c for c in collectives(mapped, params, jnp.arange(4.0)) if c.kind == KINDS[0]]
    assert [c.nbytes for c in scattered] == [params["own"].nbytes]


@pytest.mark.parametrize("given", [True, False])
def test_a_loss_that_was_averaged_before_is_told_by_loss(given):
    params, x = model(), batch()

    def step(params, x):
        def averaged(params):
            # pmean sums over ranks and divides; autodiff then sums gradients of the mean.
            return jax.lax.pmean(loss(params, x), "r")

        value, gradients = jax.value_and_grad(averaged)(params)
        optimizer, options = OptaxAdapter(ADAM), {"loss": value} if given else {}
        return fsdp_apply_gradients(gradients, params, optimizer, max_norm=0.5, **options)

    mapped = jax.shard_map(step, mesh=mesh_of(r=4), in_specs=(P(), P("r")), out_specs=P())
    out, norm = jax.jit(mapped)(params, x)
    expected, (true_norm,) = one_device(ADAM, params, x, 1)
    if given:
        close(out, expected)
    np.testing.assert_allclose(norm, true_norm if given else true_norm / 4, rtol=1e-6)


def test_a_gradient_that_would_be_divided_twice_is_refused():
    def step(params, x):
        value = jax.lax.pmean(x[0], "r")
        return fsdp_apply_gradients(params, params, OptaxAdapter(ADAM), loss=value)

    mapped = jax.shard_map(step, mesh=mesh_of(r=4), in_specs=P("r"), out_specs=P("r"))
    with pytest.raises(UsageError, match=r"gradient w \(1,\), .* would be divided twice"):
        mapped({"w": jnp.ones(4)}, jnp.ones(4))


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
    close(jax.tree.map(lambda p: p[1, 2], both()), expected)


@pytest.mark.parametrize("has_name", [True, False])
def test_bound_axes_are_found_by_public_means_too(has_name, monkeypatch):
    if not has_name:
        monkeypatch.delattr(primitives.extend_core, "unsafe_get_axis_names_DO_NOT_USE")
    seen = []

    def look(x):
        seen.append(primitives.bound_axes())
        return x

    jax.shard_map(look, mesh=mesh_of(dp=2, r=2), in_specs=P(), out_specs=P())(jnp.ones(2))
    jax.pmap(look, axis_name="p")(jnp.ones(8))
    look(jnp.ones(2))
    assert seen == [("dp", "r"), ("p",), ()]


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
    back = whole_state(transform, sliced, params, 4)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, state)


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
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


# ---- What travels ----


def test_sums_are_those_of_the_reduction_that_is_given():
    def doubled(x, axis, dim):
        return 2 * primitives.PLAIN.scatter_sum(x, axis, dim)

    reduction = primitives.PLAIN._replace(scatter_sum=doubled)
    mapped = jax.shard_map(
        lambda p: fsdp_apply_gradients(p, p, OptaxAdapter(optax.sgd(1.0)), reduction=reduction),
        mesh=mesh_of(r=4),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.ones(6)), -np.ones(6))


@pytest.mark.parametrize(
    ("options", "mean"),
    [({}, np.inf), ({"pre_divide": True}, 8192.0), ({"dtype": "float32"}, 8192.0)],
)
@pytest.mark.parametrize("groups", [{}, {"fsdp_group": "dp", "dp_group": "r"}])
def test_sums_of_float16_overflow_unless_told_how(options, mean, groups):
    def step(params):
        gradients = jax.tree.map(lambda p: jnp.full(p.shape, 8192.0, p.dtype), params)
        optimizer = OptaxAdapter(optax.sgd(1.0))
        return fsdp_apply_gradients(gradients, params, optimizer, **groups, **options)

    mapped = functools.partial(
        jax.shard_map, step, mesh=mesh_of(r=8, dp=1), in_specs=P(), out_specs=P()
    )
    out = jax.jit(mapped(check_vma=False))(jnp.zeros(5, jnp.float16))
    np.testing.assert_array_equal(out.astype(np.float32), -mean)


def test_how_to_sum_comes_too_late_where_autodiff_has_summed():
    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return fsdp_apply_gradients(gradients, params, OptaxAdapter(ADAM), dtype="bfloat16")

    mapped = jax.shard_map(step, mesh=mesh_of(r=8), in_specs=(P(), P("r")), out_specs=P())
    with pytest.raises(UsageError, match=r"gradient b \(5,\) was summed over .* come too late"):
        mapped(model(), batch())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_wire_bytes_are_two_p_f_b_when_sizes_divide(ranks):
    params = {"w": jnp.ones((16, 8)), "h": jnp.ones((3, 8), jnp.bfloat16), "b": jnp.ones(24)}

    def step(params):
        return fsdp_apply_gradients(params, params, OptaxAdapter(ADAM))

    mapped = jax.shard_map(
        step, mesh=mesh_of(r=ranks), in_specs=P(), out_specs=P(), check_vma=False
    )
    total = sum(p.nbytes for p in params.values())
    found = collectives(mapped, params)
    assert sum(c.wire_bytes for c in found) == 2 * total * (ranks - 1) / ranks
    assert {c.dtype for c in found} == {"float32", "bfloat16"}


# ---- Padding ----


@pytest.mark.parametrize(("length", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_padding_appends_zeros_and_goes_away(length, padded):
    x = jnp.ones((2, length), jnp.bfloat16)
    y = pad_to_multiple(x, 4, dim=1)
    assert (y.shape, y.dtype) == ((2, padded), x.dtype)
    np.testing.assert_array_equal(y[:, length:].astype(np.float32), 0.0)
    np.testing.assert_array_equal(unpad(y, length, dim=1), x)


def test_flat_placements_say_what_a_device_holds():
    tree = {"w": jnp.ones((3, 5)), "s": jnp.ones(()), "e": jnp.ones((0, 2))}
    layout = lay_out_flat(tree, 4)
    assert {k: p.split_shape for k, p in layout.items()} == {"w": (1, 16), "s": (4,), "e": (1, 0)}
    assert {k: p.local_shape for k, p in layout.items()} == {"w": (1, 4), "s": (1,), "e": (1, 0)}
    assert layout["w"].nbytes_per_device == 16
    assert lay_out_flat(tree, 1)["w"].local_shape == (3, 5)


# ---- Mistakes are told ----


def refused(message, mesh=None, **given):
    """Calls the function on `mesh`, with what is given; expects an error that says `message`."""
    params = {"layer": {"w": jnp.ones((4, 6))}}
    arguments = {
        "gradients": params,
        "parameters": params,
        "optimizer": OptaxAdapter(ADAM),
        **given,
    }
    mapped = jax.shard_map(
        lambda: jax.tree.leaves(fsdp_apply_gradients(**arguments)),
        mesh=mesh or mesh_of(r=2),
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        mapped()


def test_mistakes_in_groups_are_told():
    refused("axis 'nope' is not bound here; bound are ['r']", fsdp_group="nope")
    refused("axis 'r' is in fsdp_group ('r',) and dp_group ('r',)", fsdp_group="r", dp_group="r")
    refused("leaves out axis 'dp' of size 2", mesh_of(dp=2, r=2), fsdp_group=["r"])
    refused("XLA schedules collectives itself", communication_stream=0)
    refused("max_norm = -1.0", max_norm=-1.0)
    with pytest.raises(UsageError, match="axis 'r' is not bound here; bound are \\[\\]"):
        fsdp_apply_gradients({}, {}, OptaxAdapter(ADAM), "r")


def test_mistakes_in_trees_are_told_by_path():
    refused("gradient 'layer/u' has no parameter", gradients={"layer": {"u": jnp.ones(3)}})
    refused(
        "gradient 'layer/w' has shape (6, 4), its parameter (4, 6)",
        gradients={"layer": {"w": jnp.ones((6, 4))}},
    )
    refused(
        "gradient 'layer/w' has dtype int32",
        gradients={"layer": {"w": jnp.ones((4, 6), jnp.int32)}},
    )
    refused(
        "two arrays of one tree have the path 'layer/w'",
        parameters={"layer": {"w": jnp.ones(3)}, "layer/w": jnp.ones(3)},
    )


class Wrong:
    def apply_gradients(self, gradients, parameters):
        return {"other": gradients["layer"]["w"]}


def test_optimizers_that_cannot_be_split_are_refused():
    chain = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
    for transform in (chain, optax.lamb(1e-3)):
        refused("mixes elements of a parameter (reduce", optimizer=OptaxAdapter(transform))
    # Factored moments: elementwise on slices, and so silently different.
    factored = optax.adafactor(
        1e-2, min_dim_size_to_factor=4, clipping_threshold=None, multiply_by_parameter_scale=False
    )
    refused("whose state goes by a parameter's shape", optimizer=OptaxAdapter(factored))
    refused("returns other paths", optimizer=Wrong())
    refused("wrap an Optax transform: OptaxAdapter", optimizer=ADAM)
    params = {"w": jnp.ones((4, 6))}
    fsdp_apply_gradients(params, params, OptaxAdapter(chain))  # a world of one: whole parameters


class PlainSGD:
    """Any object with `apply_gradients`, as the seed has it; its arithmetic is in float32."""

    def apply_gradients(self, gradients, parameters):
        return jax.tree.map(
            lambda g, p: p.astype(np.float32) - 0.5 * g.astype(np.float32), gradients, parameters
        )


def test_any_object_with_apply_gradients_will_do_and_dtypes_stay():
    params = {"a": jnp.ones(5, jnp.bfloat16), "b": jnp.ones((2, 3))}
    mapped = jax.shard_map(
        lambda p: fsdp_apply_gradients(p, p, PlainSGD()),
        mesh=mesh_of(r=4),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    out = jax.jit(mapped)(params)
    jax.tree.map(lambda x, p: np.testing.assert_array_equal(x, 0.5 * p), out, params)
    assert {k: x.dtype for k, x in out.items()} == {k: p.dtype for k, p in params.items()}


def test_the_functions_are_configurable():
    gin.parse_config("distributed.fsdp_apply_gradients.communication_size = 7")
    bound = gin.get_configurable("fsdp_apply_gradients")
    params = [jnp.ones(8), jnp.ones(8)]
    mapped = jax.shard_map(
        lambda p: bound(p, p, OptaxAdapter(ADAM)),
        mesh=mesh_of(r=2),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    assert len(collectives(mapped, params)) == 4
