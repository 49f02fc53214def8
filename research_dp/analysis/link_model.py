"""How long a collective takes at the rates that vendors give for the links."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from research_dp.analysis.topologies import Topology
from research_dp.strategies.jaxpr_collectives import Collective


@dataclasses.dataclass(frozen=True)
class Route:
    """The links of a group of devices; rates are bytes/s that a device sends."""

    domains: int  # hosts (GPU) or slices (TPU) that the group is in
    members: int  # its devices in each of them
    ring_rate: float  # to others of its domain, in a ring
    direct_rate: float  # to others of its domain, all to all
    across_rate: float  # to other domains

    @property
    def crosses(self) -> bool:
        return self.domains > 1


def route(topology: Topology, devices: Sequence[Any]) -> Route:
    """The links of a group, e.g. of `[mesh.devices.flat[i] for i in collective.group]`."""
    chip = topology.chip
    domains = len({topology.domain(device) for device in devices})
    ring_rate = chip.inside_rate
    if chip.platform == "tpu":
        # A ring goes both ways along each dimension of the torus in which the group extends.
        coordinates = np.array([device.coords for device in devices])
        extended = int(np.count_nonzero(np.ptp(coordinates, axis=0)))
        ring_rate *= 2 * max(1, extended)
    return Route(domains, len(devices) // domains, ring_rate, chip.inside_rate, chip.across_rate)


def seconds(collective: Collective, links: Route) -> float:
    """Time of one execution, without latency.

    In a ring every byte leaves a host (a slice) once, over the cards of all its members together,
    and passes inside at the links' rate; the slower of the two bounds it. An all-to-all has no
    ring: bytes for another host leave by the sender's own card.
    """
    wire_bytes = dataclasses.replace(collective, times=1).wire_bytes
    if not links.crosses:
        is_direct = collective.kind in ("all-to-all", "permute")
        return wire_bytes / (links.direct_rate if is_direct else links.ring_rate)
    if collective.kind == "permute":
        return wire_bytes / links.across_rate
    if collective.kind == "all-to-all":
        members, devices = links.members, collective.devices
        inside = collective.nbytes * (members - 1) / devices / links.direct_rate
        across = collective.nbytes * (devices - members) / devices / links.across_rate
        return max(inside, across)
    return wire_bytes / min(links.ring_rate, links.members * links.across_rate)
