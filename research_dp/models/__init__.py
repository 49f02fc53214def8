"""Models, one file each, in Flax Linen and NNX; `TrainableModel` is all that the rest sees.

Importing this package registers all of them with gin.
"""

from research_dp.models.convnet import convnet
from research_dp.models.dropout import dropout
from research_dp.models.mlp import mlp
from research_dp.models.resnet import resnet
from research_dp.models.transformer import transformer

__all__ = ["convnet", "dropout", "mlp", "resnet", "transformer"]
