"""Devices that are not there: their names, their figures, and programs compiled for them."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.analysis import topologies
from research_dp.analysis.program_cost import read
from research_dp.analysis.topologies import topology
from research_dp.distributed.mesh import chip_of, chips
from research_dp.errors import UsageError
from tests.support.compilers import needs_compiler

BOTH = ("data", "fsdp")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "not known"),
        ("h300:8x8", "not known"),
        ("v5e:8x8", "not known"),
        ("h100-64", "not known"),
        ("cpu:9", "--cpu_devices=9"),
        ("cpu:0", "8 CPU devices"),
    ],
)
def test_a_wrong_name_is_told(name, message):
    with pytest.raises(UsageError, match=message):
        topology(name)


@pytest.mark.parametrize(("name", "extra"), [("h100:8x8", "plan-gpu"), ("v5e-64", "plan-tpu")])
def test_a_missing_compiler_is_told_with_the_command(name, extra, monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UsageError, match=rf"pip install .*\[{extra}\]"):
        topology(name)


def test_cpu_devices():
    found = topology("cpu:4")
    assert (len(found.devices), found.hosts, found.domains, found.slices) == (4, 1, (1, 4), 1)
    assert found.mesh((2, 2), BOTH).shape == {"data": 2, "fsdp": 2}


def test_present_devices():
    assert topologies.of(jax.devices()).chip.name == "cpu"
    assert len(topologies.of(jax.devices()).devices) == 8


@pytest.mark.parametrize(
    ("count", "dims", "shape"),
    [
        (1, 2, (1, 1)), (4, 2, (2, 2)), (8, 2, (2, 4)), (64, 2, (8, 8)), (256, 2, (16, 16)),
        (4, 3, (2, 2, 1)), (8, 3, (2, 2, 2)), (128, 3, (4, 4, 8)), (1024, 3, (8, 8, 16)),
    ],
)  # fmt: skip
def test_the_shape_of_a_slice(count, dims, shape):
    assert topologies._slice_shape("name", count, dims) == shape


@pytest.mark.parametrize("count", [0, 48])
def test_a_slice_has_a_power_of_two_of_chips(count):
    with pytest.raises(UsageError, match="no power of two"):
        topologies._slice_shape("v5e-48", count, 2)


@pytest.mark.parametrize("chip", chips().values(), ids=lambda chip: chip.name)
def test_every_figure_has_a_source(chip):
    if chip.platform != "cpu":
        needed = {"flops", "memory", "inside", "across", "latency"}
        assert needed <= chip.sources.keys()
        assert bool(chip.compile) == ("compile" in chip.sources) == (chip.platform == "gpu")
    assert chip.peak("f8e4m3fn") >= chip.peak("bf16") >= chip.peak("f32") >= 0
    assert chip.inside_rate >= chip.across_rate
    assert chip_of(chip.device_kinds[0]) is chip


def test_an_unknown_kind_of_device():
    assert chip_of("TPU v99") is None


NAMES = {  # platform, devices, hosts, slices
    "h100:2x8": ("gpu", 16, 2, 1),
    "h200:1x8": ("gpu", 8, 1, 1),
    "a100:2x4": ("gpu", 8, 2, 1),
    "b200:2x8": ("gpu", 16, 2, 1),
    "v5e-64": ("tpu", 64, 16, 1),
    "v5p-16": ("tpu", 16, 4, 1),
    "v6e-16": ("tpu", 16, 4, 1),
    "2xv5e-16": ("tpu", 32, 8, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_compiler(about[0])) for name, about in NAMES.items()]
)
def test_a_program_compiled_for_devices_that_are_not_there(name):
    platform, count, hosts, slices = NAMES[name]
    where = topology(name)
    assert (len(where.devices), where.hosts, where.slices) == (count, hosts, slices)
    mesh = where.mesh((2, count // 2), BOTH)

    def step(x):
        return lax.psum(lax.all_gather(x, "fsdp", tiled=True) @ x.T, "data")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    rows = 256 * count // 2
    x = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    found = read(jax.jit(mapped).lower(x).compile(), mesh, where)
    members = count // 2
    gathered, product = rows * 512 * 2, rows * 256 * 2
    assert found.wire_bytes_by("purpose", "axes") == {
        ("all-gather", "fsdp"): gathered * (members - 1) / members,
        ("all-reduce", "data"): product,
    }
    assert found.flops == 2 * rows * 256 * 512
    assert found.memory.argument_size_in_bytes == 256 * 512 * 2
    assert (found.schedule.network_across > 0) == (hosts > 1 if platform == "gpu" else slices > 1)
    assert found.schedule.step >= found.schedule.compute > 0


def hosts_of_gpus(kind, hosts, each):
    """What JAX says of real GPUs: every host has a slice's number of its own."""
    return [
        types.SimpleNamespace(device_kind=kind, platform="gpu", process_index=h, slice_index=h)
        for h in range(hosts)
        for _ in range(each)
    ]


def test_hosts_of_real_gpus_are_no_slices():
    where = topologies.of(hosts_of_gpus("NVIDIA H100 80GB HBM3", 2, 4))
    assert (where.slices, where.domains, where.are_present) == (1, (2, 4), False)
    assert topologies.of(jax.devices()).are_present


def test_a_kind_that_is_not_known_is_not_planned_for():
    with pytest.raises(UsageError, match="kind 'NVIDIA L40S': their memory and rates are not"):
        topologies.of(hosts_of_gpus("NVIDIA L40S", 1, 8))
