"""What data is to a run: its dtypes, which data it is, and what a model can take of it."""

import dataclasses
import errno
import json
import os
import types
import weakref
from pathlib import Path

import gin
import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import features as tfds_features

from research_dp.config import load
from research_dp.data import builders
from research_dp.data.indexed import Examples
from research_dp.data.preprocess import byte_text, image_classification
from research_dp.data.tf_data import tf_data
from research_dp.data.tfds import identity_of, random_access, tfds_data
from research_dp.distributed import mesh
from research_dp.models import mlp
from research_dp.runs import resume, workdir
from research_dp.runs.manifest import Manifest, Progress, origin
from research_dp.runs.resume import changes
from research_dp.training import input_checks
from research_dp.types import (
    Bound,
    DataIdentity,
    DataSet,
    EvalOrder,
    SplitIdentity,
    TrainableModel,
    TrainOrder,
)
from tests.support import tiny_run
from tests.support.data import refused
from tests.support.recipes import recipe
from tests.support.run_folders import rewrite
from tests.support.runs import DIGITS

TRAIN, TEST, CLASSES = 40, 12, 10
WRONG = 37  # the label of example 7 of each split
READERS = {"array_record": random_access, "tfrecord": tf_data}


class FloatDots(tfds.core.GeneratorBasedBuilder):
    """Images of float32 in [0, 1], and labels that are no classes."""

    VERSION = tfds.core.Version("2.1.0")
    seed, train = 0, TRAIN

    def _info(self):
        image = tfds_features.Image(shape=(4, 4, 1), dtype=np.float32)
        label = tfds_features.Scalar(np.int64)
        features = tfds_features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(self.train), "test": self._generate_examples(TEST)}

    def _generate_examples(self, count):
        draws = np.random.default_rng(self.seed)
        for index in range(count):
            image = draws.random((4, 4, 1), np.float32)
            yield index, {"image": image, "label": WRONG if index == 7 else index % CLASSES}


