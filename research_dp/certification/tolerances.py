"""How far two arrays differ, and how large a difference rounding explains."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from research_dp.argument_types import is_floating_dtype
from research_dp.distributed.placement import fingerprint
from research_dp.distributed.sharding import by_path, key_data
from research_dp.types import Bound

PyTree = Any
Named = Mapping[tuple[str, str], Any]  # (kind, path) -> array

EPS = float(np.finfo(np.float32).eps)
FACTOR = 10  # bound over the oracle's measured noise
FLOOR_ULPS = 16  # of a leaf's greatest element: measured noise may be zero by chance
COARSE_ULPS = 4  # of the dtype to which gradients are rounded before they are summed
UPDATE_ULPS, CHANGE_ULPS = 4, 32  # of an updated element, and of its leaf's greatest change
# Of that dtype too. Norms and losses sum many elements, over which rounding averages out.
COARSE = {"gradient": COARSE_ULPS, "model state": COARSE_ULPS, "gradient norm": COARSE_ULPS / 16}
COARSE |= {"loss": COARSE_ULPS / 64, "evaluation loss": COARSE_ULPS / 64}
_COUNTS = ("items counted", "evaluation items counted")
SIZE = "gradient size"  # a gradient's projection on the oracle's
CAP = 0.1  # a relative bound of a gradient's size above this would mean nothing


class Gap(NamedTuple):
    """How far an array is from its reference."""

    norm: float  # L2 norm of the difference
    ulps: float  # greatest absolute difference, in ULPs of the reference's greatest element
    relative: float  # L2 norm of the difference over that of the reference


def gap(actual: Any, expected: Any) -> Gap:
    """How far an array is from its reference; inf if the nonfinite elements differ."""
    if (pair := _finite_pair(actual, expected)) is None:
        return Gap(np.inf, np.inf, np.inf)
    reference, difference = pair[1], np.abs(pair[0] - pair[1])
    norm, size = float(np.linalg.norm(difference)), float(np.linalg.norm(reference))
    unit = ulp(np.abs(reference).max(initial=0), np.asarray(expected).dtype)
    relative = norm / size if size else (np.inf if norm else 0.0)
    return Gap(norm, float(difference.max(initial=0)) / float(unit), relative)


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

    @property
    def numbers(self) -> dict[str, float]:
        """For programs."""
        return {"ulps": self.gap.ulps, "relative": self.gap.relative, "bound_ulps": self.bound}


def named(kind: str, tree: PyTree) -> Named:
    """The arrays of a tree by kind and path."""
    return {(kind, leaf): x for leaf, x in by_path(key_data(tree)).items()}


class Envelope:
    """Bounds differences by the noise of oracle steps that differ in rounding alone."""

    def __init__(self, precision: float):
        self._precision = precision  # of a `Bench`
        self._noise: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
        # By gradient: the relative bound of its size, and its norm, at each step.
        self._sizes: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)

    def compare(
        self, step: int, actual: Named, expected: Named, noisy: Sequence[Named]
    ) -> list[Difference]:
        """Compares arrays with the oracle's, whose arrays with other rounding are `noisy`.

        Gradients are compared in size too. In their projection on the oracle's rounding errors
        average out, but no bug: one percent less is within the rounding of a bfloat16 element.
        """
        differences = []
        for key, value in expected.items():
            (kind, leaf), samples = key, [x[key] for x in noisy]
            bound = self._bound(key, value, samples, COARSE.get(kind, 0.0))
            differences.append(Difference(kind, leaf, step, gap(actual[key], value), bound))
            size = projection(actual[key], value) if kind == "gradient" else None
            if size is None:
                continue
            squares, one = as_float64(value).ravel() ** 2, np.float32(1)
            effective_count = float(squares.sum() ** 2 / (squares**2).sum())
            sizes = [projection(x, value) for x in samples]
            bound = self._bound((SIZE, leaf), one, sizes, COARSE_ULPS / math.sqrt(effective_count))
            differences.append(Difference(SIZE, leaf, step, gap(np.float32(size), one), bound))
            self._sizes[leaf].append((bound * EPS, float(np.linalg.norm(as_float64(value)))))
        return differences

    def _bound(
        self, key: tuple[str, str], expected: Any, noisy: Sequence[Any], coarse: float
    ) -> float:
        """In ULPs: FACTOR times the noise, of this step or the median so far, or a floor.

        `coarse` are the ULPs of the coarse dtype that rounding explains.
        """
        dtype = np.asarray(expected).dtype
        if not jnp.issubdtype(dtype, jnp.floating):
            return 0.0
        if key[0] in _COUNTS and float(expected).is_integer():
            return 0.0  # sums of integers are exact in any order
        noise, eps = self._noise[key], float(jnp.finfo(dtype).eps)
        noise.append(max((gap(x, expected).ulps for x in noisy), default=0.0))
        floor = FLOOR_ULPS + (coarse * self._precision / eps if self._precision > eps else 0.0)
        return max(FACTOR * max(noise[-1], statistics.median(noise)), floor)

    def unjudged(self) -> tuple[tuple[str, ...], float, float]:
        """Gradients whose size noise may change by more than CAP, so that a bug could hide.

        Also their share of the squared norm of all, and the greatest bound of the others' sizes.
        """
        usual = {leaf: statistics.median(b for b, _ in x) for leaf, x in self._sizes.items()}
        squares = {leaf: sum(norm**2 for _, norm in x) for leaf, x in self._sizes.items()}
        leaves = tuple(leaf for leaf, bound in usual.items() if not bound <= CAP)
        share = sum(squares[leaf] for leaf in leaves) / (sum(squares.values()) or 1.0)
        judged = (bound for leaf, bound in usual.items() if leaf not in leaves)
        return leaves, share, max(judged, default=0.0)


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
    step: int, actual: Named, expected: Named, before: Named, allowed: float = 1.0
) -> Iterator[Difference]:
    """Compares updated arrays with the optimizer's own.

    The bound is `UPDATE_ULPS` of each element and `CHANGE_ULPS` of the leaf's greatest change,
    times `allowed`; none for integers. A difference has the bound of the worst element.
    """
    for key, value in expected.items():
        apart, bound, dtype = gap(actual[key], value), 0.0, np.asarray(value).dtype
        pair = _finite_pair(actual[key], value)
        if pair is not None and jnp.issubdtype(dtype, jnp.floating):
            (a, b), old = pair, np.nan_to_num(as_float64(before[key]), posinf=0, neginf=0)
            change = np.abs(b - old).max(initial=0)
            element = ulp(np.maximum(np.abs(b), np.abs(old)), dtype)
            tolerance = UPDATE_ULPS * element + CHANGE_ULPS * float(jnp.finfo(dtype).eps) * change
            excess = float((np.abs(a - b) / tolerance).max(initial=0)) / allowed
            bound = apart.ulps / excess if excess else 0.0
        yield Difference(*key, step, apart, bound)


def first_difference(actual: PyTree, expected: PyTree) -> str | None:
    """Path of the first array whose dtype, shape or bits differ; None if all are the same."""
    a, b = ({path: fingerprint(x) for path, x in by_path(t).items()} for t in (actual, expected))
    return next((path for path in sorted(a | b) if a.get(path) != b.get(path)), None)


def precision_of(bindings: Mapping[str, Bound]) -> float:
    """Machine epsilon of the coarsest dtype that gradients may have before they are summed.

    The dtype of compute counts as those on the wire do: each device rounds the gradient of its own
    examples to it, the oracle that of all. What optimizers alone lead to does not count: it is the
    dtype of their state.
    """
    optimizers = {"train.optimizer", "data_parallel.optimizer"}
    rest = {name: x for name, x in bindings.items() if name not in optimizers}
    used = _reached(rest, {x for x in rest if x.startswith("train.")})
    others = bindings.keys() - (_reached(bindings, optimizers) - used)
    values = {name: bindings[name].value.strip("'") for name in others}
    named = (x for name, x in values.items() if names_dtype(name, x))
    return max(float(jnp.finfo(x).eps) for x in ("float32", *named))


def _reached(bindings: Mapping[str, Bound], roots: Set[str]) -> set[str]:
    """Names of the bindings to which the values of some lead, those included."""
    found, pending = set[str](), {*roots} & bindings.keys()
    while pending:
        name = pending.pop()
        found.add(name)
        for referred in re.findall(r"[@%]([\w./]+)", bindings[name].value):
            last = re.split(r"[./]", referred)[-1]
            own = (n for n in bindings if n == last or re.split(r"[./]", n)[-2:-1] == [last])
            pending |= set(own) - found
    return found


def names_dtype(name: str, value: Any) -> bool:
    """Whether a binding gives a floating-point dtype to `dtype` or to `*_dtype`."""
    is_named = name.lower().endswith("dtype") and isinstance(value, str)
    return is_named and is_floating_dtype(value)
