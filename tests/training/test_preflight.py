"""The start-up test of collectives: what is right passes, each kind of fault is seen and named."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax.sharding import PartitionSpec as P

import research_dp.training.train  # noqa: F401  (registers `train`)
from research_dp.distributed.collectives import (
    EXCHANGED,
    PLAIN,
    all_gather_by_exchange,
    over_gloo,
)
from research_dp.errors import RunFailure
from research_dp.training import preflight
from research_dp.training.preflight import Probe
from tests.support.recipes import recipe
from tests.support.steps import mesh_of
from tests.support.three_arrays import build, spec_of

DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "permute")


def test_what_is_right_passes_on_every_axis_and_dtype():
    mesh = mesh_of(data=2, fsdp=4)
    wanted = [
        Probe(kind, axes, dtype, 100)
        for kind in KINDS
        for axes in (("fsdp",), ("data", "fsdp"))
        for dtype in DTYPES
        if not (kind == "permute" and len(axes) > 1)
    ]
    assert preflight.faults(mesh, wanted) == []


def drop_last(send, x, axes):
    """What a race between buffers does: the last addend is lost in a few elements."""
    lost = jax.lax.axis_index(axes) == 7
    return send(jnp.where(lost & (jnp.arange(x.size) % 50 == 7), 0, x), axes)


def exchange_blocks(send, x, axes):
    """A wrong order of ranks."""
    return jnp.roll(send(x, axes), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [drop_last, exchange_blocks])
def test_a_fault_is_seen(monkeypatch, kind, fault):
    broken = functools.partial(fault, preflight._COLLECTIVES[kind])
    monkeypatch.setitem(preflight._COLLECTIVES, kind, broken)
    mesh = mesh_of(data=1, fsdp=8)
    told = preflight.faults(mesh, [Probe(k, ("fsdp",), "bfloat16", 800) for k in KINDS])
    assert len(told) == 1 and told[0].startswith(f"{kind} of 1,600 bytes of bfloat16 over fsdp")


def preflight_of(stem, monkeypatch, broken):
    spec = spec_of()
    how = recipe(stem)
    strategy = how.build(spec)
    # One process's CPU is not tested by itself: as if these were several processes.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(preflight, "check_configurations", lambda own: None)
    for kind in broken:
        send = functools.partial(drop_last, preflight._COLLECTIVES[kind])
        monkeypatch.setitem(preflight._COLLECTIVES, kind, send)
    said = []
    return strategy, preflight.preflight(how, spec, strategy, said.append), said


def test_a_run_takes_another_route_around_a_broken_reduce_scatter(monkeypatch):
    strategy, found, said = preflight_of("zero1", monkeypatch, ["reduce-scatter"])
    assert "reduce-scatter of 1,024 bytes" in said[0] and "by all-to-all instead" in said[0]
    kinds = {probe.kind for probe in preflight.probes(found)}
    assert {p.kind for p in preflight.probes(strategy)} - kinds == {"all-reduce", "reduce-scatter"}


def test_a_run_without_another_route_is_refused(monkeypatch):
    with pytest.raises(RunFailure, match="all-gather of"):
        preflight_of("fsdp", monkeypatch, ["all-gather", "reduce-scatter"])
    with pytest.raises(RunFailure, match="all-reduce of 512 bytes"):
        preflight_of("spmd", monkeypatch, ["all-reduce"])


@pytest.mark.parametrize("stem", ["fsdp", "ddp", "spmd"])
def test_a_run_whose_collectives_are_right_is_left_as_it_is(monkeypatch, stem):
    strategy, found, said = preflight_of(stem, monkeypatch, [])
    assert found is strategy and said[0].startswith("Collectives tested")


@pytest.mark.parametrize("between_cpus", [False, True])
def test_what_the_compiler_may_insert_is_tested(monkeypatch, between_cpus):
    monkeypatch.setattr(preflight, "over_gloo", lambda: between_cpus)
    found = {probe.kind for probe in preflight.probes(build("spmd_fsdp"))}
    scatters = set() if between_cpus else {"reduce-scatter"}
    assert found == {"all-reduce", "all-gather"} | scatters


class Service:
    """Of two processes: what the other one, which has devices 4 to 7, found is there already."""

    def __init__(self, found):
        self.kept = {"1": found}

    def key_value_set(self, key, value):
        self.kept[key.rpartition("/")[2]] = value

    def blocking_key_value_get(self, key, timeout):
        return self.kept[key.rpartition("/")[2]]


def test_what_another_process_found_comes_by_the_coordination_service(monkeypatch):
    service = Service(json.dumps({device: [3] for device in range(4, 8)}))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.global_state, "client", service)
    (told,) = preflight.faults(mesh_of(data=8), [Probe("all-reduce", ("data",), "float32", 64)])
    assert "12 elements in 3 runs, on device 4, 5, 6, 7" in told
    assert json.loads(service.kept["0"])["0"] == [0]


def test_sums_by_exchange_are_those_of_the_library():
    mesh = mesh_of(data=2, fsdp=4)
    x = jnp.asarray(np.random.default_rng(0).integers(-99, 99, (8, 12, 5)), jnp.float32)

    def both(reduction, x):
        block = reduction.reduce_scatter(x[0], "fsdp", 0)
        return block[None], reduction.all_reduce(x[0], ("data", "fsdp"))[None]

    results = [
        jax.jit(
            jax.shard_map(
                functools.partial(both, reduction),
                mesh=mesh,
                in_specs=P(("data", "fsdp")),
                out_specs=P(("data", "fsdp")),
                check_vma=False,
            )
        )(x)
        for reduction in (PLAIN, EXCHANGED)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert results[0][0].shape == (8, 3, 5)


def test_blocks_by_exchange_are_those_of_the_library():
    mesh = mesh_of(data=2, fsdp=4)
    x = jnp.arange(8 * 3 * 5, dtype=jnp.bfloat16).reshape(2, 12, 5)

    def both(x):
        return all_gather_by_exchange(x, "fsdp", 1), jax.lax.all_gather(
            x, "fsdp", axis=1, tiled=True
        )

    cut = P("data", "fsdp")
    mapped = jax.shard_map(both, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    ours, theirs = jax.jit(mapped)(x)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.shape == (2, 4 * 12, 5)


def test_between_cpus_reductions_are_exchanged_and_nowhere_else(monkeypatch):
    assert not over_gloo()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert over_gloo()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not over_gloo()


def test_exchanged_strategies_follow_the_plain_ones():
    norms = []
    for reduction in (PLAIN, EXCHANGED):
        slots = {"reduction": reduction}
        strategy = build("hsdp", "make_mesh.axes = {'data': 2, 'fsdp': 4}", slots=slots)
        x = np.linspace(0.5, 1.5, 16, dtype=np.float32)[strategy.train_rows]
        state = strategy.init(jax.random.key(0))
        for _ in range(2):
            state, metrics = strategy.train_step(state, strategy.place_batch({"x": x}))
        norms.append(np.asarray(metrics["grad_norm"]))
    np.testing.assert_allclose(*norms, rtol=1e-6)
