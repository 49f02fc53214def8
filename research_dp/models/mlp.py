"""A multi-layer perceptron on flattened images."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import jax

from research_dp.argument_checks import checked
from research_dp.argument_types import Count, DropoutRate, Dtype
from research_dp.models.classification import image_classifier
from research_dp.models.dropout import dropout
from research_dp.models.layers import Api, Layers, network_functions
from research_dp.types import TrainableModel


@gin.register(module="models")
@checked
def mlp(
    *,
    api: Api = "linen",
    widths: Sequence[Count] = (256, 256),
    num_classes: Count = gin.REQUIRED,
    dropout_rate: DropoutRate = 0.0,
    dtype: Dtype | None = None,
) -> TrainableModel:
    """A perceptron with ReLU layers.

    Args:
        api: 'linen' or 'nnx'; they have the same parameters.
        widths: Width of each hidden layer.
        num_classes: Number of classes.
        dropout_rate: Dropout after each hidden layer.
        dtype: Compute dtype; None: float32.
    """

    def network(layers: Layers, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(widths):
            x = jax.nn.relu(layers.dense(f"hidden_{i}", width)(x))
            x = dropout(x, dropout_rate, layers.keys, layer=i)
        return layers.dense("head", num_classes)(x)

    return image_classifier(network_functions(api, network, dtype), num_classes)
