"""Gathers for compute, whose gradients come back as shards of the mean; remat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from research_dp.argument_checks import checked
from research_dp.argument_types import Array, AxisName, Dtype
from research_dp.distributed import collectives, encoded
from research_dp.distributed.buckets import gathered, shards_of_mean
from research_dp.distributed.codecs import Codec
from research_dp.distributed.collectives import PLAIN, Axes, Reduction, Wire, cast_dtype, flat_axes
from research_dp.distributed.mesh import target_platform
from research_dp.distributed.sharding import LeafSharding
from research_dp.errors import UsageError
from research_dp.types import PyTree

# The checkpoint name of gathered parameters, by which a policy recognises them.
GATHERED = "gathered_params"

_CHEAP = frozenset(
    ("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev")
)


def drop_gathered(prim: Any, *_: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: saves everything but gathered parameters."""
    # A saved cast or reshaped copy of a gathered parameter would take its place.
    return prim.name not in _CHEAP and not _is_gathered(prim, params)


def keep_gathered(policy: Callable[..., bool], prim: Any, *args: Any, **params: Any) -> bool:
    """A policy that also saves gathered parameters."""
    return _is_gathered(prim, params) or policy(prim, *args, **params)


def _is_gathered(prim: Any, params: Mapping[str, Any]) -> bool:
    # JAX's own policies do not see a name inside a custom_vjp, so this inspects the call.
    if prim.name != "custom_vjp_call":
        return False
    equations = params["call_jaxpr"].jaxpr.eqns
    return any(e.primitive.name == "name" and e.params["name"] == GATHERED for e in equations)


def _dots(prim: Any, *args: Any, **params: Any) -> bool:
    # JAX differentiates products otherwise where it recognises this policy, which changes programs.
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(prim, *args, **params)


