"""A reader for data sets that were prepared as TFRecord, with tf.data.

TFRecord has no random access: each process reads the full stream and selects its rows, and a
resumed run reads the stream again up to its first step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import gin
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.data.builders import check_format, check_tensorflow, read_error
from research_dp.data.preprocess import Preprocess, preprocess_example, stack
from research_dp.data.shuffle import Purpose, generator
from research_dp.types import Arrays, EvalOrder, Splits, TrainOrder


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
    """Reads a stream with tf.data; its order is a function of the seed.

    Args:
        builder: A TFDS builder whose files are, or will be, TFRecord.
        train_split: Split to train on.
        eval_split: Split to evaluate on.
        preprocess: From features to model inputs.
        shuffle_buffer: Size of the shuffle buffer, in examples; files are shuffled as well.
        prefetch: Batches of raw examples that are prefetched.

    Raises:
        UsageError: The data set is in another format, or TensorFlow is not installed.
    """
    check_tensorflow()
    advice = "Leave out options/tf_data.gin, or bind another tfds_data.data_dir."
    check_format(builder, "tfrecord", advice)

    def train_stream(seed: int, first: int, **options: Any) -> Any:
        """The shuffled, repeated examples from position `first` on."""
        raw = _stream(builder, train_split, seed, **options)
        raw = raw.shuffle(shuffle_buffer, seed=_shuffle_seed(seed, Purpose.BUFFER))
        return raw.repeat().skip(first)

    def locate(order: TrainOrder | EvalOrder, position: int) -> str:
        if isinstance(order, EvalOrder):
            return f"example {position} of {builder.name} {eval_split}"
        # Reads the stream again, with the file name of each example: slow, but needs no memory.
        stream = train_stream(order.seed, position, add_tfds_id=True)
        (example,) = stream.take(1).as_numpy_iterator()
        file, _, index = example["tfds_id"].decode().rpartition("__")
        return f"example {index} of {file} ({builder.name} {train_split})"

    def train(order: TrainOrder) -> Iterator[Arrays]:
        first = order.first_step * order.batch_size
        raw = train_stream(order.seed, first).prefetch(prefetch * order.batch_size)
        examples = enumerate(_read(builder, raw, train_split), first)
        is_local = np.isin(np.arange(order.batch_size), order.rows)
        for step in range(order.first_step, order.num_steps):
            local: dict[int, Arrays] = {}
            for row in range(order.batch_size):
                position, example = next(examples)
                if is_local[row]:
                    random = preprocess.example_is_random
                    rng = generator(order.seed, Purpose.EXAMPLE, position) if random else None
                    where = locate, order, position
                    local[row] = preprocess_example(preprocess, example, rng, *where)
            batch = stack((local[row] for row in order.rows), len(order.rows))
            rng = generator(order.seed, Purpose.BATCH, step)
            yield preprocess.batch(batch, order.rows, order.batch_size, rng)

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        examples = enumerate(_read(builder, _stream(builder, eval_split, None), eval_split))
        while batch := [
            preprocess_example(preprocess, example, None, locate, order, position)
            for position, example in itertools.islice(examples, order.batch_size)
        ]:  # padded with its first example
            rows = [batch[row] if row < len(batch) else batch[0] for row in order.rows]
            inputs = preprocess.batch(stack(rows, len(rows)), order.rows, order.batch_size, None)
            yield {**inputs, "mask": (order.rows < len(batch)).astype(np.float32)}

    order = f"tf.data, shuffle_buffer {shuffle_buffer}"
    return Splits(train, evaluate, order=order, rereads=True, locate=locate)


def _stream(builder: Any, split: str, seed: int | None, **options: Any) -> Any:
    """A tf.data pipeline of a split's examples; with a seed its files are shuffled."""
    import tensorflow_datasets as tfds  # late: it imports TensorFlow

    config = tfds.ReadConfig(
        shuffle_seed=None if seed is None else _shuffle_seed(seed, Purpose.FILES),
        interleave_cycle_length=1,
        enable_ordering_guard=False,  # data sets whose files are ordered are shuffled on purpose
        **options,
    )
    return builder.as_dataset(split=split, shuffle_files=seed is not None, read_config=config)


def _read(builder: Any, examples: Any, split: str) -> Iterator[Any]:
    import tensorflow as tf

    try:
        yield from examples.as_numpy_iterator()
    except tf.errors.OpError as error:
        name = f"an example of {builder.name} {split}"
        raise read_error(error, builder.data_path, name) from error


def _shuffle_seed(seed: int, purpose: Purpose) -> int:
    """An integer seed for tf.data."""
    return int(generator(seed, purpose).integers(2**31))
