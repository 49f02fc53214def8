"""The result of a certification: its checks, and the differences of each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from research_dp.certification.compare_steps import MORE_SAMPLES, SAMPLES, StepComparison
from research_dp.certification.tolerances import (
    CHANGE_ULPS,
    COARSE_ULPS,
    FACTOR,
    FLOOR_ULPS,
    UPDATE_ULPS,
    Difference,
)

BOUND = (
    f"Bound: {FACTOR} times the oracle's own noise, at that step or usually, and at least "
    f"{FLOOR_ULPS} ULPs of a leaf's greatest element; none for counts. New parameters and "
    "optimizer state are compared with what the optimizer makes of the same gradients: "
    f"{UPDATE_ULPS} ULPs of the element and {CHANGE_ULPS} of the leaf's greatest change. Where "
    f"gradients may be rounded to a coarser dtype, each element may be {COARSE_ULPS} of its ULPs "
    "more off (norms: a 16th of that, losses: a 64th; a gradient's size: divided by the root of "
    f"the number of its elements). The noise is measured: {SAMPLES} oracles take each step with "
    "the examples of each micro-batch in another order and parameters moved by up to one float32 "
    f"unit in the last place; {MORE_SAMPLES} more where a bound is passed."
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of a certificate."""

    name: str
    passed: bool | None  # None: measured, but without a bound
    message: str  # by how much it passed or failed, and where


class StepRecord:
    """The numbers of one step; `differences` are those of the step and of the trajectory."""

    def __init__(self, comparison: StepComparison, in_a_row: Sequence[Difference]):
        self.step = comparison.number
        self.loss, self.norm = comparison.actual.loss, comparison.actual.norm
        self.expected_loss = comparison.expected.loss
        self.expected_norm = comparison.expected.norm
        self.differences = [*comparison.differences, *in_a_row]

    def worst(self, kind: str) -> Difference:
        """The array of a kind that is nearest to its bound, or furthest beyond."""
        return max((d for d in self.differences if d.kind == kind), key=lambda d: d.excess)


@dataclasses.dataclass
class Certificate:
    """The result of a certification."""

    title: str  # what was compared with what
    bound: str = BOUND
    checks: list[Check] = dataclasses.field(default_factory=list)
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    located: str = ""  # the first difference that rounding does not explain, if in a step
    cause: str | None = None
    not_judged: tuple[str, ...] = ()  # gradients whose noise could hide a bug

    def check(self, name: str, passed: bool | None, message: str) -> None:
        """Adds a check."""
        self.checks.append(Check(name, passed, message))

    def check_bits(self, name: str, different: str | None) -> None:
        """Adds a check of bits; `different` is the path of the first array with other bits."""
        message = "the same bits" if different is None else f"{different} has other bits"
        self.check(name, different is None, message)

    @property
    def certified(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def first_difference(self) -> str | None:
        """The first difference that rounding does not explain; None: there is none."""
        failed = [f"{c.name}: {c.message}" for c in self.checks if c.passed is False]
        return self.located or (failed[0] if failed else None)

    def worst(self) -> Mapping[str, Difference]:
        """By name of an array: the step at which it was nearest to its bound."""
        worst: dict[str, Difference] = {}
        for d in (d for record in self.steps for d in record.differences):
            if d.name not in worst or worst[d.name].excess < d.excess:
                worst[d.name] = d
        return worst

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs; numbers that are not finite are strings."""
        return {
            "certified": self.certified,
            "title": self.title,
            "bound": self.bound,
            "first_difference": self.first_difference,
            "cause": self.cause,
            "not_judged": list(self.not_judged),
            "checks": [{"what": c.name, "right": c.passed, "told": c.message} for c in self.checks],
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
    fields = {"ulps": d.gap.ulps, "relative": d.gap.relative, "bound_ulps": d.bound}
    return {name: _number(value) for name, value in fields.items()}


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)
