"""Rows of a plan for tests, from the figures that a test is about."""

import dataclasses

from research_dp.planning.row import Memory, Row, Setup, Timing, Traffic

PARTS = {"setup": Setup, "memory": Memory, "traffic": Traffic, "timing": Timing}
DEFAULTS = {
    "slots": (),
    "mesh": {},
    "batch_size": 0,
    "accumulation_steps": 1,
    "collectives": [],
    "is_lower_bound": False,
    "predicted_parts": {"network_inside": 0.0, "network_across": 0.0, "exposed": 0.0},
    "bound": "compute",
}


def make_row(strategy, **figures):
    """A row with these figures of `plan --json`; parts without any are unknown."""
    parts = {}
    for part, kind in PARTS.items():
        names = [field.name for field in dataclasses.fields(kind)]
        given = {name: figures.pop(name) for name in names if name in figures}
        if given:
            parts[part] = kind(**{name: given.get(name, DEFAULTS.get(name)) for name in names})
    return Row(strategy, **parts, **figures)
