"""How far two arrays are apart, and how far rounding may bring them."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from research_dp.distributed.layout import by_path

PyTree = Any

FACTOR = 10  # times what the oracle's own noise was
FLOOR_ULPS = 16  # of a leaf's greatest element: noise may be nothing by luck
COARSE_ULPS = 4  # of the coarsest dtype that is named, in which partial sums may be rounded
# By what it is: losses are means over many, and what is counted is counted exactly.
_COARSE = dict.fromkeys(("gradient", "gradient norm", "model state"), float(COARSE_ULPS))
_COARSE |= dict.fromkeys(("loss", "evaluation loss"), COARSE_ULPS / 64)
CAP = 0.1  # relative noise of usual gradients beyond which a bound would mean nothing


class Gap(NamedTuple):
    """How far an array is from what is expected.

    Attributes:
        most: Greatest absolute difference; inf if one is not a number where the other is.
        scale: Greatest absolute value that is expected.
        ulps: `most` in units in the last place of `scale`.
        relative: L2 norm of the difference over that of what is expected.
    """

    most: float
    scale: float
    ulps: float
    relative: float


def gap(found: Any, expected: Any) -> Gap:
    """How far two arrays of one shape are apart."""
    dtype = np.asarray(expected).dtype
    a, b = (np.asarray(x).astype(np.float64) for x in (found, expected))
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return Gap(np.inf, np.inf, np.inf, np.inf)
    a, b = (np.nan_to_num(x, posinf=0, neginf=0) for x in (a, b))
    difference = np.abs(a - b)
    most, scale = float(difference.max(initial=0)), float(np.abs(b).max(initial=0))
    norm = float(np.linalg.norm(b))
    apart = float(np.linalg.norm(difference))
    relative = apart / norm if norm else (np.inf if apart else 0.0)
    return Gap(most, scale, most / float(ulp(scale, dtype)), relative)


def ulp(x: Any, dtype: Any) -> Any:
    """Distance of a number to the next one of a dtype; 1 for whole numbers."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.ones_like(np.asarray(x, np.float64))
    limits = jnp.finfo(dtype)
    exponent = np.frexp(np.maximum(np.abs(np.asarray(x, np.float64)), float(limits.tiny)))[1]
    return np.ldexp(float(limits.eps), exponent - 1)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One array of one step beside what is expected of it.

    Attributes:
        what: 'loss', 'gradient norm', 'gradient', 'model state', 'update', ...
        leaf: Path of the array; '' for a scalar.
        step: Number of the step.
        gap: How far it is off.
        bound: What rounding allows, in ULPs.
    """

    what: str
    leaf: str
    step: int
    gap: Gap
    bound: float

    @property
    def excess(self) -> float:
        """Its difference as a multiple of the bound."""
        if self.gap.ulps == 0:
            return 0.0
        return self.gap.ulps / self.bound if self.bound else np.inf

    @property
    def is_wrong(self) -> bool:
        return not self.excess <= 1

    @property
    def name(self) -> str:
        return f"{self.what} {self.leaf}".rstrip()


Named = Mapping[tuple[str, str], Any]  # (what, leaf) -> array


def named(what: str, tree: PyTree) -> Named:
    """The arrays of a tree by what they are."""
    return {(what, leaf): x for leaf, x in by_path(tree).items()}


class Envelope:
    """What rounding does to each array, from steps of the oracle that differ in nothing else.

    Args:
        precision: Relative distance of neighbouring numbers of the coarsest dtype that is named.
    """

    def __init__(self, precision: float):
        self._precision = precision
        self._typical: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self._eps: dict[tuple[str, str], float] = {}

    def compare(
        self, step: int, found: Named, expected: Named, noisy: Sequence[Named]
    ) -> list[Difference]:
        """Holds arrays to what is expected.

        Args:
            step: Number of the step.
            found: What is held.
            expected: What the oracle has.
            noisy: What it has with other rounding.
        """
        return [
            Difference(
                *name,
                step,
                gap(found[name], value),
                self._bound(name, value, [x[name] for x in noisy]),
            )
            for name, value in expected.items()
        ]

    def _bound(self, name: tuple[str, str], expected: Any, noisy: Sequence[Any]) -> float:
        """In ULPs: FACTOR times the noise of this step or of a usual one, or a floor."""
        dtype = np.asarray(expected).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return 0.0
        noise = max((gap(x, expected).ulps for x in noisy), default=0.0)
        usual = statistics.median([*self._typical[name], noise])
        self._typical[name].append(noise)
        floor = float(FLOOR_ULPS)
        eps = self._eps[name] = float(jnp.finfo(dtype).eps)
        if self._precision > eps:
            floor += _COARSE.get(name[0], 0.0) * self._precision / eps
        return max(FACTOR * noise, FACTOR * usual, floor)

    def usual_noise(self, what: str) -> float:
        """Noise of a usual array of a kind, relative to its greatest element."""
        relative = [
            statistics.median(noise) * self._eps[kind, leaf]
            for (kind, leaf), noise in self._typical.items()
            if kind == what
        ]
        return statistics.median(relative) if relative else 0.0


def applied_alike(
    step: int, found: Named, expected: Named, before: Named, allowed: float
) -> Iterator[Difference]:
    """Holds an update to the optimizer's own for the same gradients.

    An element may be 4 of its ULPs off, and 32 ULPs of the leaf's greatest change, times `allowed`.

    Args:
        step: Number of the step.
        found: New parameters and optimizer state.
        expected: What the optimizer makes by itself.
        before: The old ones.
        allowed: At least 1.
    """
    for name, value in expected.items():
        whole = gap(found[name], value)
        ratio = update_ratio(found[name], value, before[name]) / allowed
        # The bound is that of the worst element, in the leaf's ULPs.
        bound = whole.ulps / ratio if ratio and np.isfinite(ratio) else 0.0
        yield Difference(*name, step, whole, bound)


def update_ratio(found: Any, expected: Any, before: Any) -> float:
    """The worst element's difference, as a multiple of what is allowed."""
    dtype = np.asarray(expected).dtype
    a, b, old = (np.asarray(x).astype(np.float64) for x in (found, expected, before))
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0 if np.array_equal(a, b) else np.inf
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    a, b, old = (np.nan_to_num(x, posinf=0, neginf=0) for x in (a, b, old))
    eps = float(jnp.finfo(dtype).eps)
    change = np.abs(b - old).max(initial=0)
    tolerance = 4 * ulp(np.maximum(np.abs(b), np.abs(old)), dtype) + 32 * eps * change
    return float((np.abs(a - b) / tolerance).max(initial=0))


def same_bits(found: PyTree, expected: PyTree) -> str | None:
    """Path of the first array that has other bits; None if there is none."""
    a, b = by_path(found), by_path(expected)
    if a.keys() != b.keys():
        return sorted(a.keys() ^ b.keys())[0]
    for path, x in a.items():
        x, y = np.asarray(x), np.asarray(b[path])
        if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
            return path
    return None
