"""Every shipped gin file parses, and what must agree between files agrees."""

import importlib
import itertools
import os
import re

import gin
import pytest

from research_dp.config import load, parser
from tests.support.repository import ROOT, relative, stems

FILES = sorted(relative(p) for p in (ROOT / "gin").rglob("*.gin"))
RUNS = [f for f in FILES if f.startswith("gin/runs/")]
REQUIRED = {"single", "ddp", "spmd", "spmd_fsdp", "zero1", "zero2", "hsdp"}
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
            for item in bindings_of(f"gin/strategies/{stem}.gin")
            if item.selector == "data_parallel"
        }
        for stem in stems()
    }
    assert len({frozenset(names) for names in bound.values()}) == 1, bound


def test_files_after_the_run_commute_where_they_bind_different_things():
    parts = [
        "gin/data/mnist.gin",
        "gin/models/mlp.gin",
        "gin/precision/bf16_gather.gin",
        "gin/strategies/zero1.gin",
    ]
    texts = set()
    for order in itertools.permutations(parts):
        load.reset()
        config = load.load(["gin/runs/digits.gin", *order], complete=True)
        assert config.origin("data_parallel.name") == "gin/strategies/zero1.gin:8"
        texts.add(gin.config_str())
    assert len(texts) == 1


def combinations(strategy):
    """Each run under a strategy, alone and with each precision and each option."""
    precisions = [f for f in FILES if f.startswith("gin/precision/")]
    options = [f for f in FILES if f.startswith("gin/options/") and not chooses_strategy(f)]
    assert len(RUNS) >= 2 and len(precisions) >= 5 and len(options) >= 6
    for run, *others in itertools.product(RUNS, [None, *precisions], [None, *options]):
        yield [run, f"gin/strategies/{strategy}.gin", *filter(None, others)]


def chooses_strategy(file):
    return any(item.name == "train.strategy" for item in bindings_of(file))


def bindings_of(file):
    return [item for item in parser.read([file], []) if isinstance(item, parser.Binding)]


def lines(text):
    """Bindings of a configuration as gin dumps it, without comments and imports."""
    text = text.replace("\\\n", "")
    return {line for line in text.splitlines() if " = " in line}


def means_the_same_to_gin(files, bindings=()):
    """Compares with plain gin; returns whether our loader accepts the files as a run."""
    importlib.import_module("research_dp.training.train")  # what a program that trains imports
    gin.clear_config()
    gin.parse_config_files_and_bindings(files, list(bindings), finalize_config=False)
    plain = gin.config_str()
    try:
        config = load.load(files, bindings, complete=True)
    except load.Mistakes:
        return False
    run = lines(gin.config_str())
    assert run <= lines(plain)
    assert len(run) + len(config.unused) == len(lines(plain))
    load.load(files, bindings, complete=True, allow_unused=True)
    assert without_imports(gin.config_str()) == without_imports(plain)
    return True


def without_imports(text):
    """Our loader writes `from a import b` where gin would number modules: `import a.b as a2`."""
    return re.sub(r"^(from|import) .*\n", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("strategy", stems())
def test_plain_gin_makes_the_same_of_the_files(strategy):
    pairs = [files for files in combinations(strategy) if len(files) < 4]
    assert sum(means_the_same_to_gin(files) for files in pairs) > len(pairs) / 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", stems())
def test_plain_gin_makes_the_same_of_all_combinations(strategy):
    """All that are of three files, shared by strategies: these meet each file above."""
    every = list(combinations(strategy))
    for files in every[stems().index(strategy) :: len(stems())]:
        means_the_same_to_gin(files)


def test_plain_gin_makes_the_same_of_other_files_and_bindings():
    for folder in ("models", "data", "optim"):
        for file in (f for f in FILES if f.startswith(f"gin/{folder}/")):
            for run in RUNS:
                means_the_same_to_gin([run, file, "gin/precision/f16.gin"], ["train.seed = 3"])
    assert means_the_same_to_gin(["gin/runs/digits.gin", "gin/options/auto.gin"])
    assert means_the_same_to_gin(["gin/runs/digits.gin"], ["convnet.dtype = 'bfloat16'"])


@pytest.mark.parametrize("folder", ["models", "data", "optim", "strategies", "precision"])
def test_files_of_a_kind_bind_the_macros_and_components_that_others_replace(folder):
    """A compute dtype is one binding of each model, which precision files replace."""
    for file in (f for f in FILES if f.startswith(f"gin/{folder}/")):
        names = {item.name for item in bindings_of(file)}
        assert ("COMPUTE_DTYPE" in names) == (folder == "models" or file.endswith("/f16.gin"))
        models = {"transformer", "convnet", "mlp", "resnet"}
        assert folder == "models" or not {n.split(".")[0] for n in names} & models


@pytest.mark.parametrize("file", RUNS)
def test_resolved_configuration_is_the_stored_one(file):
    load.load([file], [], complete=True)
    text = gin.config_str()
    golden = ROOT / "tests" / "golden" / (os.path.basename(file) + ".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "if this is meant: UPDATE_GOLDEN=1 pytest tests/config"


def test_origin_names_the_file_and_line_that_wins():
    files = ["gin/runs/digits.gin", "gin/strategies/hsdp.gin"]
    lines = (ROOT / files[1]).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.startswith("make_mesh.axes"))
    assert (
        load.load(files, complete=True).origin("make_mesh.axes")
        == f"gin/strategies/hsdp.gin:{line}"
    )
    bound = load.load(files, ["make_mesh.axes = {'data': 8}"], complete=True)
    assert bound.origin("make_mesh.axes") == "--gin.make_mesh.axes"
    assert bound.origin("train.seed") is None
    files = ["gin/runs/digits.gin", "gin/options/auto.gin"]
    scoped = load.load(files, ["fsdp/make_mesh.axes = {'data': 1, 'fsdp': 3}"], complete=True)
    assert scoped.origin("make_mesh.axes") == "--gin.fsdp/make_mesh.axes"

    single = load.load(["strategies/single.gin"])
    assert single.origin("one_device_mesh") == "strategies/single.gin:9"
