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
    """The links that a group of devices has.

    Attributes:
        domains: Hosts (GPU) or slices (TPU) that the group lies in.
        members: Its devices in each of them.
        inside: Bytes/s that a device sends to others of its domain, in a ring.
        inside_direct: The same, each to each.
        across: Bytes/s that a device sends to other domains.
    """

    domains: int
    members: int
    inside: float
    inside_direct: float
    across: float

    @property
    def crosses(self) -> bool:
        return self.domains > 1


def route(topology: Topology, devices: Sequence[Any]) -> Route:
    """The links between the devices of a group.

    Args:
        topology: Where they are.
        devices: The group, e.g. `[mesh.devices.flat[i] for i in collective.group]`.
    """
    chip = topology.chip
    domains = len({topology.domain(device) for device in devices})
    inside, direct = chip.inside_rate, chip.inside_rate
    if chip.platform == "tpu":
        # A ring goes both ways along each dimension of the torus in which the group extends.
        inside *= 2 * max(1, _dimensions(devices))
    return Route(domains, len(devices) // domains, inside, direct, chip.across_rate)


def _dimensions(devices: Sequence[Any]) -> int:
    """In how many dimensions of the torus these TPU chips differ."""
    coordinates = np.array([device.coords for device in devices])
    return int(np.count_nonzero(np.ptp(coordinates, axis=0)))


def seconds(collective: Collective, way: Route) -> float:
    """Time of one execution, without latency.

    Rings: every byte leaves a host (a slice) once, over the cards of all its members together, and
    moves inside at the links' rate; the slower of the two bounds it. All-to-all has no such ring:
    what goes to another host leaves by the sender's own card.
    """
    once = dataclasses.replace(collective, times=1).wire_bytes
    if not way.crosses:
        direct = collective.kind in ("all-to-all", "permute")
        return once / (way.inside_direct if direct else way.inside)
    if collective.kind == "permute":
        return once / way.across
    if collective.kind == "all-to-all":
        here, all_members = way.members, collective.devices
        inside = collective.nbytes * (here - 1) / all_members / way.inside_direct
        across = collective.nbytes * (all_members - here) / all_members / way.across
        return max(inside, across)
    return once / min(way.inside, way.members * way.across)
