"""Optimizers that mix the elements of a parameter, applied to shards.

The update is traced for unsharded arrays, and its program is run on this device's shards.
Elementwise operations run as they are. A reduction over the sharded dim (norms, trust ratios,
factored moments) is one of the shard, and then over the devices. `on_matrices` is given complete
matrices: an all-to-all brings each to one device, and another brings back what it became.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.interpreters import mlir

from research_dp.argument_checks import checked
from research_dp.argument_types import Arrays
from research_dp.distributed.collectives import PLAIN, Reduction, all_max, gather
from research_dp.distributed.mesh import FSDP_AXIS
from research_dp.distributed.optimizer import map_state
from research_dp.distributed.sharding import LeafSharding
from research_dp.errors import UsageError
from research_dp.tracing.jaxpr import maps_scalars, program_called
from research_dp.types import PyTree

MatrixFunction = Callable[[jax.Array], jax.Array]

_MATRICES = Primitive("on_matrices")
_MATRICES.multiple_results = True


def _of_all(*arrays: jax.Array, function: MatrixFunction) -> list[jax.Array]:
    return [function(x) for x in arrays]


_MATRICES.def_impl(_of_all)
_MATRICES.def_abstract_eval(lambda *avals, function: list(avals))
mlir.register_lowering(_MATRICES, mlir.lower_fun(_of_all, multiple_results=True))


class Mixes(UsageError):
    """An operation of an update that no rule runs on shards; the message names its parameter."""


@checked
def on_matrices(function: MatrixFunction, tree: Arrays) -> PyTree:
    """Applies a function to complete matrices, however the arrays of a tree are sharded.

    For optimizers: under a strategy that shards parameters each device gets its share of the
    matrices, and all matrices of one shape are one batch.

    Args:
        function: Maps a batch of matrices (batch, rows, columns) to one of the same shape and
            dtype, each by itself, whatever the batch. It must be hashable, and equal ones compute
            the same; an instance of a frozen dataclass is, a new lambda at each call is not.
        tree: Arrays (..., rows, columns).

    Returns:
        A tree like `tree`.

    Raises:
        UsageError: An array has fewer than two dims, or the function changes a shape or dtype.
    """
    leaves, treedef = jax.tree.flatten(tree)
    flat = []
    for x in leaves:
        if jnp.ndim(x) < 2:
            raise UsageError(f"on_matrices: an array of shape {jnp.shape(x)} has no matrices.")
        flat.append(x.reshape(-1, *x.shape[-2:]))
        like = jax.eval_shape(function, flat[-1])
        if (like.shape, like.dtype) != (flat[-1].shape, x.dtype):
            problem = f"makes {like.shape} {like.dtype} of {flat[-1].shape} {x.dtype}"
            raise UsageError(f"on_matrices: the function {problem}. Keep shape and dtype.")
    results = _MATRICES.bind(*flat, function=function) if flat else []
    shaped = [y.reshape(x.shape) for x, y in zip(leaves, results, strict=True)]
    return jax.tree.unflatten(treedef, shaped)


class _Value(NamedTuple):
    """A value of the program for unsharded arrays, as this device has it."""

    x: Any = None
    dim: int | None = None  # that is sharded; None: all devices have the same
    path: str = ""  # of the parameter


def on_shards(
    optimizer: optax.GradientTransformation,
    shardings: PyTree,
    reduction: Reduction = PLAIN,
    run_gathered: Callable[[ClosedJaxpr, list[jax.Array]], list[jax.Array]] | None = None,
) -> optax.GradientTransformation:
    """The optimizer for this device's shards; its `update` needs the mesh axis `fsdp`, bound.

    `shardings` are the `LeafSharding`s of gradients and parameters. State of its parameter's shape
    is sharded as this is; other state is replicated. Tracing raises `Mixes` for an operation that
    mixes elements and has no rule. `run_gathered` runs the program for unsharded arrays instead:
    each device gathers its arguments, and keeps its shards of the results.
    """
    size = max((p.axis_size for p in jax.tree.leaves(shardings)), default=1)

    def shaped(x: Any, like: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(like.shape, x.dtype)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        full = [jax.tree.map(shaped, tree, shardings) for tree in (grads, params)]
        shapes = jax.tree.map(shaped, state, jax.eval_shape(optimizer.init, full[1]))

        def placed(x: Any, p: LeafSharding) -> _Value:
            return _Value(None, p.dim if x.shape == p.shape else None, p.path)

        one = jax.tree.map(placed, shardings, shardings)
        of_state = map_state(optimizer, placed, shapes, shardings, lambda _: _Value())
        labels: list[_Value] = jax.tree.leaves(
            (one, of_state, one), is_leaf=lambda x: isinstance(x, _Value)
        )
        program, out = jax.make_jaxpr(optimizer.update, return_shape=True)(full[0], shapes, full[1])
        structure: Any = jax.tree.structure(out)
        if structure != jax.tree.structure((grads, state)):
            raise Mixes("its state changes structure")
        run, leaves = _Evaluation(size, reduction), jax.tree.leaves((grads, state, params))
        given = [label._replace(x=x) for label, x in zip(labels, leaves, strict=True)]
        results, wanted = [], jax.tree.leaves((full[0], shapes))
        if run_gathered is None:
            found = run.program(program, given)
        else:
            pairs = zip(given, program.in_avals, strict=True)
            gathered = [run.placed(value, None, like.shape) for value, like in pairs]
            found = [_Value(x) for x in run_gathered(program, gathered)]
        for value, label, x, want in zip(found, labels, jax.tree.leaves(out), wanted, strict=False):
            if label.dim is not None and x.shape != want.shape:  # which `apply_updates` repeats
                raise Mixes(f"an update of shape {x.shape} for {label.path} {want.shape}")
            results.append(run.placed(value, label.dim, x.shape))
        return jax.tree.unflatten(structure, results)

    return optax.GradientTransformation(optimizer.init, update)


class _Evaluation:
    """Runs programs for unsharded arrays on shards."""

    def __init__(self, size: int, reduction: Reduction):
        self._size, self._reduction = size, reduction

    def program(self, closed: Any, given: Sequence[_Value]) -> list[_Value]:
        """The results of a program, whose arguments are sharded as they say."""
        is_closed = isinstance(closed, ClosedJaxpr)
        jaxpr, consts = (closed.jaxpr, closed.consts) if is_closed else (closed, [])
        variables: list[Any] = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(variables, [*map(_Value, consts), *given], strict=True))

        def read(v: Any) -> _Value:
            return _Value(v.val) if isinstance(v, Literal) else values[v]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def placed(self, value: _Value, dim: int | None, shape: tuple[int, ...]) -> jax.Array:
        """A value sharded along another dim: its part of one that is replicated, or gathered."""
        if value.dim == dim:
            return value.x
        if value.dim is None and dim is not None:
            length = shape[dim] // self._size
            start = lax.axis_index(FSDP_AXIS) * length
            return lax.dynamic_slice_in_dim(value.x, start, length, dim)
        if dim is None and value.dim is not None:
            return gather(value.x, value.dim, FSDP_AXIS, self._reduction)
        raise Mixes(f"an array sharded along dim {value.dim} of {value.path} in place of {dim}")

    def _equation(self, equation: Any, given: list[_Value]) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        if (called := program_called(equation)) is not None:
            return self.program(called, given)
        path = next((value.path for value in given if value.dim is not None), None)
        if path is None:
            return self._bind(equation, [value.x for value in given], _Value())
        if equation.primitive is _MATRICES:
            return self._matrices(params["function"], given)
        shapes = [v.aval.shape for v in equation.invars]
        if maps_scalars(equation):
            shape = equation.outvars[0].aval.shape
            cut = [(v.dim, s) for s, v in zip(shapes, given, strict=True) if v.dim is not None]
            if all(d == cut[0][0] and s[d] == shape[d] for d, s in cut):  # others may repeat dims
                dim = cut[0][0]
                operands = [
                    self.placed(v, dim, s) if s[dim : dim + 1] == (shape[dim],) else v.x
                    for s, v in zip(shapes, given, strict=True)
                ]
                return self._bind(equation, operands, _Value(None, dim, path))
        elif rule := _RULES.get(name):
            value, dim = rule(self, given[0], shapes[0], params)
            return [_Value(value, dim, path)]
        raise Mixes(f"{name} of {path}")

    def _bind(self, equation: Any, operands: list[Any], label: _Value) -> list[_Value]:
        results = equation.primitive.bind(*operands, **equation.params)
        results = results if equation.primitive.multiple_results else [results]
        return [label._replace(x=x) for x in results]

    # Rules: (the sharded operand, its unsharded shape, parameters) -> (result, sharded dim).

    def _local(self, sizes: Sequence[int], dim: int) -> tuple[int, ...]:
        return tuple(n // self._size if i == dim else n for i, n in enumerate(sizes))

    def _broadcast(self, value: _Value, shape: tuple[int, ...], params: Any) -> Any:
        assert value.dim is not None
        dims = params["broadcast_dimensions"]
        dim = dims[value.dim]
        if params["shape"][dim] != shape[value.dim]:
            raise Mixes(f"broadcast_in_dim of {value.path}")
        return lax.broadcast_in_dim(value.x, self._local(params["shape"], dim), dims), dim

    def _reshape(self, value: _Value, shape: tuple[int, ...], params: Any) -> Any:
        """Row-major order stays: the dim that as many elements come before is sharded."""
        sizes, before = params.get("new_sizes"), math.prod(shape[: value.dim])
        if sizes is None:  # squeeze
            sizes = [n for i, n in enumerate(shape) if i not in params["dimensions"]]
        elif params["dimensions"] is not None:
            raise Mixes(f"reshape of {value.path} from {shape}")
        for dim, n in enumerate(sizes):
            if math.prod(sizes[:dim]) == before and n % self._size == 0:
                return value.x.reshape(self._local(sizes, dim)), dim
        return self.placed(value, None, shape).reshape(sizes), None  # it cuts across the shards

    def _transpose(self, value: _Value, shape: tuple[int, ...], params: Any) -> Any:
        order = params["permutation"]
        return lax.transpose(value.x, order), order.index(value.dim)

    def _reduce(self, local: Any, over: Any, value: _Value, params: Any) -> Any:
        axes, dim = params["axes"], value.dim
        result = local(value.x, axes)
        if dim is None or dim in axes:
            return over(result), None
        return result, dim - sum(axis < dim for axis in axes)

    def _sum(self, value: _Value, shape: tuple[int, ...], params: Any) -> Any:
        dtype = value.x.dtype
        floats = jnp.issubdtype(dtype, jnp.floating)
        wide = jnp.promote_types(dtype, jnp.float32) if floats else dtype

        def total(x: jax.Array) -> jax.Array:
            return self._reduction.all_reduce(x, (FSDP_AXIS,))

        result, dim = self._reduce(lambda x, axes: jnp.sum(x, axes, wide), total, value, params)
        return result.astype(dtype), dim

    def _max(self, value: _Value, shape: tuple[int, ...], params: Any) -> Any:
        return self._reduce(jnp.max, lambda x: all_max(x, FSDP_AXIS), value, params)

    def _matrices(self, function: MatrixFunction, given: list[_Value]) -> list[_Value]:
        """Each class of equal shapes as one batch, split over the devices."""
        results = [v._replace(x=function(v.x)) if v.dim in (None, 0) else v for v in given]
        classes: dict[Any, list[int]] = {}
        for i, v in enumerate(given):
            if v.dim not in (None, 0):
                sizes = (s * self._size if j == v.dim else s for j, s in enumerate(v.x.shape))
                _, rows, columns = sizes
                classes.setdefault((rows, columns, v.x.dtype), []).append(i)
        for (rows, columns, _), members in classes.items():
            new = self._of_class(function, [given[i] for i in members], rows, columns)
            for i, x in zip(members, new, strict=True):
                results[i] = results[i]._replace(x=x)
        return results

    def _of_class(
        self, function: MatrixFunction, given: list[_Value], rows: int, columns: int
    ) -> list[jax.Array]:
        """Shards (batch, rows, columns / devices), or of rows, after the function."""
        n, counts = self._size, [len(v.x) for v in given]
        each = -(-sum(counts) // n)  # matrices that a device gets; the last ones are zeros
        flat = jnp.concatenate([v.x.reshape(len(v.x), -1) for v in given])
        flat = jnp.pad(flat, ((0, n * each - sum(counts)), (0, 0)))
        by_rows = np.resize(np.repeat([v.dim == 1 for v in given], counts), (n, each))
        here = jnp.asarray(by_rows)[lax.axis_index(FSDP_AXIS)][:, None, None]

        def either(of_rows: Any, of_columns: Any) -> Any:
            """By how the shards of each matrix were cut."""
            if by_rows.all() or not by_rows.any():
                return of_rows() if by_rows.all() else of_columns()
            a, b = of_rows(), of_columns()
            return jnp.where(here.reshape(each, *(1,) * (a.ndim - 1)), a, b)

        def exchange(x: jax.Array) -> jax.Array:  # (devices, each, ...), by device
            return lax.all_to_all(x, FSDP_AXIS, 0, 0, tiled=True)

        parts = exchange(flat.reshape(n, each, -1)).swapaxes(0, 1)
        cut = (each, n, rows, columns // n)
        complete = either(
            lambda: parts.reshape(each, rows, columns),
            lambda: parts.reshape(cut).swapaxes(1, 2).reshape(each, rows, columns),
        )
        new = function(complete)
        parts = either(
            lambda: new.reshape(each, n, -1),
            lambda: new.reshape(each, rows, n, -1).swapaxes(1, 2).reshape(each, n, -1),
        )
        flat = exchange(parts.swapaxes(0, 1)).reshape(n * each, -1)
        pieces = jnp.split(flat[: sum(counts)], np.cumsum(counts)[:-1])
        return [x.reshape(v.x.shape) for v, x in zip(given, pieces, strict=True)]


_RULES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _Evaluation._broadcast,
    "reshape": _Evaluation._reshape,
    "squeeze": _Evaluation._reshape,
    "transpose": _Evaluation._transpose,
    "reduce_sum": _Evaluation._sum,
    "reduce_max": _Evaluation._max,
    # Within `shard_map` nothing but this module splits an array.
    "reshard": lambda run, value, shape, params: (value.x, value.dim),
}
