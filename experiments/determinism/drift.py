"""How far `ddp` on 1, 2, 4 and 8 devices drifts apart, with the plain reduction and with the tree.

Run: python experiments/determinism/drift.py [--steps=200]
Prints relative distances of all parameters from those on 1 device.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax

from research_dp.distributed.collectives import PLAIN
from research_dp.distributed.tree import tree_reduction
from research_dp.models import mlp
from research_dp.strategies import (
    TrainSpec,
    average_gradients,
    data_parallel,
    make_mesh,
    mapped,
    update_local,
)

BATCH = 64
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((8, 8, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}


def params_of(devices: int, reduction, steps: int) -> list[np.ndarray]:
    """All parameters as one vector, after each step."""
    recipe = data_parallel(
        name="ddp",
        engine=mapped,
        mesh=make_mesh({"data": devices}, devices=jax.devices()[:devices]),
        sync=average_gradients,
        update=update_local,
        reduction=reduction,
    )
    spec = TrainSpec(
        model=mlp(widths=(64, 64), num_classes=10, dropout_rate=0.1),
        optimizer=optax.adamw(3e-3),
        example=EXAMPLE,
        batch_size=BATCH,
        max_grad_norm=1.0,
    )
    strategy = recipe.build(spec)
    state, rng, found = strategy.init(jax.random.key(0)), np.random.default_rng(0), []
    teacher = rng.normal(size=(64, 10))
    for _ in range(steps):
        image = rng.normal(size=(BATCH, 8, 8, 1)).astype(np.float32)
        label = np.argmax(image.reshape(BATCH, -1) @ teacher, axis=1).astype(np.int32)
        batch = {"image": image[strategy.train_rows], "label": label[strategy.train_rows]}
        state, metrics = strategy.train_step(state, strategy.place_batch(batch))
        jax.block_until_ready(metrics)
        found.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, how in (("plain", PLAIN), ("tree", tree_reduction(logical_shards=8, loop=True))):
        runs = {n: params_of(n, how, steps) for n in (1, 2, 4, 8)}
        for n in (2, 4, 8):
            away = [
                float(np.linalg.norm(a - b) / np.linalg.norm(a))
                for a, b in zip(runs[1], runs[n], strict=True)
            ]
            at = ", ".join(f"{s}: {away[s - 1]:.1e}" for s in (1, 10, steps // 2, steps))
            print(f"{name}, {n} devices from 1, after steps {at}", flush=True)


if __name__ == "__main__":
    main()
