"""The training step with exact sums: the same bits on any number of devices.

The global batch is cut in logical shards, of which each device runs its own one at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxprs_in_params
from jax.sharding import PartitionSpec

from research_dp.deterministic import sum as tree_sum
from research_dp.deterministic.division import as_written
from research_dp.deterministic.sum import TreeReduction, add_pairs, fence, unknown_zero
from research_dp.distributed.buckets import flatten_padded, pad_to_multiple
from research_dp.distributed.collectives import Reduction, gather
from research_dp.distributed.jaxpr import Callers, Source, mixing_operation, trace_sources
from research_dp.distributed.optimizer import apply_in_step
from research_dp.distributed.sharding import LeafSharding
from research_dp.distributed.units import Units
from research_dp.errors import UsageError, binding_error
from research_dp.strategies import strategy
from research_dp.strategies.frozen import with_frozen
from research_dp.strategies.step import GradientPlan, Step, Sums, sums_of
from research_dp.strategies.strategy import PlacedBatch, TrainSpec, TrainState
from research_dp.types import PyTree

# Operations that only move numbers: the same bits wherever they are done.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "expand_dims", "gather"),
        *("iota", "name", "pad", "reshape", "rev", "select_n", "slice", "split", "squeeze"),
        "transpose",
    )
)


class DeterministicStep(Step):
    """A `Step` in which a micro-batch is a logical shard.

    The sum over a device's shards is complete before it is communicated, so that the order of
    additions is one for all strategies: everything is gathered before the shards, and scattered
    after them. An optimizer that mixes elements is applied to gathered arrays. Divisions of a
    user's `update` outside of the optimizer are left to the compiler.
    """

    # Compilers round an update otherwise where its arrays are cut.
    pads = False

    @staticmethod
    def check_model(config: strategy.StrategyConfig, spec: TrainSpec, abstract: TrainState) -> None:
        """Raises UsageError for what logical shards, each a batch of its own, cannot do."""
        if config.prefetch:
            raise binding_error(
                "data_parallel.prefetch",
                " = True: with logical shards (data_parallel.reduction) all is gathered before the "
                "first. Bind False.",
            )
        if config.accumulation_dtype not in (None, "float32"):
            raise binding_error(
                "data_parallel.accumulation_dtype",
                f" = {config.accumulation_dtype!r}: logical shards are added up in float32 "
                "(data_parallel.reduction). Bind None.",
            )
        _, statistics = with_frozen(abstract.params, abstract.model_state)
        if jax.tree.leaves(statistics) or _knows_other_examples(spec, abstract):
            raise binding_error(
                "data_parallel.reduction",
                ": the model has statistics over the batch, which are no sums over logical shards. "
                "Take a norm over each example, e.g. 'group'.",
            )

    @staticmethod
    def positions(spec: TrainSpec, devices: int, reduction: Reduction) -> np.ndarray:
        """Positions in the global batch, int32 (shards / devices, batch_size * devices / shards).

        A row has one logical shard of each device; a device's own are neighbours in the batch.
        """
        assert isinstance(reduction, TreeReduction)
        shards = reduction.logical_shards
        parts = devices * spec.accumulation_steps
        if shards % parts:
            raise binding_error(
                "tree_reduction.logical_shards",
                f" = {shards} cannot be shared by {devices} devices x accumulation_steps "
                f"{spec.accumulation_steps} = {parts}. Take a multiple, for all runs that are to "
                "agree; devices must be a power of two.",
            )
        if spec.batch_size % shards:
            raise binding_error(
                f"{spec.gin_name}.batch_size",
                f" = {spec.batch_size} cannot be cut in {shards} logical shards "
                "(tree_reduction.logical_shards) of one size. Take a multiple.",
            )
        positions = np.arange(spec.batch_size, dtype=np.int32)
        by_device = positions.reshape(devices, shards // devices, -1).swapaxes(0, 1)
        return by_device.reshape(shards // devices, -1)

    @property
    def _reduction(self) -> TreeReduction:
        assert isinstance(self.config.reduction, TreeReduction)
        return self.config.reduction

    @functools.cached_property
    def plan(self) -> GradientPlan:
        return GradientPlan("once", "step")

    def scales(self, scale: jax.Array) -> tuple[Any, jax.Array]:
        if not self.carries_state:
            return 1.0, scale
        # By the number of devices, a power of two: products with others would round each device's
        # sum otherwise than that of all.
        devices = math.prod(self.config.mesh.shape[axis] for axis in self.axes)
        return float(devices), scale / devices

    def local_gradients(
        self, state: TrainState, batch: PlacedBatch
    ) -> tuple[PyTree, PyTree, Sums, PyTree]:
        params, scatter, model_state = self.gathered_once(state)
        _check_wide(params)
        params, model_state = self._fenced((params, model_state), state)

        def of_shard(params: PyTree, shard: PlacedBatch) -> tuple[PyTree, PyTree]:
            loss = self.loss_of(state, model_state, shard, Units())
            grads, out = jax.grad(loss, has_aux=True)(params)
            return grads, sums_of(out)

        grads, sums = sum_over_logical_shards(of_shard, params, batch, state.step, self._reduction)
        (grads,) = scatter(grads)
        return grads, state.model_state, sums, state.slots

    def evaluate(self, state: TrainState, examples: Mapping[str, jax.Array]) -> Sums:
        gathered = self.gathered_all(state.params, state.model_state)
        params, model_state = self._fenced(gathered, state)
        rows = self.spec.batch_size // self._reduction.logical_shards

        def of_shard(params: PyTree, part: PyTree) -> Sums:
            return sums_of(self.loss(params, model_state, part, None, Units()))

        parts = {name: x.reshape(-1, rows, *x.shape[1:]) for name, x in examples.items()}
        return self.sum_metrics(
            sum_over_logical_shards(of_shard, params, parts, state.step, self._reduction)
        )

    def _fenced(self, params: PyTree, state: TrainState) -> PyTree:
        """Gathered parameters; those that a codec decodes are products with scales."""
        return fence(params, unknown_zero(state.step)) if self.config.compression else params

    def norm(self, grads: PyTree, slices: PyTree, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        shards = self._reduction.logical_shards
        return norm_by_blocks(grads, slices, shards, unknown_zero(step))

    def apply(
        self,
        state: TrainState,
        is_empty: jax.Array | None,
        value: jax.Array,
        grads: PyTree,
        params: PyTree,
    ) -> tuple[PyTree, PyTree]:
        if is_empty is not None:  # in a branch, with which no choice of the old state is fused
            apply = functools.partial(self.apply, state, None, value, grads, params)
            return lax.cond(is_empty, lambda: (params, state.opt_state), apply)
        zero = unknown_zero(state.step)
        grads = fence(jax.tree.map(tree_sum.without_negative_zero, grads), zero)
        arguments = grads, state.opt_state, params, value
        update = functools.partial(apply_in_step, self.spec.optimizer)
        written = as_written(update, *arguments)
        if mixing_operation(written.program) is None:
            return written(*arguments)

        def complete(zero: jax.Array, *arguments: PyTree) -> PyTree:
            # In a branch, which the compiler does not know to be taken: what surrounds it changes
            # no operation in it.
            arguments = fence(arguments, zero)
            _, opt_state, params, _ = arguments
            written = as_written(update, *arguments, sums=True)
            return lax.cond(zero == 0, lambda: written(*arguments), lambda: (params, opt_state))

        # Each device computes all of it, of gathered arrays.
        none = PartitionSpec()
        mapped = jax.shard_map(
            complete, mesh=self.config.mesh, in_specs=none, out_specs=none, check_vma=False
        )
        return mapped(zero, *arguments)


def sum_over_logical_shards(
    function: Callable[..., Any], params: PyTree, parts: PyTree, step: Any, reduction: TreeReduction
) -> PyTree:
    """The tree sum of `function(params, part)` over this device's logical shards.

    `parts` are arrays with a leading dim that counts shards; results are trees of arrays.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    written = as_written(function, params, like)
    leaves, treedef = jax.tree.flatten(params)
    is_fenced = computed_from_params_only(written.program, len(leaves))

    def leaf(index: Any, zero: jax.Array) -> PyTree:
        part = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), parts)
        # Not all parameters: their copies would cost as much memory as they, and as much time as
        # the sum of the gradients.
        own = [fence(x, zero) if fenced else x for x, fenced in zip(leaves, is_fenced, strict=True)]
        return fence(written(jax.tree.unflatten(treedef, own), fence(part, zero)), zero)

    count = jax.tree.leaves(parts)[0].shape[0]
    return tree_sum.add_up_pairs(leaf, count, unknown_zero(step), loop=reduction.loop)


