"""Before a run trusts its devices with months: do they compute one program, and send it right?

Collectives are run on whole numbers, of which every sum is exact, at the sizes of the training
step, up to 32 MiB: beyond, testing would take longer than a second or so. What is found goes from
process to process by JAX's coordination service, not by what is tested.

Processes compare their configurations: of two different ones the first collective would hang, or
worse.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import distributed  # the coordination service has no public name
from jax.sharding import Mesh, PartitionSpec

from research_dp.distributed.collectives import EXCHANGED, PLAIN
from research_dp.distributed.mesh import split_axes
from research_dp.distributed.multihost import texts_of_all
from research_dp.distributed.transports.all_to_all import over_gloo
from research_dp.errors import RunFailure, UsageError, some_of
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, jaxpr_collectives

_ROUNDS = 3  # what is wrong may be so now and then
_MILLISECONDS_TO_WAIT = 300_000
_TESTS = itertools.count()
_MOST_BYTES = 2**25  # beyond, an array travels in pieces anyway, and testing would take long


@dataclasses.dataclass(frozen=True)
class Probe:
    """A collective to test.

    Attributes:
        kind: As in `traffic.Collective`.
        axes: The mesh axes it runs over.
        dtype: Elements' dtype.
        size: Elements of the full array.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    size: int

    def __str__(self) -> str:
        nbytes = self.size * jnp.dtype(self.dtype).itemsize
        return f"{self.kind} of {nbytes:,} bytes of {self.dtype} over {' x '.join(self.axes)}"


def tested(
    recipe: StrategyConfig, spec: TrainSpec, strategy: Strategy, say: Callable[[str], None]
) -> Any:
    """The strategy, tested; or the same one with sums that go another way, if its own are wrong.

    The devices of one process's CPU are not tested: they share its memory.

    Args:
        recipe: What the strategy was built from.
        spec: What it was built for.
        strategy: The built strategy.
        say: Prints a line.

    Returns:
        A `Strategy`.

    Raises:
        UsageError: Processes have different configurations.
        RunFailure: Collectives return wrong numbers, and there is no way around them.
    """
    several = jax.process_count() > 1
    if several:
        check_configurations(gin.config_str())
    local = strategy.mesh.devices.flat[0].platform == "cpu" and not several
    if strategy.mesh.size == 1 or local:
        return strategy
    started = time.perf_counter()
    found = probes(strategy)
    wrong = faults(strategy.mesh, found)
    seconds = time.perf_counter() - started
    if not wrong:
        say(f"Collectives tested: {len(found)} kinds, {seconds:.1f} s")
        return strategy
    refusal = RunFailure(
        f"collectives return wrong numbers: {'; '.join(wrong[:3])}. Nothing was trained. Test the "
        "devices that are named and their links, or leave them out."
    )
    if recipe.reduction is not PLAIN:
        raise refusal
    try:
        other = dataclasses.replace(recipe, reduction=EXCHANGED).build(spec)
    except UsageError as error:  # the engine leaves sums to the compiler
        raise refusal from error
    if faults(strategy.mesh, probes(other)):
        raise refusal
    say(f"Wrong numbers: {'; '.join(wrong[:3])}. Sums go by all-to-all instead, which is right")
    return other


def probes(strategy: Strategy) -> list[Probe]:
    """The largest collective of each kind, dtype and axes of the training step.

    Those that the compiler will insert are not in the traced step: there an all-reduce, an
    all-gather and a reduce-scatter of the largest parameter stand for them; the last not between
    CPUs, whose compiler makes none.
    """
    try:
        traced = jaxpr_collectives.of_step(strategy)
    except NotImplementedError:  # one in a loop of unknown length, in a user's model
        traced = []
    largest: dict[tuple[str, tuple[str, ...], str], int] = {}
    for one in traced:
        key = (one.kind, one.axes, one.dtype)
        largest[key] = max(largest.get(key, 0), one.nbytes)
    if not largest:
        leaf = max(
            jax.tree.leaves(strategy.shardings.params), key=lambda placement: placement.nbytes
        )
        scatters = () if over_gloo() else ("reduce-scatter",)
        for kind in ("all-reduce", "all-gather", *scatters):
            largest[kind, split_axes(strategy.mesh), str(leaf.dtype)] = leaf.nbytes
    return [
        Probe(kind, axes, dtype, min(nbytes, _MOST_BYTES) // jnp.dtype(dtype).itemsize)
        for (kind, axes, dtype), nbytes in sorted(largest.items())
        if jnp.dtype(dtype) != jnp.bool_
    ]


def faults(mesh: Mesh, wanted: Sequence[Probe]) -> list[str]:
    """What returns wrong numbers, with the devices that see them; the same in every process."""

    def run(salt: jax.Array) -> jax.Array:
        return jnp.stack([_wrong_elements(probe, salt) for probe in wanted])[None]

    every = PartitionSpec(mesh.axis_names)
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=every, check_vma=False)
    )
    own: dict[int, np.ndarray] = {}
    for salt in range(_ROUNDS):
        for shard in program(np.uint32(salt)).addressable_shards:
            counts = np.asarray(shard.data, np.int64)[0]
            own[shard.device.id] = own.get(shard.device.id, 0) + counts
    by_device = _of_all({device: counts.tolist() for device, counts in own.items()})
    wrong = np.asarray([by_device[device.id] for device in mesh.devices.flat])
    told = []
    for probe, counts in zip(wanted, wrong.T, strict=True):
        seen = [str(d.id) for d, count in zip(mesh.devices.flat, counts, strict=True) if count]
        if seen:
            what = f"{int(counts.sum()):,} elements in {_ROUNDS} runs"
            told.append(f"{probe}: {what}, on device {some_of(seen, 4)}")
    return told


