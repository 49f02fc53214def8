"""Optax's optimizers and schedules under gin names, module `optax`; a run's learning rate."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import gin
import jax
import numpy as np
import optax

from research_dp.argument_checks import check_arguments, checked
from research_dp.argument_types import Fraction, Steps
from research_dp.distributed.placement import on_host
from research_dp.errors import UsageError, binding_error

_RATE = "research_dp_learning_rate"
_CHECKED = 50  # updates of a run at which a schedule is checked


def remembering_rate(factory: Callable[..., Any]) -> Callable[..., Any]:
    """An Optax factory whose optimizers carry their `learning_rate`, a number or a schedule."""
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        optimizer = factory(*args, **options)
        rate = signature.bind(*args, **options).arguments.get("learning_rate")
        setattr(optimizer.update, _RATE, rate)  # an optimizer is a tuple, and has no attributes
        return optimizer

    make.__signature__ = signature  # type: ignore[attr-defined]  # gin does not unwrap functions
    return make


for _name in ("adafactor", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd"):
    gin.register(remembering_rate(getattr(optax, _name)), module="optax")
for _name in (
    *("cosine_decay_schedule", "linear_schedule"),
    *("warmup_constant_schedule", "warmup_cosine_decay_schedule"),
):
    gin.register(getattr(optax, _name), module="optax")


@gin.register(module="optim")
@checked
def warmup_cosine(
    peak_value: float, *, warmup_fraction: Fraction = 0.05, end_fraction: Fraction = 0.0
) -> optax.Schedule:
    """A linear warm-up and a cosine decay over all of a run's `train.num_steps`.

    Args:
        peak_value: The learning rate at the end of the warm-up.
        warmup_fraction: Part of the run that the warm-up takes.
        end_fraction: Part of `peak_value` that is left at the end.
    """
    try:  # with another length the schedule would end silently
        num_steps = gin.query_parameter("train.num_steps")
    except ValueError as error:
        raise UsageError(
            "train.num_steps is bound nowhere, and warmup_cosine takes its length from it."
        ) from error
    if isinstance(num_steps, gin.config.ConfigurableReference):  # a macro
        num_steps = num_steps.scoped_configurable_fn()
    check_arguments("train", {"num_steps": num_steps}, {"num_steps": Steps})
    decay_steps = max(num_steps, 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak_value,
        warmup_steps=min(round(warmup_fraction * decay_steps), decay_steps - 1),
        decay_steps=decay_steps,
        end_value=end_fraction * peak_value,
    )


@gin.register(module="optim")
def matrices_only(params: Any) -> Any:
    """A mask for weight decay: True for parameters of two dims and more.

    Args:
        params: The parameters, or their shapes.
    """
    return jax.tree.map(lambda x: x.ndim > 1, params)


class LearningRate:
    """The rate of an optimizer that `remembering_rate` made, or of `optax.inject_hyperparams`.

    It is not known of others: a chain of transforms may scale the updates of one of them. Of
    replicas, whose states have a leading dim, it is the first one's.

    Raises:
        UsageError: It is negative within a run of `num_steps`.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        abstract_opt_state: Any,
        num_steps: int = 1,
        *,
        of_replicas: bool = False,
    ):
        self._rank = int(of_replicas)  # of a number in the state
        self._is_injected = _injected(abstract_opt_state, self._rank) is not None
        rate = getattr(optimizer.update, _RATE, None)
        self._rate: Any = rate if _is_scalar(rate) else None
        if callable(self._rate):
            self._rate = _on_host(self._rate)
        # A schedule is compiled here, not while steps are timed.
        updates = np.unique(np.linspace(1, max(num_steps, 1), _CHECKED, dtype=int)).tolist()
        rates = {update: self.after(update) or 0.0 for update in updates}
        lowest = min(rates, key=rates.__getitem__)
        # A decay to 0 may end a rounding below it.
        if rates[lowest] < -1e-6 * max(map(abs, rates.values())):
            raise binding_error(
                "train.optimizer",
                f": its learning rate is {rates[lowest]:g} at step {lowest}, which would climb the "
                "loss. Give rates of at least 0; to maximise, negate the loss.",
            )

    def read(self, opt_state: Any) -> None:
        """Reads an injected rate, for which it waits for the step; does nothing for others."""
        if self._is_injected:
            self._rate = float(np.ravel(on_host(_injected(opt_state, self._rank)))[0])

    def updates(self, opt_state: Any) -> int:
        """How many updates an optimizer's state counts; 0 if it does not, as no schedule is in it.

        Steps are no measure: those whose gradients overflow in float16 update nothing.
        """
        counts = [x for _, x in optax.tree.get_all_with_path(opt_state, "count")]
        own = [x for x in counts if x.ndim == self._rank and np.issubdtype(x.dtype, np.integer)]
        return max((int(np.ravel(x)[0]) for x in on_host(own)), default=0)

    def after(self, updates: int) -> float | None:
        """The rate of the newest of so many updates; None: not known."""
        rate = self._rate(max(updates - 1, 0)) if callable(self._rate) else self._rate
        return None if rate is None else float(rate)


def _is_scalar(rate: Any) -> bool:
    """Whether a rate, or what a schedule gives, is one number: Optax takes arrays too."""
    step = jax.ShapeDtypeStruct((), np.int32)
    return np.shape(jax.eval_shape(rate, step) if callable(rate) else rate) == ()


def _injected(opt_state: Any, rank: int = 0) -> Any:
    """The only `learning_rate`, a number, of injected hyperparameters; None: there is not one."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    found = [getattr(part, "hyperparams", {}).get("learning_rate") for part in parts]
    rates = [rate for rate in found if rate is not None]
    return rates[0] if len(rates) == 1 and np.ndim(rates[0]) == rank else None


def _on_host(schedule: Callable[[Any], Any]) -> Callable[[int], Any]:
    """A schedule that the CPU computes, where there is one: accelerators are at work on steps."""
    device = None
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
        device = jax.local_devices(backend="cpu")[0]
    jitted = jax.jit(schedule)

    def rate(count: int) -> Any:
        with jax.default_device(device):
            return jitted(np.int32(count))

    return rate
