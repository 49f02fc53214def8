"""Data sets before they are there: preparing them, and what users get wrong."""

import os
import re
import runpy
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import gin
import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.testing import mocking

from research_dp.config import load as gin_config
from research_dp.data import builders
from research_dp.data.offline import Digits, is_held_out
from research_dp.data.preprocess import byte_text, stack
from research_dp.types import TrainOrder
from tests.support import data
from tests.support.data import load, refused
from tests.support.repository import ROOT

TF_DATA = "options/tf_data.gin"
FILES = sorted(p.stem for p in (ROOT / "gin/data").glob("*.gin") if "tfds_data" in p.read_text())
ORDER = TrainOrder(seed=0, batch_size=8, rows=np.arange(8), first_step=0, num_steps=3)


@pytest.fixture
def few_digits():
    with data.few_digits(16):
        yield


# ---- When it is prepared, and by whom ----


@pytest.mark.parametrize("file", FILES)
def test_a_data_set_can_be_asked_what_it_is_without_its_data(tmp_path, file):
    data = load(file, tmp_path)
    assert data.example and data.info
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [[], [TF_DATA]])
def test_it_is_prepared_when_it_is_first_read_or_asked_to_be(tmp_path, few_digits, options):
    data = load("digits", tmp_path / "read", options=options)
    assert len(list(data.train(ORDER))) == 3
    load("digits", tmp_path / "asked", options=options).prepare()
    assert (tmp_path / "asked" / "digits").exists()


def test_who_comes_second_waits_and_reads_what_the_first_prepared(
    tmp_path, few_digits, monkeypatch
):
    """Else it would prepare it too, and fail at the end because the folder is there."""
    begun, original = [], tfds.core.GeneratorBasedBuilder.download_and_prepare

    def slow(builder, **options):
        begun.append(builder)
        time.sleep(1.0)
        original(builder, **options)

    monkeypatch.setattr(Digits, "download_and_prepare", slow)
    two = [builders.find_builder("digits", str(tmp_path)) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda builder: builders.prepare(builder, download=True), two))
    assert len(begun) == 1
    assert all(builder.info.splits["train"].num_examples for builder in two)


