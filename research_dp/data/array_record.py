"""The default reader: any example at any time, so that order and place need no state.

Examples are read by index from ArrayRecord (`tfds.data_source`), a whole batch at a time, by
threads or worker processes of Grain.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import grain
import numpy as np
from absl import flags

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.data.preprocess import Preprocess
from research_dp.data.reader import Splits, check_decodable, check_format, treated, unreadable
from research_dp.data.rng import Purpose, generator
from research_dp.data.shuffle import example_indices, stream_positions
from research_dp.errors import UsageError
from research_dp.types import Arrays, EvalOrder, TrainOrder


class Examples:
    """Stacked, treated examples of a split by index; kept in memory if they are few.

    Args:
        source: Random-access source of raw examples.
        preprocess: Its `example` is applied.
        cache_bytes: Split is kept in memory if it needs at most so many bytes.
        name: What it is called in messages, e.g. 'digits train'.
        folder: Where the data lies, for messages.
    """

    def __init__(
        self,
        source: Sequence[Any],
        preprocess: Preprocess,
        cache_bytes: int,
        name: str = "the data",
        folder: str = "its folder",
    ):
        self._source, self._preprocess = source, preprocess
        self._name, self._folder = name, folder
        self._cache_bytes = 0 if preprocess.example_is_random else cache_bytes
        self._cache: dict[str, np.ndarray] | None = None
        self._known = np.zeros(len(source), bool)
        self._lock = threading.Lock()  # held to look into the cache or change it, not to read

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes get a copy, with a lock of its own and nothing in its cache.
        copied = (self._source, self._preprocess, self._cache_bytes, self._name, self._folder)
        return _in_worker, copied

    def __len__(self) -> int:
        return len(self._source)

    def __call__(
        self, indices: np.ndarray, rngs: Sequence[np.random.Generator | None] | None = None
    ) -> Mapping[str, np.ndarray]:
        """Examples at these indices, stacked; `rngs` has one generator an example, if any."""
        if not self._cache_bytes:
            return self._read(indices, rngs)
        with self._lock:
            missing = np.unique(indices[~self._known[indices]])
        fresh = self._read(missing, None) if len(missing) else {}
        with self._lock:
            if self._cache is None:
                self._cache = self._allocate(fresh)
            if self._cache is not None:
                for name, values in fresh.items():
                    self._cache[name][missing] = values
                self._known[missing] = True
                return {name: values[indices] for name, values in self._cache.items()}
        return self._read(indices, rngs)

    def _allocate(self, sample: Arrays) -> dict[str, np.ndarray] | None:
        """Room for the whole split, or None, now and later, if that is too much."""
        if sum(v[0].nbytes for v in sample.values()) * len(self) > self._cache_bytes:
            self._cache_bytes = 0
            return None
        return {name: np.empty((len(self), *v.shape[1:]), v.dtype) for name, v in sample.items()}

    def _read(
        self, indices: np.ndarray, rngs: Sequence[np.random.Generator | None] | None
    ) -> Mapping[str, np.ndarray]:
        wanted = [int(i) for i in indices]
        try:
            raw = self._source.__getitems__(wanted)  # type: ignore[attr-defined]
        except Exception as error:
            raise self._unreadable(wanted, error) from error
        each = [
            treated(self._preprocess, x, rng, functools.partial(self.located, index))
            for index, x, rng in zip(wanted, raw, rngs or [None] * len(raw), strict=True)
        ]
        return {name: np.stack([x[name] for x in each]) for name in each[0]}

    def located(self, index: int) -> str:
        """How messages name an example."""
        return f"example {index} of {self._name}"

    def located_in_stream(self, order: TrainOrder, place: int) -> str:
        """How messages name the example at a place of the training stream."""
        (index,) = example_indices(np.array([place]), len(self), order.seed)
        return self.located(index)

    def _unreadable(self, indices: Sequence[int], error: Exception) -> UsageError:
        """Says which of some examples cannot be read."""
        for index in indices:
            try:
                self._source[index]
            except Exception as its_own:
                return unreadable(its_own, self._folder, self.located(index))
        return unreadable(error, self._folder, self._name)


def _in_worker(
    source: Sequence[Any], preprocess: Preprocess, cache_bytes: int, name: str, folder: str
) -> Examples:
    """The copy of a worker process, which leaves signals to the run.

    A signal to the whole group, as a terminal's Ctrl-C is, must not end the workers before the run
    is saved. It ends with the run's process, however that ends: nobody would take its batches.
    """
    parent = multiprocessing.parent_process()
    if parent and threading.current_thread() is threading.main_thread():
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return Examples(source, preprocess, cache_bytes, name, folder)


def _end_with(sentinel: int) -> None:
    """Ends this process once another one has."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@gin.register(module="data")
