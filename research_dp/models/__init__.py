"""Models in Flax Linen and NNX; `TrainableModel` is all that the rest sees.

Importing this package registers all of them with gin.
"""

from research_dp.models.image_classifiers import convnet, mlp, resnet
from research_dp.models.layers import dropout
from research_dp.models.transformer import transformer

__all__ = ["convnet", "dropout", "mlp", "resnet", "transformer"]
