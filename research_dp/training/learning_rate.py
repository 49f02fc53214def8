"""The learning rate of a run, where its optimizer reports one."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

_RATE = "research_dp_learning_rate"


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


class LearningRate:
    """The rate of an optimizer that `remembering_rate` made, or of `optax.inject_hyperparams`.

    It is not known of others: a chain of transforms may scale the updates of one of them.
    """

    def __init__(self, optimizer: optax.GradientTransformation, abstract_opt_state: Any):
        self._is_injected = _injected(abstract_opt_state) is not None
        rate = getattr(optimizer.update, _RATE, None)
        self._rate: Any = rate if _is_scalar(rate) else None
        if callable(self._rate):
            self._rate = _on_host(self._rate)
            self._rate(0)  # it is compiled here, not while steps are timed

    def read(self, opt_state: Any) -> None:
        """Reads an injected rate, for which it waits for the step; does nothing for others."""
        if self._is_injected:
            self._rate = float(np.asarray(_injected(opt_state)))

    def after(self, updates: int) -> float | None:
        """The rate of the newest of so many updates; None: not known."""
        rate = self._rate(max(updates - 1, 0)) if callable(self._rate) else self._rate
        return None if rate is None else float(rate)


def _is_scalar(rate: Any) -> bool:
    """Whether a rate, or what a schedule gives, is one number: Optax takes arrays too."""
    step = jax.ShapeDtypeStruct((), np.int32)
    return np.shape(jax.eval_shape(rate, step) if callable(rate) else rate) == ()


def _injected(opt_state: Any) -> Any:
    """The only 0-d `learning_rate` of injected hyperparameters; None if there is not one."""
    parts = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    found = [getattr(part, "hyperparams", {}).get("learning_rate") for part in parts]
    rates = [rate for rate in found if rate is not None]
    return rates[0] if len(rates) == 1 and np.shape(rates[0]) == () else None


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
