"""Measures how far strategies drift from one device, with plain sums and with the tree reduction.

Run: python experiments/determinism/drift.py [--steps=500] [--plot=docs/drift.svg]
Prints the relative distance of all parameters from those of `single`, and plots it by step.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax

from research_dp.config import gin_internals, load
from research_dp.distributed.mesh import planning_for
from research_dp.models import mlp
from research_dp.strategies import TrainSpec

BATCH = 64
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((8, 8, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}
CASES = (("ddp", 2), ("ddp", 4), ("ddp", 8), ("zero1", 8), ("fsdp", 8), ("hsdp", 8))
TREE = "gin/options/deterministic.gin"


def params_of(stem: str, devices: int, steps: int, *files: str) -> list[np.ndarray]:
    """Returns all parameters as one vector, after each step."""
    load.reset()
    bindings = ["shard_params.min_weight_size = 512"] if stem not in ("single", "ddp") else []
    load.load([f"gin/strategies/{stem}.gin", *files], bindings)
    with planning_for(jax.devices()[:devices]):
        config = gin_internals.value_of("train.strategy")
    spec = TrainSpec(
        model=mlp(widths=(64, 64), num_classes=10, dropout_rate=0.1),
        optimizer=optax.adamw(3e-3),
        example=EXAMPLE,
        batch_size=BATCH,
        max_grad_norm=1.0,
    )
    strategy = config.build(spec)
    state, rng, vectors = strategy.init(jax.random.key(0)), np.random.default_rng(0), []
    teacher = rng.normal(size=(64, 10))
    for _ in range(steps):
        image = rng.normal(size=(BATCH, 8, 8, 1)).astype(np.float32)
        label = np.argmax(image.reshape(BATCH, -1) @ teacher, axis=1).astype(np.int32)
        batch = {"image": image[strategy.train_rows], "label": label[strategy.train_rows]}
        state, metrics = strategy.train_step(state, strategy.place_batch(batch))
        jax.block_until_ready(metrics)
        vectors.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)]))
    return vectors


def apart(stem: str, devices: int, oracle: list[np.ndarray], *files: str) -> list[float]:
    """Returns the relative distance of all parameters from the oracle's, after each step."""
    vectors = params_of(stem, devices, len(oracle), *files)
    return [
        float(np.linalg.norm(a - b) / np.linalg.norm(a))
        for a, b in zip(oracle, vectors, strict=True)
    ]


def plot(path: str, curves: dict[str, list[float]], same: int) -> None:
    """Plots distances by step; a curve of zeros cannot be drawn on a logarithmic scale."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, away in curves.items():
        axes.plot(range(1, len(away) + 1), away, label=name, linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="step", ylabel="relative distance from one device")
    note = f"with deterministic.gin: 0 in {same} of {len(curves)}, at every step"
    axes.legend(title=f"plain sums ({note})", fontsize="small", title_fontsize="small")
    axes.grid(which="both", alpha=0.2)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plot", help="an SVG file; needs matplotlib")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    steps, curves, same = flags.steps, {}, 0
    shown = (1, 10, steps // 5, steps)
    print("| strategy | devices | sums | " + " | ".join(f"step {s}" for s in shown) + " |")
    print("|---" * (3 + len(shown)) + "|")
    for sums, files in (("plain", ()), ("tree", (TREE,))):
        oracle = params_of("single", 1, steps, *files)
        for stem, devices in CASES:
            away = apart(stem, devices, oracle, *files)
            cells = " | ".join(f"{away[s - 1]:.1e}" for s in shown)
            print(f"| {stem} | {devices} | {sums} | {cells} |", flush=True)
            if sums == "plain":
                curves[f"{stem}, {devices} devices"] = away
            else:
                same += not any(away)
    if flags.plot:
        plot(flags.plot, curves, same)


if __name__ == "__main__":
    main()