# Operations whose results a backward pass computes again at no cost, where compilers fuse them with
# what reads these. Not comparisons: a mask is one byte an element, what it is made of more.
_ELEMENTWISE = _CHEAP | frozenset(
    (
        *("abs", "add", "add_any", "ceil", "clamp", "concatenate", "copy", "cos", "div", "erf"),
        *("exp", "exp2", "expm1", "floor", "integer_pow", "iota", "log", "log1p", "logistic"),
        *("max", "min", "mul", "neg", "pad", "pow", "round", "rsqrt", "select_n", "sign", "sin"),
        *("split", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh"),
    )
)


def _all_but_elementwise(prim: Any, *args: Any, **params: Any) -> bool:
    is_fused = target_platform() != "cpu" and prim.name in _ELEMENTWISE
    return not is_fused and drop_gathered(prim, *args, **params)


Remat = Literal["full", "dots", "none"]

# What the forward pass of a unit saves, besides its inputs; never gathered parameters.
REMAT: Mapping[str, Callable[..., bool]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
    "none": _all_but_elementwise,
}


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The linear function `forward`, whose transpose is `backward`, and the reverse.

    Each is the derivative of the other, so derivatives of any order are exact. A full array has the
    gradient of this device's own loss, a shard that of the mean loss. So a gather's gradient is
    scattered and divided, and the gradient of that is gathered: autodiff would divide again.

    `forward` is (pytree, *constants) -> pytree, and closes over no traced value; `backward` is
    (gradient of the result, *constants) -> gradient of the pytree, in its dtypes. Constants, such
    as indices, are not differentiated. Forward mode, for which there is no rule, raises UsageError;
    inside `jax.jit` JAX raises its own TypeError.
    """
    linearised: list[bool] = []
    run = jax.custom_vjp(forward)

    def transposed(constants: tuple[Any, ...], g: Any) -> tuple[Any, ...]:
        return with_gradient(backward, forward)(g, *constants), *(None for _ in constants)

    def with_residuals(x: Any, *constants: Any) -> tuple[Any, tuple[Any, ...]]:
        out = run(x, *constants)
        linearised.append(True)
        return out, constants

    run.defvjp(with_residuals, transposed)

    def call(x: Any, *constants: Any) -> Any:
        linearised.clear()
        try:
            return run(x, *constants)
        except TypeError as error:
            if not linearised:
                raise
            # The forward pass has run, and only forward mode asks for the tangent here, at which
            # each JAX transformation fails in its own words.
            raise UsageError(
                "forward-mode differentiation (jvp, jacfwd, hessian) is not available through a "
                "gather. Use reverse over reverse, e.g. jax.jacrev(jax.jacrev(f))."
            ) from error

    return call


class GatherOptions(NamedTuple):
    """How an array is gathered over `axis`, and how its gradient comes back.

    `gather_dtype` is that of the gathered array; None: its own (`cast_dtype`). `wire` is that of
    gradients, and its collectives and buckets are those of the gather too. `codec` encodes what is
    gathered, an array whose layers have this `shape` in all.
    """

    dim: int
    axis: str | Axes
    gather_dtype: Any = None
    wire: Wire = Wire()
    codec: Codec | None = None
    shape: tuple[int, ...] = ()

    def rounded(self, x: jax.Array) -> jax.Array:
        """A shard as other devices decode it; itself without a codec."""
        if self.codec is None:
            return x
        axes = flat_axes(self.axis)
        own = encoded.gather(x, self.dim, axes, self.codec, self.shape, moves=False)
        return own.astype(x.dtype)

    def differentiable(self, dtype: Any) -> Callable[[jax.Array], jax.Array]:
        """The gather of a shard of this dtype; its gradient is this device's shard of the mean."""
        dim, axes, wire = self.dim, flat_axes(self.axis), self.wire

        def forward(x: jax.Array) -> jax.Array:
            full_dtype = cast_dtype(dtype, self.gather_dtype)
            if self.codec:
                full = encoded.gather(x, dim, axes, self.codec, self.shape, wire.reduction)
            else:
                full = collectives.gather(x.astype(full_dtype), dim, axes, wire.reduction)
            return checkpoint_name(full.astype(full_dtype), GATHERED)

        def backward(g: jax.Array) -> jax.Array:
            # `scatter_mean` sums over `axis` and divides by its size; nobody else does.
            sent = g if wire.encodes else wire.cast(g, dtype)
            return wire.scatter_mean(sent, dim, axes).astype(dtype)

        return with_gradient(forward, backward)


@checked
def gather_array_with_mean_grads(
    x: Array,
    axis: int,
    axis_name: AxisName,
    gather_dtype: Dtype | None = None,
    grad_scatter_dtype: Dtype | None = None,
    *,
    pre_divide: bool = False,
    reduction: Reduction = PLAIN,
) -> jax.Array:
    """Gathers an array over a mesh axis; its gradient comes back as shards of the mean.

    As in xlstm-jax. Inside mapped axes; right with `check_vma` on and off, for a loss of this
    device's own (docs/api.md, "Linen and shard_map"). `x` is this device's shard along dim `axis`,
    floating-point if it is differentiated. Further arguments are those of `gather_params`.

    Returns:
        The full array, dim `axis` multiplied by the axis size. Exact in reverse mode of any order;
        forward mode (jvp, jacfwd, hessian) is refused.

    Raises:
        UsageError: x has no such dim, or a dtype is not a floating-point dtype.
        NameError: The axis is not bound.
    """
    axes = flat_axes(axis_name)
    collectives.axes_size(axes)  # names an axis that is not bound
    if not -x.ndim <= axis < x.ndim:
        raise UsageError(f"gather over {axes}: an array of shape {x.shape} has no dim {axis}.")
    # A type that says that x is the same on each device is no reason to refuse it: `nn.scan` traces
    # its body once for shapes alone, with types that have lost where values vary.
    wire = Wire(reduction, grad_scatter_dtype, pre_divide)
    options = GatherOptions(axis % x.ndim, axes, gather_dtype, wire)
    return options.differentiable(x.dtype)(x)


def gather_by_compiler(x: jax.Array, options: GatherOptions, mesh: Mesh) -> jax.Array:
    """Tells the compiler, under `jit`, to gather `x` for compute and to scatter its gradient.

    Without it activations may be split over the dims that parameters are sharded on, and moved.
    """
    sharded = NamedSharding(mesh, PartitionSpec(*(None,) * options.dim, options.axis))
    replicated, pinned = NamedSharding(mesh, PartitionSpec()), jax.lax.with_sharding_constraint
    dtype = x.dtype

    def full(shards: jax.Array) -> jax.Array:
        wire = shards.astype(cast_dtype(shards.dtype, options.gather_dtype))
        # Shards are pinned too: else the compiler may cast what it has gathered.
        return checkpoint_name(pinned(pinned(wire, sharded), replicated), GATHERED)

    # The compiler sums gradients where they are made, before any cast: in the gathered dtype.
    return with_gradient(full, lambda g: pinned(g, sharded).astype(dtype))(x)


def gather_tree_with_mean_grads(tree: PyTree, layout: PyTree, options: GatherOptions) -> PyTree:
    """`GatherOptions.differentiable` of all leaves that are sharded, in buckets; `dim` is not used.

    Packing copies, which a compiler that combines collectives by itself does not.
    """
    dtypes, wire = jax.tree.map(lambda x: x.dtype, tree), options.wire
    axes, of_gather = flat_axes(options.axis), dataclasses.replace(wire, dtype=options.gather_dtype)

    def sent(tree: PyTree, by: Wire) -> PyTree:
        def one(x: jax.Array, p: LeafSharding, dtype: Any) -> jax.Array:
            return x if p.dim is None else by.cast(x, dtype)

        return jax.tree.map(one, tree, layout, dtypes)

    def full(tree: PyTree) -> PyTree:
        full = gathered(sent(tree, of_gather), layout, axes, wire, replicated=False)
        return jax.tree.map(lambda x: checkpoint_name(x, GATHERED), full)

    def blocks(grads: PyTree) -> PyTree:
        blocks = shards_of_mean(sent(grads, wire), layout, axes, wire)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), blocks, dtypes)

    return with_gradient(full, blocks)(tree)
