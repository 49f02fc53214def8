"""Batches on the devices, evaluation, and means of metrics: for the trainer and for own loops.

Dispatch is asynchronous: few programs are in flight, and batches are placed behind them.
"""

from __future__ import annotations

import collections
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero, described
from research_dp.distributed.mesh import texts_of_all
from research_dp.errors import UsageError
from research_dp.strategies import NONFINITE, SKIPPED, PlacedBatch, Strategy, TrainState
from research_dp.strategies.batch_losses import check_batch_evaluation
from research_dp.training import throughput
from research_dp.training.input_checks import checked_batches, nonfinite_example
from research_dp.types import Arrays, DataSet, EvalOrder, TrainableModel, TrainOrder

_MIN_PREFETCH, _MAX_PREFETCH = 2, 32  # batches on the devices before the step that takes them
_MAX_PREFETCH_BYTES = 2**24
_SECONDS_OF_BURST = 0.012  # that idle devices wait for batches ahead


@checked
def train_batches(
    strategy: Strategy, data: DataSet, *, num_steps: Count, first_step: CountOrZero = 0
) -> Iterator[PlacedBatch]:
    """Shuffled training batches on the devices, as `train_step` takes them, in the order of a run.

    The order depends on the data set, and on the seed and batch size of the strategy's `TrainSpec`,
    not on the devices.

    Args:
        strategy: What `StrategyConfig.build` returned.
        data: Its `example` must be that of the `TrainSpec`.
        num_steps: Step at which training ends.
        first_step: Steps that were done before, by a run that is continued.

    Raises:
        UsageError: While iterating: `data` has other arrays than the `TrainSpec`, or a batch has an
            integer out of the model's bounds.
    """
    _check_example(strategy, data)
    data.prepare()
    yield from placed_train_batches(strategy, data, first_step, num_steps)


@checked
def eval_metrics(strategy: Strategy, state: TrainState, data: DataSet) -> dict[str, float]:
    """Mean metrics over the evaluation split, each example counted once.

    Raises:
        UsageError: `data` has other arrays than the strategy's `TrainSpec`; the model mixes
            examples (docs/batch_losses.md); a batch has an
            integer out of the model's bounds; or a metric is not finite, nor an example's input;
            or nothing has weight.
    """
    _check_example(strategy, data)
    data.prepare()
    return evaluation(strategy, data, state, InFlight(), judges=True)


