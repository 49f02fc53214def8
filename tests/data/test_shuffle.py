"""The order of examples, and what both readers make of it."""

import collections
import concurrent.futures
import itertools
import pickle
import time

import numpy as np
import pytest

from research_dp.data import builders, shuffle
from research_dp.data.indexed import Examples
from research_dp.data.preprocess import Preprocess
from research_dp.data.shuffle import Purpose, generator
from research_dp.types import EvalOrder, TrainOrder
from tests.support.data import load
from tests.support.data import tfrecord_dir as tfrecord_dir
from tests.support.programs import output

TF_DATA = "gin/options/tf_data.gin"
BATCH = 500


def batches(data, rows=range(BATCH), first=0, last=4, size=BATCH, seed=3):
    rows = np.asarray(rows)
    return list(
        data.train(
            TrainOrder(seed=seed, batch_size=size, rows=rows, first_step=first, num_steps=last)
        )
    )


@pytest.fixture(scope="module")
def raw(data_dir):
    """The digits as TFDS reads them, one at a time, by split."""
    builder = builders.find_builder("digits", str(data_dir))
    builders.download_and_prepare(builder)
    return {split: list(builder.as_data_source(split)) for split in ("train", "test")}


# ---- Random streams and the order ----


def test_random_streams_are_shared_by_nothing():
    keys = [(seed, p, index) for seed in (0, 1, 2**32) for p in Purpose for index in (0, 1, 2**32)]
    first = {key: generator(*key).integers(2**63) for key in keys}
    assert len(set(first.values())) == len(keys)
    assert first == {key: generator(*key).integers(2**63) for key in keys}


