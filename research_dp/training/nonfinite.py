"""Losses, gradients and states that are not finite: stop the run, or skip the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.distributed.sharding import by_path
from research_dp.errors import RunFailure, some_of
from research_dp.strategies import TrainState

OnNonfinite = Literal["stop", "skip"]

_MAX_IN_A_ROW = 100
_NAMED = 4


class NonfiniteCheck:
    """Reads the flags of each step, once it has finished.

    Args:
        paths: Of the parameters, in the order of a step's flags.
        on_nonfinite: As it was compiled into the step.
        untouched: The sentence about the last checkpoint.
        say: Prints a line.
    """

    def __init__(
        self,
        paths: Sequence[str],
        on_nonfinite: OnNonfinite,
        untouched: str,
        say: Callable[[str], None],
    ):
        self._paths, self._untouched, self._say = paths, untouched, say
        self._stops = on_nonfinite == "stop"
        self._in_a_row = 0

    def check(self, step: int, flags: jax.Array) -> None:
        """Reads a step's flags, `NONFINITE`; raises RunFailure if the run is to stop."""
        # One device's: to assemble an array from all of them takes twice as long.
        loss_flag, *gradient_flags = np.asarray(flags.addressable_data(0))
        if not loss_flag:
            self._in_a_row = 0
            return
        problem = self._problem(gradient_flags)
        self._in_a_row += 1
        if self._stops:
            raise RunFailure(
                f"step {step}: {problem} (train.on_nonfinite = 'stop'). {self._untouched}\n"
                "  Continue with --gin.train.on_nonfinite=skip to leave such steps out, or change "
                "learning rate, dtype or data."
            )
        if self._in_a_row >= _MAX_IN_A_ROW:
            raise RunFailure(
                f"step {step}: {problem}, as in the {self._in_a_row - 1} steps before it: skipping "
                f"more of them trains nothing. {self._untouched}"
            )
        self._say(f"Skipped step {step}: {problem}")

    def check_state(self, step: int, state: TrainState) -> None:
        """Checks a state before it is saved; a collective, if there are several processes.

        An update can overflow though its gradients are finite, and so can a model's statistics:
        RunFailure, as every run that continues from such a checkpoint would fail.
        """
        arrays = {
            **by_path(state.params),
            **{f"model_state {path}": x for path, x in by_path(state.model_state).items()},
            # Scalars of an optimizer may be infinite: the best loss before there is one.
            **{f"opt_state {path}": x for path, x in by_path(state.opt_state).items() if x.ndim},
        }
        arrays = {p: x for p, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        finite = np.asarray(_all_finite(list(arrays.values())))
        nonfinite = [path for path, good in zip(arrays, finite, strict=True) if not good]
        if nonfinite:
            raise RunFailure(
                f"step {step}: {self._list(nonfinite)} has become infinite or NaN, though every "
                f"gradient was finite; not saved. {self._untouched}\n  Lower the learning rate, or "
                "use a wider dtype."
            )

    def _problem(self, flags: Sequence[float]) -> str:
        paths = [path for path, flag in zip(self._paths, flags, strict=True) if flag]
        if not paths:
            return "the loss is not finite"
        return f"the gradient of {self._list(paths)} is not finite"

    def _list(self, paths: Sequence[str]) -> str:
        if 1 < len(paths) == len(self._paths):
            return f"all {len(paths)} parameters"
        return some_of(paths, _NAMED)


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether all elements of each array are finite: (arrays,) bool."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])
