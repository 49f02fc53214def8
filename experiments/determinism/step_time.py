"""Compares step time and wire bytes of `tree_reduction` with the plain reduction, in pairs.

Run: python experiments/determinism/step_time.py [--pairs=15] [--shards=8] [--plot=FILE.svg]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import numpy as np
import optax

from research_dp.deterministic.reduction import tree_reduction
from research_dp.distributed.collectives import PLAIN
from research_dp.models import convnet, mlp, transformer
from research_dp.strategies import (
    TrainSpec,
    apply_gradients,
    data_parallel,
    fsdp_apply_gradients,
    gather_params,
    make_mesh,
    mapped,
    scatter_gradients,
    shard_params,
    sync_gradients,
)
from research_dp.strategies.jaxpr_collectives import collectives

# A low threshold, so that most parameters of these small models are sharded.
SHARD = functools.partial(shard_params, min_weight_size=1024)
FSDP = {"shard": SHARD, "gather": gather_params, "sync": sync_gradients}
STRATEGIES = {
    "ddp": ({"data": -1}, {"sync": sync_gradients, "update": apply_gradients}),
    "zero1": (
        {"fsdp": -1},
        {"shard": SHARD, "sync": scatter_gradients, "update": fsdp_apply_gradients},
    ),
    "fsdp": ({"fsdp": -1}, {**FSDP, "update": apply_gradients}),
    "hsdp": ({"data": 2, "fsdp": -1}, {**FSDP, "update": apply_gradients}),
}
IMAGE = {
    "image": jax.ShapeDtypeStruct((8, 8, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}
TEXT = {"tokens": jax.ShapeDtypeStruct((64,), np.int32)}
DECODER = {"vocab_size": 256, "width": 128, "depth": 4, "heads": 4, "mlp_width": 256}
MODELS = {
    "mlp": (mlp(widths=(1024, 1024), num_classes=10), IMAGE, 512),
    "convnet": (convnet(num_classes=10, dropout_rate=0.2), IMAGE, 128),
    "decoder": (transformer(**DECODER), TEXT, 32),
}


def prepared(model: str, strategy: str, reduction):
    """Returns (compiled step, state, batch, wire bytes) of a strategy on all devices."""
    trainable, example, batch_size = MODELS[model]
    axes, slots = STRATEGIES[strategy]
    config = data_parallel(
        name=strategy, engine=mapped, mesh=make_mesh(axes), reduction=reduction, **slots
    )
    spec = TrainSpec(
        model=trainable,
        optimizer=optax.adamw(1e-3),
        example=example,
        batch_size=batch_size,
        max_grad_norm=1.0,
    )
    built = config.build(spec)
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(0, 10, (batch_size, *x.shape)).astype(x.dtype)
        for name, x in example.items()
    }
    placed = built.place_batch({name: x[built.train_rows] for name, x in batch.items()})
    communication = collectives(built.train_step, built.abstract_state, built.abstract_batch)
    sent = sum(one.wire_bytes for one in communication)
    return built.train_step, built.init(jax.random.key(0)), placed, sent


def seconds(step, state, placed, steps: int):
    """Returns (state after some steps, seconds for them), with one step in flight at a time."""
    start = time.perf_counter()
    for _ in range(steps):
        state, metrics = step(state, placed)
        jax.block_until_ready(metrics)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start


def compare(
    model: str, strategy: str, pairs: int, steps: int, shards: int
) -> tuple[float, float, float, float]:
    """Returns the median and the quartiles of the time ratios, and the ratio of wire bytes."""
    runs = [
        prepared(model, strategy, how) for how in (PLAIN, tree_reduction(logical_shards=shards))
    ]
    states = [seconds(run[0], run[1], run[2], 3)[0] for run in runs]
    ratios = []
    for pair in range(pairs):
        times = [0.0, 0.0]
        for one in (0, 1) if pair % 2 else (1, 0):
            states[one], times[one] = seconds(runs[one][0], states[one], runs[one][2], steps)
        ratios.append(times[1] / times[0])
    low, high = np.percentile(ratios, [25, 75])
    return statistics.median(ratios), float(low), float(high), runs[1][3] / runs[0][3]


def plot(path: str, rows: list[tuple[str, str, float, float, float]]) -> None:
    """Plots medians as points, with their quartiles: a distance from 1 has no bar from 0."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    medians = [median for _, _, median, _, _ in rows]
    reach = [(median - low, high - median) for _, _, median, low, high in rows]
    models = [model for model, *_ in rows]
    colours = [f"C{sorted(set(models)).index(model)}" for model in models]
    places = range(len(rows))
    for place, median, lengths, colour in zip(places, medians, reach, colours, strict=True):
        whiskers = [[length] for length in lengths]
        axes.errorbar(place, median, yerr=whiskers, fmt="o", color=colour, capsize=3)
        label = {"textcoords": "offset points", "xytext": (7, 0), "va": "center"}
        axes.annotate(f"{median:.2f}", (place, median), fontsize="x-small", **label)
    names = [f"{model}\n{strategy}" for model, strategy, *_ in rows]
    axes.set_xticks(places, names, fontsize="x-small")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="step time, deterministic / plain", xlim=(-0.5, len(rows)))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--plot", help="an SVG file; needs matplotlib")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print("| model | strategy | time, tree / plain | quartiles | bytes, tree / plain |")
    print("|---|---|---|---|---|")
    rows = []
    for model in options.models.split(","):
        for strategy in options.strategies.split(","):
            median, low, high, sent = compare(
                model, strategy, options.pairs, options.steps, options.shards
            )
            rows.append((model, strategy, median, low, high))
            span = f"{low:.2f} to {high:.2f}"
            print(f"| {model} | {strategy} | {median:.2f} | {span} | {sent:.4f} |", flush=True)
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
