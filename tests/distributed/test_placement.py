"""Batches and states on devices: modules, traced arrays, optimizer states, several processes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import research_dp
from research_dp.distributed.placement import ProgramMemory
from tests.support.programs import pair
from tests.support.steps import on_all_devices, shard_shapes


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_batches_may_be_modules_and_traced(kind):
    class Batch(nnx.Module):
        def __init__(self):
            self.x, self.label = nnx.Variable(np.ones((8, 2))), "lbl"

    axis_types = (getattr(jax.sharding.AxisType, kind),)
    mesh = Mesh(jax.devices(), ("data",), axis_types=axis_types)
    sharding = research_dp.create_data_parallel_sharding(mesh)
    placed = research_dp.place_batch_on_shards(Batch(), sharding)
    assert (placed.label, shard_shapes(placed.x[...])) == ("lbl", {(1, 2)})
    inside = jax.jit(lambda x: research_dp.place_batch_on_shards(2 * x, sharding))
    assert shard_shapes(inside(jnp.ones((8, 2)))) == {(1, 2)}


def test_optimizer_state_is_placed_too():
    mesh = Mesh(jax.devices(), ("data",))
    optimizer = nnx.Optimizer(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)
    filters = {lambda path, x: x.ndim > 0: P("data"), ...: P()}
    placed = research_dp.place_nnx_state_on_shards(nnx.state(optimizer), mesh, filters)
    adam = placed["opt_state"][0]
    assert shard_shapes(adam["mu"]["kernel"][...]) == {(1, 8)}
    assert on_all_devices(adam["count"][...])


PROCESS = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
from jax.sharding import Mesh
import research_dp
mesh = Mesh(np.asarray(jax.devices()), ("data",))
sharding = research_dp.create_data_parallel_sharding(mesh)
mine = {"x": np.arange(4.0) + 4 * jax.process_index(), "s": "lbl"}
batch = research_dp.place_batch_on_shards(mine, sharding)
state = {"w": np.arange(8.0), "key": jax.random.key(0), "step": 3}
state = research_dp.place_model_state_on_shards(state, mesh, "shard")
for x in (batch["x"], state["w"]):
    assert x.shape == (8,), x.shape
    print([float(v) for shard in x.addressable_shards for v in shard.data])
assert batch["s"] == "lbl" and state["key"].is_fully_replicated and int(state["step"]) == 3
"""


@pytest.mark.slow
def test_each_process_gives_its_rows_of_a_batch_and_the_whole_state():
    with pair(PROCESS) as (_, both):
        out = [process.communicate(timeout=120)[0].splitlines() for process in both]
    held = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert out == [[str(rows)] * 2 for rows in held]


def test_memory_that_results_take_over_counts_once():
    figures = {"argument": 100, "output": 70, "temp": 10, "alias": 60}
    memory = types.SimpleNamespace(
        **{f"{name}_size_in_bytes": size for name, size in figures.items()},
        peak_memory_in_bytes=50,
    )
    program = types.SimpleNamespace(memory_analysis=lambda: memory)
    assert ProgramMemory.of(program) == (10, 50, 100 + 10 + 70 - 60)
