"""Whether two runs computed the same: bit for bit, within rounding, or not, and where first."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from research_dp.certification.noise import Metric, Noise
from research_dp.certification.tolerances import as_float64
from research_dp.comparison.differences import Setting
from research_dp.comparison.runs import Run, read_params
from research_dp.distributed.sharding import by_path
from research_dp.errors import some_of
from research_dp.runs.manifest import Damaged
from research_dp.types import MEASURED

# 'bits': the same bits. 'rounding': within the measured bound of rounding. 'design': another
# algorithm on purpose. 'varied': something was varied on purpose. 'differs': none of these.
# 'unknown': the numbers differ, and no bound was measured, or nothing can be compared yet.
Kind = Literal["bits", "rounding", "design", "varied", "differs", "unknown"]
_MOST_PAIRS = 12  # runs of which each pair is compared
METRICS: tuple[Metric, ...] = ("loss", "grad_norm")


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
        relative, bound = (
            x / self.size if self.size else np.inf for x in (self.distance, self.allowed)
        )
        return f"{self.name}, {relative:.1e} of its size apart (bound {bound:.1e})"


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
        first, step = _first_apart(a, b, records), _common_step(a, b)
        other_bits = _other_bits(a, b, step) if step is not None else None
        if step is not None and not first and not other_bits:
            too = f", and in {len(records)} records" if len(records) else ""
            return "bits", f"the same bits at step {step}{too}"
        reason = first or other_bits or f"the same {len(records)} records so far"
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
        self, a: Run, b: Run, records: np.ndarray, step: int | None, reason: str
    ) -> tuple[Kind, str]:
        coarser = max(a.precision, b.precision)
        noise = next((noise for noise in self._noise if noise.precision == coarser), None)
        if noise is None:
            return "unknown", f"{reason}; --bound=N measures what rounding explains"
        evaluations = _evaluations(a, b)
        apart = [*_records_apart(a, b, records, noise), *_evaluations_apart(evaluations, noise)]
        unreadable = ""
        try:
            apart += self._arrays_apart(a, b, step, noise)
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
        if noise.steps not in a.manifests.keys() & b.manifests.keys():
            reason = f"; parameters were not compared: not both saved step {noise.steps}"
        judged = evaluations.keys() & noise.evaluations.keys()
        if len(judged) < len(evaluations):
            reason += f"; {len(judged)} of {len(evaluations)} evaluations were compared"
        until = "" if step == noise.steps else f" in the first {noise.steps} steps"
        worst = max(apart, key=lambda one: one.excess)
        return "rounding", f"nearest to its bound{until}: {worst}{reason}"

    def _arrays_apart(self, a: Run, b: Run, step: int | None, noise: Noise) -> Iterator[Apart]:
        """Each parameter, where both runs saved the last step of the bound."""
        if step is None or noise.steps not in a.manifests.keys() & b.manifests.keys():
            return
        params = [by_path(self._read_params(run.folder, noise.steps)) for run in (a, b)]
        for path in sorted(params[0].keys() & params[1].keys() & noise.params.keys()):
            allowed, _ = noise.params[path]
            one, other = (as_float64(arrays[path]) for arrays in params)
            distance, size = np.linalg.norm(one - other), np.linalg.norm(other)
            yield Apart(f"params/{path}", float(distance), float(size), allowed)


def _other_model(a: Run, b: Run) -> str | None:
    """The first parameter whose name or shape differs; None: none is known to."""
    shapes = []
    for run in (a, b):
        if not run.manifests:
            return None
        leaves = run.manifests[max(run.manifests)].leaves
        shapes.append({k: x.shape for k, x in leaves.items() if k.startswith("params/")})
    for path in sorted(shapes[0].keys() | shapes[1].keys()):
        one, other = (str(shape.get(path, "missing")) for shape in shapes)
        if one != other:
            return f"{path} is {one} in {a.name}, {other} in {b.name}"
    return None


def _shared_records(a: Run, b: Run) -> np.ndarray:
    """Windows (record before, record) of training metrics that both runs have, shape (n, 2)."""
    windows = []
    for run in (a, b):
        steps = run.column("train", "step").astype(int)
        before = np.concatenate([[0], steps[:-1]]) if len(steps) else steps
        windows.append(set(zip(before.tolist(), steps.tolist(), strict=True)))
    return np.array(sorted(windows[0] & windows[1], key=lambda w: w[1]), int).reshape(-1, 2)


def _both(a: Run, b: Run, records: np.ndarray) -> dict[Metric, tuple[np.ndarray, np.ndarray]]:
    """The metrics that both runs recorded, at these windows."""
    known = [m for m in METRICS if len(a.column("train", m)) and len(b.column("train", m))]
    at_a, at_b = (np.searchsorted(run.column("train", "step"), records[:, 1]) for run in (a, b))
    return {m: (a.column("train", m)[at_a], b.column("train", m)[at_b]) for m in known}


def _first_apart(a: Run, b: Run, records: np.ndarray) -> str | None:
    """The first record that differs at all."""
    pairs = _both(a, b, records)
    unequal = {m: ~_is_same(x, y) for m, (x, y) in pairs.items()}
    places = np.flatnonzero(np.any(list(unequal.values()), axis=0)) if pairs else np.zeros(0, int)
    if not len(places):
        return next(
            (
                f"apart in the evaluation at step {step}: {metric} {one:.7g} and {other:.7g}"
                for step, values in _evaluations(a, b).items()
                for metric, (one, other) in values.items()
                if not _is_same(one, other)
            ),
            None,
        )
    place = places[0]
    metric = next(m for m in METRICS if unequal[m][place])
    one, other = (x[place] for x in pairs[metric])
    return f"apart from step {records[place, 1]} on: {metric} {one:.7g} and {other:.7g}"


def _is_same(one: Any, other: Any) -> Any:
    """Where recorded values are equal, or both NaN."""
    return (one == other) | (np.isnan(one) & np.isnan(other))


def _evaluations(a: Run, b: Run) -> dict[int, dict[str, tuple[float, float]]]:
    """Step -> metric -> both values, of the evaluations that both runs recorded."""
    columns = [dict(run.records.get("eval", {})) for run in (a, b)]
    steps = [{int(s): i for i, s in enumerate(c.pop("step", ()))} for c in columns]
    names = [name for name in columns[0] if name in columns[1] and name not in MEASURED]
    return {
        step: {name: (columns[0][name][place], columns[1][name][steps[1][step]]) for name in names}
        for step, place in steps[0].items()
        if step in steps[1]
    }


def _evaluations_apart(
    evaluations: Mapping[int, Mapping[str, tuple[float, float]]], noise: Noise
) -> Iterator[Apart]:
    """Each metric that differs, where a bound was measured or one value is not finite."""
    for step, metrics in sorted(evaluations.items()):
        for metric, (one, other) in metrics.items():
            allowed = noise.evaluations.get(step, {}).get(metric)
            unbound = allowed is None and np.isfinite(one) and np.isfinite(other)
            if unbound or _is_same(one, other):
                continue
            name = f"{metric} of the evaluation at step {step}"
            yield Apart(name, float(abs(one - other)), float(abs(other)), allowed or 0.0)


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


def _records_apart(a: Run, b: Run, records: np.ndarray, noise: Noise) -> Iterator[Apart]:
    """Each shared record within the steps of the bound, in their order."""
    records = records[records[:, 1] <= noise.steps]
    pairs = _both(a, b, records)
    for place, (before, step) in enumerate(records.tolist()):
        for metric, (one, other) in pairs.items():
            allowed = noise.allowed_record(metric, before, step)
            distance, size = abs(one[place] - other[place]), abs(other[place])
            yield Apart(f"{metric} at step {step}", float(distance), float(size), allowed)
