"""What the quickstart and its neighbours do, and print, where TensorFlow is not installed."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.repository import ROOT
from tests.support.runs import summary
from tests.support.terminal import on_terminal

# Python's finder of files on the path says that there is no such package, as where it is missing.
WITHOUT = """import importlib.machinery
finder = importlib.machinery.PathFinder
found = finder.find_spec
def find_spec(name, *more):
    return None if name.partition(".")[0] == "tensorflow" else found(name, *more)
finder.find_spec = find_spec
"""
FOREIGN = ("WARNING", "absl", "OpenCV", "ensorFlow", "tensorflow", "cuda", "Gloo", "Warning")


@pytest.fixture
def environment(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    home = tmp_path / "home"
    home.mkdir()
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    changed = {"PYTHONPATH": path, "HOME": str(home), "TFDS_DATA_DIR": str(home / "tfds")}
    return {**command.environment, **changed, "COLUMNS": "80", "TERM": "xterm"}


@pytest.mark.slow
def test_the_first_run_needs_no_tensorflow_and_shows_no_foreign_line(environment, tmp_path):
    words = ["-m", "research_dp", "train", "--gin_file=runs/digits.gin", "--workdir=w"]
    words.append("--gin.train.num_steps=60")
    status, chunks = on_terminal(*words, env=environment, cwd=tmp_path)
    shown = "".join(text for _, text in chunks)
    assert status == 0, shown
    for word in FOREIGN:
        assert word not in shown, shown
    assert summary(tmp_path / "w")["eval"]["accuracy"] > 0.6
    events = [path for path in (tmp_path / "w" / "tensorboard").rglob("*") if path.is_file()]
    assert len(events) == 2 and all(b"accuracy" in path.read_bytes() for path in events)

    def run(*words, status=0):
        options = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
        done = subprocess.run(
            [sys.executable, "-m", "research_dp", *words], env=environment, **options
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert not re.search("|".join(FOREIGN), done.stdout), done.stdout
        return done.stdout + done.stderr

    run("evaluate", "--workdir=w")
    tokens = ["--gin_file=runs/lm_stdlib.gin", "--gin_file=data/random_tokens.gin"]
    tokens += ["--gin.VOCAB_SIZE=256", "--gin.random_tokens.length=64"]
    run("train", *tokens, "--gin.train.num_steps=2", "--gin.train.batch_size=2", "--workdir=t")
    small = ["--gin_file=runs/digits.gin", "--gin_file=models/mlp.gin"]
    assert "ddp" in run("plan", *small, "--topology=cpu:2", "--strategies=ddp,fsdp")
    assert "CERTIFIED" in run("certify", *small, "--cpu_devices=2", "--steps=3")
    said = run("train", *small, "--gin_file=options/tf_data.gin", "--workdir=r", status=2)
    assert "tfds_data.reader = @tf_data reads with TensorFlow, which is not installed" in said
    assert "pip install 'research_dp[tf]'" in said


ARRAYS = """import numpy as np
import tensorflow_datasets as tfds


class Arrays(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"image": tfds.features.Image(shape=(8, 8, 1)), "label": np.int64}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"image": np.zeros((8, 8, 1), np.uint8), "label": 0}
"""


@pytest.mark.slow
def test_a_data_set_whose_images_are_arrays_says_what_to_install(environment, tmp_path):
    (tmp_path / "arrays.py").write_text(ARRAYS)
    code = (
        "import arrays\nfrom research_dp.data.builders import *\n"
        "try:\n    download_and_prepare(find_builder('arrays'))\n"
        "except UsageError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    last = "TFDS encodes its examples with TensorFlow. Do: pip install 'research_dp[tf]'"
    assert f"arrays cannot be prepared: {last}" in done.stdout