@checked
def random_access(
    builder: Any,
    train_split: str,
    eval_split: str,
    preprocess: Preprocess,
    *,
    threads: CountOrZero = 0,
    workers: CountOrZero = 0,
    prefetch: Count = 4,
    cache_bytes: CountOrZero = 2**28,
) -> Splits:
    """Reads examples by index.

    Args:
        builder: A TFDS builder whose files are, or will be, ArrayRecord.
        train_split: Split to train on.
        eval_split: Split to evaluate on.
        preprocess: From features to model inputs.
        threads: Threads that read batches ahead; 0: batches are read when they are taken, which
            a run does while the devices work.
        workers: Processes that do it instead while training, for data that is slow to decode; 0:
            none. Evaluation has as many threads.
        prefetch: Batches read ahead.
        cache_bytes: A split whose treated examples need at most so many bytes is kept in memory.

    Raises:
        UsageError: The data set is in a format without random access, or its images need OpenCV to
            be decoded, or a count makes no sense.
    """
    check_format(
        builder,
        "array_record",
        "Add --gin_file=gin/options/tf_data.gin, or bind another tfds_data.data_dir.",
    )
    check_decodable(builder)

    @functools.cache
    def examples_of(split: str) -> Examples:
        where = str(builder.data_path)
        source = builder.as_data_source(split=split)
        return Examples(source, preprocess, cache_bytes, f"{builder.name} {split}", where)

    def train(order: TrainOrder) -> Iterator[Arrays]:
        examples = examples_of(train_split)

        def load(step: int) -> Arrays:
            places = stream_positions(step, order.batch_size, order.rows)
            indices = example_indices(places, len(examples), order.seed)
            rngs = None
            if preprocess.example_is_random:
                rngs = [generator(order.seed, Purpose.EXAMPLE, int(place)) for place in places]
            rng = generator(order.seed, Purpose.BATCH, step)
            return preprocess.batch(examples(indices, rngs), order.rows, order.batch_size, rng)

        return _ahead(load, order.first_step, order.num_steps, threads, workers, prefetch)

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        examples = examples_of(eval_split)

        def load(index: int) -> Arrays:
            places = stream_positions(index, order.batch_size, order.rows)
            real = places < len(examples)
            batch = examples(np.where(real, places, 0))
            batch = preprocess.batch(batch, order.rows, order.batch_size, None)
            return {**batch, "mask": real.astype(np.float32)}

        # Threads only: evaluations are short beside the seconds that processes take to start.
        batches = -(-len(examples) // order.batch_size)
        return _ahead(load, 0, batches, max(threads, workers), 0, prefetch)

    def locate(order: TrainOrder | EvalOrder, place: int) -> str:
        if isinstance(order, EvalOrder):
            return examples_of(eval_split).located(place)
        return examples_of(train_split).located_in_stream(order, place)

    return Splits(train, evaluate, locate=locate)


def _ahead(
    load: Callable[[int], Arrays], first: int, last: int, threads: int, workers: int, prefetch: int
) -> Iterator[Arrays]:
    """What `load` gives for first, ..., last - 1, read by threads or processes ahead of its use."""
    batches = grain.MapDataset.range(first, last).map(load)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    ahead = batches.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain hands absl's flags, of which we have none, on
        ahead = ahead.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(ahead)
