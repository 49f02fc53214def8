"""How long a strategy's step takes to build, to compile and to read, by the number of leaves.

python experiments/plan/leaves.py cpu:8 ddp 100 500 1000

CPU seconds. Leaves are matrices of 16 x 16, in as many layers one after the other.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import research_dp
from research_dp.analysis.program_cost import read
from research_dp.analysis.topologies import topology
from research_dp.distributed.mesh import planning_for


def model(count: int) -> research_dp.TrainableModel:
    """Layers, one leaf each."""

    def init(key, batch):
        return {f"layer_{i:05}": {"w": jnp.zeros((16, 16))} for i in range(count)}, {}

    def loss(params, model_state, batch, keys, *, train, batch_axes):
        x = batch["x"]
        for name in sorted(params):
            x = jnp.tanh(x @ params[name]["w"])
        return research_dp.LossOutput(jnp.sum(x), jnp.float32(len(x)), model_state, {})

    return research_dp.TrainableModel(init, loss)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    where, stem, *counts = sys.argv[1:]
    for count in map(int, counts):
        times = [time.process_time()]
        with planning_for(topology(where).devices):
            config = research_dp.strategy(stem, {"shard_params.min_weight_size": 64})
            spec = research_dp.TrainSpec(
                model=model(count),
                optimizer=optax.adamw(1e-3),
                example={"x": jax.ShapeDtypeStruct((16,), np.float32)},
                batch_size=64,
            )
            strategy = config.build(spec)
            times.append(time.process_time())
            program = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
            program = program.compile()
        times.append(time.process_time())
        cost = read(program, strategy.mesh, topology(where))
        times.append(time.process_time())
        parts = " | ".join(f"{seconds:.1f}" for seconds in np.diff(times))
        print(f"| {where} | {stem} | {count} | {parts} | {cost.collective_count} |", flush=True)


if __name__ == "__main__":
    main()
