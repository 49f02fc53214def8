"""Optimizers applied to shards: their state as slices, and the proof that they are elementwise.

Full state has its parameters' shapes, as `transform.init(parameters)` and checkpoints have it. An
array as slices is flat and padded, its last dim sharded over the mesh axes of a group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Annotated, Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays, AxisName, Count, Shapes, Transform, arrays_like
from research_dp.distributed import buckets
from research_dp.distributed.collectives import Axes, flat_axes
from research_dp.distributed.optimizer import apply_optimizer, check_state, map_state
from research_dp.distributed.sharding import LeafSharding, by_path, infer_flat_sharding, path_name
from research_dp.errors import UsageError, first_line
from research_dp.tracing.elementwise import REPLICATED, Dependence, elementwise, find_mixing
from research_dp.types import PyTree


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
        shardings = infer_flat_sharding(parameters, shards)
        unsharded = jax.eval_shape(self.transform.init, parameters)
        given, state = unsharded, self.state
        if state is None:
            slices = jax.tree.map(_local_part, parameters, shardings)
            given, state = None, jax.eval_shape(self.transform.init, slices)
        check_state(
            state,
            map_state(self.transform, _local_part, unsharded, shardings),
            f"Lay it out for {shards} devices by slice_state and slice_specs; an optimizer whose "
            "state goes by a parameter's shape cannot be split.",
        )
        _refuse(find_mixing_update(self.transform, shardings, given), shards)


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
        cut = p.flat and x.shape == p.shape
        return buckets.flatten_padded(x, p.axis_size).reshape(p.split_shape) if cut else x

    return map_state(transform, one, state, infer_flat_sharding(parameters, shards))


@checked
def unsharded_state(
    transform: Transform, state: PyTree, parameters: Shapes, shards: Count
) -> PyTree:
    """The inverse of `slice_state`: global arrays of the parameters' shapes, without padding.

    Raises UsageError if an array is sharded over axes in another order than that of their names, in
    which slices are made.
    """

    def one(x: Any, p: LeafSharding) -> Any:
        if not p.flat or x.shape != p.split_shape:
            return x
        named = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
        axes = tuple(named.spec)[p.dim :][:1] if isinstance(named, NamedSharding) else ()
        check_slice_axes(f"sharding of the optimizer state of {p.path}", axes)
        return buckets.unflatten(x, p.shape)

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


def find_mixing_update(
    optimizer: optax.GradientTransformation, shardings: PyTree, opt_state: PyTree = None
) -> str | None:
    """Finds why an optimizer cannot be applied to shards, as `find_mixing`; None: it can.

    Traces its update, and computes nothing. `opt_state` has shapes and dtypes of its unsharded
    state; None: `init` makes it of the shards.
    """
    params = jax.tree.map(_abstract, shardings)
    state = jax.eval_shape(optimizer.init, params) if opt_state is None else opt_state
    state = jax.tree.map(_abstract, state)

    def update(grads: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        state = optimizer.init(params) if opt_state is None else state
        return optimizer.update(grads, state, params)

    def depends_on(x: Any, p: LeafSharding) -> Dependence:
        return elementwise(p.path) if p.dim is not None and x.shape == p.shape else REPLICATED

    try:
        program = jax.make_jaxpr(update)(params, params, state)
    except UsageError:  # an own one says what is wrong
        raise
    except Exception as error:
        raise UsageError(
            "the optimizer's update fails; it is called with gradients, state and parameters, and "
            f"nothing else: {type(error).__name__}: {first_line(error)}"
        ) from error
    if all(p.dim is None for p in jax.tree.leaves(shardings)):
        return None

    shards, shard_state = local_state(optimizer, shardings, params, state)
    labels = jax.tree.map(depends_on, params, shardings)
    state_labels = map_state(optimizer, depends_on, state, shardings, lambda _: REPLICATED)
    return find_mixing(
        program,
        jax.tree.leaves((labels, labels, state_labels)),
        jax.tree.leaves((labels, state_labels)),
        on_shards=lambda: jax.make_jaxpr(update)(shards, shards, shard_state),
    )


def local_state(
    optimizer: optax.GradientTransformation, shardings: PyTree, params: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    """Abstract shards of unsharded parameters, and of an optimizer's unsharded state."""
    shards = jax.tree.map(_local_part, params, shardings)
    return shards, map_state(optimizer, _local_part, state, shardings)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone: a sharding or weak type would make programs differ."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _local_part(x: Any, p: LeafSharding) -> Any:
    """Abstract local shard of an array, which is sharded if it has its parameter's shape."""
    return jax.ShapeDtypeStruct(p.local_shape if x.shape == p.shape else x.shape, x.dtype)