def computed_from_params_only(program: ClosedJaxpr, count: int) -> list[bool]:
    """Which of a program's first `count` arguments enter operations that no example enters.

    What it computes from parameters only (and constants, also in derivatives) is the same for each
    logical shard: a compiler may do it once for all, or anew beside each use, and round otherwise.
    Parameters that go straight into operations with examples leave it no choice. Where that is not
    known, as with kernels and loops of unknown length, it is assumed.
    """
    params_only: set[int] = set()

    def visit(equation: Any, given: Sequence[Source], callers: Callers) -> None:
        opaque = any(True for _ in jaxprs_in_params(equation.params))
        if opaque or (None not in given and equation.primitive.name not in _MOVES):
            params_only.update(*(one for one in given if one is not None))

    trace_sources(program, count, visit)
    return [i in params_only for i in range(count)]


def _knows_other_examples(spec: TrainSpec, abstract: TrainState) -> bool:
    """Whether a loss communicates over the axes that the batch is split over, in either mode."""
    axis = "an axis that is bound nowhere"

    def loss(params: PyTree, train: bool) -> Any:
        zero, position = jnp.int32(0), jnp.zeros(1, jnp.int32)
        keys = strategy.example_keys(spec.seed, zero, position) if train else None
        examples = {k: jnp.zeros((1, *x.shape), x.dtype) for k, x in spec.example.items()}
        more = {"units": Units()} if spec.model.units else {}
        return spec.model.loss(
            params, abstract.model_state, examples, keys, train=train, batch_axes=(axis,), **more
        )

    try:
        for train in (True, False):
            jax.eval_shape(functools.partial(loss, train=train), abstract.params)
    except (NameError, UsageError) as error:  # `from_linen` and `from_nnx` put it in words
        if axis in str(error):
            return True
        raise
    return False


