"""What a run does when a loss or a gradient is not a finite number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

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

    def _what(self, spoilt: Sequence[float]) -> str:
        named = [path for path, flag in zip(self._paths, spoilt, strict=True) if flag]
        if not named:
            return "the loss is not finite"
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        whole = len(named) > 1 and len(named) == len(self._paths)
        parameters = f"all {len(named)} parameters" if whole else ", ".join(named[:_NAMED]) + more
        return f"the gradient of {parameters} is not finite"
