"""Strategies with one order of additions, and all that they compute as bits."""

import gin
import jax
import numpy as np
import optax

from research_dp.config import gin_internals, load
from research_dp.distributed.mesh import planning_for
from research_dp.distributed.placement import fingerprint
from research_dp.strategies import TrainSpec
from tests.support.compilers import AS_USERS_COMPILE
from tests.support.repository import ROOT

BATCH, SHARDS = 32, 16
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((4, 4, 1), np.float32),
    "label": jax.ShapeDtypeStruct((), np.int32),
}


# Tests compile without LLVM's passes, which fuse multiplications with additions: users do not.
AS_USERS_DO = (f"data_parallel.compiler_options = {AS_USERS_COMPILE}",)


def recipe(stem, data, fsdp, *, exact=True, bindings=()):
    """A shipped strategy with the shipped option, on the first devices."""
    import research_dp.training.train  # noqa: F401  (registers `train`)

    load.reset()
    files = [f"strategies/{stem}.gin", *(["options/deterministic.gin"] if exact else [])]
    for file in files:
        gin.parse_config_file(str(ROOT / "gin" / file))
    sizes = [] if stem == "single" else [f"make_mesh.axes = {{'data': {data}, 'fsdp': {fsdp}}}"]
    shards = [f"tree_reduction.logical_shards = {SHARDS}"] if exact else []
    gin.parse_config([*sizes, *shards, "shard_params.min_weight_size = 20", *bindings])
    with planning_for(jax.devices()[: data * fsdp]):
        return gin_internals.value_of("train.strategy")


def build(stem, data, fsdp, model, *, accumulation=1, example=EXAMPLE, more=None, **options):
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    spec = TrainSpec(
        model=model,
        example=example,
        batch_size=BATCH,
        accumulation_steps=accumulation,
        seed=3,
        **{
            "optimizer": optax.adamw(schedule, weight_decay=1e-2),
            "max_grad_norm": 0.3,
            **(more or {}),
        },
    )
    return recipe(stem, data, fsdp, **options).build(spec)


def bits(strategy, data):
    """Everything that a run leaves, as bits: parameters, loss and norm of each step, state."""
    state, told = strategy.init(jax.random.key(0)), []
    for batch in data:
        local = {name: x[strategy.train_rows] for name, x in batch.items()}
        state, metrics = strategy.train_step(state, strategy.place_batch(local))
        told.append([float(x).hex() for name in ("loss", "grad_norm") for x in metrics[name]])
    return fingerprint(state.params), fingerprint(state.opt_state), told
