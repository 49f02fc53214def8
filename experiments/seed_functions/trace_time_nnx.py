"""Compares the functions of datarax and artifex with the same work by hand.

python experiments/seed_functions/trace_time_nnx.py

Measures processor time on a model of 100 arrays and 8 CPU devices: to trace and lower one Adam step
under `nnx.jit` or `pmap`, and to place states and batches on the mesh. Prints the median ratio of
pairs A B A B, and ends with status 1 if one exceeds the limit.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import jax_utils, nnx, struct
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from research_dp import (
    data_parallel_train_step,
    place_batch_on_shards,
    place_model_state_on_shards,
    place_nnx_state_on_shards,
    spmd_train_step,
)

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


@struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    model_state: dict


ADAM = optax.adam(1e-3)


def dense_loss(variables: dict, batch: jax.Array) -> jax.Array:
    for layer in variables["params"].values():
        batch = jnp.tanh(batch @ layer["kernel"] + layer["bias"][None])
    return jnp.mean(batch**2)


def pmap_ours(state: State, batch: jax.Array) -> tuple:
    return data_parallel_train_step(lambda v, b: dense_loss(v, b), ADAM, batch, state)


def pmap_by_hand(state: State, batch: jax.Array) -> tuple:
    def step(state: State, batch: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(lambda p: dense_loss({"params": p}, batch))(state.params)
        # pmean sums over devices and divides by their number.
        grads, loss = jax.lax.pmean((grads, loss), "batch")
        updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss

    return jax.pmap(step, axis_name="batch")(state, batch)


def lower(step: Callable[..., jax.Array], *args: object) -> None:
    jax.clear_caches()  # and a new function, so that nothing was traced before
    nnx.jit(lambda *a: step(*a)).lower(*args)


def lower_pmapped(step: Callable[..., tuple], *args: object) -> None:
    jax.clear_caches()
    jax.jit(lambda *a: step(*a)).lower(*args)


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - started


def compare(name: str, ours: Callable[[], object], by_hand: Callable[[], object]) -> bool:
    seconds(ours), seconds(by_hand)
    ratios, hand = [], []
    for _ in range(PAIRS):
        own_seconds = seconds(ours)
        hand.append(seconds(by_hand))
        ratios.append(own_seconds / hand[-1])
    ratio = statistics.median(ratios)
    print(f"{name}: {ratio:.2f} times by hand, {1000 * statistics.median(hand):.1f} ms")
    return ratio <= LIMIT


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    model = Model()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    replicated, split = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data"))
    )
    state = nnx.to_pure_dict(nnx.state(model))
    batch = jax.device_put(jnp.ones((64, WIDTH)), split)

    paths = {
        f"layers/{i}/{name}": PartitionSpec("data")
        for i in range(LAYERS)
        for name in ("kernel", "bias")
    }
    place = functools.partial(place_model_state_on_shards, state, mesh)
    to_split = functools.partial(jax.device_put, state, jax.tree.map(lambda _: split, state))
    params = {f"layer_{i:02}": state["layers"][i] for i in range(LAYERS)}
    start = State(jnp.zeros((), jnp.int32), params, ADAM.init(params), {})
    stacked = (jax_utils.replicate(start), jnp.ones((DEVICES, 8, WIDTH)))
    variables, filters = nnx.state(model), {nnx.Param: PartitionSpec("data")}
    batches = {f"array_{i}": jnp.ones((64, WIDTH)) for i in range(2 * LAYERS)}
    within = [
        compare(
            "spmd_train_step, traced and lowered",
            functools.partial(lower, step_ours, model, optimizer, batch),
            functools.partial(lower, step_by_hand, model, optimizer, batch),
        ),
        compare(
            "data_parallel_train_step, traced and lowered",
            functools.partial(lower_pmapped, pmap_ours, *stacked),
            functools.partial(lower_pmapped, pmap_by_hand, *stacked),
        ),
        compare(
            "batch of 100 arrays",
            functools.partial(place_batch_on_shards, batches, split),
            functools.partial(jax.device_put, batches, split),
        ),
        compare(
            "NNX state, by a filter",
            functools.partial(place_nnx_state_on_shards, variables, mesh, filters),
            functools.partial(jax.device_put, variables, split),
        ),
        compare("state, replicated", place, functools.partial(jax.device_put, state, replicated)),
        compare("state, 'shard'", functools.partial(place, "shard"), to_split),
        compare("state, a rule for each path", functools.partial(place, paths), to_split),
    ]
    print(f"limit {LIMIT}, medians of {PAIRS} pairs")
    raise SystemExit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
