"""The preflight: tests collectives on exact sums, compares the processes' configurations."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from research_dp.distributed.collectives import EXCHANGED, PLAIN, over_gloo
from research_dp.distributed.mesh import jax_internals, split_axes, texts_of_all
from research_dp.errors import RunFailure, UsageError, some_of
from research_dp.strategies import Strategy, StrategyConfig, TrainSpec, jaxpr_collectives

_ROUNDS = 3  # a fault may be intermittent
_TIMEOUT_MILLISECONDS = 300_000
_TESTS = itertools.count()
_MAX_BYTES = 2**25  # larger arrays are sent in pieces anyway, and their test would take long


class Probe(NamedTuple):
    """A collective to test, as in `jaxpr_collectives.Collective`; `size` is of the full array."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    size: int

    def __str__(self) -> str:
        nbytes = self.size * jnp.dtype(self.dtype).itemsize
        return f"{self.kind} of {nbytes:,} bytes of {self.dtype} over {' x '.join(self.axes)}"


def preflight(
    config: StrategyConfig, spec: TrainSpec, strategy: Strategy, say: Callable[[str], None]
) -> Strategy:
    """Tests a strategy's collectives, but not between devices of one CPU, which share memory.

    Returns the strategy, or `config` built with sums by all-to-all if those of the strategy are
    wrong. RunFailure: there is no way around wrong numbers.
    """
    several, devices = jax.process_count() > 1, strategy.mesh.devices
    if several:
        check_configurations(gin.config_str())
    if devices.size == 1 or (devices.flat[0].platform == "cpu" and not several):
        return strategy
    started, tested = time.perf_counter(), probes(strategy)
    wrong = "; ".join(faults(strategy.mesh, tested)[:3])
    if not wrong:
        seconds = time.perf_counter() - started
        say(f"Collectives tested: {len(tested)} kinds, {seconds:.1f} s")
        return strategy
    refusal = RunFailure(
        f"collectives return wrong numbers: {wrong}. Nothing was trained. Test the devices that "
        "are named and their links, or leave them out."
    )
    if config.reduction is not PLAIN:
        raise refusal
    try:
        other = dataclasses.replace(config, reduction=EXCHANGED).build(spec)
    except UsageError as error:  # the engine leaves sums to the compiler
        raise refusal from error
    if faults(strategy.mesh, probes(other)):
        raise refusal
    say(f"Wrong numbers: {wrong}. Sums go by all-to-all instead, which passed")
    return other


def probes(strategy: Strategy) -> list[Probe]:
    """The largest collective of each kind, dtype and axes of the training step.

    The traced step lacks those that the compiler inserts. An all-reduce, an all-gather and, but
    between CPUs, a reduce-scatter of the largest parameter stand for them.
    """
    try:
        traced = jaxpr_collectives.of_step(strategy)
    except NotImplementedError:  # one in a loop of unknown length, in a user's model
        traced = []
    traced = sorted(traced, key=lambda one: one.nbytes)
    largest = {(one.kind, one.axes, one.dtype): one.nbytes for one in traced}
    if not largest:
        leaf = max(jax.tree.leaves(strategy.shardings.params), key=lambda leaf: leaf.nbytes)
        scatters = () if over_gloo() else ("reduce-scatter",)
        for kind in ("all-reduce", "all-gather", *scatters):
            largest[kind, split_axes(strategy.mesh), str(leaf.dtype)] = leaf.nbytes
    return [
        Probe(kind, axes, dtype, min(nbytes, _MAX_BYTES) // jnp.dtype(dtype).itemsize)
        for (kind, axes, dtype), nbytes in sorted(largest.items())
        if jnp.dtype(dtype) != jnp.bool_
    ]


def faults(mesh: Mesh, tested: Sequence[Probe]) -> list[str]:
    """Collectives that return wrong numbers, and on which devices; the same in every process."""

    def run(salt: jax.Array) -> jax.Array:
        return jnp.stack([_wrong_elements(probe, salt) for probe in tested])[None]

    every = PartitionSpec(mesh.axis_names)
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=every, check_vma=False)
    )
    local: dict[int, Any] = collections.defaultdict(int)
    for salt in range(_ROUNDS):
        for shard in program(np.uint32(salt)).addressable_shards:
            local[shard.device.id] += np.asarray(shard.data, np.int64)[0]
    text = json.dumps({device: counts.tolist() for device, counts in local.items()})
    by_device = {int(k): x for one in _exchanged(text) for k, x in json.loads(one).items()}
    wrong = np.asarray([by_device[device.id] for device in mesh.devices.flat])
    messages = []
    for probe, counts in zip(tested, wrong.T, strict=True):
        seen = [str(d.id) for d, count in zip(mesh.devices.flat, counts, strict=True) if count]
        if seen:
            total = f"{int(counts.sum()):,} elements in {_ROUNDS} runs"
            messages.append(f"{probe}: {total}, on device {some_of(seen, 4)}")
    return messages


