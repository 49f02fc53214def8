"""How far two arrays are apart, and how far rounding may bring them."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from research_dp.distributed.sharding import by_path

PyTree = Any

EPS = float(np.finfo(np.float32).eps)
FACTOR = 10  # times what the oracle's own noise was
FLOOR_ULPS = 16  # of a leaf's greatest element: noise may be nothing by luck
COARSE_ULPS = 4  # of the dtype in which gradients are rounded before they are summed
UPDATE_ULPS, CHANGE_ULPS = 4, 32  # of an updated element, and of its leaf's greatest change
# By what it is: norms and losses are of many elements, over which rounding averages out.
_COARSE = {"gradient": 1.0, "model state": 1.0, "gradient norm": 1 / 16}
_COARSE |= dict.fromkeys(("loss", "evaluation loss"), 1 / 64)
_COUNTS = ("items counted", "evaluation items counted")
SIZE = "gradient size"  # the part of a gradient that lies along the oracle's
CAP = 0.1  # relative bound of a gradient's size beyond which it would mean nothing


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
    a, b = wide(found), wide(expected)
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
        precision: Relative distance of neighbouring numbers of the coarsest dtype in which the
            configuration lets gradients be, before they are summed over devices.
    """

    def __init__(self, precision: float):
        self._precision = precision
        self._typical: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        self._sizes: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)

    def compare(
        self, step: int, found: Named, expected: Named, noisy: Sequence[Named]
    ) -> list[Difference]:
        """Holds arrays to what is expected; gradients also in size.

        Rounding goes either way, so along the oracle's gradient it averages out. A bug does not:
        a gradient that is one percent too small is within the rounding of each bfloat16 element.

        Args:
            step: Number of the step.
            found: What is held.
            expected: What the oracle has.
            noisy: What it has with other rounding.
        """
        differences = []
        for name, value in expected.items():
            others = [x[name] for x in noisy]
            bound = self._bound(name, value, others)
            differences.append(Difference(*name, step, gap(found[name], value), bound))
            size = size_of(found[name], value) if name[0] == "gradient" else None
            if size is not None:
                one = np.float32(1)
                bound = self._size_bound(name[1], value, others)
                apart = gap(np.float32(size), one)
                differences.append(Difference(SIZE, name[1], step, apart, bound))
        return differences

    def _bound(self, name: tuple[str, str], expected: Any, noisy: Sequence[Any]) -> float:
        """In ULPs: FACTOR times the noise of this step or of a usual one, or a floor."""
        dtype = np.asarray(expected).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return 0.0
        if name[0] in _COUNTS and float(expected).is_integer():
            return 0.0  # sums of whole numbers are exact in any order
        noise = max((gap(x, expected).ulps for x in noisy), default=0.0)
        eps = float(jnp.finfo(dtype).eps)
        floor = FLOOR_ULPS + self._coarse(eps, coarse_of(name[0]))
        return max(FACTOR * self._usual(name, noise), floor)

    def _size_bound(self, leaf: str, expected: Any, noisy: Sequence[Any]) -> float:
        """The same of a gradient's size, in ULPs of 1."""
        sizes = (size_of(x, expected) for x in noisy)
        noise = max((np.inf if x is None else abs(x - 1) for x in sizes), default=0.0) / EPS
        floor = FLOOR_ULPS + self._coarse(EPS, COARSE_ULPS / math.sqrt(_count_of(expected)))
        bound = max(FACTOR * self._usual((SIZE, leaf), noise), floor)
        self._sizes[leaf].append((bound * EPS, float(np.linalg.norm(wide(expected)))))
        return bound

    def _usual(self, name: tuple[str, str], noise: float) -> float:
        """The noise of this step, or of a usual one if that is greater."""
        self._typical[name].append(noise)
        return max(noise, statistics.median(self._typical[name]))

    def _coarse(self, eps: float, ulps: float) -> float:
        """ULPs of the coarse dtype in those of an array's own, if that is finer."""
        return ulps * self._precision / eps if self._precision > eps else 0.0

    def hidden(self) -> Hidden:
        """The gradients in whose noise a bug could hide."""
        usual = {leaf: statistics.median(b for b, _ in x) for leaf, x in self._sizes.items()}
        squares = {leaf: sum(norm**2 for _, norm in x) for leaf, x in self._sizes.items()}
        leaves = tuple(leaf for leaf, bound in usual.items() if not bound <= CAP)
        judged = [bound for leaf, bound in usual.items() if leaf not in leaves]
        total = sum(squares.values())
        part = sum(squares[leaf] for leaf in leaves) / total if total else 0.0
        return Hidden(leaves, part, max(judged, default=0.0))


class Hidden(NamedTuple):
    """What cannot be judged.

    Attributes:
        leaves: Gradients whose size rounding may change by more than CAP.
        part: Of the squared norm of all gradients, what is theirs.
        bound: The greatest relative bound of the sizes of the others.
    """

    leaves: tuple[str, ...]
    part: float
    bound: float


def coarse_of(what: str) -> float:
    """How many ULPs of the dtype in which gradients are rounded a thing may be off."""
    return COARSE_ULPS * _COARSE.get(what, 0.0)


def size_of(found: Any, expected: Any) -> float | None:
    """<found, expected> / <expected, expected>; None if there is nothing to divide by."""
    a, b = wide(found).ravel(), wide(expected).ravel()
    square = float(b @ b)
    if not np.isfinite(square) or not square or a.shape != b.shape:
        return None
    return float(a @ b) / square


def _count_of(x: Any) -> float:
    """How many elements of an array count: all of them if they are of one size."""
    squares = wide(x).ravel() ** 2
    return float(squares.sum() ** 2 / (squares**2).sum())


def wide(x: Any) -> np.ndarray:
    """An array in float64, in which differences of narrower numbers are exact."""
    return np.asarray(x).astype(np.float64)


def applied_alike(
    step: int, found: Named, expected: Named, before: Named, allowed: float
) -> Iterator[Difference]:
    """Holds an update to the optimizer's own for the same gradients.

    An element may be `UPDATE_ULPS` of its own off, and `CHANGE_ULPS` of the leaf's greatest change,
    times `allowed`.

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
    a, b, old = wide(found), wide(expected), wide(before)
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0 if np.array_equal(a, b) else np.inf
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    a, b, old = (np.nan_to_num(x, posinf=0, neginf=0) for x in (a, b, old))
    eps = float(jnp.finfo(dtype).eps)
    change = np.abs(b - old).max(initial=0)
    own = ulp(np.maximum(np.abs(b), np.abs(old)), dtype)
    tolerance = UPDATE_ULPS * own + CHANGE_ULPS * eps * change
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
