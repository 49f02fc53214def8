"""The reader of traced programs, on programs whose traffic is counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from research_dp.analysis.program_cost import collectives_of, wire_totals
from research_dp.distributed.mesh import make_mesh
from research_dp.strategies.jaxpr_collectives import collectives


def read(function):
    mesh = make_mesh({"data": 2, "fsdp": 4})
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
    )
    return collectives(mapped, jax.ShapeDtypeStruct((32, 4), jnp.float32))


@pytest.mark.parametrize(
    ("function", "kind", "devices", "wire_bytes"),
    [
        # A device holds (8, 4) float32: 128 bytes.
        (lambda x: lax.psum(x, "fsdp"), "all-reduce", 4, 2 * 128 * 3 / 4),
        (lambda x: lax.pmax(x, ("data", "fsdp")), "all-reduce", 8, 2 * 128 * 7 / 8),
        (lambda x: lax.psum_scatter(x, "data", tiled=True), "reduce-scatter", 2, 128 * 1 / 2),
        (lambda x: lax.all_gather(x, "fsdp", tiled=True)[:8], "all-gather", 4, 512 * 3 / 4),
        (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), "permute", 2, 128),
        (lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), "all-to-all", 4, 128 * 3 / 4),
    ],
)
def test_bytes_of_one_collective(function, kind, devices, wire_bytes):
    (found,) = read(function)
    assert (found.kind, found.devices, found.wire_bytes) == (kind, devices, wire_bytes)


def test_loops_are_multiplied_out():
    def looped(x):
        return lax.scan(lambda c, _: (lax.psum(c, "fsdp"), None), x, length=5)[0]

    (found,) = read(looped)
    assert (found.times, found.wire_bytes) == (5, 5 * 2 * 128 * 3 / 4)


def test_collectives_in_branches_are_counted_as_taken_and_told():
    def every_second(x):
        return lax.cond(
            x[0, 0] > 0, lambda y: lax.psum(y, "fsdp"), lambda y: y, lax.pmax(x, "data")
        )

    taken, always = sorted(read(every_second), key=lambda one: one.axes, reverse=True)
    assert (taken.in_branch, always.in_branch) == (True, False)
    mesh = make_mesh({"data": 2, "fsdp": 4})
    mapped = jax.shard_map(
        every_second, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
    )
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((32, 4), jnp.float32)).compile()
    totals = wire_totals(collectives_of(compiled.as_text(), dict(mesh.shape)))
    assert totals["in_branches"] == taken.wire_bytes < totals["total"]


def test_what_cannot_be_counted_is_refused():
    def until(x):
        return lax.while_loop(lambda c: c[0, 0] < 9.0, lambda c: lax.psum(c, "fsdp"), x)

    with pytest.raises(NotImplementedError, match="unknown length"):
        read(until)
    with pytest.raises(NotImplementedError, match="is not counted"):
        read(
            lambda x: lax.ragged_all_to_all(x, x, *[jnp.zeros(4, jnp.int32)] * 4, axis_name="fsdp")
        )


def test_a_jitted_function_with_compiler_options_is_read():
    options = {"xla_cpu_enable_fast_math": True}
    mesh = make_mesh({"data": 8})
    mapped = jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P(), out_specs=P())
    found = collectives(jax.jit(mapped, compiler_options=options), jnp.ones(4))
    assert sum(one.wire_bytes for one in found) == 2 * 16 * 7 / 8