def order_by_hand(size, seed, epoch):
    """The Feistel permutation again, a place at a time, on Python's own integers."""

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    keys = generator(seed, Purpose.ORDER, epoch).integers(2**64, size=6, dtype=np.uint64).tolist()
    half = next(bits for bits in itertools.count(1) if 4**bits >= size)
    indices = []
    for place in range(size):
        while True:
            left, right = divmod(place, 2**half)
            for key in keys:
                left, right = right, left ^ mix(right ^ key) % 2**half
            place = left * 2**half + right
            if place < size:
                break
        indices.append(place)
    return indices


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1437])
def test_each_epoch_is_the_permutation_made_by_hand(size):
    stream = shuffle.example_indices(np.arange(3 * size), size, seed=5).tolist()
    epochs = [stream[:size], stream[size : 2 * size], stream[2 * size :]]
    assert epochs == [order_by_hand(size, 5, epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 10:
        assert epochs[0] != epochs[1] != order_by_hand(size, 6, 1)


def test_order_of_a_seed_never_changes():
    """Or a continued run would see some examples twice and others never."""
    stream = shuffle.example_indices(np.arange(14), 7, seed=0)
    assert stream.tolist() == [4, 1, 6, 3, 0, 5, 2, 5, 3, 0, 2, 6, 1, 4]


def test_large_epochs_are_ordered_a_place_at_a_time_the_same(monkeypatch):
    places = np.arange(990, 1010)
    small = shuffle.example_indices(places, 1000, seed=1)
    monkeypatch.setattr(shuffle, "_SMALL", 0)
    np.testing.assert_array_equal(shuffle.example_indices(places, 1000, seed=1), small)


def test_order_is_well_mixed():
    places = shuffle.permute(np.arange(10_000), 10_000, seed=0, epoch=0)
    assert abs(np.corrcoef(np.arange(10_000), places)[0, 1]) < 0.03


# ---- Reading by index ----


def normal(image):
    return (image / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def batch_by_hand(raw, step, seed=3, augment=False):
    """Images and labels of a training batch, picked and augmented one by one."""
    size = len(raw)
    draws = generator(seed, Purpose.BATCH, step)
    offsets, mirrored = draws.integers(0, 3, (BATCH, 2)), draws.random(BATCH) < 0.5
    images, labels = [], []
    for row in range(BATCH):
        epoch, place = divmod(step * BATCH + row, size)
        example = raw[order_of(size, seed, epoch)[place]]
        image = example["image"]
        if augment:
            (y, x), padded = offsets[row], np.pad(image, ((1, 1), (1, 1), (0, 0)))
            image = padded[y : y + 8, x : x + 8]
            image = image[:, ::-1] if mirrored[row] else image
        images.append(normal(image))
        labels.append(example["label"])
    return np.stack(images), np.array(labels)


orders = {}


def order_of(*key):
    if key not in orders:
        orders[key] = order_by_hand(*key)
    return orders[key]


@pytest.mark.parametrize(
    "option",
    [
        "random_access.threads = 8",
        "random_access.workers = 2",
        "random_access.cache_bytes = 0",
        "random_access.cache_bytes = 1000",
        "image_classification.flip = True",
    ],
)
def test_batches_are_those_made_by_hand_for_any_share_and_first_step(raw, data_dir, option):
    augment = "flip" in option
    data = load("digits", data_dir, f"image_classification.pad_crop = {augment:d}", option)
    assert data.info == {"num_classes": 10}
    expected = [batch_by_hand(raw["train"], step, augment=augment) for step in range(4)]
    # All of it, across the end of an epoch; then from later steps on, dealt to three processes.
    shares = [(range(BATCH), 0), *((range(i, BATCH, 3), 1 + i) for i in range(3))]
    for rows, first in shares[: 1 if "workers" in option else 4]:  # workers take long to start
        got = batches(data, rows, first)
        assert len(got) == 4 - first
        for batch, (images, labels) in zip(got, expected[first:], strict=True):
            assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int32
            np.testing.assert_allclose(batch["image"], images[rows], atol=1e-6)
            np.testing.assert_array_equal(batch["label"], labels[rows])


def test_random_examples_are_drawn_by_place_and_not_kept(raw, data_dir):
    bindings = ["image_classification.random_resized_crop = True", "image_classification.size = 8"]
    data = load("digits", data_dir, *bindings, "image_classification.pad_crop = 0")
    size = len(raw["train"])
    first, second = (b["image"] for b in batches(data, range(size), last=2, size=size))
    (share,) = batches(data, range(1, size, 2), 1, 2, size)
    np.testing.assert_array_equal(share["image"], second[1::2])
    first, second = (
        image[np.argsort(order_of(size, 3, epoch))] for epoch, image in enumerate((first, second))
    )
    same = (first == second).all(axis=(1, 2, 3))
    assert same.mean() < 0.1, "an example is cropped the same way in each epoch"


class Numbers:
    """A source of random-access examples."""

    def __len__(self):
        return 64

    def __getitems__(self, indices):
        return [{"x": np.full(100, index + 1)} for index in indices]


def as_they_are(example, rng):
    return example


def test_threads_that_share_a_cache_read_what_one_would(monkeypatch):
    examples = Examples(Numbers(), Preprocess({}, {}, as_they_are, None), cache_bytes=2**20)
    empty = np.empty

    def slow_empty(*args, **kwargs):
        time.sleep(0.02)  # so that all threads come while the first makes room
        return empty(*args, **kwargs)

    monkeypatch.setattr(np, "empty", slow_empty)
    shares = np.arange(64).reshape(8, 8)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(examples, shares))
    for share, part in [*zip(shares, parts, strict=True), (np.arange(64), examples(np.arange(64)))]:
        np.testing.assert_array_equal(part["x"], np.repeat(share[:, None] + 1, 100, axis=1))


def test_a_reader_can_be_sent_to_another_process_without_its_cache():
    examples = Examples(Numbers(), Preprocess({}, {}, as_they_are, None), cache_bytes=2**20)
    expected = examples(np.arange(64))["x"]
    sent = pickle.dumps(examples)
    assert len(sent) < expected.nbytes / 2
    np.testing.assert_array_equal(pickle.loads(sent)(np.arange(64))["x"], expected)


@pytest.mark.parametrize("reader", ["random_access", "tf_data"])
def test_evaluation_gives_every_example_once_and_in_order(raw, data_dir, tfrecord_dir, reader):
    if reader == "tf_data":
        data = load("digits", tfrecord_dir, options=[TF_DATA])
    else:
        data = load("digits", data_dir)
    for rows in (np.arange(0, 64, 2), np.arange(1, 64, 2)):
        got = list(data.evaluate(EvalOrder(batch_size=64, rows=rows)))
        assert len(got) == 6
        for index, batch in enumerate(got):
            places = index * 64 + rows
            real = places < 360
            np.testing.assert_array_equal(batch["mask"], real.astype(np.float32))
            expected = [normal(raw["test"][place]["image"]) for place in places[real]]
            np.testing.assert_allclose(batch["image"][real], expected, atol=1e-6)


# ---- Reading by tf.data ----


def test_tf_data_gives_each_example_once_an_epoch_shuffled(raw, tfrecord_dir):
    plain = "image_classification.pad_crop = 0"
    data = load("digits", tfrecord_dir, plain, options=[TF_DATA])
    stored = [np.round(normal(x["image"]), 3).tobytes() for x in raw["train"]]

    def epochs(seed):
        images = np.concatenate([b["image"] for b in batches(data, range(479), 0, 6, 479, seed)])
        keys = [np.round(image, 3).tobytes() for image in images]
        return keys[:1437], keys[1437:]

    (one, two), other = epochs(3), epochs(4)[0]
    for epoch in (one, two, other):
        assert collections.Counter(epoch) == collections.Counter(stored)
    assert len({tuple(keys) for keys in (stored, one, two, other)}) == 4


def test_tf_data_continues_and_is_shared_out(tfrecord_dir):
    data = load("digits", tfrecord_dir, "image_classification.flip = True", options=[TF_DATA])
    whole = batches(data)
    for first, rows in ((1 + i, range(i, BATCH, 3)) for i in range(3)):
        parts = batches(data, rows, first=first)
        for batch, part in zip(whole[first:], parts, strict=True):
            np.testing.assert_array_equal(part["image"], batch["image"][rows])
            np.testing.assert_array_equal(part["label"], batch["label"][rows])


def test_what_is_read_without_tensorflow_does_not_import_it(raw, data_dir):
    program = (
        "import sys\n"
        "from research_dp.data import builders, tfds\n"
        f"builder = builders.find_builder('digits', {str(data_dir)!r})\n"
        "assert tfds.identity_of(builder, ['train']).splits['train'].examples == 1437\n"
        "print('tensorflow' in sys.modules)"
    )
    assert output(program).strip() == "False"