def _exchanged(local: str) -> list[str]:
    """The texts of all processes, by the coordination service, not by a collective under test."""
    without = "verdicts of the test of collectives go by a collective"
    if not jax.distributed.is_initialized():
        return [local]
    if (internals := jax_internals(without, "distributed.global_state")) is None:
        return texts_of_all(local)
    client: Any = internals[0].client
    key = f"research_dp/preflight/{next(_TESTS)}/"  # a key is written once
    client.key_value_set(f"{key}{jax.process_index()}", local)
    keys = [f"{key}{process}" for process in range(jax.process_count())]
    return [client.blocking_key_value_get(key, _TIMEOUT_MILLISECONDS) for key in keys]


def check_configurations(local: str) -> None:
    """Raises UsageError if processes have different configurations, which would hang."""
    first, *others = texts_of_all(local)
    for process, other in enumerate(others, 1):
        if other != first:
            pairs = [(a.splitlines(), b.splitlines()) for a, b in ((first, other), (other, first))]
            only = [next((line for line in a if line not in b), "nothing") for a, b in pairs]
            raise UsageError(
                f"processes have different configurations: process 0 has {only[0]!r}, process "
                f"{process} has {only[1]!r}. Give all the same files and flags."
            )


def _wrong_elements(probe: Probe, salt: jax.Array) -> jax.Array:
    """How many elements of a collective's result are wrong on this device; 0-d int32."""
    axes = probe.axes
    count, rank = lax.axis_size(axes), lax.axis_index(axes)
    block = -(-probe.size // count)
    full = block * count
    dtype = jnp.dtype(probe.dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    exact = 2 ** (jnp.finfo(dtype).nmant + 1 if floating else min(8 * dtype.itemsize - 1, 30))
    ranks = np.arange(count)
    weights = ranks % 3 + 1 if 3 * count <= exact else (ranks < exact).astype(np.int64)
    total = int(weights.sum())
    values = exact // total + 1  # so that the largest sum is exact
    weight = jnp.asarray(weights)

    def integers(start: Any, size: int, factor: Any) -> jax.Array:
        """Pseudo-random integers by place, times a factor."""
        place = lax.iota(jnp.uint32, size) + jnp.asarray(start, jnp.uint32)
        mixed = (place * np.uint32(2654435761) + salt * np.uint32(40503)) >> np.uint32(16)
        return (mixed % np.uint32(values)).astype(dtype) * jnp.asarray(factor, dtype)

    by_rank = jnp.repeat(weight, block, total_repeat_length=full)
    local = integers(0, full, weight[rank])
    if probe.kind == "all-gather":
        local, expected = integers(rank * block, block, weight[rank]), integers(0, full, by_rank)
    elif probe.kind == "all-to-all":
        expected = jnp.tile(integers(rank * block, block, 1), count) * by_rank.astype(dtype)
    elif probe.kind == "reduce-scatter":
        expected = integers(rank * block, block, total)
    elif probe.kind == "permute":
        expected = integers(0, full, weight[rank - 1])
    else:
        expected = integers(0, full, total)
    return jnp.sum(_COLLECTIVES[probe.kind](local, axes) != expected, dtype=jnp.int32)


def _reduce_scatter(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    for axis in axes:
        x = lax.psum_scatter(x, axis, tiled=True)  # a sum: nothing is divided
    return x


def _ring_permute(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    count = lax.axis_size(axes)
    return lax.ppermute(x, axes, [(i, (i + 1) % count) for i in range(count)])


_COLLECTIVES: dict[str, Callable[[jax.Array, tuple[str, ...]], jax.Array]] = {
    "all-reduce": lax.psum,
    "reduce-scatter": _reduce_scatter,
    "all-gather": lambda x, axes: lax.all_gather(x, axes, tiled=True),
    "all-to-all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
    "permute": _ring_permute,
}