def check_elementwise(
    optimizer: Any,
    shardings: Mapping[str, LeafSharding],
    tree: Callable[[Mapping[str, Any]], PyTree],
) -> None:
    """Refuses an object with `apply_gradients` that mixes elements of the slices it is applied to.

    A copy of the object is traced. Its state is the arrays that it has, also in attributes of its
    attributes. Those of a slice's shape are slices; abstract unsharded arrays replace them in the
    program for unsharded parameters. `tree` makes of arrays by path the tree that it is given.
    """
    if getattr(optimizer, "elementwise", False):
        return
    slices = {name: _local_part(p, p) for name, p in shardings.items()}
    try:
        shared = [x for _, x in _parts(optimizer)]
        shapes = {x.shape for x in slices.values()}
        state = [(path, x) for path, x in _arrays(optimizer) if x.shape in shapes]

        def apply(gradients: Any, parameters: Any, values: Sequence[Any]) -> tuple[Any, Any]:
            memo = {id(x): x for x in shared}
            memo |= {id(x): value for (_, x), value in zip(state, values, strict=True)}
            own = copy.deepcopy(optimizer, memo)
            new = own.apply_gradients(tree(gradients), tree(parameters))
            return [x for _, x in sorted(by_path(new).items())], [x for _, x in _arrays(own)]

        def program(parameters: Mapping[str, Any], values: Sequence[Any]) -> Any:
            given = (dict(parameters), dict(parameters), values)
            return jax.make_jaxpr(apply)(*jax.tree.map(_abstract, given))

        traced = program(shardings, [_unsharded(path, x, shardings) for path, x in state])
    except Exception as error:
        raise UsageError(
            f"the optimizer, a {type(optimizer).__name__}, could not be checked before it is "
            f"applied to slices: {type(error).__name__}: {first_line(error)}. If each element is "
            "updated by itself, set its attribute elementwise = True."
        ) from error
    labels = [elementwise(name) for name in slices]
    mixing = find_mixing(
        traced,
        [*labels, *labels, *(elementwise() for _ in state)],
        labels,
        on_shards=lambda: program(slices, [x for _, x in state]),
    )
    _refuse(mixing, next(iter(shardings.values())).axis_size)


def _refuse(mixing: str | None, shards: int) -> None:
    if mixing:
        raise UsageError(
            f"the optimizer mixes elements of a parameter ({mixing}), but is applied to one of "
            f"{shards} slices. Take an elementwise one; to clip by global norm use max_norm."
        )


def _parts(x: Any, prefix: str = "", seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """(path, part) of what a copy of an object shares with it: its arrays, devices and meshes."""
    seen = {} if seen is None else seen
    for keys, leaf in jax.tree_util.tree_leaves_with_path(x):
        path = f"{prefix}/{path_name(keys)}".strip("/")
        if isinstance(leaf, jax.Array | jax.Device | Mesh | Sharding):
            yield path, leaf
        elif id(leaf) not in seen and not isinstance(leaf, type | ModuleType | FunctionType):
            seen[id(leaf)] = leaf
            inner = leaf.__self__ if isinstance(leaf, MethodType) else leaf.__getstate__()
            yield from _parts(inner, path, seen)


def _arrays(x: Any) -> list[tuple[str, jax.Array]]:
    return [(path, leaf) for path, leaf in _parts(x) if isinstance(leaf, jax.Array)]


def _unsharded(path: str, x: jax.Array, shardings: Mapping[str, LeafSharding]) -> Any:
    """What replaces a slice that an optimizer keeps: an abstract array of its parameter's shape.

    Parameters of different shapes may have slices of its shape; the end of its path then decides.
    """
    shapes = {name: p.shape for name, p in shardings.items() if p.local_shape == x.shape}
    names = list(shapes)
    if len(set(shapes.values())) > 1:
        names = [name for name in shapes if f"/{path}".endswith(f"/{name}")]
        if not names:
            raise ValueError(f"its array {path} {x.shape} may be a slice of any of {shapes}")
    return jax.ShapeDtypeStruct(shapes[max(names, key=len)], x.dtype)
