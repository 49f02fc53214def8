"""Sharded updates: what travels and in which dtype, padding, mistakes that are told."""

import dataclasses
import functools
import re

import gin
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
    fsdp_update,
    pad_to_multiple,
    sync_gradients,
    unpad,
)
from research_dp.distributed import collectives as primitives
from research_dp.distributed.sharding import infer_flat_sharding
from research_dp.strategies.jaxpr_collectives import collectives
from tests.support.steps import mesh_of, on

ADAM = optax.adam(1e-2)


def test_sums_are_those_of_the_reduction_that_is_given():
    def doubled(x, axis, dim):
        return 2 * primitives.PLAIN.reduce_scatter(x, axis, dim)

    reduction = dataclasses.replace(primitives.PLAIN, reduce_scatter=doubled)
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


@pytest.mark.parametrize(("length", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_padding_appends_zeros_and_goes_away(length, padded):
    x = jnp.ones((2, length), jnp.bfloat16)
    y = pad_to_multiple(x, 4, dim=1)
    assert (y.shape, y.dtype) == ((2, padded), x.dtype)
    np.testing.assert_array_equal(y[:, length:].astype(np.float32), 0.0)
    np.testing.assert_array_equal(unpad(y, length, dim=1), x)


def test_flat_placements_say_what_a_device_holds():
    tree = {"w": jnp.ones((3, 5)), "s": jnp.ones(()), "e": jnp.ones((0, 2))}
    layout = infer_flat_sharding(tree, 4)
    assert {k: p.split_shape for k, p in layout.items()} == {"w": (1, 16), "s": (4,), "e": (1, 0)}
    assert {k: p.local_shape for k, p in layout.items()} == {"w": (1, 4), "s": (1,), "e": (1, 0)}
    assert layout["w"].nbytes_per_device == 16
    assert infer_flat_sharding(tree, 1)["w"].local_shape == (3, 5)


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
    refused("give an object with apply_gradients, e.g. OptaxAdapter", optimizer=ADAM)
    params = {"w": jnp.ones((4, 6))}
    fsdp_apply_gradients(params, params, OptaxAdapter(chain))  # a world of one: whole parameters


class PlainSGD:
    """Any object with `apply_gradients`, as the seed has it; its arithmetic is in float32."""

    def apply_gradients(self, gradients, parameters):
        def one(g, p):
            assert g.dtype == p.dtype
            return p.astype(np.float32) - 0.5 * g.astype(np.float32)

        return jax.tree.map(one, gradients, parameters)


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


def test_gradients_are_clipped_before_they_get_the_dtype_of_their_parameters():
    params, gradients = {"w": jnp.ones(4, jnp.float16)}, {"w": jnp.full(4, 1e6)}
    out, norm = fsdp_apply_gradients(gradients, params, PlainSGD(), max_norm=1.0)
    assert float(norm) == 2e6
    np.testing.assert_array_equal(out["w"], params["w"] - 0.5 * 0.5)


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


@pytest.mark.parametrize(("size", "count"), [(2**25, 1), (200, 2), (0, 4)])
def test_shards_travel_in_buckets_of_the_communication_size(size, count):
    def step(params):
        optimizer = OptaxAdapter(ADAM)
        return fsdp_apply_gradients(params, params, optimizer, communication_size=size)

    found = collectives(on(mesh_of(r=2), step), [jnp.ones(32)] * 4)
    assert [c.kind for c in found] == ["reduce-scatter"] * count + ["all-gather"] * count


UPDATES = {
    "fsdp_apply_gradients": lambda grads, params, **options: fsdp_apply_gradients(
        grads, params, OptaxAdapter(optax.sgd(1.0)), **options
    ),
    "fsdp_update": lambda grads, params, **options: fsdp_update(
        grads, params, optax.sgd(1.0), optax.sgd(1.0).init(params), **options
    )[0],
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("group", ["dp", ("dp", "r")])
@pytest.mark.parametrize("name", UPDATES)
def test_averages_of_sync_gradients_are_not_divided_again(name, group, given):
    def step(params, x):
        value, grads = jax.value_and_grad(lambda w: jnp.sum(w * x))(params["w"])
        grads = {"w": sync_gradients(grads, group, loss=value)}
        # The gradient is then averaged over what is left of both axes.
        options = {"fsdp_group": ("dp", "r"), "loss": value if given or group == "dp" else None}
        return UPDATES[name](grads, params, **options)

    mapped = on(mesh_of(dp=2, r=2), step, (P(), P(("dp", "r"))), P(), check_vma=True)
    out = mapped({"w": jnp.zeros(3)}, jnp.arange(12.0))
    np.testing.assert_allclose(out["w"], -np.arange(12.0).reshape(4, 3).mean(0), rtol=1e-6)


@pytest.mark.parametrize("name", UPDATES)
def test_a_gradient_that_may_be_an_average_needs_the_loss(name):
    def step(params, x):
        return UPDATES[name](jax.grad(lambda p: jnp.sum(p["w"] * x))(params), params)

    mapped = on(mesh_of(r=4), step, (P(), P("r")), P(), check_vma=True)
    with pytest.raises(UsageError, match=r"w \(3,\) is the same along \('r',\).*Pass loss="):
        mapped({"w": jnp.zeros(3)}, jnp.arange(12.0))
