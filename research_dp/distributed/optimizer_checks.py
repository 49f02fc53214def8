"""Checks that an optimizer can be applied to shards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import jax
import optax
from jax.sharding import Mesh, Sharding

from research_dp.distributed.dependence import REPLICATED, Dependence, elementwise
from research_dp.distributed.elementwise import find_mixing
from research_dp.distributed.optimizer import map_state
from research_dp.distributed.sharding import LeafSharding, by_path, path_name
from research_dp.errors import UsageError, first_line

PyTree = Any


def find_mixing_update(
    optimizer: optax.GradientTransformation, shardings: PyTree, opt_state: PyTree = None
) -> str | None:
    """Finds why an optimizer cannot be applied to shards, as `find_mixing`; None: it can.

    Traces its update, and computes nothing. `opt_state` has shapes and dtypes of its unsharded
    state; None: `init` makes it of the shards. Raises UsageError if the update fails for gradients,
    state and parameters, or the state does not show which parameter it belongs to.
    """
    params = jax.tree.map(abstract, shardings)
    state = jax.eval_shape(optimizer.init, params) if opt_state is None else opt_state
    state = jax.tree.map(abstract, state)

    def update(grads: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        state = optimizer.init(params) if opt_state is None else state
        return optimizer.update(grads, state, params)

    try:
        program = jax.make_jaxpr(update)(params, params, state)
    except Exception as error:
        raise UsageError(
            "the optimizer's update fails; it is called with gradients, state and parameters, and "
            f"nothing else: {type(error).__name__}: {first_line(error)}"
        ) from error
    if all(p.dim is None for p in jax.tree.leaves(shardings)):
        return None

    shards = jax.tree.map(local_part, params, shardings)
    shard_state = map_state(optimizer, local_part, state, shardings)
    labels = jax.tree.map(_depends_on, params, shardings)
    state_labels = map_state(optimizer, _depends_on, state, shardings, lambda _: REPLICATED)
    return find_mixing(
        program,
        jax.tree.leaves((labels, labels, state_labels)),
        jax.tree.leaves((labels, state_labels)),
        on_shards=lambda: jax.make_jaxpr(update)(shards, shards, shard_state),
    )


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype alone: a sharding or weak type would make programs differ."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def local_part(x: Any, p: LeafSharding) -> Any:
    """Abstract local shard of an array, which is sharded if it has its parameter's shape."""
    return jax.ShapeDtypeStruct(p.local_shape if x.shape == p.shape else x.shape, x.dtype)


def _depends_on(x: Any, p: LeafSharding) -> Dependence:
    return elementwise(p.path) if p.dim is not None and x.shape == p.shape else REPLICATED


def check_elementwise(
    optimizer: Any,
    slices: Mapping[str, Any],
    shardings: Mapping[str, LeafSharding],
    tree: Callable[[Mapping[str, Any]], PyTree],
) -> None:
    """Refuses an object with `apply_gradients` that mixes elements of the slices it is applied to.

    A copy of the object (`copy.deepcopy`) is traced; the object itself does not change. Its state
    is the arrays that it has, also in attributes of its attributes. Those of a slice's shape are
    slices; in the program for unsharded parameters abstract unsharded arrays replace them. With an
    attribute `elementwise = True` it is not checked.

    `slices` and `shardings` are this device's, by path; `tree` makes of such arrays by path the
    tree that the object is given. Raises UsageError also if it cannot be copied and traced.
    """
    if getattr(optimizer, "elementwise", False):
        return
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
            return jax.make_jaxpr(apply)(*jax.tree.map(abstract, given))

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
    if mixing:
        raise mixing_error(mixing, next(iter(shardings.values())).axis_size)


def mixing_error(reason: str, shards: int) -> UsageError:
    """The error for an optimizer that `find_mixing` refuses."""
    return UsageError(
        f"the optimizer mixes elements of a parameter ({reason}), but is applied to one of "
        f"{shards} slices. Take an elementwise one; to clip by global norm use max_norm."
    )


def _parts(
    x: Any, prefix: str = "", seen: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """What a copy of an object shares with it, by path: its arrays, devices and meshes."""
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
    """The JAX arrays of an object, in its attributes and theirs, by path."""
    return [(path, leaf) for path, leaf in _parts(x) if isinstance(leaf, jax.Array)]


def _unsharded(
    path: str, x: jax.Array, shardings: Mapping[str, LeafSharding]
) -> jax.ShapeDtypeStruct:
    """What replaces a slice that an optimizer keeps: an abstract array of its parameter's shape.

    Raises ValueError if slices of parameters of different shapes have the shape of `x`, and `path`
    ends with the path of none of them.
    """
    shapes = {name: p.shape for name, p in shardings.items() if p.local_shape == x.shape}
    names = list(shapes)
    if len(set(shapes.values())) > 1:
        names = [name for name in shapes if f"/{path}".endswith(f"/{name}")]
        if not names:
            raise ValueError(f"its array {path} {x.shape} may be a slice of any of {shapes}")
    return jax.ShapeDtypeStruct(shapes[max(names, key=len)], x.dtype)
