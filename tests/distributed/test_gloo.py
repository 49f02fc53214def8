"""Sums between two processes' CPUs are right at sizes where gloo's own reduce-scatter is not."""

import subprocess

import pytest

from tests.support.programs import pair

BLOCK = 2**21  # elements: 8 MiB
ROUNDS = 4

PROGRAM = f"""
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from research_dp.distributed.collectives import PLAIN
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = Mesh(jax.devices(), ("fsdp",))
here = NamedSharding(mesh, P("fsdp"))
step = jax.jit(jax.shard_map(
    lambda x: (PLAIN.reduce_scatter(x[0], "fsdp", 0)[None], PLAIN.all_reduce(x[0], ("fsdp",))[None],
               PLAIN.all_gather(x[0], "fsdp", 0, "varying")[None]),
    mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False))
wrong = 0
for round in range({ROUNDS}):
    x = np.random.default_rng(round).integers(0, 100, (2, {BLOCK} * 2)).astype(np.float32)
    given = jax.make_array_from_callback(x.shape, here, lambda index: x[index])
    if not round:
        text = step.lower(given).compile().as_text()
        assert "reduce-scatter" not in text and "all-gather" not in text
    block, whole, both = (y.addressable_shards[0].data[0] for y in step(given))
    total = x.sum(0)
    own = total.reshape(2, -1)[jax.process_index()]
    wrong += not (np.array_equal(block, own) and np.array_equal(whole, total))
    wrong += not np.array_equal(both, x.reshape(-1))
print("wrong", wrong)
"""


@pytest.mark.slow
def test_large_sums_between_processes_are_exact():
    with pair(PROGRAM, stderr=subprocess.STDOUT) as (_, both):
        for process in both:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0 and "wrong 0" in output, output
