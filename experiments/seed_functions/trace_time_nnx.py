"""What `spmd_train_step` and `place_model_state_on_shards` cost beside the same work by hand.

python experiments/seed_functions/trace_time_nnx.py

On a model of 100 arrays and 8 CPU devices: processor time to trace and lower one Adam step under
`nnx.jit`, and to put the state on the mesh. Pairs A B A B; prints the median of their ratios, and
ends with status 1 if one is above the limit.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from research_dp import place_model_state_on_shards, spmd_train_step

LAYERS, WIDTH, DEVICES, PAIRS, LIMIT = 50, 16, 8, 15, 1.5


class Model(nnx.Module):
    """Fifty dense layers: a hundred arrays."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model: Model, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def step_ours(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    return spmd_train_step(model, optimizer, loss_fn, batch)


def step_by_hand(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def lower(step: Callable[..., jax.Array], *args: object) -> None:
    jax.clear_caches()  # and a new function, so that nothing traced before is found
    nnx.jit(lambda *a: step(*a)).lower(*args)


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - started


def compare(name: str, ours: Callable[[], object], by_hand: Callable[[], object]) -> bool:
    seconds(ours), seconds(by_hand)
    ratios, hand = [], []
    for _ in range(PAIRS):
        mine = seconds(ours)
        hand.append(seconds(by_hand))
        ratios.append(mine / hand[-1])
    ratio = statistics.median(ratios)
    print(f"{name}: {ratio:.2f} times by hand, {1000 * statistics.median(hand):.1f} ms")
    return ratio <= LIMIT


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    whole, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data")))
    state = nnx.to_pure_dict(nnx.state(model))
    batch = jax.device_put(jnp.ones((64, WIDTH)), split)

    paths = {
        f"layers/{i}/{name}": PartitionSpec("data")
        for i in range(LAYERS)
        for name in ("kernel", "bias")
    }
    place = functools.partial(place_model_state_on_shards, state, mesh)
    to_split = functools.partial(jax.device_put, state, jax.tree.map(lambda _: split, state))
    within = [
        compare(
            "spmd_train_step, traced and lowered",
            functools.partial(lower, step_ours, model, optimizer, batch),
            functools.partial(lower, step_by_hand, model, optimizer, batch),
        ),
        compare("state, replicated", place, functools.partial(jax.device_put, state, whole)),
        compare("state, 'shard'", functools.partial(place, "shard"), to_split),
        compare("state, a rule for each path", functools.partial(place, paths), to_split),
    ]
    print(f"limit {LIMIT}, medians of {PAIRS} pairs")
    raise SystemExit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
