"""What a run does when a loss or a gradient is not a finite number."""

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

_MOST_IN_A_ROW = 100
_NAMED = 4


class Nonfinite:
    """Reads what each step says of its numbers, once the step is over.

    Args:
        paths: Of the parameters, in the order of a step's flags.
        on_nonfinite: 'stop' or 'skip'; what was compiled into the step.
        untouched: What to say of the last checkpoint.
        say: Prints a line.
    """

    def __init__(
        self,
        paths: Sequence[str],
        on_nonfinite: OnNonfinite,
        untouched: str,
        say: Callable[[str], None],
    ):
        self._paths, self._on, self._untouched, self._say = paths, on_nonfinite, untouched, say
        self._in_a_row = 0

    def look(self, step: int, flags: jax.Array) -> None:
        """Looks at the flags, `NONFINITE`, of a step that is over; the same on every device.

        Raises:
            RunFailure: The step went wrong, and the run is to stop then; or too many did.
        """
        # One device's: to assemble an array from all of them takes twice as long.
        found = np.asarray(flags.addressable_data(0))
        if not found[0]:
            self._in_a_row = 0
            return
        what = self._what(found[1:])
        self._in_a_row += 1
        if self._on == "stop":
            raise RunFailure(
                f"step {step}: {what} (train.on_nonfinite = 'stop'). {self._untouched}\n"
                "  Continue with --gin.train.on_nonfinite=skip to leave such steps out, or change "
                "learning rate, dtype or data."
            )
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise RunFailure(
                f"step {step}: {what}, as in the {self._in_a_row - 1} steps before it: nothing "
                f"is learnt by skipping more. {self._untouched}"
            )
        self._say(f"Skipped step {step}: {what}")

    def check_state(self, step: int, state: TrainState) -> None:
        """Looks at a state that is to be saved; a collective, if there are several processes.

        An update can overflow though its gradients were finite, and so can a model's statistics;
        what is saved then would end every run that is continued from it.

        Raises:
            RunFailure: One of its arrays is not finite.
        """
        arrays = {
            **by_path(state.params),
            **{f"model_state {path}": x for path, x in by_path(state.model_state).items()},
            # Scalars of an optimizer may be infinite: the best loss so far, before there is one.
            **{f"opt_state {path}": x for path, x in by_path(state.opt_state).items() if x.ndim},
        }
        arrays = {p: x for p, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        finite = np.asarray(_all_finite(list(arrays.values())))
        named = [path for path, good in zip(arrays, finite, strict=True) if not good]
        if named:
            raise RunFailure(
                f"step {step}: {self._list(named)} has become infinite or no number, though no "
                f"gradient was; not saved. {self._untouched}\n  Lower the learning rate, or use a "
                "wider dtype."
            )

    def _what(self, spoilt: np.ndarray) -> str:
        named = [path for path, flag in zip(self._paths, spoilt, strict=True) if flag]
        if not named:
            return "the loss is not finite"
        return f"the gradient of {self._list(named)} is not finite"

    def _list(self, named: Sequence[str]) -> str:
        """Some names of parameters; not all of many."""
        if 1 < len(named) == len(self._paths):
            return f"all {len(named)} parameters"
        return some_of(named, _NAMED)


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether all elements of each array are finite: (arrays,) bool."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])
