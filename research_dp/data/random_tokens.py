"""Tokens drawn at random: shapes for plans, and batches that cost nothing, for rates."""

from __future__ import annotations

from collections.abc import Iterator

import gin
import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.data.rng import Purpose, generator
from research_dp.data.shuffle import stream_positions
from research_dp.types import Arrays, DataSet, EvalOrder, TrainOrder


@gin.register(module="data")
@checked
def random_tokens(
    *,
    length: Count = gin.REQUIRED,
    vocab_size: Count = gin.REQUIRED,
    eval_examples: Count = 64,
) -> DataSet:
    """Sequences of tokens, each as likely as any other. Nothing is read or downloaded.

    No model can learn them: the loss ends at log(vocab_size). An example is a function of the
    run's seed and its place in the stream, on any number of devices.

    Args:
        length: Tokens an example.
        vocab_size: Tokens are drawn from so many.
        eval_examples: Examples to evaluate on, the same in every run.

    Raises:
        UsageError: A count makes no sense.
    """

    def drawn(seed: int, purpose: Purpose, places: np.ndarray) -> np.ndarray:
        rows = (generator(seed, purpose, int(p)).integers(vocab_size, size=length) for p in places)
        return np.stack(list(rows)).astype(np.int32)

    def train(order: TrainOrder) -> Iterator[Arrays]:
        for step in range(order.first_step, order.num_steps):
            places = stream_positions(step, order.batch_size, order.rows)
            yield {"tokens": drawn(order.seed, Purpose.TOKENS, places)}

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        for index in range(-(-eval_examples // order.batch_size)):
            places = stream_positions(index, order.batch_size, order.rows)
            mask = (places < eval_examples).astype(np.float32)
            yield {"tokens": drawn(0, Purpose.EVAL_TOKENS, places), "mask": mask}

    return DataSet(
        name="random_tokens",
        example={"tokens": jax.ShapeDtypeStruct((length,), np.int32)},
        info={"vocab_size": vocab_size},
        prepare=lambda: None,
        train=train,
        evaluate=evaluate,
    )
