"""The order of examples, exact evaluation, and every shipped data set on generated data."""

import functools

import gin
import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.testing import mocking

from research_dp.config import gin_config
from research_dp.data import order
from research_dp.data.generators import Purpose, generator
from research_dp.distributed.data_set import EvalOrder, TrainOrder
from research_dp.distributed.errors import UsageError


def load(file, *bindings, options=()):
    gin_config.load([f"gin/data/{file}.gin", *options], list(bindings))
    return gin.query_parameter("train.data").configurable.wrapper()


def train_order(rows, first=0, last=4, size=8, seed=0):
    return TrainOrder(
        seed=seed, batch_size=size, rows=np.asarray(rows), first_step=first, num_steps=last
    )


def test_random_streams_are_shared_by_nothing():
    keys = [(seed, p, index) for seed in (0, 1, 2**32) for p in Purpose for index in (0, 1, 2**32)]
    first = {key: generator(*key).integers(2**63) for key in keys}
    assert len(set(first.values())) == len(keys)
    assert first == {key: generator(*key).integers(2**63) for key in keys}


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000, 1437])
def test_each_epoch_is_a_permutation(size):
    seen = [order.example_indices(np.arange(size) + size * e, size, seed=5) for e in range(3)]
    for indices in seen:
        assert sorted(indices) == list(range(size))
    if size > 10:
        assert not np.array_equal(seen[0], seen[1])
        other = order.example_indices(np.arange(size), size, seed=6)
        assert not np.array_equal(seen[0], other)


def test_order_is_well_mixed():
    places = order.permute(np.arange(10_000), 10_000, seed=0, epoch=0)
    assert abs(np.corrcoef(np.arange(10_000), places)[0, 1]) < 0.03


def test_order_does_not_depend_on_who_reads_it():
    rows = np.arange(32)
    everything = order.stream_positions(3, 32, rows)
    parts = [order.stream_positions(3, 32, rows[i::4]) for i in range(4)]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), everything)


@pytest.fixture(scope="module")
def digits_dir(data_dir):
    return f"tfds_data.data_dir = '{data_dir}'"


def test_digits_train_in_the_same_order_from_any_step_and_on_any_share(digits_dir):
    data = load("digits", digits_dir)
    assert data.info["num_classes"] == 10
    whole = list(data.train(train_order(range(8))))
    assert len(whole) == 4
    assert whole[0]["image"].shape == (8, 8, 8, 1) and whole[0]["image"].dtype == np.float32
    for batch, part in zip(whole[2:], data.train(train_order([5, 2], first=2)), strict=True):
        np.testing.assert_array_equal(part["image"], batch["image"][[5, 2]])
        np.testing.assert_array_equal(part["label"], batch["label"][[5, 2]])


@pytest.mark.parametrize("option", ["random_access.workers = 2", "random_access.cache_bytes = 10"])
def test_worker_processes_and_a_small_cache_read_the_same(digits_dir, option):
    plain = list(load("digits", digits_dir).train(train_order(range(8))))
    gin_config.reset()
    other = load("digits", digits_dir, option)
    for a, b in zip(plain, other.train(train_order(range(8))), strict=True):
        np.testing.assert_array_equal(a["image"], b["image"])


def test_evaluation_counts_every_example_once(digits_dir, data_dir):
    data = load("digits", digits_dir)
    rows = np.arange(64)
    shares = [rows[:32], rows[32:]]
    labels, count = [], 0.0
    for share in shares:
        for batch in data.evaluate(EvalOrder(batch_size=64, rows=share)):
            count += batch["mask"].sum()
            labels += list(batch["label"][batch["mask"] == 1])
    assert count == 360 == len(labels)
    source = tfds.builder("digits", data_dir=str(data_dir)).as_data_source("test")
    assert sorted(labels) == sorted(int(x["label"]) for x in source)


def test_pystdlib_text_is_split_by_file(data_dir):
    from research_dp.data.pystdlib_text import is_held_out

    data = load("pystdlib_text", f"tfds_data.data_dir = '{data_dir}'")
    builder = tfds.builder("pystdlib_text", data_dir=str(data_dir), file_format="array_record")
    for split in ("train", "test"):
        paths = {x["path"] for x in builder.as_data_source(split)}
        assert paths and all(is_held_out(_text(p)) == (split == "test") for p in paths)
    batch = next(data.train(train_order(range(8))))
    assert batch["tokens"].shape == (8, 1024)
    assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
    assert 20_000_000 > builder.info.splits["train"].num_examples * 1024 > 1_000_000


