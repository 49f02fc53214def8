"""Times a training step on the devices that are present, beside what `plan` predicts.

python experiments/gpu/steps.py MODEL SEQUENCES STRATEGY [FILE|BINDING ...] [--profile=DIR]

A step trains on so many sequences of 2048 random tokens per device. The script prints one line of
JSON. With `--profile` three more steps are traced.
"""

import argparse
import json
import statistics
import sys
import time

import jax
import numpy as np
import optax

from research_dp.analysis import topologies
from research_dp.config import gin_internals, load
from research_dp.planning import estimate
from research_dp.strategies import TrainSpec

LENGTH, WARM_UP, STEPS = 2048, 3, 20
OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)


def spec_of(sequences: int) -> TrainSpec:
    return TrainSpec(
        model=gin_internals.value_of("train.model"),
        optimizer=OPTIMIZER,
        example={"tokens": jax.ShapeDtypeStruct((LENGTH,), np.int32)},
        batch_size=sequences * jax.device_count(),
        max_grad_norm=1.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("sequences", type=int)
    parser.add_argument("strategy")
    parser.add_argument("given", nargs="*")
    parser.add_argument("--profile")
    flags = parser.parse_args()
    files = [f"gin/models/{flags.model}.gin", f"gin/strategies/{flags.strategy}.gin"]
    files += [f"gin/{x}" for x in flags.given if x.endswith(".gin")]
    load.load(files, [x for x in flags.given if not x.endswith(".gin")])
    spec, config = spec_of(flags.sequences), gin_internals.value_of("train.strategy")
    compiled = estimate.compile_row("", config, spec, topologies.of(jax.devices()))
    row, strategy = compiled.row, compiled.strategy
    if compiled.program is None:
        sys.exit(row.problem)

    rows = len(strategy.train_rows)
    tokens = np.random.default_rng(0).integers(0, 32768, (rows, LENGTH)).astype(np.int32)
    batch, state = strategy.place_batch({"tokens": tokens}), strategy.init(jax.random.key(0))
    seconds, losses = [], []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        state, metrics = compiled.program(state, batch)
        total, count = np.asarray(metrics["loss"].addressable_shards[0].data)
        seconds.append(time.perf_counter() - start)
        losses.append(float(total / count))
    memory, step = jax.local_devices()[0].memory_stats() or {}, statistics.median(seconds[WARM_UP:])
    rate, gigabyte = row.predicted_seconds / step, 1e9
    found = {
        "case": " ".join([flags.model, str(flags.sequences), flags.strategy, *flags.given]),
        "devices": f"{jax.devices()[0].device_kind} x {jax.device_count()}",
        "ms": step * 1e3,
        "least and greatest": [min(seconds[WARM_UP:]) * 1e3, max(seconds[WARM_UP:]) * 1e3],
        "predicted ms": row.predicted_seconds * 1e3,
        "predicted parts": {k: x * 1e3 for k, x in row.predicted_parts.items()},
        "tokens/s": spec.batch_size * LENGTH / step,
        "MFU": row.mfu * rate,
        "peak GB": memory.get("peak_bytes_in_use", 0) / gigabyte,
        "in use GB": memory.get("bytes_in_use", 0) / gigabyte,
        "planned GB": row.needed_bytes / gigabyte,
        "temporary GB": row.temp_bytes / gigabyte,
        "compile s": row.compile_seconds,
        "losses": [losses[0], losses[-1]],
    }
    print(json.dumps(found), flush=True)
    if flags.profile:
        with jax.profiler.trace(flags.profile):
            for _ in range(3):
                state, metrics = compiled.program(state, batch)
            jax.block_until_ready(state)


if __name__ == "__main__":
    main()
