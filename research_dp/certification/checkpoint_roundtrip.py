"""Whether a state survives being saved: the same bits go on, and lie anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from research_dp.certification.harness import Batch, Bench, on_host, put, step
from research_dp.certification.tolerances import same_bits
from research_dp.distributed.mesh import build_mesh, sizes_text
from research_dp.strategies import Strategy, TrainState
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.manifest import Progress


class Survived(NamedTuple):
    """One way of leaving and coming back.

    Attributes:
        what: Which.
        lost: Path of the first array with other bits; None: all have the same.
    """

    what: str
    lost: str | None


def survivals(bench: Bench, state: TrainState, batches: Sequence[Batch]) -> Iterator[Survived]:
    """Saves a state, and looks what becomes of it.

    Args:
        bench: The strategy and its oracle.
        state: A state of the strategy, on the host.
        batches: What it is trained on next.
    """
    strategy = bench.strategy
    with tempfile.TemporaryDirectory() as folder:
        saved = _Saved(Path(folder), strategy, bench)
        saved.save(put(strategy, state))
        back = saved.restore(strategy)
        yield Survived("saved and restored", same_bits(back, state))
        ways = (_trained(strategy, given, batches) for given in (state, back))
        yield Survived(f"{len(batches)} steps after it", same_bits(*ways))
        for other in (bench.oracle, *_elsewhere(bench)):
            sizes = sizes_text(other.mesh.shape)
            found = saved.restore(other)
            yield Survived(f"moved to {other.name} on {sizes}", same_bits(found, state))
    with tempfile.TemporaryDirectory() as folder:
        saved = _Saved(Path(folder), bench.oracle, bench)
        saved.save(put(bench.oracle, state))
        found = saved.restore(strategy)
        yield Survived(f"moved back from {bench.oracle.name}", same_bits(found, state))


class _Saved:
    """A folder of checkpoints, opened anew for each use, as a run that continues does."""

    def __init__(self, folder: Path, strategy: Strategy, bench: Bench):
        self._folder, self._strategy, self._spec = folder, strategy, bench.spec

    def save(self, state: TrainState) -> None:
        with contextlib.closing(Checkpoints(self._folder)) as checkpoints:
            progress = Progress(
                batch_size=self._spec.batch_size, seed=self._spec.seed, order="", window={}
            )
            checkpoints.save(state, int(state.step), progress, origin={})

    def restore(self, strategy: Strategy) -> TrainState:
        with contextlib.closing(Checkpoints(self._folder)) as checkpoints:
            restored = checkpoints.restore(strategy.abstract_state)
            assert restored is not None  # it was saved just now
            return on_host(restored.state)


def _trained(strategy: Strategy, state: TrainState, batches: Sequence[Batch]) -> TrainState:
    for batch in batches:
        state = step(strategy, state, batch).state
    return state


def _elsewhere(bench: Bench) -> Iterator[Strategy]:
    """The strategy on half of its devices, where it has an even number; only traced."""
    mesh = bench.config.mesh
    sizes = dict(mesh.shape)
    axis = max(sizes, key=lambda name: (sizes[name] % 2 == 0, sizes[name]))
    if sizes[axis] % 2:
        return
    sizes[axis] //= 2
    devices = list(mesh.devices.flat)[: math.prod(sizes.values())]
    smaller = dataclasses.replace(bench.config, mesh=build_mesh(sizes, devices))
    yield dataclasses.replace(bench, config=smaller).strategy