def _text(value):
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", ["mnist", "cifar10", "imagenet", "lm1b", "c4"])
def test_data_sets_that_need_a_download_on_generated_data(name, monkeypatch):
    # The mock's batch read is set on an instance, where Python passes no self.
    batch_read = functools.partial(mocking._getitems, None)
    monkeypatch.setattr(mocking, "_getitems", batch_read)
    with tfds.testing.mock_data(num_examples=20):
        data = load(name, "random_access.workers = 0")
        batches = list(data.train(train_order(range(8), last=3)))
    assert len(batches) == 3
    for key, spec in data.example.items():
        assert batches[0][key].shape == (8, *spec.shape)
        assert batches[0][key].dtype == spec.dtype


def test_tf_data_reads_tfrecord_in_a_repeatable_order(data_dir):
    bindings = [f"tfds_data.data_dir = '{data_dir}/tfrecord'"]
    data = load("digits", *bindings, options=["gin/options/tf_data.gin"])
    whole = list(data.train(train_order(range(8))))
    for batch, part in zip(whole[2:], data.train(train_order([5, 2], first=2)), strict=True):
        np.testing.assert_array_equal(part["image"], batch["image"][[5, 2]])
    order_ = EvalOrder(batch_size=64, rows=np.arange(64))
    assert sum(batch["mask"].sum() for batch in data.evaluate(order_)) == 360


def test_tfrecord_is_refused_by_random_access_with_what_to_do(data_dir):
    with pytest.raises(UsageError, match=r"no random access. Use --gin_file=gin/options/tf_data"):
        load("digits", f"tfds_data.data_dir = '{data_dir}/tfrecord'")


@pytest.mark.parametrize("value", [-1, 1.5, True, "abc", (2,)])
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("digits", "random_access.threads"),
        ("digits", "random_access.workers"),
        ("digits", "random_access.prefetch"),
        ("digits", "random_access.cache_bytes"),
        ("digits", "image_classification.size"),
        ("digits", "image_classification.pad_crop"),
        ("pystdlib_text", "byte_text.length"),
        ("digits", "tf_data.shuffle_buffer"),
        ("digits", "tf_data.prefetch"),
    ],
)
def test_a_count_that_is_none_is_refused_by_name(tmp_path, file, name, value):
    where = f"tfds_data.data_dir = '{tmp_path}'"
    options = ["gin/options/tf_data.gin"] if name.startswith("tf_data") else []
    with pytest.raises(UsageError, match=f"^{name} = .*whole number of at least") as raised:
        load(file, where, f"{name} = {value!r}", options=options)
    assert raised.value.binding == name


def test_counts_of_things_that_must_be_there_are_not_zero(tmp_path):
    where = f"tfds_data.data_dir = '{tmp_path}'"
    for name in ("random_access.threads", "random_access.prefetch", "image_classification.size"):
        gin_config.reset()
        with pytest.raises(UsageError, match=f"^{name} = 0: .* at least 1"):
            load("digits", where, f"{name} = 0")
    gin_config.reset()
    load("digits", where, "random_access.workers = 0", "random_access.cache_bytes = 0")


def test_unknown_data_set_and_split_and_feature(data_dir):
    where = f"tfds_data.data_dir = '{data_dir}'"
    for binding, message in [
        ("tfds_data.name = 'mnits'", "Did you mean .*mnist"),
        ("tfds_data.train_split = 'training'", "digits has splits"),
        ("tfds_data.preprocess = @byte_text", "byte_text needs feature 'text'"),
        ("tfds_data.download = False", "tfds_data.download is False"),
    ]:
        gin_config.reset()
        folder = where.replace("'", f"'{data_dir}/none/", 1) if "download" in binding else where
        with pytest.raises(UsageError, match=message):
            load("digits", folder, binding)


def test_augmentation_is_drawn_by_place_not_by_share(digits_dir):
    data = load("digits", digits_dir, "image_classification.flip = True")
    whole = next(data.train(train_order(range(8))))
    part = next(data.train(train_order([6, 1])))
    np.testing.assert_array_equal(part["image"], whole["image"][[6, 1]])
