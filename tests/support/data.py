"""The digits as data sets of gin files, in either file format."""

import gin
import pytest

from research_dp.config import load as gin_config
from research_dp.data import builders


def load(file, folder, *bindings, options=()):
    """The data set of a gin file, in a folder."""
    where = f"tfds_data.data_dir = '{folder}'"
    gin_config.load([f"gin/data/{file}.gin", *options], [where, *bindings])
    return gin.query_parameter("train.data").configurable.wrapper()


@pytest.fixture(scope="module")
def tfrecord_dir(data_dir):
    folder = data_dir / "tfrecord"
    builders.download_and_prepare(builders.find_builder("digits", str(folder), "tfrecord"))
    return folder
