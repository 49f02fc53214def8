"""Measures what this project's own step needs on 64 accelerators, compiled without one.

python experiments/limits/lm_1b.py [h100:8x8|v5e-64] [--case=NAME ...] [--budget] [--init]

Needs the extra `plan-gpu` or `plan-tpu`. A case is a list of shipped gin files and bindings. With
`--budget` it takes the cases that have one; the status is 1 if one exceeds it. With `--init` the
script reads the program that initialises the state instead of the step.
"""

import argparse
import dataclasses
import math
import sys
import time

import jax
import numpy as np
import optax

from research_dp.analysis.program_cost import ProgramCost, read
from research_dp.analysis.topologies import Topology, topology
from research_dp.config import gin_internals, load
from research_dp.distributed.mesh import planning_for
from research_dp.strategies import Strategy, TrainSpec

LENGTH = 2048
BF16 = "gin/precision/bf16_collectives.gin"
GATHER = "gin/precision/bf16_gather.gin"
PARAMS = "gin/precision/bf16_params.gin"
MEMORY, SPEED = "gin/options/h100_memory.gin", "gin/options/h100.gin"
V5E, TORUS = "gin/options/v5e.gin", "gin/options/tpu_torus.gin"
NNX, PLAIN = "transformer.api = 'nnx'", "transformer.attention = 'chunked'"


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy with gin files and bindings, and its budget.

    Attributes:
        strategy: Its stem.
        given: Gin files and bindings.
        wire: GB a device sends a step.
        temporary: GB of temporary memory a device.
        state: GB of arguments a device.
        collectives: Number a step.
        waited: Predicted milliseconds of waiting for the network's bytes, without latency.
    """

    strategy: str
    given: tuple[str, ...] = ()
    wire: float | None = None
    temporary: float | None = None
    state: float | None = None
    collectives: int | None = None
    waited: float | None = None


H100 = {
    "memory": Case("fsdp", (BF16, MEMORY), 6.88, 0.62),
    "speed": Case("fsdp", (BF16, SPEED), 6.63, 1.0, None, 80, 3.0),
    "f32 scatter": Case("fsdp", (GATHER, MEMORY), 9.26),
    "no flash attention": Case("fsdp", (BF16, MEMORY, PLAIN), 6.88, 1.0),
    "memory, nnx": Case("fsdp", (BF16, MEMORY, NNX), 6.88, 0.62),
    "speed, nnx": Case("fsdp", (BF16, SPEED, NNX), 6.63, 1.0, None, 80, 3.0),
    "fsdp_keep": Case("fsdp_keep", (BF16,), 4.76),
    "zero1": Case("zero1", (PARAMS,), 4.76, 1.3, 2.65),
    "zero2": Case("zero2", (PARAMS,), 4.76, 1.3, 2.65),
    "hsdp 8 x 8": Case("hsdp", (BF16, MEMORY, "make_mesh.axes = {'data': 8, 'fsdp': 8}"), 6.65),
    "ddp bf16": Case("ddp", (BF16,), 4.76),
    "ddp f32": Case("ddp", (), 9.52),
    "spmd_fsdp": Case("spmd_fsdp", (BF16,), 6.9, collectives=200),
}
V5E = {
    "fsdp": Case("fsdp", (BF16, V5E), 9.1, 0.6, None, None, 17.0),
    "fsdp, torus": Case("fsdp", (BF16, TORUS), 6.76, 0.6, None, None, 34.2),
    "fsdp, no options": Case("fsdp", (BF16,)),
}
CASES = {"h100:8x8": H100, "v5e-64": V5E}


def build_case(case: Case, where: Topology) -> Strategy:
    """Builds the strategy of a case on these devices."""
    files = [word for word in case.given if word.endswith(".gin")]
    bindings = [word for word in case.given if not word.endswith(".gin")]
    load.reset()
    load.load(["gin/models/lm_1b.gin", f"gin/strategies/{case.strategy}.gin", *files], bindings)
    with planning_for(where.devices):
        config = gin_internals.value_of("train.strategy")
    spec = TrainSpec(
        model=gin_internals.value_of("train.model"),
        optimizer=optax.adamw(1e-3),
        example={"tokens": jax.ShapeDtypeStruct((LENGTH,), np.int32)},
        batch_size=len(where.devices),
    )
    return config.build(spec)


def compile_step(case: Case, where: Topology) -> ProgramCost:
    """Compiles the training step of a case and reads it."""
    built = build_case(case, where)
    lowered = built.train_step.lower(built.abstract_state, built.abstract_batch)
    return read(lowered.compile(), built.mesh, where)


def init_row(case: Case, where: Topology) -> tuple[str, bool]:
    """Returns the table cells for the initialisation, and whether it exceeds the budget."""
    built = build_case(case, where)
    memory = built.init.lower(jax.eval_shape(lambda: jax.random.key(0))).compile().memory_analysis()
    leaves = jax.tree.leaves(built.abstract_state)
    shards = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
    leaf = max(x.size * x.dtype.itemsize for x in leaves)
    peak = memory.output_size_in_bytes + memory.temp_size_in_bytes
    figures = (sum(shards), memory.temp_size_in_bytes, peak, leaf)
    return " | ".join(f"{x:,}" for x in figures), peak > sum(shards) + leaf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topology", nargs="?", default="h100:8x8", choices=CASES)
    parser.add_argument("--case", action="append", help="run this case; default: all")
    parser.add_argument(
        "--budget", action="store_true", help="status 1 if a case exceeds its budget"
    )
    parser.add_argument("--init", action="store_true", help="read the initialisation")
    flags = parser.parse_args()
    where, over = topology(flags.topology), 0
    cases = {n: c for n, c in CASES[flags.topology].items() if not flags.case or n in flags.case}
    if flags.budget and not flags.init:
        cases = {n: c for n, c in cases.items() if c.wire is not None}
    if flags.init:
        print(
            "| case | state bytes | temporary bytes | peak | largest leaf |\n|---|---|---|---|---|"
        )
        for name, case in cases.items():
            cells, too_much = init_row(case, where)
            over += too_much
            print(f"| {name} | {cells} |", flush=True)
        return 1 if flags.budget and over else 0
    print("| case | state GB | temporary GB | wire GB | collectives | waited ms | step ms ", end="")
    print("| with latency | step ms | s |\n|---|---|---|---|---|---|---|---|---|---|")
    for name, case in cases.items():
        start = time.perf_counter()
        cost = compile_step(case, where)
        bytes_alone = cost.without_latency
        measured = [
            (cost.memory.argument_size_in_bytes / 1e9, case.state),
            (cost.memory.temp_size_in_bytes / 1e9, case.temporary),
            (cost.wire_bytes / 1e9, case.wire),
            (cost.collective_count, case.collectives),
            (bytes_alone.exposed * 1e3, case.waited),
        ]
        cells = [
            f"{value:.4g}" + (f" (at most {most})" if most else "") for value, most in measured
        ]
        over += sum(most is not None and value > most for value, most in measured)
        seconds = time.perf_counter() - start
        cells += [f"{bytes_alone.step * 1e3:.1f}", f"{cost.schedule.exposed * 1e3:.1f}"]
        cells += [f"{cost.schedule.step * 1e3:.1f}", f"{seconds:.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 1 if flags.budget and over else 0


if __name__ == "__main__":
    sys.exit(main())
