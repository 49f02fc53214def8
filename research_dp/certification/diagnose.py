"""What a difference is due to, in words: the first suspicion that is borne out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from research_dp.certification import diagnose_rerun, diagnose_scale, diagnose_static
from research_dp.certification.failed_step import Case


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
    diagnose_static.cast,
    diagnose_static.not_updated,
    diagnose_static.stale_gather,
    diagnose_rerun.one_step_behind,
)
_BY_RUNS: tuple[Callable[[Case], str | None], ...] = (
    diagnose_rerun.without_clipping,
    diagnose_static.apart,
    diagnose_scale.multiple,
    diagnose_scale.update,
    diagnose_rerun.unseen,
    diagnose_rerun.with_equal_masks,
    diagnose_rerun.without_keys,
    diagnose_rerun.with_the_same_examples,
    diagnose_static.rounded,
)
