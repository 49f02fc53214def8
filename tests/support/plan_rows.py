"""Rows of a plan for tests, from the figures that a test is about."""

from research_dp.analysis.topologies import Topology
from research_dp.distributed.mesh import chips
from research_dp.planning.row import Row


class Device:
    """A device on some host."""

    def __init__(self, host):
        self.process_index = host


def absent(name, chip, count, hosts):
    """A topology of which the figures alone are read: nothing can be compiled for it."""
    return Topology(name, chips()[chip], tuple(Device(n * hosts // count) for n in range(count)))


GPUS = absent("h100:8x8", "h100", 64, 8)

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
