"""Random tokens: shapes for plans, and batches without input cost for throughput measurements."""

from __future__ import annotations

from collections.abc import Iterator

import gin
import jax
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import Count
from research_dp.data.shuffle import Purpose, generator, stream_positions
from research_dp.types import Arrays, DataSet, EvalOrder, TrainOrder


@gin.register(module="data")
@checked
def random_tokens(
    *, length: Count = gin.REQUIRED, vocab_size: Count = gin.REQUIRED, eval_examples: Count = 64
) -> DataSet:
    """Sequences of uniformly distributed tokens; the loss cannot fall below log(vocab_size).

    An example is a function of the run's seed and its position in the stream.

    Args:
        length: Tokens an example.
        vocab_size: Number of different tokens.
        eval_examples: Examples to evaluate on, the same in every run.
    """

    def draw(seed: int, purpose: Purpose, positions: np.ndarray) -> np.ndarray:
        rngs = (generator(seed, purpose, int(position)) for position in positions)
        rows = [rng.integers(vocab_size, size=length) for rng in rngs]
        return np.stack(rows).astype(np.int32)

    def train(order: TrainOrder) -> Iterator[Arrays]:
        for step in range(order.first_step, order.num_steps):
            positions = stream_positions(step, order.batch_size, order.rows)
            yield {"tokens": draw(order.seed, Purpose.TOKENS, positions)}

    def evaluate(order: EvalOrder) -> Iterator[Arrays]:
        for index in range(-(-eval_examples // order.batch_size)):
            positions = stream_positions(index, order.batch_size, order.rows)
            mask = (positions < eval_examples).astype(np.float32)
            yield {"tokens": draw(0, Purpose.EVAL_TOKENS, positions), "mask": mask}

    return DataSet(
        name="random_tokens",
        example={"tokens": jax.ShapeDtypeStruct((length,), np.int32)},
        info={"vocab_size": vocab_size},
        prepare=lambda: None,
        train=train,
        evaluate=evaluate,
    )
