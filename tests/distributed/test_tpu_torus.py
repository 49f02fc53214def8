"""Sums along one dimension of a torus after the other."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.analysis.program_cost import read
from research_dp.analysis.topologies import topology
from research_dp.config import gin_internals, load
from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.mesh import make_mesh
from research_dp.distributed.tpu_torus import (
    groups_of,
    staged_reduction,
    torus_reduction,
    torus_stages,
)
from research_dp.errors import UsageError
from research_dp.strategies.jaxpr_collectives import collectives, of_step
from tests.support import certified
from tests.support.compilers import needs_compiler


def scattered(reduction, x, dim):
    """(sums, as scattered over 8 devices of which each adds multiples of x; bytes sent)."""
    mesh = make_mesh({"fsdp": 8})

    def run(x):
        return reduction.reduce_scatter(x * (1.0 + jax.lax.axis_index("fsdp")), "fsdp", dim)

    out = P(*[None] * dim, "fsdp")
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False))
    return np.asarray(mapped(x)), sum(one.wire_bytes for one in collectives(mapped, x))


def gathered(reduction, x, dim):
    """(blocks of 8 devices, whole again; bytes sent)."""
    mesh = make_mesh({"fsdp": 8})

    def run(x):
        return reduction.all_gather(x, "fsdp", dim, "varying")

    split = P(*[None] * dim, "fsdp")
    mapped = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=P(), check_vma=False))
    return np.asarray(mapped(x)), sum(one.wire_bytes for one in collectives(mapped, x))


@pytest.mark.parametrize("stages", [(2, 4), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize(
    ("shape", "dim"), [((16, 1024), 0), ((8, 3, 16), 2), ((8, 2048), 0), ((8192,), 0)]
)
def test_in_stages_as_at_once(stages, shape, dim):
    """Any block in another place, or a stage over the wrong devices, gives other whole numbers."""
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    found, sent = scattered(staged_reduction({"fsdp": stages}), x, dim)
    expected, least = scattered(PLAIN, x, dim)
    np.testing.assert_array_equal(found, expected)
    assert sent == least
    found, sent = gathered(staged_reduction({"fsdp": stages}), x, dim)
    np.testing.assert_array_equal(found, x)
    assert sent == pytest.approx(gathered(PLAIN, x, dim)[1])


@pytest.mark.parametrize("stages", [(2, 4), (2, 2, 2)])
@pytest.mark.parametrize("size", [5, 600])  # left as they are; filled up to a tile
def test_blocks_that_fill_no_tile(stages, size):
    x = jnp.arange(8.0 * size)
    found, _ = scattered(staged_reduction({"fsdp": stages}), x, 0)
    np.testing.assert_array_equal(found, 36 * np.asarray(x))
    np.testing.assert_array_equal(gathered(staged_reduction({"fsdp": stages}), x, 0)[0], x)


def test_stages_of_another_mesh_are_not_taken():
    """A strategy is put on half of its devices to see whether its state survives that."""
    x = jnp.arange(16.0)
    found, _ = scattered(staged_reduction({"fsdp": (4, 4)}), x, 0)
    np.testing.assert_array_equal(found, 36 * np.asarray(x))
    np.testing.assert_array_equal(gathered(staged_reduction({"fsdp": (2, 2, 4)}), x, 0)[0], x)


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("stem", ["zero1", "fsdp", "fsdp_keep"])
def test_strategies_compute_the_same_in_stages(stem, api):
    load.reset()
    load.load([f"gin/strategies/{stem}.gin"], ["shard_params.min_weight_size = 64"])
    recipe = gin_internals.value_of("train.strategy")
    staged = dataclasses.replace(recipe, reduction=staged_reduction({"fsdp": (2, 2, 2)}))
    certified.assert_follows_single(staged, api)
    sent, expected = (
        sum(one.wire_bytes for one in of_step(r.build(certified.small_spec(api))))
        for r in (staged, recipe)
    )
    assert sent == pytest.approx(expected, rel=0.01)


def test_groups_of_two_stages():
    first, second = groups_of((2, 3))
    assert first == [[0, 3], [1, 4], [2, 5]]
    assert second == [[0, 1, 2], [3, 4, 5]]
    assert groups_of((8,)) == []


def chips(places, axes):
    devices = np.empty(len(places), object)
    devices[:] = [types.SimpleNamespace(coords=place) for place in places]
    names = tuple(axes)
    return types.SimpleNamespace(axis_names=names, devices=devices.reshape(tuple(axes.values())))


# One line of 4 x 2 chips, one of 2 x 4.
UNEVEN = [*itertools.product(range(4), range(2)), *itertools.product(range(9, 11), range(4))]
GRID = list(itertools.product(range(4), range(2), range(1)))


@pytest.mark.parametrize(
    ("places", "axes", "stages"),
    [
        (GRID, {"data": 1, "fsdp": 8}, {"data": (), "fsdp": (4, 2)}),
        (GRID, {"data": 4, "fsdp": 2}, {"data": (4,), "fsdp": (2,)}),
        (list(itertools.product(range(2), repeat=3)), {"fsdp": 8}, {"fsdp": (2, 2, 2)}),
        ([(0, 0), (0, 1), (1, 1), (1, 0)], {"fsdp": 4}, {"fsdp": (4,)}),  # a ring, to and fro
        (2 * list(itertools.product(range(2), repeat=2)), {"fsdp": 8}, {"fsdp": (8,)}),  # 2 slices
        ([(0, 0), (1, 1), (0, 1), (1, 0)], {"fsdp": 4}, {"fsdp": (4,)}),
        (UNEVEN, {"data": 2, "fsdp": 8}, {"data": (2,), "fsdp": (8,)}),
    ],
)
def test_the_stages_of_a_mesh(places, axes, stages):
    assert torus_stages(chips(places, axes)) == stages


def test_devices_without_a_torus_are_told():
    with pytest.raises(UsageError, match="'cpu' has no torus coordinates"):
        torus_reduction(mesh=make_mesh({"fsdp": 8}))


@pytest.mark.slow
@needs_compiler("tpu")
@pytest.mark.parametrize("name", ["v5e-64", "v5p-64"])
def test_a_tpu_sends_what_a_ring_sends(name):
    """Its compiler sends a reduce-scatter over the whole torus at twice the bytes."""
    where = topology(name)
    mesh = where.mesh((1, 64), ("data", "fsdp"))

    def ratio(run, inside, outside):
        mapped = jax.shard_map(run, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
        x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, inside))
        sent = read(jax.jit(mapped).lower(x).compile(), mesh, where).wire_bytes
        return sent / (x.size * 2 * 63 / 64)

    def scatters(reduction):
        return ratio(lambda x: reduction.reduce_scatter(x, "fsdp", 0), P(), P("fsdp"))

    staged = torus_reduction(mesh=mesh)
    assert scatters(PLAIN) == pytest.approx(2, rel=0.05)
    assert scatters(staged) == pytest.approx(1, rel=1e-6)
    if name == "v5p-64":  # of three dimensions
        gathers = ratio(lambda x: staged.all_gather(x, "fsdp", 0, "varying"), P("fsdp"), P())
        assert gathers == pytest.approx(1, rel=1e-6)
