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
from research_dp.argument_types import (
    Arrays,
    AxisName,
    Count,
    Shapes,
    Transform,
    arrays_like,
)
from research_dp.distributed.collectives import Axes, flat_axes
from research_dp.distributed.optimizer import apply_optimizer, check_state, map_state
from research_dp.distributed.optimizer_checks import find_mixing_update, local_part, mixing_error
from research_dp.distributed.padding import flatten_padded, unflatten
from research_dp.distributed.sharding import LeafSharding, dim_spec, infer_flat_sharding
from research_dp.errors import UsageError

PyTree = Any


@gin.register(module="distributed")
@checked
class OptaxAdapter:
    """An Optax transform as an object with `apply_gradients`, which keeps its state.

    Inside a jitted map make one of the state that comes in, and hand its state out; an adapter
    that outlives the trace would hold tracers.

    Attributes:
        transform: The Optax transform, or what is used like one (`optax.MultiSteps`).
        state: Its state; made of the parameters at hand by the first call, if None. Inside a map
            that splits the update these are slices, and so is the state.

    Args:
        transform: As above.
        state: As above.
    """

    def __init__(self, transform: Transform, state: PyTree = None):
        self.transform = transform
        self.state = state
        # Jitted, so that outside of a map it is one program.
        self._jitted = optax.GradientTransformation(transform.init, jax.jit(transform.update))

    @checked
    def init(self, parameters: Arrays, shards: Count = 1) -> PyTree:
        """Sets and returns the state before the first step, as global arrays.

        Args:
            parameters: The unsharded parameters that will have gradients.
            shards: Size of the group that the update is split over; 1: full arrays.
        """
        full = self.transform.init(parameters)
        self.state = slice_state(self.transform, full, parameters, shards)
        return self.state

    @checked
    def apply_gradients(
        self, gradients: Annotated[PyTree, arrays_like("parameters")], parameters: Arrays
    ) -> PyTree:
        """One step: new parameters, dtypes kept; the state is replaced."""
        state = self._state_of(parameters)
        parameters, self.state = apply_optimizer(self._jitted, gradients, state, parameters)
        return parameters

    @checked
    def check_slices(self, parameters: Shapes, shards: Count) -> None:
        """Checks that the update of slices is a slice of the update. Computes nothing.

        Args:
            parameters: The unsharded parameters that have gradients; shapes suffice.
            shards: Number of slices.

        Raises:
            UsageError: The optimizer mixes elements of an array, or needs more than gradients,
                state and parameters. Or its state is not what `slice_state` makes: it was not
                sliced, or not for so many shards or these parameters, or it goes by the shape of a
                parameter (factored moments).
        """
        layout = infer_flat_sharding(parameters, shards)
        unsharded = jax.eval_shape(self.transform.init, parameters)
        state = self.state
        if state is None:
            slices = jax.tree.map(local_part, parameters, layout)
            state = jax.eval_shape(self.transform.init, slices)
        check_state(
            state,
            map_state(self.transform, local_part, unsharded, layout),
            f"Lay it out for {shards} devices by slice_state and slice_specs; an optimizer whose "
            "state goes by a parameter's shape cannot be split.",
        )
        mixing = find_mixing_update(
            self.transform, layout, None if self.state is None else unsharded
        )
        if mixing:
            raise mixing_error(mixing, shards)

    def _state_of(self, parameters: PyTree) -> PyTree:
        if self.state is None:
            self.state = self.transform.init(parameters)
        return self.state


def check_slice_axes(name: str, group: str | Sequence[str]) -> Axes:
    """Checks that the axes of a group are in the order in which slices are numbered: by name.

    Two groups of the same axes then number slices alike: those of the step and of its state.

    Args:
        name: What the message calls the group.
        group: The axis, or axes.

    Returns:
        The axes.

    Raises:
        UsageError: The order is another one.
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
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= (p.dim or 0):
        return ()
    return flat_axes(sharding.spec[p.dim or 0])


@checked
def slice_state(transform: Transform, state: PyTree, parameters: Shapes, shards: Count) -> PyTree:
    """A state of full arrays as slices for a group of this size.

    Pure, and fit for `jit` with `out_shardings` from `slice_specs`, so that no device need hold
    all of it.

    Args:
        transform: The transform whose state it is.
        state: Whole, as from `transform.init(parameters)` or `unsharded_state`.
        parameters: The parameters that have gradients; shapes suffice.
        shards: Size of the group. With 1 the state stays unsharded.

    Returns:
        A tree of the same structure. Arrays of another shape than their parameter's (counts, say)
        are as they were.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        if not p.flat or x.shape != p.shape:
            return x
        return flatten_padded(x, p.axis_size).reshape(p.split_shape)

    return map_state(transform, one, state, infer_flat_sharding(parameters, shards))


@checked
def unsharded_state(
    transform: Transform, state: PyTree, parameters: Shapes, shards: Count
) -> PyTree:
    """The inverse of `slice_state`: global arrays of the parameters' shapes, without padding.

    Raises:
        UsageError: An array is sharded over axes that are not in the order of their names: slices
            would be read back in another order than they were made in.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        if not p.flat or x.shape != p.split_shape:
            return x
        axes = _sharded_over(x, p)
        check_slice_axes(f"sharding of the optimizer state of {p.path}", axes)
        return unflatten(x, p.shape)

    return map_state(transform, one, state, infer_flat_sharding(parameters, shards))


@checked
def slice_specs(transform: Transform, parameters: Shapes, axis: AxisName, shards: Count) -> PyTree:
    """The `PartitionSpec`s of a sliced state, for `shard_map` and for shardings.

    Args:
        transform: The transform.
        parameters: The parameters that have gradients; shapes suffice.
        axis: The mesh axis, or axes, of the group, in the order of their names.
        shards: Size of the group.

    Raises:
        UsageError: The axes are in another order.
    """
    axes = check_slice_axes("axis", axis)

    def one(x: Any, p: LeafSharding) -> PartitionSpec:
        if p.dim is None or x.shape != p.shape:
            return PartitionSpec()
        return dim_spec(p.dim, axes if len(axes) > 1 else axes[0])

    state, layout = (
        jax.eval_shape(transform.init, parameters),
        infer_flat_sharding(parameters, shards),
    )
    return map_state(transform, one, state, layout, lambda _: PartitionSpec())