def _of_all(own: dict[int, list[int]]) -> dict[int, list[int]]:
    """What the devices of all processes found, from what this one's did."""
    if not jax.distributed.is_initialized():
        return own
    client: Any = distributed.global_state.client
    # A number of its own for each test: a key is written once.
    key = f"research_dp/selftest/{next(_TESTS)}"
    client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(own))
    found: dict[int, list[int]] = {}
    for process in range(jax.process_count()):
        theirs = client.blocking_key_value_get(f"{key}/{process}", _MILLISECONDS_TO_WAIT)
        found |= {int(device): counts for device, counts in json.loads(theirs).items()}
    return found


def check_configurations(own: str) -> None:
    """Compares this process's configuration with that of process 0.

    Raises:
        UsageError: In all processes, if one has another; with the first line that differs.
    """
    texts = texts_of_all(own)
    for process, other in enumerate(texts):
        if other != texts[0]:
            lines = texts[0].splitlines(), other.splitlines()
            only = [[x for x in a if x not in b] or ["nothing"] for a, b in (lines, lines[::-1])]
            raise UsageError(
                f"processes have different configurations: process 0 has {only[0][0]!r}, process "
                f"{process} has {only[1][0]!r}. Give all the same files and flags."
            )


def _wrong_elements(probe: Probe, salt: jax.Array) -> jax.Array:
    """How many elements of a collective's result are wrong on this device; 0-d int32."""
    axes = probe.axes
    count = math.prod(lax.axis_size(axis) for axis in axes)
    rank = lax.axis_index(axes)
    block = -(-probe.size // count)
    dtype = jnp.dtype(probe.dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    exact = 2 ** (jnp.finfo(dtype).nmant + 1 if floating else min(8 * dtype.itemsize - 1, 30))
    ranks = np.arange(count)
    weights = ranks % 3 + 1 if 3 * count <= exact else (ranks < exact).astype(np.int64)
    total = int(weights.sum())
    values = exact // total + 1  # so that the largest sum is exact

    def numbers(start: Any, size: int, weight: Any) -> jax.Array:
        """Whole numbers that depend on their place, times a device's weight."""
        place = lax.iota(jnp.uint32, size) + jnp.asarray(start, jnp.uint32)
        mixed = (place * np.uint32(2654435761) + salt * np.uint32(40503)) >> np.uint32(16)
        return (mixed % np.uint32(values)).astype(dtype) * jnp.asarray(weight, dtype)

    own = jnp.asarray(weights)[rank]
    full = block * count
    by_block = jnp.repeat(jnp.asarray(weights), block, total_repeat_length=full)
    if probe.kind == "all-gather":
        sent, right = numbers(rank * block, block, own), numbers(0, full, by_block)
    elif probe.kind == "all-to-all":
        sent = numbers(0, full, own)
        right = jnp.tile(numbers(rank * block, block, 1), count) * by_block.astype(dtype)
    elif probe.kind == "reduce-scatter":
        sent, right = numbers(0, full, own), numbers(rank * block, block, total)
    elif probe.kind == "permute":
        sent, right = numbers(0, full, own), numbers(0, full, jnp.asarray(weights)[rank - 1])
    else:
        sent, right = numbers(0, full, own), numbers(0, full, total)
    return jnp.sum(_SEND[probe.kind](sent, axes) != right, dtype=jnp.int32)


def _scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    for axis in axes:
        x = lax.psum_scatter(x, axis, tiled=True)  # only sums
    return x


def _ring(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    count = math.prod(lax.axis_size(axis) for axis in axes)
    return lax.ppermute(x, axes, [(i, (i + 1) % count) for i in range(count)])


_SEND: dict[str, Callable[[jax.Array, tuple[str, ...]], jax.Array]] = {
    "all-reduce": lax.psum,
    "reduce-scatter": _scatter,
    "all-gather": lambda x, axes: lax.all_gather(x, axes, tiled=True),
    "all-to-all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "permute": _ring,
}
