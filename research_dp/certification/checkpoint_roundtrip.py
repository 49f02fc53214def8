"""Whether a state keeps its bits when it is saved, restored, and moved to other devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from research_dp.certification.harness import Batch, Bench, run_step, to_devices, to_host
from research_dp.certification.tolerances import first_difference
from research_dp.distributed.mesh import build_mesh, sizes_text
from research_dp.strategies import Strategy, TrainState
from research_dp.training.checkpoint import Checkpoints
from research_dp.training.manifest import Progress


def round_trips(
    bench: Bench, state: TrainState, batches: Sequence[Batch]
) -> Iterator[tuple[str, str | None]]:
    """Saves a state of the strategy, and restores it in several ways.

    Yields each way, and the path of the first array whose bits it changes; None: it changes none.
    """
    strategy, oracle = bench.strategy, bench.oracle
    with _saved(bench, strategy, state) as restore:
        restored = restore(strategy)
        yield "saved and restored", first_difference(restored, state)
        ends = (_train(strategy, start, batches) for start in (state, restored))
        yield f"{len(batches)} steps after it", first_difference(*ends)
        for other in (oracle, *_on_half_of_the_devices(bench)):
            sizes = sizes_text(other.mesh.shape)
            yield f"moved to {other.name} on {sizes}", first_difference(restore(other), state)
    with _saved(bench, oracle, state) as restore:
        yield f"moved back from {oracle.name}", first_difference(restore(strategy), state)


@contextlib.contextmanager
def _saved(
    bench: Bench, strategy: Strategy, state: TrainState
) -> Iterator[Callable[[Strategy], TrainState]]:
    """Saves a state; the folder is opened anew for each use, as by a run that continues."""
    spec = bench.spec
    progress = Progress(batch_size=spec.batch_size, seed=spec.seed, order="", window={})
    with tempfile.TemporaryDirectory() as folder:

        def restore(other: Strategy) -> TrainState:
            with contextlib.closing(Checkpoints(Path(folder))) as checkpoints:
                restored = checkpoints.restore(other.abstract_state)
                assert restored is not None  # it was saved just now
                return to_host(restored.state)

        with contextlib.closing(Checkpoints(Path(folder))) as checkpoints:
            checkpoints.save(to_devices(strategy, state), int(state.step), progress, origin={})
        yield restore


def _train(strategy: Strategy, state: TrainState, batches: Sequence[Batch]) -> TrainState:
    for batch in batches:
        state = run_step(strategy, state, batch).state
    return state


def _on_half_of_the_devices(bench: Bench) -> Iterator[Strategy]:
    """The strategy on half of an axis, if one has an even size; it is traced, not compiled."""
    mesh = bench.config.mesh
    sizes = dict(mesh.shape)
    axis = max(sizes, key=lambda name: (sizes[name] % 2 == 0, sizes[name]))
    if sizes[axis] % 2:
        return
    sizes[axis] //= 2
    devices = list(mesh.devices.flat)[: math.prod(sizes.values())]
    smaller = dataclasses.replace(bench.config, mesh=build_mesh(sizes, devices))
    yield dataclasses.replace(bench, config=smaller).strategy
