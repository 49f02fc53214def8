"""Rows of a plan for tests, from the figures that a test is about."""

from research_dp.planning.row import Row

BUILT = {"mesh": {}, "batch_size": 0, "accumulation_steps": 1}
TIMED = {
    "collectives": [],
    "predicted_parts": {"network_inside": 0.0, "network_across": 0.0, "exposed": 0.0},
    "bound": "compute",
}


def make_row(strategy, **figures):
    """A row of a strategy that was built, with these figures of `plan --json`."""
    timed = TIMED if "predicted_seconds" in figures else {}
    return Row(strategy, **{**BUILT, **timed, **figures})