def test_an_empty_data_folder_is_none(tmp_path, monkeypatch):
    """As of a variable of the shell that is not set: nothing is prepared in the current folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TFDS_DATA_DIR", "")
    for folder in (None, ""):
        root = builders.find_builder("digits", folder).data_dir_root
        assert root == tmp_path / "home" / "tensorflow_datasets"


def test_preparation_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Digits, "download_and_prepare", lambda self: os.stat("none"))
    with refused("digits cannot be prepared: .*No such file"):
        load("digits", tmp_path / "other").prepare()


def test_a_killed_preparation_is_followed_by_a_whole_one(tmp_path, few_digits):
    left = tmp_path / "digits" / "incomplete.A1B2C3_1.0.0"
    left.mkdir(parents=True)
    (left / "digits-train.array_record-00000-of-00001").write_text("half of it")
    (tmp_path / ".digits.lock").touch()
    data = load("digits", tmp_path)
    assert len(list(data.train(ORDER))) == 3
    assert left.exists()


def test_the_tool_prepares_and_reports(tmp_path, few_digits, monkeypatch, capsys):
    main = runpy.run_path("tools/prepare_data.py")["main"]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "digits", f"--data_dir={tmp_path}"])
    for _ in range(2):
        assert main() == 0
        assert "digits train: 16 examples" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "digitz", f"--data_dir={tmp_path}"])
    assert main() == 2
    assert "Did you mean digits" in capsys.readouterr().err


# ---- What cannot be prepared or read ----


@pytest.mark.parametrize("there", [[], ["another.zip"], ["ILSVRC2012_img_train.tar"]])
def test_archives_that_are_to_be_fetched_by_hand_are_named(tmp_path, there):
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    for name in there:
        (manual / name).touch()
    with refused(f"{manual}.*ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar.*register"):
        load("imagenet", tmp_path).prepare()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with refused("c4 cannot be prepared: .*pip install apache-beam"):
        load("c4", tmp_path).prepare()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no route to host\n" + "again " * 1000),
        tfds.download.DownloadError("404"),
        tfds.download.download_manager.NonMatchingChecksumError("another file"),
    ],
)
def test_a_failed_download_is_told_in_a_line(tmp_path, monkeypatch, error):
    def fail(self):
        raise error

    monkeypatch.setattr(Digits, "download_and_prepare", fail)
    with refused("cannot be prepared: .*where there is a network") as raised:
        load("digits", tmp_path).prepare()
    assert len(str(raised.value)) < 600


def test_a_fault_of_a_builder_is_not_taken_for_a_mistake(tmp_path, monkeypatch):
    def fail(self):
        raise AssertionError("a fault")

    monkeypatch.setattr(Digits, "download_and_prepare", fail)
    with pytest.raises(AssertionError, match="a fault"):
        load("digits", tmp_path).prepare()


@pytest.mark.parametrize(
    ("prepared", "options", "message", "binding"),
    [
        ("tfrecord", [], f"is tfrecord, .* Add --gin_file={TF_DATA}", "reader"),
        ("array_record", [TF_DATA], f"is array_record, .* Leave out {TF_DATA}", "reader"),
        (None, [TF_DATA, "array_record"], "would be prepared as array_record", "file_format"),
        (None, ["tfrecord"], "would be prepared as tfrecord", "file_format"),
        (None, ["tfrecords"], r"'tfrecords': use one of \['array_record', 't", "file_format"),
    ],
)
def test_a_format_that_the_reader_does_not_read(
    tmp_path, few_digits, prepared, options, message, binding
):
    if prepared:
        builder = builders.find_builder("digits", str(tmp_path), prepared)
        builders.download_and_prepare(builder)
    files = [o for o in options if o.endswith(".gin")]
    formats = [f"tfds_data.file_format = '{o}'" for o in options if o not in files]
    with refused(message) as raised:  # when it is made, not in the middle of a run
        load("digits", tmp_path, *formats, options=files)
    assert raised.value.binding == f"tfds_data.{binding}"


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("tfds_data.name = 'mnits'", "Did you mean .*mnist"),
        ("tfds_data.name = 'c4/xx'", "BuilderConfig xx not found"),
        ("tfds_data.name = 'mnist:9.9.9'", "only: 3"),
        ("tfds_data.name = 3", "tfds_data.name = 3"),
        ("tfds_data.preprocess = @byte_text", "byte_text needs feature 'text'"),
    ],
)
def test_what_is_wrong_without_the_data_is_told_without_it(tmp_path, binding, message):
    with refused(message):
        load("digits", tmp_path, binding)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("tfds_data.train_split = 'training'", r"digits has splits \['test', 'train'\]"),
        ("tfds_data.eval_split = '3'", r"digits has splits \['test', 'train'\]"),
        ("tfds_data.eval_split = 'test[:0]'", r"'test\[:0\]' has no examples"),
    ],
)
def test_a_wrong_split_is_told_as_soon_as_splits_are_known(tmp_path, few_digits, binding, message):
    data = load("digits", tmp_path, binding)
    with refused(message):
        data.train(ORDER)
    with refused(message):
        load("digits", tmp_path, binding)


def test_data_that_may_not_be_downloaded(tmp_path):
    data = load("digits", tmp_path, "tfds_data.download = False")
    with refused("not in .* and tfds_data.download is False"):
        data.train(ORDER)


COUNTS = [
    *("random_access.threads", "random_access.workers", "random_access.prefetch"),
    *("random_access.cache_bytes", "image_classification.size", "image_classification.pad_crop"),
    *("byte_text.length", "tf_data.shuffle_buffer", "tf_data.prefetch"),
]
MAY_BE_ZERO = {
    *("random_access.threads", "random_access.workers", "random_access.cache_bytes"),
    "image_classification.pad_crop",
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_that_makes_no_sense_is_refused_by_name(tmp_path, name):
    file = "pystdlib_text" if name.startswith("byte_text") else "digits"
    options = [TF_DATA] if name.startswith("tf_data") else []
    for value in [-1, 1.5, True, "abc", *([] if name in MAY_BE_ZERO else [0])]:
        gin_config.reset()
        with refused(f"{name} = .*integer of at least") as raised:
            load(file, tmp_path, f"{name} = {value!r}", options=options)
        assert raised.value.binding == name


def test_a_text_is_cropped_anywhere_from_its_first_to_its_last_byte():
    text = types.SimpleNamespace(shape=(), np_dtype=np.dtype(object))
    made = byte_text({"text": text}, length=3, crop_from=8)
    many = stack((made.example({"text": "abcde"}, None) for _ in range(64)), 64)
    batch = made.batch(many, np.arange(64), 64, np.random.default_rng(0))
    assert {bytes(row.astype(np.uint8)) for row in batch["tokens"]} == {b"abc", b"bcd", b"cde"}


# ---- The files of gin/data ----


def test_pystdlib_text_is_split_by_file(data_dir):
    data = load("pystdlib_text", data_dir)
    batch = next(data.train(ORDER))
    assert batch["tokens"].shape == (8, 256)
    assert set(np.unique(batch["weights"])) <= {0.0, 1.0}
    builder = tfds.builder("pystdlib_text", data_dir=data_dir)
    for split in ("train", "test"):
        paths = {x["path"].decode() for x in builder.as_data_source(split)}
        assert paths and all(is_held_out(path) == (split == "test") for path in paths)
    assert 20_000_000 > builder.info.splits["train"].num_examples * 1024 > 1_000_000


@pytest.mark.parametrize("file", sorted({*FILES} - {"digits", "pystdlib_text"}))
def test_data_sets_that_need_a_download_on_generated_data(tmp_path, monkeypatch, file):
    data = load(file, tmp_path, "random_access.workers = 0")
    kind = tfds.builder_cls(data.name.split("/")[0])

    def generated(self, download):
        examples = list(mocking.RandomFakeGenerator(self.info.features, 20))
        splits = [gin.query_parameter(f"tfds_data.{part}_split") for part in ("train", "eval")]
        return {split: iter(enumerate(examples)) for split in splits}

    monkeypatch.setattr(kind, "_split_generators", generated)
    got = list(data.train(ORDER))
    assert len(got) == 3
    for key, spec in data.example.items():
        assert got[0][key].shape == (8, *spec.shape) and got[0][key].dtype == spec.dtype


def resolved(*files):
    gin_config.load([f"gin/data/{file}.gin" if "/" not in file else file for file in files], [])
    return sorted(gin.config_str().splitlines())


@pytest.mark.parametrize("first", FILES)
def test_the_last_data_file_wins_and_leaves_nothing_of_another(first):
    for last in FILES:
        alone, after = resolved(last), resolved(first, last)
        task = next(line for line in alone if line.startswith("tfds_data.preprocess"))
        # Parameters of a task's function, and what models of that task are told, are its own.
        if task not in resolved(first):
            other = "image_classification" if "byte" in task else "byte_text"
            unused = rf"{other}|NUM_CLASSES|VOCAB_SIZE"
            after = [line for line in after if not re.search(unused, line)]
            alone = [line for line in alone if not re.search(unused, line)]
        assert [x for x in after if " = " in x] == [x for x in alone if " = " in x], first


@pytest.mark.parametrize("file", FILES)
def test_the_reader_is_chosen_after_the_data(file):
    assert "tfds_data.reader = @tf_data" in resolved(file, TF_DATA)
