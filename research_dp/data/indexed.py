"""Reads examples by index, without iterator state; the identity of a split by a few of them.

Threads or worker processes of Grain read a batch at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from research_dp.data import builders
from research_dp.data.preprocess import Preprocess, Rng, preprocess_example, stack
from research_dp.data.shuffle import Purpose, example_indices, generator, stream_positions
from research_dp.errors import RunFailure, UsageError
from research_dp.types import Arrays, EvalOrder, SplitIdentity, Splits, TrainOrder

NUM_HASHED = 8  # examples of a split, for its identity
_TURN = threading.Lock()  # one for all: two splits may have the same source


@dataclasses.dataclass(eq=False)
class Examples:
    """Stacked, preprocessed examples of a split by index, cached if they need few bytes."""

    source: Any  # by index: `len`, and `__getitem__` of one or `__getitems__` of several
    preprocess: Preprocess
    cache_bytes: int
    name: str = "the data"  # in messages, e.g. 'digits train'
    folder: str | None = None  # that TFDS prepared, for messages
    entries: np.ndarray | None = None  # of the source that are the split, (N,); None: all
    takes_turns: bool = False  # threads read one after the other: the source reuses memory

    def __post_init__(self) -> None:
        if self.preprocess.example_is_random:
            self.cache_bytes = 0
        self._cache: dict[str, np.ndarray] | None = None
        self._is_cached = np.zeros(len(self), bool)
        self._lock = threading.Lock()  # guards the cache
        self._reading = _TURN if self.takes_turns else contextlib.nullcontext()

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes get a copy with an empty cache.
        return _in_worker, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(self.source if self.entries is None else self.entries)

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
        examples = zip(indices, self._raw(indices), rngs or [None] * len(indices), strict=True)
        prepare = functools.partial(preprocess_example, self.preprocess)
        with self._reading:
            made = (prepare(x, rng, self.locate, index) for index, x, rng in examples)
            return stack(made, len(indices))

    def _raw(self, indices: np.ndarray) -> Iterator[Any]:
        """What the source has at these indices."""
        integers = [int(i) for i in (indices if self.entries is None else self.entries[indices])]
        failed = None
        if get_many := getattr(self.source, "__getitems__", None):
            try:
                raw = list(get_many(integers))
            except Exception as error:
                failed = error  # the first example that cannot be read alone is named
            else:
                if not _share_memory(raw):  # some collect what `__getitem__` returns
                    yield from raw
                    return
        for index, integer in zip(indices, integers, strict=True):
            try:
                one = self.source[integer]
            except Exception as error:
                name = self.locate(index)
                raise builders.read_error(error, self.folder, name) from (failed or error)
            yield one
        if failed:
            raise builders.read_error(failed, self.folder, self.name) from failed

    def locate(self, index: int) -> str:
        if self.entries is not None:
            index = self.entries[index]
        return f"example {index} of {self.name}"


def _share_memory(examples: Sequence[Any]) -> bool:
    """Whether two examples are the same object, or have arrays in the same memory."""
    seen: set[tuple[str, int]] = set()
    kept = []  # nothing is freed whose place another could take
    for one in examples:
        leaves = [x for x in jax.tree.leaves(one) if hasattr(x, "__array__")]
        arrays = [np.asarray(x) for x in leaves if not isinstance(x, jax.Array)]
        places = {("array", x.__array_interface__["data"][0]) for x in arrays if x.size}
        places.add(("example", id(one)))
        if places & seen:
            return True
        if not leaves and isinstance(one, dict | list | tuple):
            return False  # no arrays: lists of numbers are long
        seen |= places
        kept.append((one, arrays))
    return False


def _in_worker(*fields: Any) -> Examples:
    """Unpickles `Examples` in a worker process, which ignores signals and exits with its parent.

    A signal to the process group, e.g. Ctrl-C, must not end workers before the run is saved.
    """
    builders.quieten_tfds()
    parent = multiprocessing.parent_process()

    def exit_with_parent(sentinel: int) -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    if parent and threading.current_thread() is threading.main_thread():
        threading.Thread(target=exit_with_parent, args=(parent.sentinel,), daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return Examples(*fields)


def indexed_splits(
    train_examples: Callable[[], Examples],
    eval_examples: Callable[[], Examples],
    preprocess: Preprocess,
    *,
    threads: int = 0,
    workers: int = 0,
    prefetch: int = 4,
) -> Splits:
    """Reads two splits by index; the splits are made when they are first read.

    The order of examples is a function of the seed and the step. So a run resumes anywhere, on any
    number of processes. The other arguments are as in `random_access`.
    """

    def train(order: TrainOrder) -> Iterator[Arrays]:
        examples = train_examples()

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
        examples = eval_examples()

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
            return eval_examples().locate(position)
        examples = train_examples()
        (index,) = example_indices(np.array([position]), len(examples), order.seed)
        return examples.locate(index)

    return Splits(train, evaluate, locate=locate)


def _prefetched(
    load: Callable[[int], Arrays], first: int, last: int, threads: int, workers: int, prefetch: int
) -> Iterator[Arrays]:
    """Yields load(first), ..., load(last - 1), prefetched by threads or processes, if any."""
    if not threads and not workers:
        return map(load, range(first, last))
    import grain  # slow: it imports Orbax too

    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    batches = grain.MapDataset.range(first, last).map(load).to_iter_dataset(options)
    if workers:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                "workers: each worker process imports the program that starts it, and would start "
                'workers itself. Put what the program runs below `if __name__ == "__main__":`.'
            )
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain passes absl's flags to workers; there are none
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return _of_workers(iter(batches))
    return (batch for batch in batches)  # the order is the step's: no state of Grain's is saved


def _of_workers(batches: Iterator[Arrays]) -> Iterator[Arrays]:
    """Yields batches; RunFailure: one of the processes that read them has ended."""
    try:
        yield from batches
    except RuntimeError as error:
        ended = re.search(r"terminated unexpectedly with exit code (\S+)\.", str(error))
        if ended is None:
            raise
        raise RunFailure(
            f"a worker process that reads data ended (exit code {ended[1]}). -9: it was killed, "
            "often because memory was short; then bind fewer workers.\n  What was saved stays, and "
            "the same command continues from the last step that was."
        ) from error


def split_identity(size: int, examples: Iterable[Any]) -> SplitIdentity:
    """The identity of a split of this size, by some of its examples."""
    digest = hashlib.sha256()
    for example in examples:
        _update(digest, example)
    return SplitIdentity(examples=size, digest=digest.hexdigest()[:16])


def _update(digest: Any, value: Any) -> None:
    """Hashes a feature, or a dict of features, independently of the reader's Python types."""
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        value = value.ravel().tolist()
    if isinstance(value, Mapping):
        for name, inner in sorted(value.items()):
            digest.update(name.encode())
            _update(digest, inner)
    elif isinstance(value, bytes | str):
        text = value.encode() if isinstance(value, str) else value
        digest.update(len(text).to_bytes(8, "little") + text)
    elif isinstance(value, list | tuple):
        digest.update(len(value).to_bytes(8, "little"))
        for inner in value:
            _update(digest, inner)
    elif (array := np.asarray(value)).dtype != np.object_:  # not a nested data set
        # Readers differ in dtypes: all integers are hashed as int64, all floats as float64.
        wide = np.float64 if jnp.issubdtype(array.dtype, jnp.floating) else np.int64
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array, wide).tobytes())
