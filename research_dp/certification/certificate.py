"""The result of a certification: its checks, the differences of each step, and their tables."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from research_dp.certification import tolerances
from research_dp.certification.compare_steps import MORE_SAMPLES, SAMPLES, StepComparison
from research_dp.certification.tolerances import Difference
from research_dp.console import Table, put, table

BOUND = (
    f"Bound: {tolerances.FACTOR} times the reference's own noise, at that step or usually, and at "
    f"least {tolerances.FLOOR_ULPS} ULPs of a leaf's greatest element; none for counts. New "
    "parameters and optimizer state are compared with what the optimizer makes of the same "
    f"gradients: {tolerances.UPDATE_ULPS} ULPs of the element and {tolerances.CHANGE_ULPS} of the "
    "leaf's greatest change. Where gradients may be rounded to a coarser dtype, each element may "
    f"be {tolerances.COARSE_ULPS} of its ULPs more off (norms: a 16th of that, losses: a 64th; a "
    "gradient's size: divided by the root of the number of its elements). The noise is measured: "
    f"{SAMPLES} references take each step with the examples of each micro-batch in another order "
    f"and parameters moved by up to one float32 unit in the last place; {MORE_SAMPLES} more where "
    "a bound is passed."
)
_KNOWN_OF_OTHERS = ("gradient of the first step", "loss, in a row")
_STEPS, _LEAVES = 8, 12  # rows of the tables
_VERDICTS = {True: Text("holds", "green"), False: Text("FAILS", "bold red"), None: Text("-")}


class Check(NamedTuple):
    """One line of a certificate."""

    name: str
    passed: bool | None  # None: measured, but without a bound
    message: str  # by how much it passed or failed, and where


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The numbers of one step."""

    step: int
    loss: float
    expected_loss: float
    grad_norm: float
    expected_grad_norm: float
    differences: list[Difference]  # of the step and of the trajectory


