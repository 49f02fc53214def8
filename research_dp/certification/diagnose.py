"""The table of suspicions, and the search for the first one that is confirmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from research_dp.certification import diagnose_rerun as rerun
from research_dp.certification import diagnose_scale as scale
from research_dp.certification import diagnose_static as static
from research_dp.certification.diagnose_case import Case


class Suspicion(NamedTuple):
    """A possible cause: its test returns None, or the values that complete the sentence."""

    name: str
    test: Callable[[Case], Mapping[str, Any] | None]
    sentence: str


# These do not run the strategy again, which may keep something from run to run.
_WITHOUT_RUNS = (
    Suspicion(
        "cast on the wire",
        static.cast_on_the_wire,
        "the program sends {dtypes}, which nothing in the configuration names: a cast",
    ),
    Suspicion(
        "shard not updated",
        static.not_updated,
        "the optimizer's state is not updated on {devices}: it has the bits of the step before",
    ),
    Suspicion(
        "stale gather of updated shards",
        static.stale_shards,
        "after the update {old} of {size} elements of parameter {leaf} on {device} are those of "
        "the step before: a stale gather",
    ),
    Suspicion(
        "stale gather before the forward pass",
        rerun.one_step_behind,
        "gradients are those of the parameters of the step before: a stale gather",
    ),
)
_WITH_RUNS = (
    Suspicion(
        "clipping by a local norm",
        rerun.without_clipping,
        "only with train.max_grad_norm = {limit}: gradients are clipped by another norm than the "
        "global one, such as a device's local norm (its norm is {norm:.6g}, where the oracle has "
        "{expected:.6g})",
    ),
    Suspicion("replicas differ", static.replicas_differ, "{message}"),
    Suspicion("gradients scaled", scale.scaled_gradients, "{message}"),
    Suspicion("gradient norm scaled", scale.scaled_norm, "the gradient norm {message}"),
    Suspicion(
        "update scaled",
        scale.scaled_update,
        "gradients are right, but parameter {leaves} is {message}",
    ),
    Suspicion(
        "examples not used",
        rerun.unused_examples,
        "the examples of device {devices} do not count (places {first} to {last} of the batch "
        "first): another device's are repeated in their place",
    ),
    Suspicion(
        "mean of means",
        rerun.with_equal_masks,
        "only with uneven {masks}: a mean of each device's own means is taken, and not the sum "
        "over all valid items divided by their number",
    ),
    Suspicion(
        "random keys by device",
        rerun.without_keys,
        "only with random keys (dropout): derive them from the seed, the step and the example's "
        "place in the global batch, not from a device's index",
    ),
    Suspicion(
        "statistics by device",
        rerun.with_the_same_examples,
        "only where devices have different examples: each device computes something from its own "
        "examples that is no sum over them",
    ),
    Suspicion(
        "rounding to a coarse dtype",
        static.rounded,
        "gradients are usually {usual:.1e} off, as if they, or what they are computed from, had "
        "been rounded to {dtype} on the way",
    ),
)


def find_cause(cases: Sequence[Case]) -> str | None:
    """Reports the first suspicion that one of the cases confirms, the clearest case first."""
    for suspicions in (_WITHOUT_RUNS, _WITH_RUNS):
        for case in cases:
            for suspicion in suspicions:
                values = suspicion.test(case)
                if values is not None:
                    return suspicion.sentence.format(**values)
    return None
