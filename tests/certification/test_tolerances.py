"""How large a difference rounding explains, and what it does not."""

import numpy as np
import pytest

from research_dp.certification import tolerances
from research_dp.certification.tolerances import SIZE, Envelope
from research_dp.config import load

EPS = float(np.finfo(np.float32).eps)
BF16 = 2.0**-7


def gradient(count=600, seed=0):
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


def wrong(found, expected, *, precision, noise=0.0, what="gradient"):
    """What is wrong of one array beside three that are `noise` of its elements off."""
    name, rng = (what, "w" if what == "gradient" else ""), np.random.default_rng(1)
    noisy = [
        {name: expected * (1 + noise * rng.normal(size=np.shape(expected))).astype(np.float32)}
        for _ in range(3)
    ]
    compared = Envelope(precision).compare(0, {name: found}, {name: expected}, noisy)
    return [d.kind for d in compared if d.is_wrong]


@pytest.mark.parametrize("precision", [EPS, BF16])
def test_counts_are_exact_whatever_dtype_is_named(precision):
    counts = {"precision": precision, "what": "items counted"}
    assert wrong(np.float32(125), np.float32(128), **counts) == ["items counted"]
    assert wrong(np.nextafter(np.float32(128), np.float32(0)), np.float32(128), **counts)
    assert not wrong(np.float32(128), np.float32(128), **counts)
    # Weights need not be whole: their sums are rounded.
    assert not wrong(np.float32(12.5) + np.float32(1e-6), np.float32(12.5), **counts)


def test_a_coarse_dtype_hides_no_gradient_that_is_too_small():
    g = gradient()
    rounded = g.astype("bfloat16").astype(np.float32)
    assert not wrong(rounded, g, precision=BF16)
    assert wrong(rounded, g, precision=EPS) == ["gradient", SIZE]
    assert wrong(rounded * np.float32(0.99), g, precision=BF16) == [SIZE]


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_coarse_dtype_loosens_sums_over_many_little(what):
    assert wrong(np.float32(1.01), np.float32(1), precision=BF16, what=what) == [what]


def test_noise_of_single_elements_hides_no_gradient_that_is_too_small():
    g = gradient(60_000)
    assert wrong(g * np.float32(0.5), g, precision=EPS, noise=0.1) == [SIZE]


def test_gradients_that_are_noise_are_not_judged():
    envelope, rng = Envelope(EPS), np.random.default_rng(0)
    right = {("gradient", "w"): gradient(), ("gradient", "b"): gradient() * np.float32(1e-9)}
    noisy = [{**right, ("gradient", "b"): rng.normal(size=600) * 1e-9} for _ in range(3)]
    envelope.compare(0, right, right, noisy)
    leaves, share, bound = envelope.unjudged()
    assert leaves == ("b",)
    assert share < 1e-12 and bound < 1e-5
    envelope = Envelope(EPS)
    envelope.compare(0, right, right, [{**x, ("gradient", "w"): gradient(seed=9)} for x in noisy])
    assert envelope.unjudged()[1] == 1.0


@pytest.mark.parametrize(
    ("bindings", "precision"),
    [
        (["optax.adamw.mu_dtype = 'bfloat16'"], EPS),
        (["adamw.mu_dtype = 'bfloat16'"], EPS),
        (["mlp.dtype = 'bfloat16'"], BF16),
        (["COMPUTE_DTYPE = 'bfloat16'"], BF16),  # the macro of shipped models
        (["COMPUTE_DTYPE = 'bfloat16'", "optax.adamw.mu_dtype = %COMPUTE_DTYPE"], BF16),
        (["sync_gradients.dtype = 'bfloat16'"], BF16),
        (["data_parallel.optimizer = @optax.lion", "optax.lion.mu_dtype = 'bfloat16'"], EPS),
    ],
)
def test_the_dtype_of_an_optimizers_state_does_not_count(bindings, precision):
    config = load.load(["runs/digits.gin", "models/mlp.gin", "strategies/ddp.gin"], bindings)
    assert tolerances.precision_of(config.bound()) == precision


def test_ulps_are_of_the_greatest_element():
    a = np.asarray([1.0, 1e-9], np.float32)
    b = a + np.asarray([2**-22, 0], np.float32)
    found = tolerances.gap(b, a)
    assert found.ulps == 2.0
    assert found.relative == pytest.approx(2**-22, rel=1e-3)
    assert tolerances.gap(a * np.nan, a).ulps == np.inf
    assert tolerances.gap(a * np.nan, a * np.nan).ulps == 0
    assert float(tolerances.ulp(3.0, np.float32)) == 2**-22
    assert float(tolerances.ulp(1.0, "bfloat16")) == 2**-7


def test_a_bound_follows_the_noise_and_has_a_floor():
    name = ("gradient", "w")
    right = np.ones(3, np.float32)
    envelope = tolerances.Envelope(float(np.finfo(np.float32).eps))

    def bound(ulps):
        noisy = {name: right + np.float32(ulps * 2**-23)}
        found, _ = envelope.compare(0, {name: right}, {name: right}, [noisy])
        return found.bound

    assert bound(0) == tolerances.FLOOR_ULPS
    assert bound(40) == tolerances.FACTOR * 40
    # A step without noise is judged by usual ones.
    assert bound(40) == bound(40) == bound(0) == tolerances.FACTOR * 40


def test_a_coarse_dtype_loosens_gradients_and_no_counts():
    right = {("gradient", "w"): np.ones(3, np.float32), ("items counted", ""): np.float32(128)}
    off = {name: x * np.float32(127 / 128) for name, x in right.items()}
    envelope = tolerances.Envelope(2.0**-7)
    wrong = [d.kind for d in envelope.compare(0, off, right, [right]) if d.is_wrong]
    assert wrong == ["items counted"]


def test_each_element_of_an_update_has_its_bound():
    name = ("parameter", "w")
    old = {name: np.asarray([1.0, 1e-6], np.float32)}
    right = {name: old[name] + np.float32(1e-9)}
    off = {name: right[name] + np.asarray([0, 1e-10], np.float32)}
    (same,) = tolerances.compare_updates(0, right, right, old, 1.0)
    (wrong,) = tolerances.compare_updates(0, off, right, old, 1.0)
    assert not same.is_wrong
    assert wrong.is_wrong, "an element far below the greatest one was off"


def test_an_element_that_falls_below_a_power_of_two_has_the_ulps_that_it_had():
    name, one = ("parameter", "w"), np.ones(1, np.float32)
    right = {name: np.nextafter(one, 0)}
    for apart, is_wrong in ((4, False), (5, True)):
        off = {name: right[name] - np.float32(apart * EPS)}
        (found,) = tolerances.compare_updates(0, off, right, {name: one})
        assert found.is_wrong == is_wrong