def dots(folder, file_format="array_record", eval_split="test"):
    return tfds_data(
        name="float_dots",
        eval_split=eval_split,
        preprocess=image_classification,
        reader=READERS[file_format],
        file_format=file_format,
        data_dir=str(folder),
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The data set in both formats, by the readers that read them."""
    return {name: dots(tmp_path_factory.mktemp(name), name) for name in READERS}


@pytest.fixture(params=READERS)
def data(request, both):
    return both[request.param]


def raw_images(count):
    draws = np.random.default_rng(0)
    return np.stack([draws.random((4, 4, 1), np.float32) for _ in range(count)])


EVALUATION = EvalOrder(batch_size=8, rows=np.arange(8))


def order_of(steps=5, batch_size=16, rows=None):
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    return TrainOrder(seed=3, batch_size=batch_size, rows=rows, first_step=0, num_steps=steps)


# ---- Dtypes ----


def features_of(image, label=np.int64, shape=(8, 8, 3), label_shape=()):
    return {
        "image": tfds_features.Tensor(shape=shape, dtype=image),
        "label": tfds_features.Tensor(shape=label_shape, dtype=label),
    }


LEVELS = {"uint8": 255, "uint16": 65535, "float16": 1, "float32": 1, "float64": 1, "bool": 1}


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("dtype", LEVELS)
def test_the_same_pixels_are_the_same_input_in_any_dtype(dtype, size):
    draws = np.random.default_rng(1)
    pixels = draws.random((8, 8, 3)) if dtype != "bool" else draws.random((8, 8, 3)) < 0.5
    scaled = pixels * LEVELS[dtype]
    stored = (np.round(scaled) if LEVELS[dtype] > 1 else scaled).astype(dtype)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    made = image_classification(features_of(np.dtype(dtype)), size=size, mean=mean, std=std)
    one = made.example({"image": stored, "label": 3}, None)
    batch = made.batch({k: x[None] for k, x in one.items()}, np.arange(1), 1, None)
    assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int32
    if size is None:
        wanted = (pixels - np.array(mean)) / np.array(std)
    else:
        single = image_classification(features_of(np.float32), size=size, mean=mean, std=std)
        one = single.example({"image": pixels.astype(np.float32), "label": 3}, None)
        assert len(np.unique(one["image"])) > 10, "resizing cut floats"
        wanted = single.batch({"image": one["image"][None], "label": None}, None, 1, None)["image"]
        wanted = wanted[0]
    levels = {"uint8": 255, "float16": 2048}.get(dtype, 65535)
    np.testing.assert_allclose(batch["image"][0], wanted, atol=4 / levels + 1e-5)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (features_of(np.int32), r"'image' as .* uint8, uint16 or floats; here it is .* of int32"),
        (features_of(np.uint8, shape=(8, 8)), r"'image' as .*; here it is \(8, 8\) of uint8"),
        (features_of(np.uint8, np.float32), r"'label' as one integer; here .* of float32"),
        (features_of(np.uint8, label_shape=(10,)), r"'label' as one integer; here it is \(10,\)"),
        (
            {**features_of(np.uint8), "label": tfds_features.FeaturesDict({"a": np.int64})},
            r"'label' as one integer; here it is features \['a'\]",
        ),
    ],
)
def test_what_would_be_cut_is_refused_before_anything_is_read(features, message):
    with refused(message) as raised:
        image_classification(features)
    assert raised.value.binding == "tfds_data.preprocess"


@pytest.mark.parametrize(
    "feature",
    [
        tfds_features.Tensor(shape=(None,), dtype=np.int64),
        tfds_features.Tensor(shape=(None,), dtype=np.float32),
        tfds_features.Sequence(tfds_features.Text()),
    ],
)
def test_what_is_neither_text_nor_bytes_is_refused(feature):
    with refused("byte_text needs feature 'text' as one text or a vector of uint8; here it is"):
        byte_text({"text": feature})
    assert byte_text({"text": tfds_features.Text()}).info


def test_floats_reach_the_model_as_they_are(data):
    (batch, *_) = data.evaluate(EvalOrder(batch_size=TEST, rows=np.arange(TEST)))
    np.testing.assert_allclose(batch["image"], (raw_images(TEST) - 0.5) / 0.5, atol=1e-6)


@pytest.mark.parametrize("installed", [True, False])
def test_images_that_only_opencv_decodes_are_refused_without_it(monkeypatch, installed):
    monkeypatch.setattr(builders.importlib.util, "find_spec", lambda name: installed or None)
    image = tfds_features.Image(shape=(4, 4, 1), dtype=np.uint16)
    builder = types.SimpleNamespace(name="x", info=types.SimpleNamespace(features={"scan": image}))
    if installed:
        builders.check_decodable(builder)
    else:
        with refused(r"uint16 \(scan\).*pip install opencv-python-headless; or"):
            builders.check_decodable(builder)


class Huge(list):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_a_label_beyond_int32_is_named_and_not_wrapped():
    made = image_classification(features_of(np.uint8))
    image = np.zeros((8, 8, 3), np.uint8)
    source = Huge({"image": image, "label": np.int64(i * 2**31 + 3)} for i in range(3))
    examples = Examples(source, made, 0, "mine train")
    assert examples(np.array([0]))["label"].tolist() == [3]
    with refused("^example 2 of mine train: its label is 4294967299, beyond int32"):
        examples(np.array([0, 2]))


def test_a_split_that_its_builder_leaves_empty_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(FloatDots, "train", 0)
    with refused('cannot be prepared: .*split "train": No examples were yielded.*each split'):
        dots(tmp_path).prepare()


# ---- Identity ----


def test_identity_is_that_of_the_content_whatever_the_file_format(both, tmp_path, monkeypatch):
    found = both["array_record"].identity()
    assert (found.name, found.version) == ("float_dots", "2.1.0")
    counts = {split: one.examples for split, one in found.splits.items()}
    assert counts == {"train": TRAIN, "test": TEST}
    assert both["tfrecord"].identity() == found
    assert DataIdentity.from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found
    monkeypatch.setattr(FloatDots, "train", TRAIN - 1)
    fewer = dots(tmp_path / "fewer").identity()
    assert found.difference(fewer) == ("the number of examples in train", "40", "39")
    monkeypatch.undo()
    monkeypatch.setattr(FloatDots, "seed", 1)
    what, *digests = dots(tmp_path / "seed").identity().difference(found)
    assert "digest" in what and len(set(digests)) == 2


@pytest.mark.parametrize("several", [False, True])
def test_identity_of_images_is_that_of_their_files(tmp_path, several):
    """Decoders of JPEG differ by a level here and there."""

    class Photos(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            image = tfds_features.Image(shape=(16, 16, 3), encoding_format="jpeg")
            inner = {"photo": tfds_features.Sequence(image) if several else image}
            features = tfds_features.FeaturesDict({"view": inner, "label": np.int64})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            draws = np.random.default_rng(0)
            for index in range(3):
                photo = draws.integers(0, 255, (16, 16, 3), np.uint8)
                yield index, {"view": {"photo": [photo] * 2 if several else photo}, "label": 0}

    found = []
    for file_format in READERS:
        builder = Photos(data_dir=str(tmp_path / file_format), file_format=file_format)
        builder.download_and_prepare()
        found.append(identity_of(builder, ["train"]))
    assert found[0] == found[1]


def identity(examples=40, digest="ab", version="1.0.0", split="test"):
    splits = {split: SplitIdentity(examples=examples, digest=digest)}
    return DataIdentity(name="mine", version=version, splits=splits)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (identity(examples=1200), "the number of examples in test was 40, and is 1,200 now"),
        (identity(digest="cd"), "the digest of examples of test was ab, and is cd now"),
        (identity(version="1.0.1"), "the data set was mine 1.0.0, and is mine 1.0.1 now"),
        (identity(), None),
        (identity(examples=7, split="test[:7]"), None),  # its binding is reported as changed
        (None, None),
    ],
)
def test_a_run_is_continued_on_its_own_data_alone(other, message):
    if message is None:
        resume.check_same_data(other, identity(), "the run")
    else:
        with refused(f"^the run was trained on other data: {message}.\n.*or use another --workdir"):
            resume.check_same_data(other, identity(), "the run")


def test_processes_with_different_data_are_refused(monkeypatch):
    data = types.SimpleNamespace(name="mine", identity=identity)
    others = []
    monkeypatch.setattr(input_checks, "texts_of_all", lambda own: [own, *others])
    assert input_checks.shared_identity(data) == identity()
    others.append(json.dumps(dataclasses.asdict(identity(examples=39))))
    with refused("the number of examples in test is 40 in process 0 and 39 in process 1"):
        input_checks.shared_identity(data)


def test_a_manifest_keeps_the_identity_and_one_without_it_is_read(tmp_path):
    progress = Progress(batch_size=8, seed=0, order="x", window={}, data=identity())
    manifest = Manifest(step=1, progress=progress, leaves={}, origin=origin())
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(manifest.as_json()))
    assert Manifest.read(file).progress == progress
    written = manifest.as_json()["content"]
    assert set(written["progress"]) == {"batch_size", "seed", "order", "window"}
    later = ("data", "records")
    rewrite(file, lambda content: {k: x for k, x in content.items() if k not in later})
    assert Manifest.read(file).progress == dataclasses.replace(progress, data=None)


# ---- Bounds ----


def test_a_label_that_is_no_class_is_named_in_both_splits(data):
    model = mlp(widths=(4,), num_classes=CLASSES)
    told = f"has label {WRONG}, and train.model takes 0 to 9 \\(num_classes = 10\\)"
    with refused(f"^example 7 of float_dots test {told}"):
        list(input_checks.checked_batches(data, EVALUATION, model))
    with refused(rf"^example 7 of \S+( \(float_dots)? train\)? {told}"):
        list(input_checks.checked_batches(data, order_of(), model))
    wide = mlp(widths=(4,), num_classes=WRONG + 1)
    assert len(list(input_checks.checked_batches(data, order_of(), wide))) == 5


def test_a_process_that_has_no_such_row_goes_on(data):
    batches = list(data.train(order_of()))
    rows = [np.flatnonzero(batch["label"] == WRONG) for batch in batches]
    clean = [r for r in range(16) if not any(r in found for found in rows)]
    model = mlp(widths=(4,), num_classes=CLASSES)
    assert len(list(input_checks.checked_batches(data, order_of(rows=clean), model))) == 5


def stream(*batches, name="mine"):
    return DataSet(
        name=name,
        example={},
        info={},
        prepare=lambda: None,
        train=lambda order: iter(batches),
        evaluate=lambda order: iter(batches),
    )


def _init(key, batch):
    return {}, {}


def _loss(*args, **more):
    raise AssertionError("these tests read inputs alone")


def test_any_integers_that_a_model_bounds_are_checked_and_padding_is_not():
    model = TrainableModel(
        lambda key, batch: ({}, {}),
        lambda *args, **more: None,
        {"words": 5},
        bounds={"tokens": "words"},
    )
    tokens = np.array([[0, 4, 1], [2, 9, 0]], np.int32)
    rows = np.array([4, 6])
    order = EvalOrder(batch_size=8, rows=rows)
    good, masked = {"tokens": tokens % 5}, {"tokens": tokens, "mask": np.array([1.0, 0.0])}
    assert len(list(input_checks.checked_batches(stream(good, masked), order, model))) == 2
    with refused("^example 14 of the evaluation stream of mine has tokens 9, .* 0 to 4"):
        list(input_checks.checked_batches(stream(good, {"tokens": tokens}), order, model))
    with refused("has tokens -1"):
        list(input_checks.checked_batches(stream({"tokens": -tokens % 3 - 1}), order, model))
    # A mask of the model's own.
    own = {"tokens": tokens, "mask": np.array([[1, 1, 1], [1, 0, 1]])}
    with refused("^example 6 of the evaluation stream of mine has tokens 9"):
        list(input_checks.checked_batches(stream(own), order, model))
    with refused("^the evaluation data of mine has no 'tokens'; .* Its arrays: words."):
        list(input_checks.checked_batches(stream({"words": tokens}), order, model))


def spoilt(order, batches, place=2):
    """Batches of the tiny run, of which one has a NaN in its third row."""
    for number, batch in enumerate(batches(order)):
        if number == place:
            batch = {**batch, "x": batch["x"].copy()}
            batch["x"][2, 5] = np.nan
        yield batch


def test_an_evaluation_input_that_is_not_finite_is_named(tmp_path):
    def evaluate(order):
        yield from spoilt(order, tiny_run.DATA.evaluate, place=0)

    data = dataclasses.replace(tiny_run.DATA, evaluate=evaluate)
    status, message = tiny_run.outcome(tmp_path, data=data)
    assert status == 2
    assert "example 2 of the evaluation stream of tiny has x nan" in message
    assert "what this run saved is untouched" in message


def test_padding_that_is_not_finite_is_no_mistake():
    rows = {"x": np.array([[1.0], [np.inf]], np.float32), "mask": np.array([1.0, 0.0])}
    model = TrainableModel(_init, _loss)
    where = stream(rows), model, EvalOrder(batch_size=2, rows=np.arange(2)), 0
    assert input_checks.nonfinite_example(*where, rows) is None
    own = {**rows, "mask": np.array([[1.0], [0.0]])}
    found = input_checks.nonfinite_example(*where, own)
    assert found == "example 1 of the evaluation stream of mine has x inf"


def test_a_metric_of_no_example_is_no_mistake_and_reads_nothing_again(tmp_path):
    """Inputs may be NaN where the model masks them, and a metric may count nothing."""
    reads = []

    def evaluate(order):
        reads.append(order)
        for batch in tiny_run.DATA.evaluate(order):
            yield {**batch, "missing": np.full(len(order.rows), np.nan, np.float32)}

    def loss(*args, **options):
        out = tiny_run._loss(*args, **options)
        return out._replace(sums={"rare": (0 * out.total, 0 * out.weight)})

    model = dataclasses.replace(tiny_run.MODEL, loss=loss)
    data = dataclasses.replace(tiny_run.DATA, evaluate=evaluate)
    built_anew = {"model": model, "strategy": recipe("single")}
    tiny_run.train(tmp_path, num_steps=2, data=data, **built_anew)
    assert len(reads) == 1


def train_skipping(folder, data, num_steps):
    """The tiny run, built for `skip`; its own programs are those of `stop`."""
    skips = {"strategy": recipe("single"), "on_nonfinite": "skip"}
    tiny_run.train(folder, num_steps=num_steps, data=data, **skips)


def test_naming_an_example_leaves_the_stream_alone(tmp_path):
    """A data set by hand may read from one place of one file, wherever an order begins."""
    place, seen = [0], []

    def train(order):
        place[0] = order.first_step
        while place[0] < order.num_steps:
            seen.append(place[0])
            batch = tiny_run._batch(place[0], order.batch_size)
            batch[1, 1] = np.nan if place[0] == 2 else 0
            place[0] += 1
            yield {"x": batch[order.rows]}

    train_skipping(tmp_path, dataclasses.replace(tiny_run.DATA, train=train), num_steps=8)
    assert seen == list(range(8))


def test_batches_of_steps_that_are_done_are_not_kept(tmp_path):
    alive, counts = weakref.WeakValueDictionary(), []

    def train(order):
        for step, batch in enumerate(tiny_run.DATA.train(order)):
            alive[step] = batch["x"]
            counts.append(len(alive))
            yield batch

    data = dataclasses.replace(tiny_run.DATA, train=train)
    assert tiny_run.outcome(tmp_path, num_steps=100, data=data, checkpoint_every=None) == (0, "")
    assert max(counts) < 50, "more than are prefetched and in flight"


@pytest.mark.parametrize("skips", [False, True])
def test_a_training_input_that_is_not_finite_is_named(tmp_path, capsys, skips):
    def train(order):
        """Step 3 has it, however the stream is entered."""
        yield from spoilt(order, tiny_run.DATA.train, place=2 - order.first_step)

    data = dataclasses.replace(tiny_run.DATA, train=train)
    if not skips:
        status, said = tiny_run.outcome(tmp_path, data=data)
        assert status == 1
    else:
        train_skipping(tmp_path, data, num_steps=4)
        said = capsys.readouterr().out
    assert "step 3: all 2 parameters" in said or "step 3: the gradient of all 2 par" in said
    assert "is not finite: example 10 of the training stream of tiny has x nan" in said


def test_data_that_ends_early_is_refused():
    model = TrainableModel(_init, _loss)
    with refused("mine has no training batch 3: its training data is empty, or"):
        list(input_checks.checked_batches(stream({}, {}), order_of(steps=5), model))
    with refused("mine has no evaluation batch 1"):
        list(input_checks.checked_batches(stream(), EVALUATION, model))


# ---- What changed ----


def config(*bindings):
    gin.clear_config()
    gin.parse_config([*bindings])
    return gin.config_str()


def test_every_binding_that_changed_is_told_with_both_values_and_its_place():
    load.register_all()
    values = [f"a rather long value {i}" for i in range(9)]
    same = ["mlp.widths = (%A, 4)", f"tfds_data.eval_split = {values!r}"]
    old = config(*same, "A = 3", "optax.adam.b1 = 0.5", f"tfds_data.name = {values!r}")
    values[4] = "# = @"
    new = config(*same, "A = 4", "x/optax.adam.b1 = 0.5", f"tfds_data.name = {values!r}")
    before = {"config": old, "devices": 4, "processes": 1, "versions": {"jax": "1"}}
    now = {"config": new, "devices": 8, "processes": 1, "versions": {"jax": "2"}}
    found = changes(before, now, {"A": Bound("4", "mine.gin:3", False)})
    assert [line for line in found if not line.startswith("tfds_data")] == [
        "A: 3 -> 4  (mine.gin:3)",
        "x/adam.b1: unbound -> 0.5",
        "devices: 4 -> 8",
        "version of jax: 1 -> 2",
        "adam.b1: 0.5 -> unbound",
    ]
    (name,) = (line for line in found if line.startswith("tfds_data"))
    old_value, new_value = name.removeprefix("tfds_data.name: ").split(" -> ")
    assert "value 4'" in old_value and "'# = @'" in new_value and "value 8']" in new_value
    assert changes(now, now) == []


# ---- The folder ----


def as_one_of_two(monkeypatch, process, name):
    """Has this process take itself for one of two; returns what it tells the other of problems."""
    problems = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(workdir, "_SECONDS_TO_APPEAR", 0.0)
    monkeypatch.setattr(workdir, "texts_of_all", lambda own: [f"{name} first", own])
    monkeypatch.setattr(workdir, "first_problem", lambda own: problems.append(own) or own)
    return problems


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_is_not_shared_is_refused(tmp_path, monkeypatch, process, shared):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    name = ".run.abc"
    problems = as_one_of_two(monkeypatch, process, name)
    monkeypatch.setattr(workdir.secrets, "token_hex", lambda size: "abc")
    if process == 1:
        (tmp_path / "0" / name).touch()
    folder = tmp_path / ("0" if shared else str(process))
    if shared or process == 0:
        workdir.check_shared(folder)
    else:
        with refused(r"^--workdir=.*1 on .* is not the folder that process 0 has on first"):
            workdir.check_shared(folder)
    assert (tmp_path / "0" / name).exists() == (process == 1), "process 0 removes its file"
    assert len(problems) == 2, "each process takes part in each collective"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE])
def test_a_folder_that_one_process_cannot_read_is_refused_in_all(tmp_path, monkeypatch, number):
    problems = as_one_of_two(monkeypatch, 1, ".run.abc")

    def fail(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "stat", fail)
    with refused(f"--workdir={tmp_path} on .* cannot be read: {os.strerror(number)}"):
        workdir.check_shared(tmp_path)
    assert len(problems) == 2, "each process takes part in each collective"


def test_processes_agree_on_numbers_of_any_size(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gathered = mesh.multihost_utils
    monkeypatch.setattr(gathered, "process_allgather", lambda x: np.stack([x, 0 * x]))
    for number in (-1, 0, 7, 9_999_999_999, 10**18 - 1):
        assert mesh.of_the_first(number) == number


def test_a_batch_beyond_the_memory_is_refused_before_it_is_made(command, tmp_path):
    """The machine would end the process without a word."""
    done = command(DIGITS, "--gin.train.batch_size=1000000000000", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 2, done.stderr
    said = "error: train.batch_size = 1,000,000,000,000: two batches take "
    assert said in done.stderr and "this machine has " in done.stderr
    assert not (tmp_path / "run").exists()
