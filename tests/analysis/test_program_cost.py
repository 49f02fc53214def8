"""Costs read from compiled programs whose traffic is known by hand: eight CPU devices."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from research_dp.analysis import schedule, topologies
from research_dp.analysis.program_cost import collectives_of, link_rate, read, wire_totals
from research_dp.analysis.topologies import topology
from tests.support.repository import ROOT, stems
from tests.support.strategies import build, one_matrix, traffic

BOTH = ("data", "fsdp")
ROWS, COLUMNS = 64, 128
NBYTES = ROWS * COLUMNS * 4  # of a device's array


def in_a_loop(function, times):
    def looped(x):
        return lax.scan(lambda carry, _: (function(carry), None), x, None, length=times)[0]

    return looped


def cost(function, sizes=(2, 4), times=None):
    """Costs of a function of each device's f32[64, 128], run `times` times in a loop."""
    where = topology("cpu:8")
    mesh = where.mesh(sizes, BOTH)
    mapped = jax.shard_map(
        in_a_loop(function, times) if times else function,
        mesh=mesh,
        in_specs=P(BOTH),
        out_specs=P(BOTH),
        check_vma=False,
    )
    argument = jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32)
    return read(jax.jit(mapped).lower(argument).compile(), mesh, where)


def gather(axis):
    def function(x):
        whole = lax.all_gather(jnp.tanh(x), axis, tiled=True)
        return whole.reshape(-1, *x.shape).max(0)

    return function


