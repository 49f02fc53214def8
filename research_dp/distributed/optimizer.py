"""The optimizer step, and its state by parameter; master weights, loss scales of narrow dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax

from research_dp import argument_types as types
from research_dp.argument_checks import checked
from research_dp.distributed.sharding import by_path, path_name
from research_dp.errors import UsageError
from research_dp.types import PyTree

AboveOne = Annotated[float, types.Limit(lambda x: types.is_number(x) and x > 1, "a number above 1")]


class Optimizer(Protocol):
    """What `fsdp_apply_gradients` needs of an optimizer; inside a map it traces a copy of it.

    A class whose objects cannot be copied and traced may say by an attribute `elementwise = True`
    that each element is updated by itself.
    """

    def apply_gradients(self, gradients: PyTree, parameters: PyTree) -> PyTree: ...


AnOptimizer = Annotated[
    Optimizer, types.has_attributes(("apply_gradients",), "OptaxAdapter(transform, state)")
]


@gin.register(module="distributed")
@checked
def apply_gradients(
    gradients: types.Numbers, parameters: types.Placeable, optimizer: AnOptimizer
) -> PyTree:
    """Applies the optimizer.

    Args:
        gradients: The averaged gradients.
        parameters: Arrays of the same shapes as the gradients.
        optimizer: An object with `apply_gradients`, e.g. `OptaxAdapter`.
    """
    return optimizer.apply_gradients(gradients, parameters)


def apply_optimizer(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extra: Any,
) -> tuple[PyTree, PyTree]:
    """One optimizer step: (new parameters, new optimizer state), dtypes kept.

    `extra` are further arguments, for an optimizer that takes some (`value` and `grad` of a step).
    If the update fails for a state that `optimizer.init` would not make, UsageError says so.
    """
    flat = jax.tree_util.tree_leaves_with_path(grads)
    for (path, g), p in zip(flat, jax.tree.leaves(params), strict=True):
        if g.shape != p.shape:
            given = f"a gradient of shape {g.shape} for {path_name(path)} of shape {p.shape}"
            raise UsageError(f"the optimizer is given {given}.")
    try:
        update = optax.with_extra_args_support(optimizer).update
        updates, new_state = update(grads, opt_state, params, **extra)
    except UsageError:
        raise
    except Exception:  # a wrong state raises anything: it is looked for afterwards
        expected = jax.eval_shape(optimizer.init, params)
        check_state(opt_state, expected, "Make it by optimizer.init of these parameters.")
        raise
    return optax.apply_updates(params, updates), new_state


def apply_in_step(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    value: Any,
) -> tuple[PyTree, PyTree]:
    """`apply_optimizer`, given all that a training step has; `value` is its loss."""
    return apply_optimizer(optimizer, grads, opt_state, params, value=value, grad=grads)


def check_state(opt_state: PyTree, expected: PyTree, advice: str) -> None:
    """Raises UsageError if a state has other arrays, shapes or another structure than expected."""
    given, by_name = by_path(opt_state), by_path(expected)
    for name in sorted(given.keys() | by_name.keys()):
        if name not in given or name not in by_name:
            raise UsageError(
                f"opt_state {name or 'itself'} is {'left over' if name in given else 'missing'}: "
                "the state must be that of the parameters that have gradients, and no others."
            )
        shape = np.shape(given[name])
        if shape != (right := by_name[name].shape):
            raise UsageError(f"opt_state {name} has shape {shape}, not {right}. {advice}")
    structures: Any = map(jax.tree.structure, (opt_state, expected))
    if len(set(structures)) > 1:
        raise UsageError(
            f"opt_state = {types.described(opt_state)} has another structure than what "
            f"optimizer.init makes of the parameters: {types.described(expected)}."
        )


class MasterState(NamedTuple):
    """State of `with_master_weights`."""

    master: PyTree
    inner: PyTree


def with_master_weights(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose state has master weights, wider than the parameters.

    It is initialised with wide parameters, and updates them with gradients cast to their dtype.
    From then on it is given, and returns, their rounding (Micikevicius et al., arXiv 1710.03740).
    """

    def init(params: PyTree) -> MasterState:
        return MasterState(params, optimizer.init(params))

    inner_update = optax.with_extra_args_support(optimizer).update

    def update(
        grads: PyTree, state: Any, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MasterState]:
        wide = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, state.master)
        updates, inner = inner_update(wide, state.inner, state.master, **extra)
        master = optax.apply_updates(state.master, updates)
        # Added to the rounded parameters, these make them the rounding of the new ones.
        steps = jax.tree.map(lambda m, p: m - p.astype(m.dtype), master, params)
        return steps, MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


@gin.register(module="strategies")
@checked
def sign_descent(
    optimizer: types.Transform, learning_rate: types.Positive = 1e-3
) -> optax.GradientTransformation:
    """Steps of one size by the signs of gradients, however these were scaled or clipped.

    A strategy's `optimizer` (signSGD; Bernstein et al., arXiv 1810.05291).

    Args:
        optimizer: The run's, which is not used.
        learning_rate: The size of a step in each element.
    """
    del optimizer
    return optax.sign_sgd(learning_rate)


sign_descent.algorithm = "it is descent by signs, not the run's optimizer"


def map_state(
    function: Callable[[Any, Any], Any],
    opt_state: PyTree,
    shardings: PyTree,
    others: Callable[[Any], Any] = lambda x: x,
) -> PyTree:
    """Maps over an optimizer's state, or its like, each array with its parameter's sharding.

    An array belongs to the parameter whose path its own ends with: `function` is (array, sharding)
    -> anything. `others` is for what belongs to none, and for integers alone, such as counts.
    """
    by_name = {p.path: p for p in jax.tree.leaves(shardings)}

    def one(keys: Any, x: Any) -> Any:
        names = path_name(keys).split("/")
        ends = ("/".join(names[i:]) for i in range(len(names) + 1))
        p = next((by_name[end] for end in ends if end in by_name), None)
        is_count = x.shape == () and not jnp.issubdtype(x.dtype, jnp.inexact)
        return others(x) if p is None or is_count else function(x, p)

    return jax.tree_util.tree_map_with_path(one, opt_state)


class LossScaleState(NamedTuple):
    """The factor of the loss, and the steps since it changed or a gradient overflowed."""

    scale: jax.Array  # 0-d float32
    good_steps: jax.Array  # 0-d int32


@gin.register("dynamic_loss_scale", module="distributed")
@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """Multiplies the loss by a scale, and divides the reduced gradients by it, in float32.

    The scale is multiplied by `factor` after `growth_interval` steps without an overflow. A step
    whose gradients overflow only divides it by `factor` (Micikevicius et al., arXiv 1710.03740).

    Attributes:
        initial: The scale of the first step.
        growth_interval: The number of steps without an overflow after which the scale grows.
        factor: By how much the scale grows, and shrinks.
    """

    gin_name: ClassVar[str] = "dynamic_loss_scale"

    initial: types.Positive = 2.0**15
    growth_interval: types.Count = 2000
    factor: AboveOne = 2.0

    def init(self) -> LossScaleState:
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0))

    def adapt(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """The state after a step, by whether its gradients were finite."""
        good = jnp.where(finite, state.good_steps + 1, 0)
        grows = good >= self.growth_interval
        scale = jnp.where(finite, state.scale, jnp.maximum(state.scale / self.factor, 1.0))
        scale = jnp.where(grows, jnp.minimum(scale * self.factor, 2.0**24), scale)
        return LossScaleState(scale, jnp.where(grows, 0, good))


dynamic_loss_scale = LossScale
