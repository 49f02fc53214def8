"""The default reader of TFDS: random access to ArrayRecord files by index."""

from __future__ import annotations

import functools
from typing import Any

import gin

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, CountOrZero
from research_dp.data import builders
from research_dp.data.indexed import Examples, indexed_splits
from research_dp.data.preprocess import Preprocess
from research_dp.types import Splits


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
    advice = "Add --gin_file=options/tf_data.gin, or bind another tfds_data.data_dir."
    builders.check_format(builder, "array_record", advice)
    builders.check_decodable(builder)

    @functools.cache
    def examples_of(split: str) -> Examples:
        source, folder = builder.as_data_source(split=split), str(builder.data_path)
        return Examples(source, preprocess, cache_bytes, f"{builder.name} {split}", folder)

    return indexed_splits(
        functools.partial(examples_of, train_split),
        functools.partial(examples_of, eval_split),
        preprocess,
        threads=threads,
        workers=workers,
        prefetch=prefetch,
    )
