"""Whether two runs computed the same: bit for bit, within rounding, or not, and where first."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from research_dp.certification.noise import METRICS, Noise
from research_dp.certification.tolerances import as_float64
from research_dp.comparison.differences import Setting
from research_dp.comparison.runs import Run, read_params
from research_dp.distributed.sharding import by_path
from research_dp.errors import some_of
from research_dp.runs.files import SPLITS
from research_dp.runs.manifest import Damaged
from research_dp.types import MEASURED

# 'bits': the same bits. 'rounding': within the measured bound of rounding. 'design': another
# algorithm on purpose. 'varied': something was varied on purpose. 'differs': none of these.
# 'unknown': the numbers differ, and no bound was measured, or nothing can be compared yet.
Kind = Literal["bits", "rounding", "design", "varied", "differs", "unknown"]
Record = tuple[int, int]  # steps of the training record before it, or 0, and its own
_MOST_PAIRS = 12  # runs of which each pair is compared


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What two runs have in common.

    Attributes:
        a: Name of the run that is compared.
        b: Name of the run that it is compared with.
        kind: The verdict.
        message: Why, with numbers; the bound and the worst array where one was measured.
    """

    a: str
    b: str
    kind: Kind
    message: str


class Apart(NamedTuple):
    """How far a quantity of two runs is apart, and how far rounding explains."""

    name: str  # of a metric with its step, or of an array
    distance: float  # of metrics absolute, of arrays the L2 norm of the difference
    size: float  # of the other run's
    allowed: float

    @property
    def excess(self) -> float:
        """The distance as a multiple of the bound."""
        if not self.distance:
            return 0.0
        is_known = np.isfinite(self.distance) and self.allowed
        return self.distance / self.allowed if is_known else np.inf

    def __str__(self) -> str:
        relative = self.distance / self.size if self.size else np.inf
        return f"{self.name}: {self.excess:.2g} times the allowed ({relative:.1e} of its size)"


class Figure(NamedTuple):
    """A metric that both runs recorded, in training or in an evaluation."""

    metric: str
    since: int | None  # the step of the record before it; None: of an evaluation
    step: int
    one: float
    other: float

    @property
    def is_same(self) -> bool:
        """Whether both have the same value, or NaN."""
        return self.one == self.other or (math.isnan(self.one) and math.isnan(self.other))

    def __str__(self) -> str:
        where = "from step {} on" if self.since is not None else "in the evaluation at step {}"
        digits = next((d for d in (7, 9) if f"{self.one:.{d}g}" != f"{self.other:.{d}g}"), 17)
        numbers = f"{self.one:.{digits}g} and {self.other:.{digits}g}"
        return f"they differ {where.format(self.step)}: {self.metric} {numbers}"

    def apart(self, noise: Noise) -> Apart | None:
        """How far; None where no bound was measured, unless an evaluation of one is not finite."""
        distance = 0.0 if self.is_same else abs(self.one - self.other)
        allowed: float | None = None
        if self.since is None:
            name = f"{self.metric} of the evaluation at step {self.step}"
            unmeasured = None if math.isfinite(distance) else 0.0
            allowed = noise.evaluations.get(self.step, {}).get(self.metric, unmeasured)
        else:
            name = f"{self.metric} at step {self.step}"
            if self.step <= noise.steps:
                allowed = noise.allowed_record(self.metric, self.since, self.step)
        return None if allowed is None else Apart(name, distance, abs(self.other), allowed)


