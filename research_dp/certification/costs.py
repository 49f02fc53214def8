"""What a strategy sends and holds, against the table of README.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.analysis import traffic
from research_dp.distributed.layout import TABLE as TABLE_UNIT
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.strategies import Strategy, TrainSpec

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the bytes that a step sends depend on.

    Attributes:
        sharded: Bytes of the parameters that the rule shards.
        whole: Bytes of the others.
        replicas: Size of mesh axis `data`.
        shards: Size of mesh axis `fsdp`.
        micros: Micro-batches a step.
    """

    sharded: int
    whole: int
    replicas: int
    shards: int
    micros: int

    def all_reduce(self, nbytes: float, devices: int) -> float:
        return 2 * nbytes * (devices - 1) / devices

    def moved(self, times: int) -> float:
        """Sharded parameters gathered, or their gradients scattered, so many times."""
        return times * self.sharded * (self.shards - 1) / self.shards

    @property
    def rest(self) -> float:
        """Averages of what is whole, and of shards across replicas."""
        across = self.all_reduce(self.sharded / self.shards, self.replicas)
        return across + self.all_reduce(self.whole, self.replicas * self.shards)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        formula: As it stands there.
        wire: Bytes that a device sends a step, at most.
        params: Whether parameters are 'sharded' or 'whole' on each device.
        optimizer: The same of the optimizer's state.
    """

    formula: str
    wire: Callable[[Sizes], float]
    params: str
    optimizer: str


def _all_reduced(sizes: Sizes) -> float:
    return sizes.all_reduce(sizes.sharded + sizes.whole, sizes.replicas * sizes.shards)


def _each_time(sizes: Sizes) -> float:
    return sizes.moved(sizes.micros + 1) + sizes.micros * sizes.rest


# What is sharded is P of the table; the little that stays whole is all-reduced, 2 P f.
TABLE = {
    "single": Row("0", lambda s: 0.0, "whole", "whole"),
    "ddp": Row("2 P f", _all_reduced, "whole", "whole"),
    "pmap": Row("2 P f", _all_reduced, "whole", "whole"),
    "zero1": Row("2 P f", lambda s: s.moved(2) + s.rest, "whole", "sharded"),
    "zero2": Row("(k + 1) P f", _each_time, "whole", "sharded"),
    "fsdp": Row("3 k P f", lambda s: s.moved(3 * s.micros) + s.rest, "sharded", "sharded"),
    "fsdp_keep": Row("2 P f", lambda s: s.moved(2) + s.rest, "sharded", "sharded"),
    "hsdp": Row(
        "3 k P f inside, 2 P / s across",
        lambda s: s.moved(3 * s.micros) + s.rest,
        "sharded",
        "sharded",
    ),
}
_METRICS = 256  # bytes of sums of metrics and squares that come on top


@dataclasses.dataclass(frozen=True)
class Cost:
    """A cost beside what the table says.

    Attributes:
        what: 'bytes sent a step', ...
        measured: Bytes a device.
        most: What the table allows; None: it has no row for the strategy.
        told: Where the bound is from.
    """

    what: str
    measured: float
    most: float | None
    told: str

    @property
    def is_right(self) -> bool:
        return self.most is None or self.measured <= self.most


def costs(strategy: Strategy, spec: TrainSpec) -> Iterator[Cost]:
    """Costs of a strategy that was built for the user's own optimizer.

    Bytes sent are counted in the traced program of engines that write collectives out; those of
    the compiler are left out.
    """
    row = TABLE.get(strategy.name)
    sent = collectives(strategy)
    if row is None and not sent:
        yield Cost("bytes sent a step", 0.0, None, "by the compiler; not counted")
    else:
        sizes = _sizes(strategy, spec)
        most = row.wire(sizes) + _METRICS if row else None
        told = f"{row.formula} of the table" if row else f"the table has no row {strategy.name!r}"
        again = _tables_again(strategy, spec)
        if most is not None and again:
            most += again
            told += "; embeddings may be heads too, so as much again of them"
        yield Cost("bytes sent a step", sum(one.wire_bytes for one in sent), most, told)
    shares = {"whole": 1.0, "sharded": _share(strategy)}
    for what, part in (("params", "params"), ("optimizer", "opt_state")):
        held, total = _held(getattr(strategy.abstract_state, part))
        lies = getattr(row, what) if row else None
        most = None if lies is None else shares[lies] * total + _METRICS
        told = f"{lies}, of {total:,} in all" if lies else f"of {total:,} in all"
        name = "parameters" if what == "params" else "optimizer state"
        yield Cost(f"{name} a device", held, most, told)


def _tables_again(strategy: Strategy, spec: TrainSpec) -> float:
    """What units that are tables cost if they are used twice, gathered or row by row."""
    kinds, shards = spec.model.units, strategy.mesh.shape[FSDP_AXIS]
    tables = [
        p.nbytes
        for name, part in strategy.layouts.params.items()
        for p in jax.tree.leaves(part)
        if p.dim is not None and kinds.get(name) == TABLE_UNIT
    ]
    return 3 * spec.accumulation_steps * sum(tables) * (shards - 1) / shards


def collectives(strategy: Strategy) -> list[traffic.Collective]:
    """Collectives of the traced training step."""
    return traffic.collectives(
        strategy.train_step, strategy.abstract_state, strategy.abstract_batch
    )


def unnamed_dtypes(strategy: Strategy, dtypes: Iterable[str]) -> list[str]:
    """Floating-point dtypes that gradients or parameters travel in, and that nothing names."""
    names = {str(x.dtype) for x in jax.tree.leaves(strategy.abstract_state.params)}
    known = {"float32", *names, *(str(jnp.dtype(x)) for x in dtypes)}
    sent = {one.dtype for one in collectives(strategy)}
    return sorted(d for d in sent - known if jnp.issubdtype(jnp.dtype(d), jnp.floating))


def _sizes(strategy: Strategy, spec: TrainSpec) -> Sizes:
    places = jax.tree.leaves(strategy.layouts.slices)
    sharded = sum(math.prod(p.split_shape) * p.dtype.itemsize for p in places if p.dim is not None)
    return Sizes(
        sharded=sharded,
        whole=sum(p.nbytes for p in places if p.dim is None),
        replicas=strategy.mesh.shape[DATA_AXIS],
        shards=strategy.mesh.shape[FSDP_AXIS],
        micros=spec.accumulation_steps,
    )


def _share(strategy: Strategy) -> float:
    """The part of what is sharded where it can be that a device holds."""
    places = jax.tree.leaves(strategy.layouts.slices)
    return sum(p.nbytes_per_device for p in places) / sum(p.nbytes for p in places)


def _held(tree: PyTree) -> tuple[int, int]:
    """Bytes of a tree a device, and in all."""
    leaves = jax.tree.leaves(tree)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    return held, sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
