"""A program that does not fit is an answer, told apart from an error."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from research_dp.analysis.program_cost import ProgramCost
from research_dp.analysis.schedule import Schedule
from research_dp.analysis.topologies import topology
from research_dp.errors import UsageError
from research_dp.planning import estimate
from research_dp.planning.estimate import compile_step, dump_options, text_of
from research_dp.planning.row import Row
from research_dp.types import Work
from tests.support.compilers import needs_compiler
from tests.support.plan_rows import absent


class Lowered:
    def __init__(self, message):
        self.message = message

    def compile(self, options):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (25.00G) exceeds available HBM (15.75G). HLO module: jit_f.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 25.00G of 15.75G hbm.",
    ],
)
def test_does_not_fit(message):
    row = Row("x", available_bytes=int(15.75 * 2**30), state_bytes=10**10)
    assert compile_step(row, Lowered(message), {}) is None
    assert (row.needed_bytes, row.fits) == (25 * 2**30, False)
    assert row.problem == "does not fit: needs 26.84 of 16.91 GB a device, of which state 10.00"


def test_other_errors_stay():
    row = Row("x")
    assert compile_step(row, Lowered("INTERNAL: libdevice not found"), {}) is None
    assert row.problem == "does not compile: INTERNAL: libdevice not found"
    assert (row.needed_bytes, row.fits) == (None, False)


def test_what_fits_compiles():
    row = Row("x")
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), jnp.float32))
    program = compile_step(row, lowered, {})
    assert program.memory_analysis().argument_size_in_bytes == 32
    assert row.fits and row.problem is None
    small = Row("x", available_bytes=63)
    assert compile_step(small, lowered, {}) is not None
    assert (small.needed_bytes, small.fits) == (64, False)


@pytest.mark.slow
@needs_compiler("tpu")
def test_a_tpu_program_that_does_not_fit():
    where = topology("v5e-4")
    rows = NamedSharding(where.mesh((4,), ("fsdp",)), P("fsdp"))
    x = jax.ShapeDtypeStruct((4 * 20480, 65536), jnp.float32, sharding=rows)
    lowered = jax.jit(lambda x: (jnp.sort(x, 0)[::-1], x + 1), out_shardings=rows).lower(x)
    row = Row("x", available_bytes=where.memory_budget()[0])
    assert compile_step(row, lowered, {}) is None
    assert row.needed_bytes > row.available_bytes
    assert "does not fit" in row.problem


def test_a_program_is_printed_by_its_compiler_where_jaxlib_may_not_be_able_to(tmp_path):
    class Newer:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: unknown")

    assert dump_options("gpu", tmp_path) == {}
    assert dump_options("tpu", tmp_path)["xla_dump_to"] == str(tmp_path)
    with pytest.raises(jax.errors.JaxRuntimeError):
        text_of(Newer(), tmp_path)
    (tmp_path / "module_1.jit_convert.after_codegen.txt").write_text("small")
    (tmp_path / "module_2.jit_train.after_codegen.txt").write_text("the larger one")
    (tmp_path / "module_2.jit_train.after_optimizations.txt").write_text("before: larger still")
    assert text_of(Newer(), tmp_path) == "the larger one"


@pytest.mark.parametrize(("across", "bound"), [(4.0, "network across"), (0.0, "compute")])
def test_what_bounds_the_step(across, bound):
    times = Schedule(3.0, 2.0, 1.0, across, 1.0, 0.0, 5.0, 8.0, 6.0)
    spec = types.SimpleNamespace(batch_size=10, model=types.SimpleNamespace(work=None))
    row = Row("x")
    estimate._set_costs(row, ProgramCost(None, 7, (), times), spec, topology("cpu:8"))
    assert (row.bound, row.flops, row.hidden_fraction) == (bound, 7, 0.75)
    assert (row.predicted_seconds, row.examples_per_second) == (5.0, 2.0)
    assert row.predicted_parts["exposed"] == 1.0


def test_rates_are_those_of_all_devices_together():
    where = absent("h100:8x8", "h100", 64, 8)
    work = Work(tokens=7, flops=32 * where.chip.peak("bfloat16"), dtype="bfloat16")
    model = types.SimpleNamespace(work=lambda example: work)
    spec = types.SimpleNamespace(batch_size=10, model=model, example={})
    row, times = Row("x", mesh={"data": 8, "fsdp": 8}), Schedule(*[5.0] * 9)
    estimate._set_costs(row, ProgramCost(None, 7, (), times), spec, where)
    assert (row.examples_per_second, row.tokens_per_second, row.mfu) == (2.0, 14.0, 1.0)


def test_the_first_of_the_measured_steps_does_not_count(monkeypatch):
    took = [100.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    clock = [0.0]

    def program(state, batch):
        clock[0] += took[state]
        return state + 1, {}

    monkeypatch.setattr(estimate.time, "perf_counter", lambda: clock[0])
    batch = types.SimpleNamespace(position=np.zeros((1, 8)), examples={})
    strategy = types.SimpleNamespace(
        abstract_batch=batch, place_batch=lambda examples: batch, init=lambda key: 0
    )
    assert estimate._median_seconds(estimate.Compiled(Row("x"), strategy, program)) == 3.0


@pytest.mark.parametrize(
    ("where", "count", "expected"),
    [
        (("h100:8x8", "h100", 64, 8), 16, "h100:2x8"),
        (("h100:8x8", "h100", 64, 8), 4, "h100:1x4"),
        (("v5e-64", "v5e", 64, 1), 256, "v5e-256"),
        (("cpu:8", "cpu", 8, 1), 2, "cpu:2"),
        (("h100:8x8", "h100", 64, 8), 12, "hosts of 8 devices: give a multiple of 8, or fewer"),
        (("v5e-64", "v5e", 64, 1), 512, "at most 256 chips: plan for slices, e.g. 2xv5e-64"),
        (("cpu:8", "cpu", 8, 1), 16, "--cpu_devices=16 makes as many"),
    ],
)
def test_other_sizes_have_whole_hosts(monkeypatch, where, count, expected):
    if where[1] != "cpu":  # whose compiler may be absent
        monkeypatch.setattr(estimate, "topology", lambda name: absent(name, where[1], count, 1))
    if " " in expected:
        with pytest.raises(UsageError, match=expected):
            estimate.resized(absent(*where), count)
    else:
        assert estimate.resized(absent(*where), count).name == expected


def test_what_a_model_sends_is_no_waste_of_its_strategy():
    sent = {"total": 30.0, "of_model": 10.0}
    assert Row("x", wire_bytes=sent, min_wire_bytes=20.0).wire_ratio == 1.0
