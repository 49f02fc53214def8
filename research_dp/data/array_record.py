"""The default reader: random access to ArrayRecord files by index, without iterator state.

Threads or worker processes of Grain read a batch at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gin
import grain
import numpy as np
from absl import flags

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.data import builders
from research_dp.data.preprocess import Preprocess, Rng, preprocess_example, stack
from research_dp.data.shuffle import Purpose, example_indices, generator, stream_positions
from research_dp.types import Arrays, EvalOrder, Splits, TrainOrder


@dataclasses.dataclass(eq=False)
class Examples:
    """Stacked, preprocessed examples of a split by index, cached if they need few bytes."""

    source: Sequence[Any]
    preprocess: Preprocess
    cache_bytes: int
    name: str = "the data"  # in messages, e.g. 'digits train'
    folder: str = "its folder"

    def __post_init__(self) -> None:
        if self.preprocess.example_is_random:
            self.cache_bytes = 0
        self._cache: dict[str, np.ndarray] | None = None
        self._is_cached = np.zeros(len(self), bool)
        self._lock = threading.Lock()  # guards the cache; reading needs no lock

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes get a copy with an empty cache.
        return _in_worker, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(self.source)

    def __call__(self, indices: np.ndarray, rngs: Sequence[Rng] | None = None) -> Arrays:
        """Examples at these indices, stacked; `rngs` has one generator for each, or is None."""
        if not self.cache_bytes:
            return self._read(indices, rngs)
        with self._lock:
            missing = np.unique(indices[~self._is_cached[indices]])
        fresh = self._read(missing, None) if len(missing) else {}
        with self._lock:
            size = sum(x[0].nbytes for x in fresh.values()) * len(self)
            if self._cache is None and size > self.cache_bytes:
                self.cache_bytes = 0
            elif self._cache is None:
                shapes = {name: (len(self), *x.shape[1:]) for name, x in fresh.items()}
                self._cache = {name: np.empty(shapes[name], x.dtype) for name, x in fresh.items()}
            if self._cache is not None:
                for name, values in fresh.items():
                    self._cache[name][missing] = values
                self._is_cached[missing] = True
                return {name: values[indices] for name, values in self._cache.items()}
        return self._read(indices, rngs)

    def _read(self, indices: np.ndarray, rngs: Sequence[Rng] | None) -> Arrays:
        integers = [int(i) for i in indices]
        try:
            raw = self.source.__getitems__(integers)  # type: ignore[attr-defined]
        except Exception as error:
            for index in integers:  # names the first example that cannot be read alone
                try:
                    self.source[index]
                except Exception as single_error:
                    name = self.locate(index)
                    raise builders.read_error(single_error, self.folder, name) from error
            raise builders.read_error(error, self.folder, self.name) from error
        examples = zip(integers, raw, rngs or [None] * len(raw), strict=True)
        prepare = functools.partial(preprocess_example, self.preprocess)
        return stack([prepare(x, rng, self.locate, index) for index, x, rng in examples])

    def locate(self, index: int) -> str:
        return f"example {index} of {self.name}"


def _in_worker(*fields: Any) -> Examples:
    """Unpickles `Examples` in a worker process, which ignores signals and exits with its parent.

    A signal to the process group, e.g. Ctrl-C, must not end workers before the run is saved.
    """
    parent = multiprocessing.parent_process()

    def exit_with_parent(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    if parent and threading.current_thread() is threading.main_thread():
        threading.Thread(target=exit_with_parent, args=(parent.sentinel,), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return Examples(*fields)


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
        threads: Threads that prefetch batches; 0: a batch is read when it is requested, which a
            run does while the devices compute.
        workers: Processes that prefetch training batches instead, for data that is slow to decode;
            0: none. Evaluation uses as many threads.
        prefetch: Batches that are prefetched.
        cache_bytes: A split is cached in memory if its preprocessed examples need at most this
            many bytes.

    Raises:
        UsageError: The data set is in a format without random access, or decoding its images needs
            OpenCV, which is not installed.
    """
    advice = "Add --gin_file=gin/options/tf_data.gin, or bind another tfds_data.data_dir."
    builders.check_format(builder, "array_record", advice)
    builders.check_decodable(builder)

    @functools.cache
    def examples_of(split: str) -> Examples:
        source, folder = builder.as_data_source(split=split), str(builder.data_path)
        return Examples(source, preprocess, cache_bytes, f"{builder.name} {split}", folder)

    def train(order: TrainOrder) -> Iterator[Arrays]:
        examples = examples_of(train_split)

        def load(step: int) -> Arrays:
            positions = stream_positions(step, order.batch_size, order.rows)
            indices = example_indices(positions, len(examples), order.seed)
            rngs = None
            if preprocess.example_is_random:
                rngs = [generator(order.seed, Purpose.EXAMPLE, int(p)) for p in positions]
            rng = generator(order.seed, Purpose.BATCH, step)
            return preprocess.batch(examples(indices, rngs), order.rows, order.batch_size, rng)

        return _prefetched(load, order.first_step, order.num_steps, threads, workers, prefetch)

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        examples = examples_of(eval_split)

        def load(index: int) -> Arrays:
            positions = stream_positions(index, order.batch_size, order.rows)
            real = positions < len(examples)
            batch = examples(np.where(real, positions, 0))
            batch = preprocess.batch(batch, order.rows, order.batch_size, None)
            return {**batch, "mask": real.astype(np.float32)}

        # Threads only: processes take seconds to start, and evaluations are short.
        num_batches = -(-len(examples) // order.batch_size)
        return _prefetched(load, 0, num_batches, max(threads, workers), 0, prefetch)

    def locate(order: TrainOrder | EvalOrder, position: int) -> str:
        if isinstance(order, EvalOrder):
            return examples_of(eval_split).locate(position)
        examples = examples_of(train_split)
        (index,) = example_indices(np.array([position]), len(examples), order.seed)
        return examples.locate(index)

    return Splits(train, evaluate, locate=locate)


def _prefetched(
    load: Callable[[int], Arrays], first: int, last: int, threads: int, workers: int, prefetch: int
) -> Iterator[Arrays]:
    """Yields load(first), ..., load(last - 1), prefetched by threads or processes."""
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    batches = grain.MapDataset.range(first, last).map(load).to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain passes absl's flags to workers; there are none
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(batches)
