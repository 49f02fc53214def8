"""Optimizer state as slices on devices and as whole arrays; an Optax optimizer as an object.

Whole: each array of the state has its parameter's shape, as `transform.init(parameters)` leaves it.
This is what belongs on disk. Sliced: each is flat and padded, and its last dim lies on the mesh
axes of a group (`Placement.split_shape`). Both are addressed by parameter path; neither knows of
buckets.
"""

from __future__ import annotations

from typing import Any

import gin
import jax
import optax
from jax.sharding import PartitionSpec

from research_dp.distributed.collectives import Axes
from research_dp.distributed.errors import UsageError
from research_dp.distributed.layout import Placement, by_path, dim_spec, lay_out_flat
from research_dp.distributed.padding import flatten_padded, unflatten
from research_dp.distributed.updates import apply_optimizer, map_state, mixing_in

PyTree = Any


@gin.register(module="distributed")
class OptaxAdapter:
    """An Optax transform as an object with `apply_gradients`, which holds its state.

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

    def __init__(self, transform: optax.GradientTransformation, state: PyTree = None):
        self.transform = transform
        self.state = state
        # Jitted, so that the check and the update are one trace.
        self._jitted = optax.GradientTransformation(transform.init, jax.jit(transform.update))

    def init(self, parameters: PyTree, shards: int = 1) -> PyTree:
        """Sets and returns the state before the first step, as global arrays.

        Args:
            parameters: The parameters that will have gradients, whole.
            shards: Size of the group that the update is split over; 1: whole arrays.
        """
        whole = self.transform.init(parameters)
        self.state = slice_state(self.transform, whole, parameters, shards)
        return self.state

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree:
        """One step: new parameters, dtypes kept; the state is replaced."""
        state = self._state_of(parameters)
        parameters, self.state = apply_optimizer(self._jitted, gradients, state, parameters)
        return parameters

    def check_slices(
        self, gradients: PyTree, slices: PyTree, parameters: PyTree, shards: int
    ) -> None:
        """Checks that the update of slices is a slice of the update. Computes nothing.

        Args:
            gradients: This device's slices of the gradients.
            slices: This device's slices of the parameters.
            parameters: The whole parameters; shapes suffice.
            shards: Number of slices.

        Raises:
            UsageError: The optimizer mixes elements of an array, or its state is not what
                `slice_state` makes: it was not sliced, or not for so many shards, or it goes by the
                shape of a parameter (factored moments).
        """
        state = self._state_of(slices)
        whole = jax.eval_shape(self.transform.init, parameters)
        layout = lay_out_flat(parameters, shards)
        expected = by_path(map_state(self.transform, _local, whole, layout))
        held = by_path(state)
        for name in sorted(expected.keys() | held.keys()):
            shape, wanted = (x[name].shape if name in x else None for x in (held, expected))
            if shape != wanted:
                raise UsageError(
                    f"optimizer state {name} has shape {shape} on a device, but slices for "
                    f"{shards} devices have {wanted}. Lay it out by slice_state and slice_specs; "
                    "an optimizer whose state goes by a parameter's shape cannot be split."
                )
        mixing = mixing_in(self._jitted.update, gradients, state, slices)
        if mixing:
            raise UsageError(
                f"the optimizer mixes elements of a parameter ({mixing}), but is applied to one of "
                f"{shards} slices. Take an elementwise one; to clip by global norm use max_norm."
            )

    def _state_of(self, parameters: PyTree) -> PyTree:
        if self.state is None:
            self.state = self.transform.init(parameters)
        return self.state


def _local(x: Any, p: Placement) -> Any:
    """What a device holds of an array of the state."""
    return jax.ShapeDtypeStruct(p.local_shape, x.dtype) if x.shape == p.shape else x


def slice_state(
    transform: optax.GradientTransformation, state: PyTree, parameters: PyTree, shards: int
) -> PyTree:
    """A state of whole arrays as slices for a group of this size.

    Pure, and fit for `jit` with `out_shardings` from `slice_specs`, so that no device need hold
    all of it.

    Args:
        transform: The transform whose state it is.
        state: Whole, as from `transform.init(parameters)` or `whole_state`.
        parameters: The parameters that have gradients; shapes suffice.
        shards: Size of the group. With 1 the state stays whole.

    Returns:
        A tree of the same structure. Arrays of another shape than their parameter's (counts, say)
        are as they were.
    """

    def one(x: Any, p: Placement) -> Any:
        if not p.flat or x.shape != p.shape:
            return x
        return flatten_padded(x, p.axis_size).reshape(p.split_shape)

    return map_state(transform, one, state, lay_out_flat(parameters, shards))


def whole_state(
    transform: optax.GradientTransformation, state: PyTree, parameters: PyTree, shards: int
) -> PyTree:
    """The inverse of `slice_state`: global arrays of the parameters' shapes, without padding."""

    def one(x: Any, p: Placement) -> Any:
        return unflatten(x, p.shape) if p.flat and x.shape == p.split_shape else x

    return map_state(transform, one, state, lay_out_flat(parameters, shards))


def slice_specs(
    transform: optax.GradientTransformation, parameters: PyTree, axis: str | Axes, shards: int
) -> PyTree:
    """The `PartitionSpec`s of a sliced state, for `shard_map` and for shardings.

    Args:
        transform: The transform.
        parameters: The parameters that have gradients; shapes suffice.
        axis: The mesh axis, or axes, of the group.
        shards: Size of the group.
    """

    def one(x: Any, p: Placement) -> PartitionSpec:
        if p.dim is None or x.shape != p.shape:
            return PartitionSpec()
        return dim_spec(p.dim, axis)

    state, layout = jax.eval_shape(transform.init, parameters), lay_out_flat(parameters, shards)
    return map_state(transform, one, state, layout, lambda _: PartitionSpec())
