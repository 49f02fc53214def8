"""The global batch as logical shards: which examples they are, and the loop over a device's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.deterministic.division import as_written
from research_dp.deterministic.param_only_ops import worked_on_alone
from research_dp.deterministic.sum import TreeReduction, add_up_pairs, fence, unknown_zero
from research_dp.distributed.units import Units
from research_dp.errors import UsageError
from research_dp.strategies.rng import example_keys
from research_dp.strategies.strategy import StrategyConfig, TrainSpec, TrainState

PyTree = Any


def in_shards(spec: TrainSpec, devices: int, shards: int) -> np.ndarray:
    """Places in the global batch, int32 (shards / devices, batch_size * devices / shards).

    A row has one logical shard of each device; a device's own are neighbours in the batch.

    Raises:
        UsageError: The shards cannot be shared by the devices, or the batch by the shards.
    """
    parts = devices * spec.accumulation_steps
    if shards % parts:
        raise UsageError(
            f"tree_reduction.logical_shards = {shards} cannot be shared by {devices} devices x "
            f"accumulation_steps {spec.accumulation_steps} = {parts}. Take a multiple, for all "
            "runs that are to agree; devices must be a power of two.",
            binding="tree_reduction.logical_shards",
        )
    if spec.batch_size % shards:
        raise UsageError(
            f"train.batch_size = {spec.batch_size} cannot be cut in {shards} logical shards "
            "(tree_reduction.logical_shards) of one size. Take a multiple.",
            binding="train.batch_size",
        )
    places = np.arange(spec.batch_size, dtype=np.int32)
    by_device = places.reshape(devices, shards // devices, -1).swapaxes(0, 1)
    return by_device.reshape(shards // devices, -1)


def one_by_one(
    function: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    parts: PyTree,
    step: jax.Array,
    reduction: TreeReduction,
) -> PyTree:
    """The tree sum of what a function makes of each of this device's logical shards.

    Args:
        function: (parameters, logical shard) -> a tree of arrays.
        params: What it is called with.
        parts: Arrays with a leading dim that counts them.
        step: The step, as `unknown_zero` takes it.
        reduction: Its `loop` says whether they are a loop, or written out.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    written = as_written(function, params, like)
    leaves, treedef = jax.tree.flatten(params)
    alone = worked_on_alone(written.program, len(leaves))

    def leaf(index: Any, zero: jax.Array) -> PyTree:
        part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), parts)
        # Not all parameters: their copies would cost as much memory as they, and as much time as
        # the sum of the gradients.
        own = [fence(x, zero) if fenced else x for x, fenced in zip(leaves, alone, strict=True)]
        return fence(written(jax.tree.unflatten(treedef, own), fence(part, zero)), zero)

    count = jax.tree.leaves(parts)[0].shape[0]
    return add_up_pairs(leaf, count, unknown_zero(step), loop=reduction.loop)


def check_model(recipe: StrategyConfig, spec: TrainSpec, abstract: TrainState) -> None:
    """Raises UsageError for what logical shards, which know nothing of each other, cannot do."""
    if recipe.prefetch:
        raise UsageError(
            "data_parallel.prefetch = True: with logical shards (data_parallel.reduction) all is "
            "gathered before the first. Bind False.",
            binding="data_parallel.prefetch",
        )
    if recipe.accumulation_dtype not in (None, "float32"):
        raise UsageError(
            f"data_parallel.accumulation_dtype = {recipe.accumulation_dtype!r}: logical shards are "
            "added up in float32 (data_parallel.reduction). Bind None.",
            binding="data_parallel.accumulation_dtype",
        )
    if jax.tree.leaves(abstract.model_state) or _knows_other_examples(spec, abstract):
        raise UsageError(
            "data_parallel.reduction: train.model has statistics over the batch, which are "
            "no sums over logical shards. Take a norm over each example, e.g. 'group'.",
            binding="data_parallel.reduction",
        )


def _knows_other_examples(spec: TrainSpec, abstract: TrainState) -> bool:
    """Whether a loss communicates over the axes that the batch is split over."""
    axis = "an axis that is bound nowhere"

    def loss(params: PyTree) -> Any:
        keys = example_keys(spec.seed, jnp.int32(0), jnp.zeros(1, jnp.int32))
        examples = {k: jnp.zeros((1, *x.shape), x.dtype) for k, x in spec.example.items()}
        more = {"units": Units()} if spec.model.units else {}
        return spec.model.loss(
            params, abstract.model_state, examples, keys, train=True, batch_axes=(axis,), **more
        )

    try:
        jax.eval_shape(loss, abstract.params)
    except NameError as error:
        if axis in str(error):
            return True
        raise
    return False


def check_wide(gathered: PyTree) -> None:
    """Raises UsageError if gradients of what was gathered would be added in a narrow dtype."""
    for x in jax.tree.leaves(gathered):
        if jnp.iscomplexobj(x):
            raise UsageError(
                "data_parallel.reduction: exact sums are of real numbers, but a parameter is "
                f"{x.dtype}. Split it into its real and imaginary part, or leave the default.",
                binding="data_parallel.reduction",
            )
        if jnp.finfo(x.dtype).bits < 32:
            raise UsageError(
                f"data_parallel.reduction: gradients of parameters in {x.dtype} cannot be added in "
                "float32. Leave gather_params.gather_dtype and data_parallel.param_dtype at None.",
                binding="data_parallel.reduction",
            )