def _check_wide(gathered: PyTree) -> None:
    """Raises UsageError if gradients of what was gathered would be added in a narrow dtype."""
    for x in jax.tree.leaves(gathered):
        if jnp.iscomplexobj(x):
            raise binding_error(
                "data_parallel.reduction",
                f": exact sums are of real numbers, but a parameter is {x.dtype}. Split it into "
                "its real and imaginary part, or leave the default.",
            )
        if jnp.finfo(x.dtype).bits < 32:
            raise binding_error(
                "data_parallel.reduction",
                f": gradients of parameters in {x.dtype} cannot be added in float32. Leave "
                "gather_params.gather_dtype, fsdp_apply_gradients.gather_dtype and "
                "data_parallel.param_dtype at None.",
            )


def norm_by_blocks(
    tree: PyTree, shardings: PyTree, blocks: int, zero: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The L2 norm, 0-d float32, and float32 (leaves,), 1 where the sum of squares is not finite.

    They are the same bits on every device, however arrays are sharded.

    Every dim of an array is cut into as many equal pieces as `blocks`, a power of two, allows.
    Devices, whose number divides `blocks`, exchange the sums of squares of these blocks, and all
    are added in one order. `zero` is `unknown_zero`.
    """
    leaf_shardings = jax.tree.leaves(shardings)
    sums = []
    for x, sharding in zip(jax.tree.leaves(tree), leaf_shardings, strict=True):
        if not x.size:
            sums.append(jnp.zeros((), jnp.float32))
            continue
        order = _order(sharding.shape, blocks)
        one = jnp.transpose(_squares(x.astype(jnp.float32), sharding, blocks, zero), order)
        # Along the dims before the one that is split, and along this device's part of that.
        for _ in order if sharding.dim is None else range(order.index(sharding.dim) + 1):
            one = add_pairs(one)
        sums.append(one)
    split = [i for i, sharding in enumerate(leaf_shardings) if sharding.dim is not None]
    if split:
        local = jnp.concatenate([sums[i].reshape(1, -1) for i in split], axis=1)
        axes = leaf_shardings[split[0]].axes
        total = add_pairs(gather(local, 0, axes, replicated=True))
        for i, part in zip(split, lax.split(total, [sums[i].size for i in split]), strict=True):
            sums[i] = part.reshape(sums[i].shape)
    for i, one in enumerate(sums):
        while one.ndim:
            one = add_pairs(one)
        sums[i] = one
    each = jnp.stack(sums)
    total = fence(add_pairs(flatten_padded(each, _power_of_two(len(sums)))), zero)
    return jnp.sqrt(total), (~jnp.isfinite(each)).astype(jnp.float32)


def _order(shape: tuple[int, ...], blocks: int) -> list[int]:
    """The dims in the order of additions: last the likely sharded one, whose sum communicates."""
    dims = range(len(shape))
    last = max(dims, key=lambda d: (math.gcd(shape[d], blocks), shape[d], d), default=None)
    return sorted(dims, key=lambda d: d == last)


def _squares(x: jax.Array, sharding: LeafSharding, blocks: int, zero: jax.Array) -> jax.Array:
    """Sums of squares of this device's blocks of one array.

    Written as additions, for the order of a `jnp.sum` depends on the memory layout of its operand.
    Four quarters are added at a time: compilers make one loop over memory of that.
    """
    shape: list[int] = []
    for dim, length in enumerate(sharding.shape):
        pieces = math.gcd(length, blocks)
        local = pieces // sharding.axis_size if dim == sharding.dim else pieces
        shape += [local, length // pieces]
    squares = fence(jnp.square(x), zero).reshape(shape)
    for dim in range(1, len(shape), 2):
        squares = pad_to_multiple(squares, _power_of_two(shape[dim]), dim)
        while squares.shape[dim] > 1:
            squares = tree_sum.pairwise(jnp.split(squares, min(4, squares.shape[dim]), axis=dim))
    return squares.reshape(shape[0::2])


def _power_of_two(least: int) -> int:
    return 2 ** math.ceil(math.log2(least))
