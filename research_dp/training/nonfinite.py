"""Losses, gradients and states that are not finite: stop the run, or skip the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from research_dp.distributed.collectives import flat_axes
from research_dp.distributed.mesh import DATA_AXIS, texts_of_all
from research_dp.distributed.placement import on_host
from research_dp.distributed.sharding import by_path
from research_dp.errors import RunFailure, some_of
from research_dp.strategies import TrainSpec, TrainState
from research_dp.strategies.strategy import NO_WEIGHT, WEIGHTLESS

OnNonfinite = Literal["stop", "skip"]

_MAX_IN_A_ROW = 100
_NAMED = 4


@dataclasses.dataclass
class NonfiniteCheck:
    """Reads the flags of each step, once it has finished."""

    paths: Sequence[str]  # of the parameters, in the order of a step's flags
    on_nonfinite: OnNonfinite  # as it was compiled into the step
    untouched: str  # the sentence about the last checkpoint
    say: Callable[[str], None]
    in_a_row: int = 0
    hint: str = ""  # what to check where it is the first step

    def check(
        self, step: int, flags: jax.Array, find_example: Callable[[], str | None] = lambda: None
    ) -> None:
        """Reads a step's flags, `NONFINITE`; raises RunFailure if the run is to stop.

        `find_example` names an example of this process that is not finite; a collective, if so.
        Reading the flags of replicas, (replicas, 1 + parameters), is one too.
        """
        # One device's: to assemble an array from all of them takes twice as long.
        rows = np.asarray(flags.addressable_data(0))[None] if flags.ndim == 1 else on_host(flags)
        weighted = rows[rows[:, 0] != NO_WEIGHT]  # of the replicas whose part has any
        loss_flag, *gradient_flags = (weighted if len(weighted) else rows).max(0)
        if not loss_flag:
            self.in_a_row = 0
            return
        paths = [path for path, flag in zip(self.paths, gradient_flags, strict=True) if flag]
        where = f"the gradient of {self._list(paths)}" if paths else "the loss"
        if loss_flag == WEIGHTLESS:
            raise RunFailure(
                f"step {step}: the weights of its examples are too small: squares of its gradients "
                f"would be 0. Scale them up, e.g. to a mean of 1. {self.untouched}"
            )
        is_empty = loss_flag == NO_WEIGHT
        named = "" if is_empty else next(filter(None, texts_of_all(find_example() or "")), "")
        problem = f"step {step}: {where} is not finite{named and f': {named}'}"
        if is_empty:
            problem = f"step {step}: nothing in its batch has weight (they sum to 0 or less)"
        self.in_a_row += 1
        if self.on_nonfinite == "stop" and not is_empty:
            check_first = f"\n  {self.hint}" if step == 1 and self.hint else ""
            raise RunFailure(
                f"{problem} (train.on_nonfinite = 'stop'). {self.untouched}\n"
                "  Continue with --gin.train.on_nonfinite=skip to leave such steps out, or change "
                f"learning rate, dtype or data.{check_first}"
            )
        if self.in_a_row >= _MAX_IN_A_ROW:
            raise RunFailure(
                f"{problem}, as in the {self.in_a_row - 1} steps before it: skipping more of them "
                f"trains nothing. {self.untouched}"
            )
        self.say(f"Skipped {problem}")

    def check_state(self, step: int, state: TrainState) -> None:
        """Refuses a state from which every run would fail; a collective. Updates can overflow."""
        fields = {"opt_state": state.opt_state, "slots": state.slots}
        others = [(name, p, x) for name, tree in fields.items() for p, x in by_path(tree).items()]
        arrays = {
            **by_path(state.params),
            **{f"model_state {path}": x for path, x in by_path(state.model_state).items()},
            # Scalars may be infinite: the best loss before there is one.
            **{f"{name} {p}": x for name, p, x in others if _own_rank(f"{name} {p}", x)},
        }
        arrays = {p: x for p, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        finite = np.asarray(_all_finite(list(arrays.values())))
        if nonfinite := [path for path, good in zip(arrays, finite, strict=True) if not good]:
            raise RunFailure(
                f"step {step}: {self._list(nonfinite)} has become infinite or NaN, though every "
                f"gradient was finite; not saved. {self.untouched}\n  Lower the learning rate, or "
                "use a wider dtype."
            )

    def _list(self, paths: Sequence[str]) -> str:
        if 1 < len(paths) == len(self.paths):
            return f"all {len(paths)} parameters"
        return some_of(paths, _NAMED)


def hint(spec: TrainSpec) -> str:
    """What to check first where integers of the data have no bounds; '' otherwise."""
    if spec.model.bounds or not any(
        jnp.issubdtype(x.dtype, jnp.integer) for x in spec.example.values()
    ):
        return ""
    advice = "from_linen(..., bounds=...) checks it."
    return f"Are integer labels below the number of classes? {advice}"


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    """Whether all elements of each array are finite: (arrays,) bool."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])


def _own_rank(path: str, x: jax.Array) -> int:
    """The rank on one device, or replica, without a leading dim that counts these."""
    axes = flat_axes(next(iter(getattr(x.sharding, "spec", ())), None))
    of_devices = path.startswith("slots ") and not path.startswith("slots outer/state")
    return x.ndim - (axes[:1] == (DATA_AXIS,) or (of_devices and bool(axes)))