class Judge:
    """Compares runs with each other.

    Args:
        settings: What differs in the configurations.
        noise: What rounding explains, for each precision of gradients that was measured.
    """

    def __init__(self, settings: Sequence[Setting], noise: Sequence[Noise] = ()):
        self._settings, self._noise = settings, noise
        # Pairs in a row share a run.
        self._read_params = functools.lru_cache(maxsize=2)(read_params)

    def verdicts(self, runs: Sequence[Run], reference: Run) -> list[Verdict]:
        """Of each run with the reference, then of all other pairs if they are few."""
        others = [run for run in runs if run is not reference]
        pairs = [(run, reference) for run in others]
        if len(runs) <= _MOST_PAIRS:
            pairs += [(b, a) for a, b in itertools.combinations(others, 2)]
        return list(itertools.starmap(self.verdict, pairs))

    def verdict(self, a: Run, b: Run) -> Verdict:
        """The verdict on run `a`, compared with run `b`."""
        return Verdict(a.name, b.name, *self._judge(a, b))

    def _judge(self, a: Run, b: Run) -> tuple[Kind, str]:
        for run in (a, b):
            if not run.is_run:
                return "unknown", f"{run.name} is {run.status.message}"
        if different := _other_model(a, b):
            return "differs", f"another model: {different}"
        records = _shared_records(a, b)
        step = _common_step(a, b)
        first = next((x for x in _figures(a, b, records) if not x.is_same), None)
        other_bits = _other_bits(a, b, step) if step is not None else None
        if step is not None and not first and not other_bits:
            too = f", and in {len(records)} records" if records else ""
            return "bits", f"the same bits at step {step}{too}"
        reason = str(first or other_bits or f"the same {len(records)} records so far")
        differing = [s for s in self._settings if s.between(a, b)]
        if others := [s.name for s in differing if s.role == "other"]:
            return "differs", f"another configuration ({some_of(others, 2)}); {reason}"
        if varied := [s.name for s in differing if s.role == "varied"]:
            return "varied", f"varied on purpose ({some_of(varied, 2)}); {reason}"
        if nonfinite := _nonfinite(a, b):
            return "differs", nonfinite
        if designs := dict.fromkeys(run.algorithm for run in (a, b) if run.algorithm):
            return (
                "design",
                f"another algorithm by design: {'; '.join(map(str, designs))}; {reason}",
            )
        if not first and not other_bits:
            return "unknown", f"{reason}; no checkpoint of one step in both yet"
        return self._within_rounding(a, b, records, step, reason)

    def _within_rounding(
        self, a: Run, b: Run, records: Sequence[Record], step: int | None, reason: str
    ) -> tuple[Kind, str]:
        coarser = max(a.precision, b.precision)
        noise = next((noise for noise in self._noise if noise.precision == coarser), None)
        if noise is None:
            return "unknown", f"{reason}; --bound=N measures what rounding explains"
        figures = list(_figures(a, b, records))
        apart = [x for figure in figures if (x := figure.apart(noise))]
        unreadable, is_saved = "", noise.steps in a.manifests.keys() & b.manifests.keys()
        try:
            apart += self._arrays_apart(a, b, noise) if is_saved else ()
        except (Damaged, OSError) as error:
            unreadable = f"a checkpoint of step {noise.steps} cannot be read: {error}"
        beyond = [one for one in apart if one.excess > 1]
        if beyond:
            more = f" ({len(beyond) - 1} more are)" if len(beyond) > 1 else ""
            return "differs", f"beyond rounding first in {beyond[0]}{more}"
        if unreadable or not apart:
            missing = f"no record within the {noise.steps} steps of the bound"
            return "unknown", f"{reason}; {unreadable or missing}"
        reason = ""
        if not is_saved:
            reason = f"; parameters were not compared: not both saved step {noise.steps}"
        evaluations = {figure.step for figure in figures if figure.since is None}
        judged = evaluations & noise.evaluations.keys()
        if len(judged) < len(evaluations):
            reason += f"; {len(judged)} of {len(evaluations)} evaluations were compared"
        until = "" if step == noise.steps else f" in the first {noise.steps} steps"
        worst = max(apart, key=lambda one: one.excess)
        return "rounding", f"nearest to its bound{until}: {worst}{reason}"

    def _arrays_apart(self, a: Run, b: Run, noise: Noise) -> Iterator[Apart]:
        """Each parameter of the last step of the bound, which both runs saved."""
        params = [by_path(self._read_params(run.folder, noise.steps)) for run in (a, b)]
        for path in sorted(params[0].keys() & params[1].keys() & noise.params.keys()):
            allowed, _ = noise.params[path]
            one, other = (as_float64(arrays[path]) for arrays in params)
            distance, size = np.linalg.norm(one - other), np.linalg.norm(other)
            yield Apart(f"params/{path}", float(distance), float(size), allowed)


def _other_model(a: Run, b: Run) -> str | None:
    """The first parameter whose name or shape differs; None: none is known to."""
    if not a.newest or not b.newest:
        return None
    leaves = a.newest.leaves, b.newest.leaves
    for path in sorted(path for path in {*leaves[0], *leaves[1]} if path.startswith("params/")):
        one, other = (str(x[path].shape if path in x else "missing") for x in leaves)
        if one != other:
            return f"{path} is {one} in {a.name}, {other} in {b.name}"
    return None


def _shared_records(a: Run, b: Run) -> list[Record]:
    """The records of training metrics that both runs have, with the same one before it."""
    windows = []
    for run in (a, b):
        steps = run.column("train", "step").astype(int).tolist()
        windows.append(set(zip([0, *steps], steps, strict=False)))
    return sorted(windows[0] & windows[1], key=lambda window: window[1])


def _figures(a: Run, b: Run, records: Sequence[Record]) -> Iterator[Figure]:
    """What both runs recorded: at these steps of training, then in each evaluation."""
    for split in SPLITS:
        one, other = (run.records.get(split, {}) for run in (a, b))
        at, there = ({int(s): i for i, s in enumerate(x.get("step", ()))} for x in (one, other))
        places: Sequence[tuple[int | None, int]] = records
        names = [name for name in METRICS if name in one and name in other]
        if split == "eval":
            places = [(None, step) for step in at if step in there]
            names = [x for x in one if x in other and x not in ("step", *MEASURED)]
        for since, step in places:
            for x in names:
                yield Figure(x, since, step, float(one[x][at[step]]), float(other[x][there[step]]))


def _common_step(a: Run, b: Run) -> int | None:
    """The newest step whose parameters are known of both runs."""
    saved = a.manifests.keys() & b.manifests.keys()
    return max(saved | _ends(a) & _ends(b), default=None)


def _ends(run: Run) -> set[int]:
    """The last step, if the fingerprint of its parameters is known."""
    return {run.summary["step"]} if run.summary.get("params_fingerprint") else set()


def _other_bits(a: Run, b: Run, step: int) -> str | None:
    """The first saved array that has other bits; parameters before the optimizer's state."""
    prints = [run.summary.get("params_fingerprint") for run in (a, b)]
    if step in _ends(a) & _ends(b) and prints[0] != prints[1]:
        return f"the fingerprints of the parameters of step {step} differ"
    if step not in a.manifests.keys() & b.manifests.keys():
        return None
    for part in ("params", "model_state", "opt_state"):
        one, other = (
            {k: x for k, x in run.manifests[step].leaves.items() if k.split("/")[0] == part}
            for run in (a, b)
        )
        # Optimizers of strategies may have state of their own.
        keys = one.keys() & other.keys() if part == "opt_state" else one.keys() | other.keys()
        paths = [path for path in sorted(keys) if one.get(path) != other.get(path)]
        if paths:
            return f"{some_of(paths, 1)} of step {step} have other bits"
    return None


def _nonfinite(a: Run, b: Run) -> str | None:
    steps = {run.name: run.first_nonfinite for run in (a, b)}
    bad = [f"{name} from step {step} on" for name, step in steps.items() if step is not None]
    return f"the loss is not finite: {' and '.join(bad)}" if bad else None
