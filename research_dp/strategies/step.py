"""One training step as every engine runs it, and one evaluation step.

The functions here see what one device sees (`mapped`, `pmapped`, with mesh axes bound) or the
whole (`compiled`, without). An engine only wraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from research_dp.distributed.collectives import axes_size, drop_gathered, global_norm
from research_dp.distributed.trainable import LossOutput
from research_dp.distributed.updates import apply_optimizer, clip_factor
from research_dp.strategies.strategy import Layouts, PlacedBatch, Recipe, TrainSpec, TrainState

PyTree = Any


class Steps(NamedTuple):
    """`train` and `eval` as an engine wraps them."""

    train: Callable[[TrainState, PlacedBatch], tuple[TrainState, dict[str, jax.Array]]]
    eval: Callable[[TrainState, Mapping[str, jax.Array]], dict[str, jax.Array]]


def make_steps(recipe: Recipe, spec: TrainSpec, layouts: Layouts, axes: tuple[str, ...]) -> Steps:
    """The step functions of a recipe.

    Args:
        recipe: The slots.
        spec: Model, optimizer and batch.
        layouts: Where things lie, as the step sees them.
        axes: The mesh axes that are bound where the steps run; () in the compiled engine.
    """

    def whole(held: PyTree) -> PyTree:
        if recipe.gather is None:
            return held
        return recipe.gather(held, layouts.params, reduction=recipe.reduction)

    def sync(grads: PyTree, when: str) -> PyTree:
        if recipe.sync is None or recipe.sync_each != when:
            return grads
        return recipe.sync(grads, layouts.slices, axes=axes, reduction=recipe.reduction)

    def gradients(
        state: TrainState, model_state: PyTree, micro: PlacedBatch
    ) -> tuple[PyTree, LossOutput]:
        keys = example_keys(spec.seed, state.step, micro.position)

        def loss(held: PyTree) -> tuple[jax.Array, LossOutput]:
            out = spec.model.loss(
                whole(held), model_state, micro.examples, keys, train=True, batch_axes=axes
            )
            # Divided by a constant, so that the numbers are of a mean's size whatever the dtype;
            # the true number of valid items comes in once, in `train`.
            return out.total / micro.position.shape[0], out

        if recipe.gather is not None:
            loss = jax.checkpoint(loss, policy=drop_gathered)
        grads, out = jax.grad(loss, has_aux=True)(state.params)
        return sync(grads, "micro_batch"), out

    def train(state: TrainState, batch: PlacedBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, model_state, sums = _accumulate(gradients, state, batch, recipe.accumulation_dtype)
        grads = sync(grads, "step")
        sums = _add_up(sums, axes, recipe)
        rows = batch.position.shape[1] * axes_size(axes)
        count = sums["loss"][1]
        scale = jnp.where(count > 0, rows / jnp.maximum(count, 1e-9), 0.0)
        norm = scale * global_norm(grads, layouts.slices, recipe.reduction)
        scale = scale * clip_factor(norm, spec.max_grad_norm)
        grads = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads, state.params)
        if recipe.update is None:
            params, opt_state = apply_optimizer(
                spec.optimizer, grads, state.opt_state, state.params
            )
        else:
            params, opt_state = recipe.update(
                spec.optimizer, grads, state.opt_state, state.params, layouts.slices
            )
        metrics = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
        return TrainState(state.step + 1, params, model_state, opt_state), metrics

    def evaluate(state: TrainState, examples: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        out = spec.model.loss(
            whole(state.params), state.model_state, examples, None, train=False, batch_axes=axes
        )
        return _add_up(_pairs(out), axes, recipe)

    return Steps(train, evaluate)


def example_keys(seed: int, step: jax.Array, position: jax.Array) -> jax.Array:
    """One random key an example, from the seed, the step and its place in the global batch."""
    step_key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda place: jax.random.fold_in(step_key, place))(position)


def _accumulate(
    gradients: Callable[..., tuple[PyTree, LossOutput]],
    state: TrainState,
    batch: PlacedBatch,
    dtype: Any,
) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Adds up micro-batches: (sum of gradients, last model state, sums of metrics)."""
    first = jax.tree.map(lambda x: x[0], batch)
    if batch.position.shape[0] == 1:
        grads, out = gradients(state, state.model_state, first)
        return grads, out.model_state, _pairs(out)

    def add(carry: Any, micro: PlacedBatch) -> tuple[Any, None]:
        total, model_state, sums = carry
        grads, out = gradients(state, model_state, micro)
        total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
        return (total, out.model_state, jax.tree.map(jnp.add, sums, _pairs(out))), None

    grads, out = jax.eval_shape(gradients, state, state.model_state, first)
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, dtype or g.dtype), grads)
    no_sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(_pairs, out))
    carry, _ = jax.lax.scan(add, (zeros, state.model_state, no_sums), batch)
    return carry


def _pairs(out: LossOutput) -> dict[str, jax.Array]:
    """Metrics as float32 arrays (2,): sum and count."""
    sums = {"loss": (out.total, out.weight), **out.sums}
    return {name: jnp.stack(pair).astype(jnp.float32) for name, pair in sums.items()}


def _add_up(
    sums: dict[str, jax.Array], axes: tuple[str, ...], recipe: Recipe
) -> dict[str, jax.Array]:
    """Sums over devices, all in one small collective; means are taken on the host."""
    if not axes:
        return sums
    names = sorted(sums)
    added = recipe.reduction.all_sum(jnp.stack([sums[name] for name in names]), axes)
    return {name: added[i] for i, name in enumerate(names)}
