"""The other reader: tf.data, for data sets that were prepared as TFRecord.

TFRecord has no random access, so each process reads the whole stream and keeps its rows, and a
continued run reads from the stream's beginning to the step where it stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import gin
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.data.preprocess import Preprocess
from research_dp.data.reader import Splits, check_format, treated, unreadable
from research_dp.data.rng import Purpose, generator
from research_dp.types import Arrays, EvalOrder, TrainOrder


@gin.register(module="data")
@checked
def tf_data(
    builder: Any,
    train_split: str,
    eval_split: str,
    preprocess: Preprocess,
    *,
    shuffle_buffer: Count = 10_000,
    prefetch: Count = 4,
) -> Splits:
    """Reads a stream by tf.data, in the same order each time it is read with the same seed.

    Args:
        builder: A TFDS builder whose files are, or will be, TFRecord.
        train_split: Split to train on.
        eval_split: Split to evaluate on.
        preprocess: From features to model inputs.
        shuffle_buffer: Examples that are shuffled at a time; files are shuffled as well.
        prefetch: Batches of raw examples read ahead.

    Raises:
        UsageError: The data set is in another format, or a count makes no sense.
    """
    check_format(
        builder,
        "tfrecord",
        "Leave out gin/options/tf_data.gin, or bind another tfds_data.data_dir.",
    )

    def train_stream(seed: int, first: int, **options: Any) -> Any:
        """The shuffled examples from a place on."""
        raw = _stream(builder, train_split, seed, **options)
        raw = raw.shuffle(shuffle_buffer, seed=_shuffle_seed(seed, Purpose.BUFFER))
        return raw.repeat().skip(first)

    def locate(order: TrainOrder | EvalOrder, place: int) -> str:
        if isinstance(order, EvalOrder):
            return f"example {place} of {builder.name} {eval_split}"
        # Read again with the name of each example's file, which takes time but no memory.
        (found,) = train_stream(order.seed, place, add_tfds_id=True).take(1).as_numpy_iterator()
        file, _, index = found["tfds_id"].decode().rpartition("__")
        return f"example {index} of {file} ({builder.name} {train_split})"

    def train(order: TrainOrder) -> Iterator[Arrays]:
        first = order.first_step * order.batch_size
        raw = train_stream(order.seed, first).prefetch(prefetch * order.batch_size)
        examples = enumerate(_read(builder, raw, train_split), first)
        wanted = set(order.rows.tolist())
        for step in range(order.first_step, order.num_steps):
            kept: dict[int, Arrays] = {}
            for row in range(order.batch_size):
                place, example = next(examples)
                if row in wanted:
                    random = preprocess.example_is_random
                    rng = generator(order.seed, Purpose.EXAMPLE, place) if random else None
                    where = functools.partial(locate, order, place)
                    kept[row] = treated(preprocess, example, rng, where)
            rng = generator(order.seed, Purpose.BATCH, step)
            rows = _stack([kept[row] for row in order.rows.tolist()])
            yield preprocess.batch(rows, order.rows, order.batch_size, rng)

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        batch: list[Arrays] = []
        raw = _stream(builder, eval_split, None)
        for place, example in enumerate(_read(builder, raw, eval_split)):
            where = functools.partial(locate, order, place)
            batch.append(treated(preprocess, example, None, where))
            if len(batch) == order.batch_size:
                yield _masked(batch, order, preprocess)
                batch = []
        if batch:
            yield _masked(batch, order, preprocess)

    order = f"tf.data, shuffle_buffer {shuffle_buffer}"
    return Splits(train, evaluate, order=order, rereads=True, locate=locate)


def _stream(builder: Any, split: str, seed: int | None, **options: Any) -> Any:
    """A tf.data pipeline of a split's examples; with a seed its files are shuffled."""
    import tensorflow_datasets as tfds  # imported late, and TensorFlow with it

    config = tfds.ReadConfig(
        shuffle_seed=None if seed is None else _shuffle_seed(seed, Purpose.FILES),
        interleave_cycle_length=1,
        # Shuffled on purpose, data sets too whose files are in order.
        enable_ordering_guard=False,
        **options,
    )
    return builder.as_dataset(split=split, shuffle_files=seed is not None, read_config=config)


def _read(builder: Any, examples: Any, split: str) -> Iterator[Any]:
    """The examples of a tf.data pipeline."""
    import tensorflow as tf

    try:
        yield from examples.as_numpy_iterator()
    except tf.errors.OpError as error:
        raise unreadable(
            error, builder.data_path, f"an example of {builder.name} {split}"
        ) from error


def _shuffle_seed(seed: int, purpose: Purpose) -> int:
    """A seed for tf.data, which takes integers and not generators."""
    return int(generator(seed, purpose).integers(2**31))


def _masked(batch: list[Arrays], order: EvalOrder, preprocess: Preprocess) -> Arrays:
    """This process's rows of a global batch, filled up with its first example."""
    rows = [batch[row] if row < len(batch) else batch[0] for row in order.rows]
    inputs = preprocess.batch(_stack(rows), order.rows, order.batch_size, None)
    return {**inputs, "mask": (order.rows < len(batch)).astype(np.float32)}


def _stack(rows: list[Arrays]) -> Arrays:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
