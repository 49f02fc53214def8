"""Compares a step of `lm_tiny` under each mapped strategy with the step written by hand.

python experiments/overhead/lm_steps.py [--strategy=NAME ...] [--pairs=N] [--sequences=N]

Eight CPU devices in one process, AdamW, clipping. Both start from the same weights and must give
the same losses. Then they alternate, a few steps each, so that other work on the cores cancels out
in the ratios.
"""

import argparse
import statistics
import time

import jax
import numpy as np
from lm_by_hand import CLIP, OPTIMIZER, build

from research_dp.config import gin_internals, load
from research_dp.strategies import TrainSpec

COMMON = ["gin/models/lm_tiny.gin", "gin/options/cpu.gin"]
LENGTH, STEPS, WARM_UP = 256, 3, 3
CASES = {name: name for name in ("ddp", "zero1", "zero2", "fsdp", "fsdp_keep", "hsdp")}
CASES = {**CASES, "ddp beside jit": "jit"}


def shipped(strategy: str, sequences: int, *files: str):
    load.reset()
    load.load(
        [*COMMON, f"gin/strategies/{strategy}.gin", *files],
        ["VOCAB_SIZE = 256", "shard_params.min_weight_size = 1024"],
    )
    spec = TrainSpec(
        model=gin_internals.value_of("train.model"),
        optimizer=OPTIMIZER,
        example={"tokens": jax.ShapeDtypeStruct((LENGTH,), np.int32)},
        batch_size=sequences,
        max_grad_norm=CLIP,
    )
    return gin_internals.value_of("train.strategy").build(spec)


def by_name(params):
    """Renames the arrays as in the hand-written step."""
    blocks = {name: next(iter(arrays.values())) for name, arrays in params["blocks"].items()}
    return {"embed": params["embed"]["table"], "norm": params["norm"]["scale"], "blocks": blocks}


def compare(case: str, by_hand: str, pairs: int, sequences: int) -> list[float]:
    """Returns the time ratios of a few steps, ours over by hand, pair by pair."""
    strategy = shipped(case, sequences)
    tokens = np.random.default_rng(0).integers(0, 256, (sequences, LENGTH)).astype(np.int32)
    ours = [strategy.init(jax.random.key(0))]
    weights = jax.tree.map(np.asarray, by_name(ours[0].params))
    theirs, step = build(by_hand, strategy.mesh, weights)
    theirs, placed = list(theirs), strategy.place_batch({"tokens": tokens})
    rows = jax.sharding.NamedSharding(strategy.mesh, jax.P(("data", "fsdp")))
    their_tokens = jax.device_put(tokens, rows)

    def run_ours() -> float:
        for _ in range(STEPS):
            ours[0], metrics = strategy.train_step(ours[0], placed)
            total, count = jax.device_get(metrics["loss"])
        return total / count

    def run_theirs() -> float:
        for _ in range(STEPS):
            *theirs[:], value, _ = step(*theirs, their_tokens)
            value = jax.device_get(value)
        return value

    for _ in range(WARM_UP):
        losses = run_ours(), run_theirs()
        np.testing.assert_allclose(*losses, rtol=1e-4)
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for run in (run_ours, run_theirs) if pair % 2 else (run_theirs, run_ours):
            start = time.perf_counter()
            run()
            seconds[run] = time.perf_counter() - start
        ratios.append(seconds[run_ours] / seconds[run_theirs])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", action="append", choices=CASES)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=16)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    print("| strategy | median ratio | quartiles |\n|---|---|---|")
    for case in flags.strategy or CASES:
        ratios = compare(case.split()[0], CASES[case], flags.pairs, flags.sequences)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"| {case} | {middle:.3f} | {low:.3f} to {high:.3f} |", flush=True)


if __name__ == "__main__":
    main()
