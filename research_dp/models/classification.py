"""Image classification: softmax cross-entropy and accuracy, weighted by a mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from research_dp.types import Batch, Functions, LossOutput, TrainableModel

PyTree = Any


def image_classifier(functions: Functions, num_classes: int) -> TrainableModel:
    """A model that classifies `image` (B, H, W, C) float32 into `label` (B,) int32.

    `functions` compute logits (B, num_classes). Batches may have `mask` (B,), the weight of each
    example: 0 for padding.
    """

    def init(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        return functions.init(key, batch["image"])

    def loss(
        params: PyTree,
        model_state: PyTree,
        batch: Batch,
        keys: jax.Array | None,
        *,
        train: bool,
        batch_axes: tuple[str, ...] = (),
    ) -> LossOutput:
        logits, model_state = functions.apply(
            params, model_state, batch["image"], train=train, keys=keys, batch_axes=batch_axes
        )
        logits, label = logits.astype(jnp.float32), batch["label"]
        mask = batch.get("mask", jnp.ones(label.shape, jnp.float32))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        correct = (jnp.argmax(logits, axis=-1) == label).astype(jnp.float32)
        count = jnp.sum(mask)
        sums = {"accuracy": (jnp.sum(correct * mask), count)}
        return LossOutput(jnp.sum(losses * mask), count, model_state, sums)

    facts, bounds = {"num_classes": num_classes}, {"label": "num_classes"}
    return TrainableModel(init, loss, facts, bounds=bounds)
