"""Strategies with one order of additions, and all that they compute as bits."""

import jax
import optax

from research_dp.distributed.mesh import planning_for
from research_dp.distributed.placement import fingerprint
from research_dp.strategies import TrainSpec
from tests.support import recipes
from tests.support.certified import EXAMPLE
from tests.support.compilers import AS_USERS_COMPILE

BATCH, SHARDS = 32, 16

# Tests compile without LLVM's passes, which fuse multiplications with additions: users do not.
AS_USERS_DO = (f"data_parallel.compiler_options = {AS_USERS_COMPILE}",)


def recipe(stem, data, fsdp, *, exact=True, bindings=()):
    """A shipped strategy with the shipped option, on the first devices."""
    sizes = [] if stem == "single" else [f"make_mesh.axes = {{'data': {data}, 'fsdp': {fsdp}}}"]
    shards = [f"tree_reduction.logical_shards = {SHARDS}"] if exact else []
    small = "shard_params.min_weight_size = 20"
    more = ["options/deterministic.gin"] if exact else []
    with planning_for(jax.devices()[: data * fsdp]):
        return recipes.recipe(stem, *sizes, *shards, small, *bindings, more=more)


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
    state = strategy.logical(state)
    return fingerprint(state.params), fingerprint(state.opt_state), told
