"""Every shipped gin file parses, and what must agree between files agrees."""

import itertools
import os

import gin
import pytest
from conftest import ROOT, stems

from research_dp.config import gin_config

FILES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "gin").rglob("*.gin"))
RUNS = [f for f in FILES if f.startswith("gin/runs/")]
REQUIRED = {"single", "ddp", "pmap", "spmd", "spmd_fsdp", "zero1", "zero2", "hsdp"}
REQUIRED |= {"fsdp", "fsdp_keep"}


@pytest.mark.parametrize("file", FILES)
def test_file_parses_and_is_short_and_says_what_it_is(file):
    gin_config.load([file], ["NUM_CLASSES = 10", "VOCAB_SIZE = 256"])
    lines = (ROOT / file).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert 3 <= len(lines) <= 40


def test_every_strategy_of_the_table_has_its_file_and_name():
    assert set(stems()) >= REQUIRED
    for stem in stems():
        gin_config.reset()
        gin_config.load([f"gin/strategies/{stem}.gin"], [])
        assert gin.query_parameter("data_parallel.name") == stem


def test_strategy_files_bind_the_same_parameters():
    """Otherwise a binding of one would be left over when another is given after it."""
    bound = {
        stem: {
            name
            for name, _ in gin_config._bound_in(f"gin/strategies/{stem}.gin")
            if name.startswith("data_parallel.")
        }
        for stem in stems()
    }
    assert len({frozenset(names) for names in bound.values()}) == 1, bound


def test_files_commute():
    parts = [
        "gin/data/digits.gin",
        "gin/models/mlp.gin",
        "gin/optim/sgd_momentum.gin",
        "gin/precision/bf16_gather.gin",
        "gin/strategies/zero1.gin",
    ]
    texts = set()
    for order in itertools.permutations(parts):
        gin_config.reset()
        gin_config.load(order, [])
        texts.add("\n".join(sorted(gin.config_str().splitlines())))
    assert len(texts) == 1


@pytest.mark.parametrize("file", RUNS)
def test_resolved_configuration_is_the_stored_one(file):
    gin_config.load([file], [])
    text = gin.config_str()
    golden = ROOT / "tests" / "golden" / (os.path.basename(file) + ".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "if this is meant: UPDATE_GOLDEN=1 pytest tests"


def test_origin_names_the_file_and_line_that_wins():
    files = ["gin/runs/digits.gin", "gin/strategies/hsdp.gin"]
    lines = (ROOT / files[1]).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith("make_mesh.axes"))
    assert gin_config.origin("make_mesh.axes", files, []) == f"gin/strategies/hsdp.gin:{line}"
    binding = "make_mesh.axes = {'data': 8}"
    assert gin_config.origin("make_mesh.axes", files, [binding]) == "--gin.make_mesh.axes"
    assert gin_config.origin("train.seed", files, []) is None
