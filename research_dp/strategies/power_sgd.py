"""PowerSGD: gradients averaged as products of two thin matrices, with error feedback.

Vogels et al., 2019, arXiv 1905.13727. Sharded matrices are factored as a whole: of both factors a
device sends its part alone across groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import gin
import jax
import jax.numpy as jnp

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.distributed import buckets, collectives
from research_dp.distributed.boxed import is_box, split_over, unboxed, value_of, with_value
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, axes_size, takes
from research_dp.distributed.gradient_sync import sync_gradients
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.distributed.sharding import LeafSharding, is_sharded
from research_dp.errors import UsageError, binding_error
from research_dp.strategies.error_feedback import KeepsErrors
from research_dp.types import PyTree


@gin.register("power_sgd", module="strategies")
class PowerSGD(KeepsErrors):
    """Averages matrices of gradients at a low rank; what is lost is added to the next gradient.

    The last two dims of an array are a matrix, those before count matrices: layers of a stack,
    places of a convolution. What has one dim, or is small, is averaged as it is.

    Args:
        rank: Of the product; at most the smaller side of a matrix, at which nothing is lost.
        by_unit: Whether gradients are sent as soon as those of a unit are ready, which takes the
            memory of the errors once more.
        min_size: Parameters of at most so many elements a layer are averaged as they are.
    """

    algorithm = "gradients are averaged as matrices of low rank, with error feedback"
    # Each device has errors of its own; a basis is that of the mean of all.
    differs_over: ClassVar = {"error": (DATA_AXIS, FSDP_AXIS), "basis": ()}

    @checked
    def __init__(self, rank: Count = 4, by_unit: bool = False, min_size: CountOrZero = 2**12):
        self.rank, self.by_unit, self.min_size = rank, by_unit, min_size

    def _rank_of(self, p: LeafSharding) -> int:
        """The rank of a gradient's matrices; 0: it is averaged as it is."""
        layer = p.shape[1:] if p.stacked else p.shape
        if len(layer) < 2 or math.prod(layer) <= self.min_size or _side(p) is None:
            return 0
        return min(self.rank, *layer[-2:])

    @takes("devices", "stored", "key")
    def init(
        self, params: PyTree, *, devices: Mapping[str, int], stored: PyTree, key: jax.Array
    ) -> dict[str, PyTree]:
        """No errors, and random bases; () for what is averaged as it is."""
        del params
        if is_sharded(stored) and devices[DATA_AXIS] == 1:
            problem = ": under fsdp of one group `sync` has nothing to average."
            raise binding_error("data_parallel.sync", f"{problem} Take ddp, zero1 or hsdp.")
        flat: Any = jax.tree.flatten(stored)
        leaves, tree = flat
        error, basis = list[Any](), list[Any]()
        for p, own_key in zip(leaves, jax.random.split(key, len(leaves)), strict=True):
            rank = self._rank_of(p)
            size = (*p.shape[:-2], _basis_rows(p), rank) if rank else ()
            error.append(jnp.zeros(p.local_shape) if rank else ())
            basis.append(jax.random.normal(own_key, size) if rank else ())
        return {"error": tree.unflatten(error), "basis": tree.unflatten(basis)}

    @takes("reduction", "shardings", "stored")
    @jax.default_matmul_precision("highest")  # what is sent and what is kept are the gradient
    def apply(
        self,
        grads: PyTree,
        axis_names: Axes,
        *,
        state: Mapping[str, PyTree],
        shardings: PyTree,
        stored: PyTree,
        reduction: Reduction = PLAIN,
    ) -> tuple[PyTree, dict[str, PyTree]]:
        """(mean gradients, of low rank; new errors and bases)."""
        flat: Any = jax.tree.flatten(grads, is_leaf=is_box)
        boxes, tree = flat
        errors, bases = (tree.flatten_up_to(state[name]) for name in ("error", "basis"))
        layout = jax.tree.leaves(stored)
        factored = [i for i, basis in enumerate(bases) if isinstance(basis, jax.Array)]
        over = [split_over(box) for box in boxes]

        def mean(values: Mapping[int, jax.Array]) -> dict[int, jax.Array]:
            """Means by number of the gradient, over axes that its box does not name."""
            boxed = {i: with_value(boxes[i], x) for i, x in values.items()}
            return unboxed(sync_gradients(boxed, axis_names, reduction=reduction))

        means = mean({i: value_of(x) for i, x in enumerate(boxes) if i not in factored})
        exact = {i: _turned(value_of(boxes[i]) + errors[i], layout[i]) for i in factored}
        # Sharded matrices have their own rows of the first factor, and all of the second.
        left = mean({i: x @ bases[i] for i, x in exact.items()})
        for i, x in left.items():
            whole = collectives.gather(x, x.ndim - 2, over[i], reduction)
            left[i] = _rows_of(jnp.linalg.qr(whole)[0], over[i])
        # Sums over the shards of this group; `mean` divides, once, by the number of groups.
        own = {i: reduction.all_reduce(x.mT @ left[i], over[i]) for i, x in exact.items()}
        right = mean({i: _rows_of(x, over[i]) for i, x in own.items()})
        for i, x in exact.items():
            whole = collectives.gather(right[i], x.ndim - 2, over[i], reduction)
            bases[i] = whole[..., : own[i].shape[-2], :]
            sent = _turned(left[i] @ bases[i].mT, layout[i])
            means[i] = sent.astype(value_of(boxes[i]).dtype)
            errors[i] = _turned(x - left[i] @ own[i].mT, layout[i])
        result = tree.unflatten([means[i] for i in range(len(boxes))])
        if not is_sharded(stored):  # they came whole, and an update may take slices
            result = buckets.shard_tree(result, shardings)
        return result, {"error": tree.unflatten(errors), "basis": tree.unflatten(bases)}

    @takes("devices", "sharding")
    def wire_bytes(
        self, shape: tuple[int, ...], dtype: Any, *, devices: Mapping[str, int], sharding: Any
    ) -> float:
        """Bytes that, all-reduced across groups, cost what is sent of a gradient, in float32."""
        if not (rank := self._rank_of(sharding)):
            return math.prod(shape) * dtype.itemsize
        rows, columns = sharding.shape[-2:][:: -1 if _side(sharding) == -1 else 1]
        count = 4 * rank * math.prod(sharding.shape[:-2])
        if sharding.dim is None:
            return count * (rows + columns)
        shards, groups = sharding.axis_size, devices[DATA_AXIS]
        # Inside a group the first factor is gathered, the second summed, and gathered once more.
        inside = (rows + 3 * columns) * (shards - 1) / shards
        return count * ((rows + columns) / shards + inside / (2 * (groups - 1) / groups))

    @takes("devices", "stored")
    def resize(
        self, state: Mapping[str, PyTree], *, devices: Mapping[str, int], stored: PyTree
    ) -> dict[str, PyTree]:
        """The mean of the errors is what it was."""
        for p, basis in zip(
            jax.tree.leaves(stored), jax.tree.leaves(state["basis"], is_leaf=_is_none), strict=True
        ):
            if not _is_none(basis) and basis.shape[-2] != _basis_rows(p):
                raise UsageError(
                    f"power_sgd factors {p.path} {p.shape} from its other side where other devices "
                    "share it: continue with as many devices, or shard the same dim "
                    "(shard_params.rule)."
                )
        return super().resize(state, devices=devices, stored=stored)


def _side(p: LeafSharding) -> int | None:
    """The dim of its matrices that is sharded, -2 or -1; 0: none is; None: that of another dim."""
    if p.dim is None:
        return 0
    return p.dim - len(p.shape) if p.dim >= len(p.shape) - 2 and p.parts == 1 else None


def _basis_rows(p: LeafSharding) -> int:
    return p.shape[-2 if _side(p) == -1 else -1]


def _is_none(x: Any) -> bool:
    return isinstance(x, tuple)


def _turned(x: jax.Array, p: LeafSharding) -> jax.Array:
    """Matrices, transposed if their columns are sharded; or back."""
    return x.mT if _side(p) == -1 else x


def _rows_of(x: jax.Array, axes: Axes) -> jax.Array:
    """This device's rows of matrices that are replicated over axes, maybe padded."""
    rows = x.ndim - 2
    return collectives.shard(buckets.pad_to_multiple(x, axes_size(axes), rows), rows, axes)
