"""Optimizer state as slices on devices and as full arrays; an Optax optimizer as an object.

Full: each array of the state has its parameter's shape, as `transform.init(parameters)` leaves it.
Checkpoints have this form. Sliced: each is flat and padded, and its last dim is sharded over the
mesh axes of a group (`LeafSharding.split_shape`). Both are addressed by parameter path; neither
knows of buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import gin
import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisName, Count, Shapes, Transform, arrays_like
from research_dp.distributed import sharding
from research_dp.distributed.collectives import Axes, flat_axes
from research_dp.distributed.optimizer import apply_optimizer, check_state, map_state
from research_dp.distributed.optimizer_checks import find_mixing_update, local_part, mixing_error
from research_dp.distributed.sharding import LeafSharding, infer_flat_sharding
from research_dp.errors import UsageError

PyTree = Any


@gin.register(module="distributed")
@checked
class OptaxAdapter:
    """An Optax transform as an object with `apply_gradients`, which keeps its state.

    Inside a jitted map make one of the state that comes in, and hand its state out; an adapter
    that outlives the trace would hold tracers.

    Args:
        transform: The Optax transform, or what is used like one (`optax.MultiSteps`).
        state: Its state; made of the parameters at hand by the first call, if None. Inside a map
            that splits the update these are slices, and so is the state.
    """

    def __init__(self, transform: Transform, state: PyTree = None):
        self.transform = transform
        self.state = state
        # Jitted, so that outside of a map it is one program.
        self._jitted = optax.GradientTransformation(transform.init, jax.jit(transform.update))

    @checked
    def init(self, parameters: Arrays, shards: Count = 1) -> PyTree:
        """Sets and returns the state before the first step, as global arrays.

        `parameters` are the unsharded ones that will have gradients; `shards` is the size of the
        group that the update is split over, 1: full arrays.
        """
        full = self.transform.init(parameters)
        self.state = slice_state(self.transform, full, parameters, shards)
        return self.state

    @checked
    def apply_gradients(
        self, gradients: Annotated[PyTree, arrays_like("parameters")], parameters: Arrays
    ) -> PyTree:
        """One step: new parameters, dtypes kept; the state is replaced."""
        state = self.transform.init(parameters) if self.state is None else self.state
        parameters, self.state = apply_optimizer(self._jitted, gradients, state, parameters)
        return parameters

    @checked
    def check_slices(self, parameters: Shapes, shards: Count) -> None:
        """Checks that the update of slices is a slice of the update. Computes nothing.

        `parameters` are the unsharded ones that have gradients; their shapes suffice. Raises
        UsageError if the optimizer mixes elements of an array, or needs more than gradients, state
        and parameters; or if its state is not what `slice_state` makes: it was not sliced, or not
        for so many shards or these parameters, or it goes by the shape of a parameter (factored
        moments).
        """
        shardings = infer_flat_sharding(parameters, shards)
        unsharded = jax.eval_shape(self.transform.init, parameters)
        state = self.state
        if state is None:
            slices = jax.tree.map(local_part, parameters, shardings)
            state = jax.eval_shape(self.transform.init, slices)
        check_state(
            state,
            map_state(self.transform, local_part, unsharded, shardings),
            f"Lay it out for {shards} devices by slice_state and slice_specs; an optimizer whose "
            "state goes by a parameter's shape cannot be split.",
        )
        given = None if self.state is None else unsharded
        mixing = find_mixing_update(self.transform, shardings, given)
        if mixing:
            raise mixing_error(mixing, shards)


def check_slice_axes(name: str, group: str | Sequence[str]) -> Axes:
    """The axes of a group; UsageError if they are not in the order of their names.

    Two groups of the same axes then number slices alike: those of the step and of its state.
    Messages call the group `name`.
    """
    axes = flat_axes(group)
    if axes != tuple(sorted(axes)):
        raise UsageError(
            f"{name}: slices are numbered by the axes' names, but the order is {axes}. Write "
            f"{tuple(sorted(axes))}, here and in slice_specs and fsdp_apply_gradients."
        )
    return axes


def _sharded_over(x: Any, p: LeafSharding) -> Axes:
    """The axes over which the dim of slices is sharded, where that is known."""
    named = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(named, NamedSharding) or len(named.spec) <= (p.dim or 0):
        return ()
    return flat_axes(named.spec[p.dim or 0])


@checked
def slice_state(transform: Transform, state: PyTree, parameters: Shapes, shards: Count) -> PyTree:
    """A state of full arrays as slices for a group of this size.

    Pure, and fit for `jit` with `out_shardings` from `slice_specs`, so that no device needs memory
    for all of it. The state is that of `transform.init(parameters)`, for the parameters that have
    gradients; of these shapes suffice. Arrays of another shape than their parameter's (counts, say)
    stay as they are, as does everything with one shard.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        if not p.flat or x.shape != p.shape:
            return x
        return sharding.flatten_padded(x, p.axis_size).reshape(p.split_shape)

    return map_state(transform, one, state, infer_flat_sharding(parameters, shards))


@checked
def unsharded_state(
    transform: Transform, state: PyTree, parameters: Shapes, shards: Count
) -> PyTree:
    """The inverse of `slice_state`: global arrays of the parameters' shapes, without padding.

    Raises UsageError if an array is sharded over axes that are not in the order of their names:
    slices would be read back in another order than they were made in.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        if not p.flat or x.shape != p.split_shape:
            return x
        axes = _sharded_over(x, p)
        check_slice_axes(f"sharding of the optimizer state of {p.path}", axes)
        return sharding.unflatten(x, p.shape)

    return map_state(transform, one, state, infer_flat_sharding(parameters, shards))


@checked
def slice_specs(transform: Transform, parameters: Shapes, axis: AxisName, shards: Count) -> PyTree:
    """The `PartitionSpec`s of a sliced state, for `shard_map` and for shardings.

    `axis` is the mesh axis, or axes, of the group; UsageError if not in the order of their names.
    """
    axes = check_slice_axes("axis", axis)

    def one(x: Any, p: LeafSharding) -> PartitionSpec:
        if p.dim is None or x.shape != p.shape:
            return PartitionSpec()
        return PartitionSpec(*(None,) * p.dim, axes if len(axes) > 1 else axes[0])

    state = jax.eval_shape(transform.init, parameters)
    shardings = infer_flat_sharding(parameters, shards)
    return map_state(transform, one, state, shardings, lambda _: PartitionSpec())
