"""Optimizers applied to slices inside a map: their state, and whether they are elementwise.

Full state has its parameters' shapes, as `transform.init(parameters)` and checkpoints have it. An
array as slices is flat and padded, its last dim sharded over the mesh axes of a group.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Annotated, Any

import jax
import optax
from jax.extend.core import ClosedJaxpr, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisName, Count, Shapes, Transform, arrays_like
from research_dp.distributed import buckets
from research_dp.distributed.collectives import Axes, flat_axes
from research_dp.distributed.jaxpr import Source, mixing_operation, operations, trace_sources
from research_dp.distributed.optimizer import apply_optimizer, check_state
from research_dp.distributed.sharding import LeafSharding, infer_flat_sharding, path_name
from research_dp.errors import UsageError, first_line
from research_dp.types import PyTree

_OTHER = "Give the state of this `transform` and these parameters."


@checked
class OptaxAdapter:
    """An Optax transform as an object with `apply_gradients`, which keeps its state.

    Inside a jitted map make one of the state that comes in, and hand its state out; an adapter
    that outlives the trace would hold tracers.

    Args:
        transform: The Optax transform, or what is used like one (`optax.MultiSteps`).
        state: Its state, of slices inside a map that splits the update; None: made of the
            parameters at hand by the first call.
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
        and parameters; or if its state is not what `slice_state` makes of these parameters for so
        many shards, or goes by the shape of a parameter (factored moments).
        """
        params = jax.tree.map(_abstract, parameters)
        unsharded = jax.eval_shape(self.transform.init, params)
        slices, expected = (
            jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(p.local_shape, x.dtype), tree, layout)
            for tree, layout in (
                (params, infer_flat_sharding(params, shards)),
                (unsharded, _layout(self.transform, parameters, shards)),
            )
        )
        state = jax.eval_shape(self.transform.init, slices) if self.state is None else self.state
        check_state(
            state,
            expected,
            f"Lay it out for {shards} devices by slice_state and slice_specs; an optimizer whose "
            "state goes by a parameter's shape cannot be split.",
        )
        if mixing := self._mixing((params, unsharded), (slices, expected)):
            _refuse(mixing, shards)

    def _mixing(self, *of_arrays: tuple[PyTree, PyTree]) -> str | None:
        """Why updates of unsharded arrays and of slices differ; parameters and state of either."""

        def update(params: PyTree, state: PyTree) -> PyTree:
            return self.transform.update(params, state, params)

        try:
            full, local = (jax.make_jaxpr(update)(*given) for given in of_arrays)
        except UsageError:  # an own one says what is wrong
            raise
        except Exception as error:
            raise UsageError(
                "the optimizer's update fails; it is called with gradients, state and parameters, "
                f"and nothing else: {type(error).__name__}: {first_line(error)}"
            ) from error
        if any(jax.numpy.size(x) > 1 for x in full.consts):
            return "an array that is not sharded with the parameter"
        is_same = operations(full) == operations(local)
        differs = None if is_same else "its program depends on the shape of a parameter"
        used = _numbers_used(full, len(jax.tree.leaves(of_arrays[0][0])))
        return mixing_operation(full) or used or differs


def _numbers_used(program: ClosedJaxpr, params: int) -> str | None:
    """An operation of an array with a parameter that is one number, of which one device has it."""
    numbers = {i for i, x in enumerate(program.in_avals[:params]) if math.prod(x.shape) == 1}
    found = list[str]()

    def visit(equation: Any, given: Sequence[Source], _: Any) -> None:
        # Of a branch its predicate: what its programs do with the others is not known.
        operands = equation.invars[: 1 if any(jaxprs_in_params(equation.params)) else None]
        sizes = [math.prod(v.aval.shape) for v in operands]
        uses = any(n == 1 and x and x & numbers for n, x in zip(sizes, given, strict=False))
        if uses and any(math.prod(v.aval.shape) > 1 for v in equation.outvars):
            found.append(f"{equation.primitive.name} with a parameter that is one number")

    trace_sources(program, len(program.in_avals), visit)
    return next(iter(found), None)


def check_slice_axes(name: str, group: str | Sequence[str]) -> Axes:
    """The axes of a group; UsageError, about `name`, if they are not in the order of their names.

    Two groups of the same axes then number slices alike: those of the step and of its state.
    """
    axes = flat_axes(group)
    if axes != (in_order := tuple(sorted(axes))):
        raise UsageError(
            f"{name}: slices are numbered by the axes' names, but the order is {axes}. Write "
            f"{in_order}, here and in slice_specs and fsdp_apply_gradients."
        )
    return axes


@checked
def slice_state(transform: Transform, state: PyTree, parameters: Shapes, shards: Count) -> PyTree:
    """A state of full arrays as slices for a group of this size.

    Pure, and fit for `jit` with `out_shardings` from `slice_specs`, so that no device needs memory
    for all of it. The state is that of `transform.init(parameters)`, for the parameters that have
    gradients; of these shapes suffice. Arrays of another shape than their parameter's (counts, say)
    stay as they are, as does everything with one shard.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        return buckets.flatten_padded(x, shards).reshape(p.split_shape) if p.flat else x

    check_state(state, jax.eval_shape(transform.init, parameters), _OTHER)
    return jax.tree.map(one, state, _layout(transform, parameters, shards))


