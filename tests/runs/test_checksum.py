"""Checksums: the same on any sharding and on the host, another for any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.runs.checksum import _sums_of_parts, array_checksum, tree_checksums
from tests.support.steps import mesh_of

ARRAYS = {
    "matrix": np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32),
    "uneven": np.random.default_rng(1).normal(size=(13, 19)).astype(np.float32),
    "half": np.random.default_rng(2).normal(size=(8, 3)).astype(jnp.bfloat16),
    "bytes": np.arange(-40, 40, dtype=np.int8),
    "mask": np.arange(16) % 3 == 0,
    "count": np.int32(7),
    "complex": np.exp(1j * np.arange(8)).astype(np.complex64),
    "none": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"data": 1, "fsdp": 1}, P()),
        ({"data": 4, "fsdp": 2}, P()),
        ({"data": 1, "fsdp": 8}, P("fsdp")),
        ({"data": 2, "fsdp": 4}, P("fsdp")),
    ],
)
@pytest.mark.parametrize("small", [0, 2**16], ids=["by the devices", "by the host"])
def test_is_the_same_on_any_sharding_and_by_numpy(axes, spec, small, monkeypatch):
    monkeypatch.setattr("research_dp.runs.checksum._SMALL", small)
    mesh = mesh_of(**axes)
    divides = {name for name, x in ARRAYS.items() if x.ndim and x.shape[0] % 8 == 0}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, spec if name in divides else P()))
        for name, x in ARRAYS.items()
    }
    assert tree_checksums(placed) == {name: array_checksum(x) for name, x in sorted(ARRAYS.items())}


def test_no_array_of_the_program_is_empty():
    """JAX 0.11's compiler for CPUs crashes with one: each save of large parameters did."""
    sharding = NamedSharding(mesh_of(data=1, fsdp=8), P(("data", "fsdp")))
    matrix = ARRAYS["matrix"]
    program = jax.make_jaxpr(_sums_of_parts, static_argnums=(1, 2))(matrix, sharding, matrix.shape)
    assert "[3,16]" in str(program) and "[0" not in str(program)


def test_wide_elements_are_two_places(monkeypatch):
    monkeypatch.setattr("research_dp.runs.checksum._SMALL", 0)
    wide = np.random.default_rng(3).normal(size=(5, 3))
    with jax.enable_x64(True):
        assert tree_checksums({"x": jax.device_put(wide, NamedSharding(mesh_of(data=8), P()))})[
            "x"
        ] == array_checksum(wide)


def test_the_host_takes_large_arrays_in_parts(monkeypatch):
    whole = array_checksum(ARRAYS["matrix"])
    monkeypatch.setattr("research_dp.runs.checksum._CHUNK", 7)
    assert array_checksum(ARRAYS["matrix"]) == whole


def test_every_flipped_bit_and_every_swap_shows():
    x = ARRAYS["matrix"][:3]
    found = {array_checksum(x)}
    for place in range(x.size):
        for bit in range(32):
            flipped = x.copy()
            flipped.view(np.uint32).reshape(-1)[place] ^= np.uint32(1 << bit)
            found.add(array_checksum(flipped))
    assert len(found) == 1 + 32 * x.size
    swapped = x.copy()
    swapped[0, 0], swapped[2, 5] = x[2, 5], x[0, 0]
    assert array_checksum(swapped) not in found
    # Two flips of the top bit cancel in a plain sum.
    twice = x.copy()
    twice.view(np.uint32)[0, :2] ^= np.uint32(1 << 31)
    assert array_checksum(twice) not in found
