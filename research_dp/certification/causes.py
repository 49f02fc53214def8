"""What a difference is due to, in words: the first suspicion that is borne out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from research_dp.certification import counterfactuals, multiples, symptoms
from research_dp.certification.case import Case


def cause(cases: Sequence[Case]) -> str | None:
    """The first suspicion that is borne out by one of the cases, the clearest first; None: none."""
    for suspicions in (_AT_ONCE, _BY_RUNS):
        for case in cases:
            for suspicion in suspicions:
                found = suspicion(case)
                if found:
                    return found
    return None


# Those that do not run the strategy again come first: it may keep something from run to run.
_AT_ONCE: tuple[Callable[[Case], str | None], ...] = (
    symptoms.cast,
    symptoms.not_updated,
    symptoms.stale_gather,
    counterfactuals.one_step_behind,
)
_BY_RUNS: tuple[Callable[[Case], str | None], ...] = (
    counterfactuals.without_clipping,
    symptoms.apart,
    multiples.multiple,
    multiples.update,
    counterfactuals.unseen,
    counterfactuals.with_equal_masks,
    counterfactuals.without_keys,
    counterfactuals.with_the_same_examples,
    symptoms.rounded,
)