@checked
def unsharded_state(
    transform: Transform, state: PyTree, parameters: Shapes, shards: Count
) -> PyTree:
    """The inverse of `slice_state`: global arrays of the parameters' shapes, without padding.

    Raises UsageError if an array is sharded over axes in another order than that of their names, in
    which slices are made.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        if not p.flat:
            return x
        named = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        axes = tuple(named.spec)[p.dim :][:1] if isinstance(named, NamedSharding) else ()
        check_slice_axes(f"sharding of the optimizer state {p.path}", axes)
        return buckets.unflatten(x, p.shape)

    layout = _layout(transform, parameters, shards)
    split = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.split_shape, p.dtype), layout)
    check_state(state, split, _OTHER)
    return jax.tree.map(one, state, layout)


@checked
def slice_specs(transform: Transform, parameters: Shapes, axis: AxisName, shards: Count) -> PyTree:
    """The `PartitionSpec`s of a sliced state, for `shard_map` and for shardings.

    `axis` is the mesh axis, or axes, of the group; UsageError if not in the order of their names.
    """
    axes = check_slice_axes("axis", axis)

    def one(p: LeafSharding) -> PartitionSpec:
        if p.dim is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * p.dim, axes if len(axes) > 1 else axes[0])

    return jax.tree.map(one, _layout(transform, parameters, shards))


def _layout(transform: Transform, parameters: Shapes, shards: int) -> PyTree:
    """`LeafSharding`s of a transform's state: flat ones of what has its parameter's shape."""

    def other(x: Any) -> jax.ShapeDtypeStruct:  # as a slice, of a size that nothing else has
        return jax.ShapeDtypeStruct((*(1,) * (x.ndim - 1), x.size + 1), x.dtype)

    def one(keys: Any, x: Any, y: Any) -> LeafSharding:
        cut = shards > 1 and x.shape != y.shape == other(x).shape
        dim = max(x.ndim - 1, 0) if cut else None
        return LeafSharding(path_name(keys), x.shape, x.dtype, dim, "", shards, flat=cut)

    params = jax.tree.map(_abstract, parameters)
    trees = params, jax.tree.map(other, params)
    states = [jax.eval_shape(transform.init, tree) for tree in trees]
    structures: Any = map(jax.tree.structure, states)
    if len(set(structures)) > 1:
        problem = "the optimizer's state goes by a parameter's shape, so that it cannot be split."
        raise UsageError(problem)
    return jax.tree_util.tree_map_with_path(one, *states)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone: a sharding or weak type would make programs differ."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def check_elementwise(optimizer: Any, slices: PyTree, shards: int) -> None:
    """Refuses an object with `apply_gradients` that mixes elements of the slices it is applied to.

    A copy of the object is traced, which shares its arrays.
    """
    if getattr(optimizer, "elementwise", False):
        return

    def apply(gradients: PyTree, parameters: PyTree) -> PyTree:
        own = copy.deepcopy(optimizer, {id(x): x for x in _parts(optimizer)})
        new = own.apply_gradients(gradients, parameters)
        return new, [x for x in _parts(own) if isinstance(x, jax.Array)]

    try:
        mixing = mixing_operation(jax.make_jaxpr(apply)(slices, slices))
    except Exception as error:
        raise UsageError(
            f"the optimizer, a {type(optimizer).__name__}, could not be checked before it is "
            f"applied to slices: {type(error).__name__}: {first_line(error)}. If each element is "
            "updated by itself, set its attribute elementwise = True."
        ) from error
    if mixing:
        _refuse(mixing, shards)


def _refuse(mixing: str, shards: int) -> None:
    if shards > 1:
        raise UsageError(
            f"the optimizer mixes elements of a parameter ({mixing}), but is applied to one of "
            f"{shards} slices. Take an elementwise one; to clip by global norm use max_norm."
        )


def _parts(x: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """What a copy of an object shares with it: its arrays, devices and meshes."""
    seen = {} if seen is None else seen
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, jax.Array | jax.Device | Mesh | Sharding):
            yield leaf
        elif id(leaf) not in seen and not isinstance(leaf, type | ModuleType | FunctionType):
            seen[id(leaf)] = leaf
            inner = leaf.__self__ if isinstance(leaf, MethodType) else leaf.__getstate__()
            yield from _parts(inner, seen)
