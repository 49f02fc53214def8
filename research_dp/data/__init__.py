"""Data sets, readers and preprocessing; the order of examples is a function of (seed, step).

Importing this package registers them with gin; TFDS is imported when a data set is constructed.
"""

from research_dp.data.own_data import from_arrays, from_source
from research_dp.data.preprocess import byte_text, image_classification
from research_dp.data.random_tokens import random_tokens
from research_dp.data.text import text_data
from research_dp.data.tf_data import tf_data
from research_dp.data.tfds import random_access, tfds_data
from research_dp.types import DataSet

__all__ = [
    "DataSet",
    "byte_text",
    "from_arrays",
    "from_source",
    "image_classification",
    "random_access",
    "random_tokens",
    "text_data",
    "tf_data",
    "tfds_data",
]
