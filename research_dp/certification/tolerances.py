"""How far two arrays differ, and how large a difference rounding explains."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from research_dp.distributed.placement import fingerprint
from research_dp.distributed.sharding import by_path

PyTree = Any
Named = Mapping[tuple[str, str], Any]  # (kind, path) -> array

EPS = float(np.finfo(np.float32).eps)
FACTOR = 10  # bound over the oracle's measured noise
FLOOR_ULPS = 16  # of a leaf's greatest element: measured noise may be zero by chance
COARSE_ULPS = 4  # of the dtype to which gradients are rounded before they are summed
UPDATE_ULPS, CHANGE_ULPS = 4, 32  # of an updated element, and of its leaf's greatest change
# Norms and losses sum many elements, over which rounding averages out.
_COARSE = {"gradient": 1.0, "model state": 1.0, "gradient norm": 1 / 16}
_COARSE |= {"loss": 1 / 64, "evaluation loss": 1 / 64}
_COUNTS = ("items counted", "evaluation items counted")
SIZE = "gradient size"  # a gradient's projection on the oracle's
CAP = 0.1  # a relative bound of a gradient's size above this would mean nothing


class Gap(NamedTuple):
    """How far an array is from its reference; inf if the nonfinite elements differ."""

    norm: float  # L2 norm of the difference
    scale: float  # greatest absolute value of the reference
    ulps: float  # greatest absolute difference, in units in the last place of `scale`
    relative: float  # L2 norm of the difference over that of the reference


def gap(actual: Any, expected: Any) -> Gap:
    """How far an array is from its reference."""
    pair = _finite_pair(actual, expected)
    if pair is None:
        return Gap(*[np.inf] * 4)
    difference, reference = np.abs(pair[0] - pair[1]), pair[1]
    scale = float(np.abs(reference).max(initial=0))
    norm, size = float(np.linalg.norm(difference)), float(np.linalg.norm(reference))
    relative = norm / size if size else (np.inf if norm else 0.0)
    ulps = float(difference.max(initial=0)) / float(ulp(scale, np.asarray(expected).dtype))
    return Gap(norm, scale, ulps, relative)


def _finite_pair(actual: Any, expected: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Both in float64, nonfinite elements as 0; None if these or the shapes do not match."""
    a, b = as_float64(actual), as_float64(expected)
    finite = np.isfinite(b)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), finite):
        return None
    return np.where(finite, a, 0.0), np.where(finite, b, 0.0)


def ulp(x: Any, dtype: Any) -> Any:
    """Distance from a number to the next one of a dtype; 1 for integers."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.ones_like(np.asarray(x, np.float64))
    limits = jnp.finfo(dtype)
    exponent = np.frexp(np.maximum(np.abs(np.asarray(x, np.float64)), float(limits.tiny)))[1]
    return np.ldexp(float(limits.eps), exponent - 1)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One array of one step, compared with its reference."""

    kind: str  # 'loss', 'gradient norm', 'gradient', 'model state', 'parameter', ...
    leaf: str  # path of the array; '' for a scalar
    step: int
    gap: Gap
    bound: float  # what rounding explains, in ULPs

    @property
    def excess(self) -> float:
        """The difference as a multiple of its bound."""
        if self.gap.ulps == 0:
            return 0.0
        return self.gap.ulps / self.bound if self.bound else np.inf

    @property
    def is_wrong(self) -> bool:
        return not self.excess <= 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.leaf}".rstrip()


def named(kind: str, tree: PyTree) -> Named:
    """The arrays of a tree by kind and path."""
    return {(kind, leaf): x for leaf, x in by_path(tree).items()}


class Unjudged(NamedTuple):
    """Gradients whose size rounding may change by more than CAP, so that a bug could hide."""

    leaves: tuple[str, ...]
    share: float  # of the squared norm of all gradients
    bound: float  # the greatest relative bound of the other gradients' sizes


