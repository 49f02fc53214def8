"""Every shipped gin file parses, and what must agree between files agrees."""

import itertools
import os

import gin
import pytest
from conftest import ROOT, stems

from research_dp.config import load, parser

FILES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "gin").rglob("*.gin"))
RUNS = [f for f in FILES if f.startswith("gin/runs/")]
REQUIRED = {"single", "ddp", "pmap", "spmd", "spmd_fsdp", "zero1", "zero2", "hsdp"}
REQUIRED |= {"fsdp", "fsdp_keep"}


@pytest.mark.parametrize("file", FILES)
def test_file_parses_and_is_short_and_says_what_it_is(file):
    load.load([file], ["NUM_CLASSES = 10", "VOCAB_SIZE = 256"])
    lines = (ROOT / file).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert 3 <= len(lines) <= 40


def test_every_strategy_of_the_table_has_its_file_and_name():
    assert set(stems()) >= REQUIRED
    for stem in stems():
        load.reset()
        load.load([f"gin/strategies/{stem}.gin"])
        assert gin.query_parameter("data_parallel.name") == stem


def test_strategy_files_bind_the_same_parameters():
    """Otherwise a binding of one would be left over when another is given after it."""
    bound = {
        stem: {
            item.name
            for item in parser.read([f"gin/strategies/{stem}.gin"], [])
            if isinstance(item, parser.Binding) and item.selector == "data_parallel"
        }
        for stem in stems()
    }
    assert len({frozenset(names) for names in bound.values()}) == 1, bound


def test_files_commute_the_run_file_too():
    parts = [
        "gin/data/mnist.gin",
        "gin/models/mlp.gin",
        "gin/precision/bf16_gather.gin",
        "gin/strategies/zero1.gin",
        "gin/runs/digits.gin",
    ]
    texts = set()
    for order in itertools.permutations(parts):
        load.reset()
        config = load.load(order, whole=True)
        assert config.origin("data_parallel.name") == "gin/strategies/zero1.gin:6"
        texts.add("\n".join(sorted(gin.config_str().splitlines())))
    assert len(texts) == 1


@pytest.mark.parametrize("file", RUNS)
def test_resolved_configuration_is_the_stored_one(file):
    load.load([file], [], whole=True)
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
    assert (
        load.load(files, whole=True).origin("make_mesh.axes") == f"gin/strategies/hsdp.gin:{line}"
    )
    bound = load.load(files, ["make_mesh.axes = {'data': 8}"], whole=True)
    assert bound.origin("make_mesh.axes") == "--gin.make_mesh.axes"
    assert bound.origin("train.seed") is None
