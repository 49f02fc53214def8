"""What a run does when a loss or a gradient is not a finite number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.distributed.errors import RunFailure

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

    def look(self, step: int, flags: Any) -> None:
        """Looks at the flags, `NONFINITE`, of a step that is over.

        Raises:
            RunFailure: The step went wrong, and the run is to stop then; or too many did.
        """
        wrong, *spoilt = np.asarray(flags)
        if not wrong:
            self._in_a_row = 0
            return
        what = self._what(spoilt)
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

    def check_parameters(self, step: int, params: Any) -> None:
        """Looks at parameters that are to be saved; a collective, if there are several processes.

        An update can overflow though its gradients were finite; what is saved then would end every
        run that is continued from it.

        Raises:
            RunFailure: One of them is not finite.
        """
        finite = np.asarray(_all_finite(jax.tree.leaves(params)))
        named = [path for path, good in zip(self._paths, finite, strict=True) if not good]
        if named:
            raise RunFailure(
                f"step {step}: {self._list(named)} has become infinite or no number, though no "
                f"gradient was; not saved. {self._untouched}\n  Lower the learning rate, or use a "
                "wider dtype."
            )

    def _what(self, spoilt: Sequence[float]) -> str:
        named = [path for path, flag in zip(self._paths, spoilt, strict=True) if flag]
        if not named:
            return "the loss is not finite"
        return f"the gradient of {self._list(named)} is not finite"

    def _list(self, named: Sequence[str]) -> str:
        """Some names of parameters; not all of many."""
        if 1 < len(named) == len(self._paths):
            return f"all {len(named)} parameters"
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return ", ".join(named[:_NAMED]) + more


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether all elements of each array are finite: (arrays,) bool."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])
