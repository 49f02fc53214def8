"""The digits as data sets of gin files, in either file format."""

import contextlib
import itertools

import gin
import pytest

from research_dp.config import load as gin_config
from research_dp.data import builders
from research_dp.data.offline import Digits
from research_dp.errors import UsageError


def load(file, folder, *bindings, options=()):
    """The data set of a gin file, in a folder."""
    where = f"tfds_data.data_dir = '{folder}'"
    gin_config.load([f"gin/data/{file}.gin", *options], [where, *bindings])
    return gin.query_parameter("train.data").configurable.wrapper()


@contextlib.contextmanager
def few_digits(count):
    """Has the digits prepared with this many examples of each split, which takes no time."""
    whole = Digits._generate_examples
    with pytest.MonkeyPatch.context() as patched:
        few = lambda self, test: itertools.islice(whole(self, test), count)  # noqa: E731
        patched.setattr(Digits, "_generate_examples", few)
        yield


def refused(message):
    """Expects a mistake told in its first line; then come what to do, and what gin adds."""
    return pytest.raises(UsageError, match=rf"^.*{message}.*(\n  \S.*)*$")


@pytest.fixture(scope="module")
def tfrecord_dir(data_dir):
    folder = data_dir / "tfrecord"
    builders.download_and_prepare(builders.find_builder("digits", str(folder), "tfrecord"))
    return folder