@dataclasses.dataclass
class Certificate:
    """The result of a certification."""

    title: str  # what was compared with what
    checks: list[Check] = dataclasses.field(default_factory=list)
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    located: str = ""  # the first difference that rounding does not explain, if in a step
    cause: str | None = None
    algorithm: str | None = None  # why the strategy is not to compute what the reference does
    not_judged: tuple[str, ...] = ()  # gradients whose noise could hide a bug

    def add_step(self, step: StepComparison, in_a_row: Sequence[Difference]) -> None:
        actual, expected = step.actual, step.expected
        numbers = (actual.loss, expected.loss, actual.norm, expected.norm)
        record = StepRecord(step.number, *numbers, [*step.differences, *in_a_row])
        self.steps.append(record)

    def check(self, name: str, passed: bool | None, message: str) -> None:
        self.checks.append(Check(name, passed, message))

    def check_bits(self, name: str, different: str | None) -> None:
        """Adds a check of bits; `different` is the path of the first array with other bits."""
        message = "the same bits" if different is None else f"{different} has other bits"
        self.check(name, different is None, message)

    @property
    def certified(self) -> bool:
        return self.is_right and self.algorithm is None

    @property
    def is_right(self) -> bool:
        """Whether nothing that was judged fails; of another algorithm, numbers are not judged."""
        return all(check.passed is not False for check in self.checks)

    @property
    def first_difference(self) -> str | None:
        """The first difference that rounding does not explain; None: there is none."""
        failed = (f"{c.name}: {c.message}" for c in self.checks if c.passed is False)
        return self.located or next(failed, None)

    def worst(self) -> Mapping[str, Difference]:
        """By name of an array: the step at which it was nearest to its bound."""
        return furthest((d for record in self.steps for d in record.differences), "name")

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs; numbers that are not finite are strings."""
        return {
            "certified": self.certified,
            "title": self.title,
            "bound": BOUND,
            "first_difference": self.first_difference,
            "cause": self.cause,
            "algorithm": self.algorithm,
            "not_judged": list(self.not_judged),
            "checks": [{"what": c.name, "right": c.passed, "told": c.message} for c in self.checks],
            "steps": [
                _finite({**vars(r), "differences": {d.name: d.numbers for d in r.differences}})
                for r in self.steps
            ],
        }

    def __str__(self) -> str:
        """The text of the command, without tables of steps and arrays."""
        text = io.StringIO()
        put(*self.parts(), file=text)
        return text.getvalue()

    def parts(self, *, verbose: bool = False) -> Iterator[Any]:
        """Text and tables for a terminal: the verdict first, with `verbose` all that was compared.

        Without `verbose` only failed checks are listed.
        """
        if self.certified:
            yield Text(f"CERTIFIED: {self.title}.", "bold green")
        elif self.is_right:
            yield Text(f"ANOTHER ALGORITHM BY DESIGN: {self.title}.", "bold yellow")
            yield f"Its numbers are not judged: {self.algorithm}."
            known = [c for c in self.checks if c.name in _KNOWN_OF_OTHERS]
            yield "; ".join(f"{c.name}: {c.message}" for c in known) + "."
        else:
            yield Text(f"NOT CERTIFIED: {self.title}.", "bold red")
            yield f"First difference: {self.first_difference}."
            yield f"Cause: {self.cause or 'not found; only the first difference is known'}."
        worst = sorted(self.worst().values(), key=lambda d: -d.excess)
        for d in worst[:1]:
            numbers = f"{d.gap.ulps:.3g} ULPs of at most {d.bound:.3g}"
            place = "Furthest beyond" if d.is_wrong else "Nearest to"
            yield f"{place} its bound: {d.name}, step {d.step}: {numbers}."
        if self.not_judged:
            yield f"Not judged, because noise could hide a bug: {', '.join(self.not_judged)}."
        results = [check.passed for check in self.checks]
        counts = f"{results.count(True)} hold, {results.count(False)} fail"
        rest = "" if verbose else " (--verbose lists them)"
        yield f"{len(results)} checks: {counts}, {results.count(None)} have no bound{rest}."
        if verbose or False in results:
            checks = table("", "check", "", "found~")
            for name, passed, message in self.checks:
                if verbose or passed is False:
                    checks.add_row(name, _VERDICTS[passed], message)
            yield checks
        if verbose and self.steps:
            yield self._steps_table()
            yield self._arrays_table(worst)
        if verbose:
            yield BOUND

    def _arrays_table(self, worst: Sequence[Difference]) -> Table:
        shown = table(
            f"Arrays nearest to their bounds, of {len(worst)}, each at its worst step",
            *("array", "step:", "ULPs:", "bound:", "relative:"),
        )
        for d in (d for d in worst[:_LEAVES] if d.excess):
            numbers = (f"{d.gap.ulps:.3g}", f"{d.bound:.3g}", f"{d.gap.relative:.1e}")
            shown.add_row(d.name, str(d.step), *numbers)
        return shown

    def _steps_table(self) -> Table:
        """Some of the steps, the first and the last among them."""
        shown = table(
            "Steps from the reference's state; differences in ULPs",
            *("step:", "loss:", "loss ULPs:", "free-running:", "gradient norm:", "norm ULPs:"),
            *("worst gradient:", "at"),
        )
        last = len(self.steps) - 1
        for i in sorted({round(i * last / (_STEPS - 1)) for i in range(_STEPS)}):
            record, worst = self.steps[i], furthest(self.steps[i].differences, "kind")
            ulps = {kind: f"{d.gap.ulps:.3g}" for kind, d in worst.items()}
            shown.add_row(
                *(str(record.step), f"{record.loss:.6f}", ulps["loss"], ulps["loss, in a row"]),
                *(f"{record.grad_norm:.6f}", ulps["gradient norm"], ulps["gradient"]),
                worst["gradient"].leaf,
            )
        return shown


def furthest(differences: Iterable[Difference], attribute: str) -> dict[str, Difference]:
    """By name or kind: the difference that is nearest to its bound, or furthest beyond."""
    worst: dict[str, Difference] = {}
    for d in differences:
        key = getattr(d, attribute)
        worst[key] = max(worst.get(key, d), d, key=lambda d: d.excess)
    return worst


def _finite(value: Any) -> Any:
    """The value with strings for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    return value if math.isfinite(value) else str(value)