def scatter(axis):
    def function(x):
        part = lax.psum_scatter(jnp.tanh(x), axis, tiled=True)
        return jnp.tile(part, (x.shape[0] // part.shape[0], 1))

    return function


def exchange(axis):
    return lambda x: lax.all_to_all(jnp.tanh(x), axis, 0, 0, tiled=True)


def total(axis):
    return lambda x: lax.psum(jnp.tanh(x), axis)


def shift(x):
    return lax.ppermute(jnp.tanh(x), "fsdp", [(i, (i + 1) % 4) for i in range(4)])


CASES = {  # function, kind, axes, devices, wire bytes of one execution
    "psum over fsdp": (total("fsdp"), "all-reduce", "fsdp", 4, 2 * NBYTES * 3 / 4),
    "psum over data": (total("data"), "all-reduce", "data", 2, 2 * NBYTES * 1 / 2),
    "psum over both": (total(BOTH), "all-reduce", "data+fsdp", 8, 2 * NBYTES * 7 / 8),
    "gather over fsdp": (gather("fsdp"), "all-gather", "fsdp", 4, 4 * NBYTES * 3 / 4),
    "gather over both": (gather(BOTH), "all-gather", "data+fsdp", 8, 8 * NBYTES * 7 / 8),
    "scatter over fsdp": (scatter("fsdp"), "reduce-scatter", "fsdp", 4, NBYTES * 3 / 4),
    "scatter over data": (scatter("data"), "reduce-scatter", "data", 2, NBYTES * 1 / 2),
    "exchange over fsdp": (exchange("fsdp"), "all-to-all", "fsdp", 4, NBYTES * 3 / 4),
    "exchange over data": (exchange("data"), "all-to-all", "data", 2, NBYTES * 1 / 2),
    "shift along fsdp": (shift, "permute", "fsdp", 4, NBYTES),
}


@pytest.mark.parametrize("times", [None, 5], ids=["once", "in a loop"])
@pytest.mark.parametrize("name", CASES)
def test_one_collective(name, times):
    function, kind, axes, devices, wire_bytes = CASES[name]
    found = cost(function, times=times)
    turns = times or 1
    assert found.wire_bytes_by("kind", "axes", "dtype") == {(kind, axes, "f32"): wire_bytes * turns}
    assert found.collective_count == turns
    if kind != "permute":
        assert {c.devices for c in found.collectives} == {devices}


def test_loops_in_loops_multiply():
    found = cost(in_a_loop(total("fsdp"), 3), times=5)
    assert found.collective_count == 15
    assert found.wire_bytes == 15 * 2 * NBYTES * 3 / 4


def test_a_loop_that_never_runs_sends_nothing():
    found = cost(lambda x: lax.fori_loop(3, 3, lambda _, y: lax.psum(y, "fsdp"), x))
    assert (found.wire_bytes, found.collective_count) == (0, 0)


def test_flops_in_a_loop():
    def function(x):
        weights = jnp.ones((COLUMNS, COLUMNS)) * x[0, 0]
        return jnp.tanh(x @ weights)

    assert cost(function, times=5).flops == 5 * 2 * ROWS * COLUMNS * COLUMNS


def test_arrays_of_two_types_in_one_operation():
    def function(x):
        y = jnp.tanh(x)
        one, other = lax.psum((y, jnp.int32(y)), "fsdp")
        return one + other

    found = cost(function)
    assert found.wire_bytes == 2 * 2 * NBYTES * 3 / 4
    assert found.collective_count == len({c.name for c in found.collectives})


def test_the_time_of_one_operation_is_that_of_all_its_types():
    text = """
ENTRY %main (x: f32[8], y: bf16[4]) -> (f32[8], bf16[4]) {
  %x = f32[8]{0} parameter(0)
  %y = bf16[4]{0} parameter(1)
  ROOT %z = (f32[8]{0}, bf16[4]{0}) all-reduce(%x, %y), replica_groups={{0,1,2,3,4,5,6,7}}
}
"""
    where = topology("cpu:8")
    program = SimpleNamespace(memory_analysis=lambda: None)
    found = read(program, where.mesh((1, 8), BOTH), where, text)
    assert found.schedule.wire_bytes == found.wire_bytes == 2 * (32 + 8) * 7 / 8


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    def function(x):
        return lax.while_loop(lambda y: y[0, 0] < 3, lambda y: y + lax.pmax(y, "fsdp"), x)

    with pytest.raises(NotImplementedError, match="unknown length"):
        cost(function)


def test_memory_is_the_compilers():
    found = cost(total("fsdp"))
    assert found.memory.argument_size_in_bytes == NBYTES
    assert found.memory.output_size_in_bytes == NBYTES
    assert found.memory.peak_memory_in_bytes >= NBYTES


@pytest.mark.parametrize("stem", ["ddp", "zero1", "zero2", "fsdp_keep", "fsdp", "hsdp"])
def test_a_strategy_sends_what_was_traced(stem):
    """Compiled and traced counts agree; only what is gathered twice XLA may gather once here."""
    strategy = build(stem, one_matrix(), accumulation=2)
    where = topology("cpu:8")
    mesh = where.mesh((2, 4) if stem == "hsdp" else (1, 8), BOTH)
    shapes = strategy.abstract_state, strategy.abstract_batch
    found = read(jax.jit(strategy.train_step).lower(*shapes).compile(), mesh, where)
    traced = sum(c.wire_bytes for c in traffic(strategy))
    if stem in ("fsdp", "hsdp"):
        gathered_again = sum(c.wire_bytes for c in traffic(strategy) if c.kind == "all-gather") / 2
        assert traced - gathered_again <= found.wire_bytes <= traced
    else:
        assert found.wire_bytes == pytest.approx(traced)


# ---- From the text alone, and at other speeds of the links ----


def step_of(stem):
    """A strategy's compiled step, and the mesh and devices that it runs on."""
    strategy = build(stem, one_matrix(), accumulation=2)
    shapes = strategy.abstract_state, strategy.abstract_batch
    return jax.jit(strategy.train_step).lower(*shapes).compile(), strategy.mesh


@pytest.mark.slow
@pytest.mark.parametrize("stem", stems())
def test_a_programs_text_says_what_it_sends(stem):
    """A comparison reads recorded programs where their devices are not: no byte may differ."""
    program, mesh = step_of(stem)
    where = topologies.of(list(mesh.devices.flat))
    found = read(program, mesh, where)
    from_text = collectives_of(program.as_text(), dict(mesh.shape))
    assert from_text == found.collectives
    totals = wire_totals(from_text)
    assert totals["total"] == found.wire_bytes
    assert totals["by_kind"] == {k: v for (k,), v in found.wire_bytes_by("kind").items()}
    assert totals["by_axis"] == {k: v for (k,), v in found.wire_bytes_by("axes").items()}
    assert found.seconds_at(link_rate(where)) == found.schedule.step
    assert (found.wire_bytes > 0) == (stem != "single")


def gpus(hosts, each):
    devices = tuple(
        SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", process_index=h)
        for h in range(hosts)
        for _ in range(each)
    )
    return topologies.of(devices)


def recorded(where):
    """The costs of a stack of layers on these GPUs."""
    shape = {"data": 2, "fsdp": 8}
    mesh = SimpleNamespace(devices=np.array(where.devices, object).reshape(2, 8), shape=shape)
    program = SimpleNamespace(memory_analysis=lambda: None)
    return read(program, mesh, where, (ROOT / "tests" / "hlo" / "gpu_fsdp.txt").read_text())


@pytest.mark.parametrize(("hosts", "name"), [(2, "across_rate"), (1, "inside_rate")])
def test_a_step_with_links_of_another_speed(hosts, name):
    """The step is what a chip with those links would take, to the last bit."""
    where = gpus(hosts, 16 // hosts)
    found = recorded(where)
    own = link_rate(where)
    assert own == getattr(where.chip, name)
    assert found.seconds_at(own) == found.schedule.step
    for rate in (own / 1e4, own / 7, own * 7):
        chip = dataclasses.replace(where.chip, **{name: rate})
        other = recorded(dataclasses.replace(where, chip=chip))
        assert found.seconds_at(rate) == other.schedule.step
    slow, slower = found.seconds_at(own / 1e5), found.seconds_at(own / 1e6)
    assert slower == pytest.approx(10 * slow, rel=0.01), "bytes do not dominate"


def test_instructions_are_read_once_for_all_speeds(monkeypatch):
    """The page of a comparison has 30 speeds of each strategy's program."""
    found = recorded(gpus(2, 8))
    monkeypatch.setattr(schedule, "hbm_bytes", None)  # cannot be called
    times = [found.seconds_at(rate) for rate in np.geomspace(1e5, 1e11, 30)]
    assert times == sorted(times, reverse=True)
