"""The global batch as logical shards: which examples they are, and the loop over a device's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from research_dp.deterministic.division import as_written
from research_dp.deterministic.sum import TreeReduction, add_up_pairs, fence, unknown_zero
from research_dp.distributed.jaxpr import Callers, Source, trace_sources
from research_dp.distributed.units import Units
from research_dp.errors import UsageError
from research_dp.strategies.strategy import StrategyConfig, TrainSpec, TrainState, example_keys

PyTree = Any

# Operations that only move numbers: the same bits wherever they are done.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "expand_dims", "gather"),
        *("iota", "name", "pad", "reshape", "rev", "select_n", "slice", "split", "squeeze"),
        "transpose",
    )
)


def in_shards(spec: TrainSpec, devices: int, shards: int) -> np.ndarray:
    """Places in the global batch, int32 (shards / devices, batch_size * devices / shards).

    A row has one logical shard of each device; a device's own are neighbours in the batch. Raises
    UsageError if the devices do not divide the shards, or these the batch.
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

    `function` is (parameters, logical shard) -> a tree of arrays; `parts` are arrays with a leading
    dim that counts shards.
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


def worked_on_alone(program: ClosedJaxpr, count: int) -> list[bool]:
    """Whether a program computes with a parameter alone, for each of its first `count` arguments.

    What it makes of parameters alone (and constants, also in derivatives that it takes) is the same
    for each logical shard: a compiler may do it once for all, or anew beside each use, and round
    otherwise. Parameters that go straight into operations with examples leave it no choice. Where
    that is not known, as with kernels and loops of unknown length, it is assumed.
    """
    alone: set[int] = set()

    def visit(equation: Any, given: Sequence[Source], callers: Callers) -> None:
        del callers
        opaque = any(True for _ in jaxprs_in_params(equation.params))
        if opaque or (None not in given and equation.primitive.name not in _MOVES):
            alone.update(*(one for one in given if one is not None))

    trace_sources(program, count, visit)
    return [i in alone for i in range(count)]


def _refused(parameter: str, problem: str) -> UsageError:
    binding = f"data_parallel.{parameter}"
    return UsageError(f"{binding}{problem}", binding=binding)


def check_model(config: StrategyConfig, spec: TrainSpec, abstract: TrainState) -> None:
    """Raises UsageError for what logical shards, which know nothing of each other, cannot do."""
    if config.prefetch:
        raise _refused(
            "prefetch",
            " = True: with logical shards (data_parallel.reduction) all is gathered before the "
            "first. Bind False.",
        )
    if config.accumulation_dtype not in (None, "float32"):
        raise _refused(
            "accumulation_dtype",
            f" = {config.accumulation_dtype!r}: logical shards are added up in float32 "
            "(data_parallel.reduction). Bind None.",
        )
    if jax.tree.leaves(abstract.model_state) or _knows_other_examples(spec, abstract):
        raise _refused(
            "reduction",
            ": train.model has statistics over the batch, which are no sums over logical shards. "
            "Take a norm over each example, e.g. 'group'.",
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
            raise _refused(
                "reduction",
                f": exact sums are of real numbers, but a parameter is {x.dtype}. Split it into "
                "its real and imaginary part, or leave the default.",
            )
        if jnp.finfo(x.dtype).bits < 32:
            raise _refused(
                "reduction",
                f": gradients of parameters in {x.dtype} cannot be added in float32. Leave "
                "gather_params.gather_dtype and data_parallel.param_dtype at None.",
            )