class Envelope:
    """Bounds differences by the noise of oracle steps that differ in rounding alone.

    `precision` is the epsilon of the coarsest dtype of gradients before devices sum them.
    """

    def __init__(self, precision: float):
        self._precision = precision
        self._noise: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self._sizes: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)

    def compare(
        self, step: int, actual: Named, expected: Named, noisy: Sequence[Named]
    ) -> list[Difference]:
        """Compares arrays with the oracle's, and gradients also in size.

        Rounding errors have either sign, so they average out in the projection on the oracle's
        gradient. A bug does not: a gradient that is one percent too small is within the rounding
        of each bfloat16 element. `noisy` are the oracle's arrays with other rounding.
        """
        differences = []
        for key, value in expected.items():
            samples = [x[key] for x in noisy]
            bound = self._bound(key, value, samples)
            differences.append(Difference(*key, step, gap(actual[key], value), bound))
            size = projection(actual[key], value) if key[0] == "gradient" else None
            if size is not None:
                apart = gap(np.float32(size), np.float32(1))
                bound = self._size_bound(key[1], value, samples)
                differences.append(Difference(SIZE, key[1], step, apart, bound))
        return differences

    def _bound(self, key: tuple[str, str], expected: Any, noisy: Sequence[Any]) -> float:
        """In ULPs: FACTOR times the noise of this step or of a usual one, or a floor."""
        dtype = np.asarray(expected).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return 0.0
        if key[0] in _COUNTS and float(expected).is_integer():
            return 0.0  # sums of integers are exact in any order
        noise = max((gap(x, expected).ulps for x in noisy), default=0.0)
        floor = FLOOR_ULPS + self._coarse(float(jnp.finfo(dtype).eps), coarse_ulps(key[0]))
        return max(FACTOR * self._usual(key, noise), floor)

    def _size_bound(self, leaf: str, expected: Any, noisy: Sequence[Any]) -> float:
        """The bound of a gradient's size, in ULPs of 1."""
        sizes = (projection(x, expected) for x in noisy)
        noise = max((np.inf if x is None else abs(x - 1) for x in sizes), default=0.0) / EPS
        squares = as_float64(expected).ravel() ** 2
        effective_count = float(squares.sum() ** 2 / (squares**2).sum())
        floor = FLOOR_ULPS + self._coarse(EPS, COARSE_ULPS / math.sqrt(effective_count))
        bound = max(FACTOR * self._usual((SIZE, leaf), noise), floor)
        self._sizes[leaf].append((bound * EPS, float(np.linalg.norm(as_float64(expected)))))
        return bound

    def _usual(self, key: tuple[str, str], noise: float) -> float:
        """The noise of this step, or the median so far if that is greater."""
        self._noise[key].append(noise)
        return max(noise, statistics.median(self._noise[key]))

    def _coarse(self, eps: float, ulps: float) -> float:
        """Converts ULPs of the coarse dtype to those of a finer one."""
        return ulps * self._precision / eps if self._precision > eps else 0.0

    def unjudged(self) -> Unjudged:
        """The gradients whose noise could hide a bug."""
        usual = {leaf: statistics.median(b for b, _ in x) for leaf, x in self._sizes.items()}
        squares = {leaf: sum(norm**2 for _, norm in x) for leaf, x in self._sizes.items()}
        leaves = tuple(leaf for leaf, bound in usual.items() if not bound <= CAP)
        total = sum(squares.values())
        share = sum(squares[leaf] for leaf in leaves) / total if total else 0.0
        judged = (bound for leaf, bound in usual.items() if leaf not in leaves)
        return Unjudged(leaves, share, max(judged, default=0.0))


def coarse_ulps(kind: str) -> float:
    """How many ULPs of the coarse dtype rounding explains."""
    return COARSE_ULPS * _COARSE.get(kind, 0.0)


def projection(actual: Any, expected: Any) -> float | None:
    """<actual, expected> / <expected, expected>; None if the reference is zero or not finite."""
    a, b = as_float64(actual).ravel(), as_float64(expected).ravel()
    square = float(b @ b)
    if not np.isfinite(square) or not square or a.shape != b.shape:
        return None
    return float(a @ b) / square


def as_float64(x: Any) -> np.ndarray:
    """An array in float64, in which differences of narrower numbers are exact."""
    return np.asarray(x).astype(np.float64)


def compare_updates(
    step: int, actual: Named, expected: Named, before: Named, allowed: float
) -> Iterator[Difference]:
    """Compares updated arrays with the optimizer's own; `allowed` multiplies their bounds."""
    for key, value in expected.items():
        apart = gap(actual[key], value)
        excess = update_excess(actual[key], value, before[key]) / allowed
        # The bound of the worst element, in ULPs of the leaf.
        bound = apart.ulps / excess if excess and np.isfinite(excess) else 0.0
        yield Difference(*key, step, apart, bound)


def update_excess(actual: Any, expected: Any, before: Any) -> float:
    """The worst element's difference over its bound.

    The bound is `UPDATE_ULPS` of the element and `CHANGE_ULPS` of the leaf's greatest change.
    """
    dtype = np.asarray(expected).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0 if np.array_equal(actual, expected) else np.inf
    pair = _finite_pair(actual, expected)
    if pair is None:
        return np.inf
    (a, b), old = pair, np.nan_to_num(as_float64(before), posinf=0, neginf=0)
    change = np.abs(b - old).max(initial=0)
    element = ulp(np.maximum(np.abs(b), np.abs(old)), dtype)
    tolerance = UPDATE_ULPS * element + CHANGE_ULPS * float(jnp.finfo(dtype).eps) * change
    return float((np.abs(a - b) / tolerance).max(initial=0))


def first_difference(actual: PyTree, expected: PyTree) -> str | None:
    """Path of the first array whose dtype, shape or bits differ; None if all are the same."""
    a, b = ({path: fingerprint(x) for path, x in by_path(t).items()} for t in (actual, expected))
    return next((path for path in sorted(a | b) if a.get(path) != b.get(path)), None)