@checked
def metric_means(steps: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics of a step, or of several, as means over examples; waits for the steps.

    Args:
        steps: What `train_step` or `eval_step` returned: arrays (2,) of sum and count by name.

    Raises:
        UsageError: It is something else.
    """
    several = [steps] if isinstance(steps, Mapping) else steps
    others = (NONFINITE, SKIPPED)  # no sums over examples
    named = [{k: x for k, x in step.items() if k not in others} for step in several]
    for name, x in (item for step in named for item in step.items()):
        if getattr(x, "shape", ())[-1:] != (2,) or not np.issubdtype(x.dtype, np.floating):
            raise UsageError(
                f"metric_means.steps: {name!r} is {described(x)}. Give what train_step or "
                "eval_step returned: float32 arrays (2,) of sum and count."
            )
    return throughput.means(throughput.accumulate({}, named))


def _check_example(strategy: Strategy, data: DataSet) -> None:
    """Refuses data of other arrays than those that the strategy was built for."""
    expected, given = strategy.spec.example, data.example
    for name in sorted({*expected, *given}):
        there, here = (
            f"{x[name].dtype}{list(x[name].shape)}" if name in x else "missing"
            for x in (expected, given)
        )
        if here != there:
            raise UsageError(
                f"data: {name!r} of an example of {data.name} is {here}, but {there} in the "
                "TrainSpec of the strategy. Build it with example=data.example."
            )


def placed_train_batches(
    strategy: Strategy,
    data: DataSet,
    first_step: int,
    num_steps: int,
    is_busy: Callable[[], bool] = lambda: False,
    on_batch: Callable[[int, Arrays], None] = lambda step, batch: None,
) -> Iterator[PlacedBatch]:
    """`train_batches` of prepared data; more are placed ahead while the devices are busy.

    `on_batch` is called with the number of the step that takes a batch, and its host arrays.
    """
    order = train_order(strategy, first_step, num_steps)

    def read() -> Iterator[Arrays]:
        for step, batch in enumerate(checked_batches(data, order, strategy.spec.model), first_step):
            on_batch(step + 1, batch)
            yield batch

    return prefetch(strategy.place_batch, read(), is_busy)


def train_order(strategy: Strategy, first_step: int, num_steps: int) -> TrainOrder:
    """The training batches of steps `first_step` to `num_steps` - 1, as this process reads them."""
    return TrainOrder(
        seed=strategy.spec.seed,
        batch_size=strategy.spec.batch_size,
        rows=strategy.train_rows,
        first_step=first_step,
        num_steps=num_steps,
    )


def evaluation(
    strategy: Strategy,
    data: DataSet,
    state: TrainState,
    in_flight: InFlight,
    on_batch: Callable[[], None] = lambda: None,
    *,
    judges: bool = False,
) -> dict[str, float]:
    """`eval_metrics` of prepared data; `on_batch` is called when a batch is dispatched.

    `judges`: whether a model that mixes examples is looked for, by the first batch.
    """
    sums: list[Mapping[str, jax.Array]] = []
    order = EvalOrder(batch_size=strategy.eval_batch_size, rows=strategy.eval_rows)
    source = checked_batches(data, order, strategy.spec.model)
    for batch in prefetch(strategy.place_eval_batch, source, in_flight.is_busy):
        if judges and not sums:
            check_batch_evaluation(strategy, state, batch)
        sums.append(strategy.eval_step(state, batch))
        on_batch()
        in_flight.add(sums[-1])
        in_flight.wait_for_room()
    totals = throughput.accumulate({}, sums)
    means = throughput.means(totals)
    if totals["loss"][1] == 0:
        raise UsageError(
            f"nothing in the evaluation data of {data.name} has weight, so its loss is 0 / 0.\n"
            "  Mend the weights, or give other data; what this run saved is untouched."
        )
    if not math.isfinite(means["loss"]):
        _name_example(data, strategy.spec.model, order, on_batch)
    return means


def _name_example(
    data: DataSet, model: TrainableModel, order: EvalOrder, on_batch: Callable[[], None]
) -> None:
    """UsageError in every process, if one read an example that is not finite; a collective."""
    found = None
    for number, batch in enumerate(data.evaluate(order)):
        on_batch()
        if found := nonfinite_example(data, model, order, number, batch):
            break
    if named := next(filter(None, texts_of_all(found or "")), None):
        problem = f"the evaluation's loss is not finite: {named}"
        raise UsageError(f"{problem}.\n  Mend the data set; what this run saved is untouched.")


class InFlight:
    """Dispatched programs, the oldest first, each with a callback for when it has finished."""

    def __init__(self) -> None:
        self._programs: collections.deque[tuple[Any, Callable[[], None]]] = collections.deque()
        self._newest: Any = None
        self._ended: tuple[Any, float] = (None, 0.0)  # results, and when they were there
        self._watched: queue.SimpleQueue[Any] | None = None

    def add(self, results: Any, on_done: Callable[[], None] = lambda: None) -> None:
        """Adds a program by its results; `on_done` is called once they are there."""
        self._programs.append((results, on_done))
        if self._watched is not None:
            self._newest = results
            self._watched.put(results)

    def idle_since(self) -> float | None:
        """When the newest program ended, as `time.perf_counter()`; None: it is still running.

        Only programs that are added after the first call are known to it.
        """
        if self._watched is None:
            self._watched = queue.SimpleQueue()
            threading.Thread(target=self._watch, args=(self._watched,), daemon=True).start()
        results, at = self._ended
        return at if results is self._newest else None

    def close(self) -> None:
        """Ends the thread that notes when programs end."""
        if self._watched is not None:
            self._watched.put(None)

    def _watch(self, watched: queue.SimpleQueue[Any]) -> None:
        """Notes when programs end: a thread, for this process may read a batch meanwhile."""
        while (results := watched.get()) is not None:
            with contextlib.suppress(Exception):  # `wait` meets it too, and raises it
                jax.block_until_ready(results)
            self._ended = results, time.perf_counter()

    def wait_for_room(self) -> None:
        """Waits until another one may be dispatched: two keep an accelerator busy.

        On a split CPU a strategy's programs begin one after another anyway (`strategies/engines`).
        """
        self.wait(1 if jax.default_backend() == "cpu" else 2)

    def wait(self, most: int = 1) -> None:
        """Waits for the oldest while `most` are in flight."""
        while len(self._programs) >= most:
            results, on_done = self._programs.popleft()
            jax.block_until_ready(results)
            on_done()

    def is_busy(self) -> bool:
        """Whether the newest program is still running."""
        newest = jax.tree.leaves([results for results, _ in list(self._programs)[-1:]])
        return bool(newest) and not newest[0].is_ready()


def prefetch(
    place: Callable[[Any], Any], batches: Iterable[Any], is_busy: Callable[[], bool]
) -> Iterator[Any]:
    """Places batches on the devices ahead of their use, in bursts: short, or while these compute.

    The first batch after a step finds cold caches and costs three times the next.
    """
    source, placed = iter(batches), collections.deque[Any]()
    while True:
        if len(placed) < _MIN_PREFETCH:
            end = time.perf_counter() + _SECONDS_OF_BURST
            for batch in source:
                placed.append(place(batch))
                nbytes = sum(x.nbytes for x in jax.tree.leaves(batch))
                most = min(_MAX_PREFETCH, _MAX_PREFETCH_BYTES // nbytes)
                may_go_on = len(placed) < most and (is_busy() or time.perf_counter() < end)
                if len(placed) >= _MIN_PREFETCH and not may_go_on:
                    break
        if not placed:
            return
        yield placed.popleft()
