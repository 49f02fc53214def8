"""What a plan tries beside what it was asked for: batches that fit, other dtypes and layouts."""

import optax
import pytest

from research_dp.analysis.topologies import topology
from research_dp.commands import plan_candidates
from research_dp.planning import estimate, report
from research_dp.strategies import TrainSpec
from research_dp.types import TrainableModel
from tests.support.plan_rows import GPUS, make_row
from tests.support.recipes import recipe


def spec_of(**sizes):
    """A spec of which the sizes alone are read."""
    model = TrainableModel(init=lambda *_: None, loss=lambda *_: None)
    return TrainSpec(model=model, optimizer=optax.identity(), example={}, **sizes)


@pytest.mark.parametrize(("fixed", "each", "expected"), [(10, 1, 90), (10, 7, 12), (50, 49, 1)])
def test_the_largest_batch_is_found_in_a_few_compilations(fixed, each, expected):
    """Memory is `fixed + each * examples a device` of 100, and a little more with every tenth."""
    tried = []

    def attempt(spec):
        n = spec.batch_size // 16
        tried.append(n)
        needed = fixed + each * n
        return make_row(
            "x",
            batch_size=spec.batch_size,
            needed_bytes=needed,
            available_bytes=100,
            fits=needed <= 100,
        )

    spec = spec_of(batch_size=16, accumulation_steps=2)
    first = attempt(spec)
    found = estimate.largest_batch(recipe("fsdp"), spec, first, attempt)
    assert found.fits
    assert found.batch_size == 16 * expected
    assert len(tried) <= 5


def test_variants_are_those_that_can_change_something():
    file = "precision/bf16_collectives.gin"

    def names(least, *files):
        narrow = {"min_wire_bytes": least, "narrow_wire_bytes": 5.0, "narrow_file": file}
        row = make_row("fsdp", mesh={"data": 1, "fsdp": 8}, **narrow)
        chosen = plan_candidates.Candidate("fsdp", files)
        return [c.name for c in plan_candidates.variants(chosen, row, topology("cpu:8"))]

    kept = ["fsdp", "fsdp_keep"]
    assert names(10.0, "strategies/fsdp.gin") == ["fsdp+bf16_collectives", *kept]
    assert names(5.0, "strategies/fsdp.gin") == kept
    assert names(10.0, "strategies/fsdp.gin", file) == [f"{x}+bf16_collectives" for x in kept]


def test_what_variants_change_is_said():
    def costs(name, seconds, needed, sent):
        return make_row(
            name,
            fits=True,
            batch_size=16,
            predicted_seconds=seconds,
            needed_bytes=needed,
            wire_bytes={"total": sent},
        )

    best = costs("fsdp", 0.1, 10**9, 2e9)
    others = [costs("fsdp_keep", 0.08, 3 * 10**9, 1e9), costs("fsdp+bf16_gather", 0.1, 10**9, 2e9)]
    quicker, same = report.changes(others, [best], GPUS)
    assert quicker.startswith("fsdp_keep instead of fsdp: a step of 80.0 ms instead of 100.0")
    assert same.startswith(
        "fsdp+bf16_gather costs what fsdp does: is what it binds bound otherwise"
    )


def test_variants_keep_the_files_that_a_candidate_adds():
    (chosen,) = plan_candidates.of(["zero1+h100"])
    row = make_row("zero1+h100", mesh={"data": 1, "fsdp": 8}, wire_bytes={"total": 0.0})
    found = plan_candidates.variants(chosen, row, topology("cpu:8"))
    assert [(c.name, c.files) for c in found] == [
        (f"{stem}+h100", (f"strategies/{stem}.gin", "options/h100.gin"))
        for stem in ("fsdp", "fsdp_keep")
    ]


def test_more_micro_batches_are_tried_until_it_fits():
    tried = []

    def attempt(spec):
        tried.append(spec)
        steps = spec.accumulation_steps
        return make_row("x", fits=steps >= 4, accumulation_steps=steps)

    def steps(size):
        spec = spec_of(batch_size=size)
        return estimate.fewest_micro_batches(recipe("fsdp"), spec, make_row("x"), attempt)

    assert steps(32).accumulation_steps == 4
    assert steps(8 * 9 * 5).accumulation_steps == 5, "of 3, 5, 9, 15, 45"
    assert not steps(16).fits, "one example a device at a time"
    assert steps(8) is None
    assert len(tried) <= 9


def test_the_batch_grows_by_no_more_than_can_be_tried():
    """Memory that does not depend on the batch must not send the search to billions of examples."""
    tried = []

    def attempt(spec):
        tried.append(spec.batch_size)
        return make_row(
            "x",
            batch_size=spec.batch_size,
            needed_bytes=10,
            available_bytes=10**9,
            fits=True,
        )

    spec = spec_of(batch_size=4096)
    estimate.largest_batch(recipe("fsdp"), spec, attempt(spec), attempt)
    assert max(tried) <= 4096 * 2 * 8**3
    tried.clear()
    spec = spec_of(batch_size=2**29)
    estimate.largest_batch(recipe("fsdp"), spec, attempt(spec), attempt)
    assert max(tried) < 2**31


def test_where_no_larger_batch_fits_at_once_more_micro_batches_are_tried():
    def attempt(spec):
        needed = 10 * spec.batch_size // spec.accumulation_steps
        return make_row(
            "x",
            batch_size=spec.batch_size,
            needed_bytes=needed,
            available_bytes=100,
            accumulation_steps=spec.accumulation_steps,
            fits=needed <= 100,
        )

    spec = spec_of(batch_size=8)
    found = estimate.largest_batch(recipe("fsdp"), spec, attempt(spec), attempt)
    assert (found.batch_size, found.accumulation_steps) == (16, 2)
