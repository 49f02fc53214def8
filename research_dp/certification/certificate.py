"""What certification found, line by line and step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from research_dp.certification import compare_steps
from research_dp.certification.tolerances import (
    CHANGE_ULPS,
    COARSE_ULPS,
    FACTOR,
    FLOOR_ULPS,
    UPDATE_ULPS,
    Difference,
)

BOUND = (
    f"Bound: {FACTOR} times the noise of the oracle itself, at that step or usually, and at least "
    f"{FLOOR_ULPS} ULPs of a leaf's greatest element; none for counts; of new parameters and "
    f"optimizer state, beside the optimizer's own of the same gradients, {UPDATE_ULPS} ULPs of the "
    f"element and {CHANGE_ULPS} of the leaf's greatest change. Where gradients may be rounded to a "
    f"coarser dtype, {COARSE_ULPS} ULPs of it more for each element (norms: a 16th of "
    "that, losses: a 64th; a gradient's size: divided by the root of the number of its elements). "
    "The noise is measured: "
    f"{compare_steps.NOISY} oracles take each step with the examples of each micro-batch in "
    "another order "
    "and parameters moved by up to one float32 unit in the last place; "
    f"{compare_steps.MORE} more where a bound is passed."
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of a certificate.

    Attributes:
        what: What was checked.
        right: Whether it holds; None: there is nothing to hold it to.
        told: By how much, and where.
    """

    what: str
    right: bool | None
    told: str


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of both.

    Attributes:
        step: Its number.
        loss: The strategy's, from the oracle's state.
        expected_loss: The oracle's.
        norm: The strategy's gradient norm.
        expected_norm: The oracle's.
        differences: All that was compared.
    """

    step: int
    loss: float
    expected_loss: float
    norm: float
    expected_norm: float
    differences: list[Difference]

    def worst(self, what: str) -> Difference:
        """The array of a kind that is nearest to its bound, or furthest beyond."""
        return max((d for d in self.differences if d.what == what), key=lambda d: d.excess)


@dataclasses.dataclass
class Certificate:
    """What was found.

    Attributes:
        title: What was compared with what.
        checks: Line by line.
        steps: Step by step.
        first: Where the first difference is that rounding does not explain; None: nowhere.
        cause: What it is due to, where that was found.
        unjudged: Gradients in whose noise a bug could hide.
    """

    title: str
    checks: list[Check] = dataclasses.field(default_factory=list)
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    first: str | None = None
    cause: str | None = None
    unjudged: tuple[str, ...] = ()

    @property
    def certified(self) -> bool:
        return all(check.right is not False for check in self.checks)

    def worst(self) -> Mapping[str, Difference]:
        """By name of an array: the step at which it was nearest to its bound."""
        found: dict[str, Difference] = {}
        for record in self.steps:
            for d in record.differences:
                if d.name not in found or found[d.name].excess < d.excess:
                    found[d.name] = d
        return found

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs; numbers that are none are strings."""
        return {
            "certified": self.certified,
            "title": self.title,
            "bound": BOUND,
            "first_difference": self.first,
            "cause": self.cause,
            "not_judged": list(self.unjudged),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "steps": [
                {
                    "step": r.step,
                    "loss": _number(r.loss),
                    "expected_loss": _number(r.expected_loss),
                    "grad_norm": _number(r.norm),
                    "expected_grad_norm": _number(r.expected_norm),
                    "differences": {d.name: _fields(d) for d in r.differences},
                }
                for r in self.steps
            ],
        }


def _fields(d: Difference) -> dict[str, Any]:
    found = {"ulps": d.gap.ulps, "relative": d.gap.relative, "bound_ulps": d.bound}
    return {name: _number(value) for name, value in found.items()}


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
