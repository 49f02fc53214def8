"""The strategy that plans: it takes the fastest that fits, and computes what one device does."""

import dataclasses

import pytest

from research_dp.config import gin_internals, load
from research_dp.errors import UsageError
from research_dp.planning import auto as auto_lib
from research_dp.planning.estimate import Compiled
from research_dp.training import train
from tests.support import certified, recipes
from tests.support.plan_rows import make_row
from tests.support.repository import ROOT
from tests.support.runs import WITH_MLP, summary

AUTO = "gin/options/auto.gin"
NAMES = ["ddp", "zero1", "fsdp_keep", "fsdp"]


def recipe(*bindings):
    return recipes.recipe("ddp", *bindings, more=[AUTO])


def test_candidates_are_the_shipped_strategies():
    chosen = recipe().choose.args[0]
    assert [candidate.name for candidate in chosen] == NAMES
    for candidate in chosen:
        load.reset()
        load.load([f"gin/strategies/{candidate.name}.gin"])
        shipped = gin_internals.value_of("train.strategy")
        for field in dataclasses.fields(shipped):
            ours, theirs = (getattr(r, field.name) for r in (candidate, shipped))
            named = [getattr(value, "__qualname__", value) for value in (ours, theirs)]
            assert named[0] == named[1], (candidate.name, field.name)


def planned(monkeypatch, needs):
    """Lets each candidate need so many bytes and seconds: {name: (bytes, seconds)}."""

    def made(name, candidate, spec, where):
        nbytes, seconds = needs[name]
        fits = nbytes <= 100
        row = make_row(
            name,
            fits=fits,
            needed_bytes=nbytes,
            available_bytes=100,
            predicted_seconds=seconds,
            problem=None if fits else "does not fit",
        )
        return Compiled(row, None, None)

    monkeypatch.setattr(auto_lib, "compile_row", made)


def test_the_fastest_that_fits_is_taken_and_three_lines_tell_why(monkeypatch, capsys):
    planned(monkeypatch, {"ddp": (200, 1), "zero1": (90, 4), "fsdp_keep": (80, 2), "fsdp": (9, 3)})
    chosen = recipe()
    assert chosen.resolve(None).name == "fsdp_keep"
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 3
    assert "fsdp_keep, 2000.0 ms" in told[0]
    assert told[1] == "Others: fsdp +50%, zero1 +100%."
    assert told[2] == "Not possible: ddp does not fit."


def test_where_nothing_fits_each_reason_is_told(monkeypatch):
    planned(monkeypatch, {name: (200, 1) for name in NAMES})
    chosen = recipe()
    with pytest.raises(UsageError, match="ddp does not fit; zero1 does not fit; fsdp_keep"):
        chosen.resolve(None)


def test_all_processes_take_what_the_first_takes(monkeypatch):
    """Another process's compiler may count another byte, and each would wait for the others."""
    planned(monkeypatch, {"ddp": (101, 1), "zero1": (90, 4), "fsdp_keep": (80, 2), "fsdp": (9, 3)})
    told = []
    monkeypatch.setattr(auto_lib, "of_the_first", lambda x: told.append(x) or 0)
    assert recipe().resolve(None).name == "ddp"
    assert told == [NAMES.index("fsdp_keep")]


def test_who_looks_at_a_run_sees_the_one_that_is_taken(monkeypatch):
    planned(monkeypatch, {"ddp": (200, 1), "zero1": (9, 1), "fsdp_keep": (9, 2), "fsdp": (9, 3)})
    files = ["gin/runs/digits.gin", "gin/models/mlp.gin", AUTO]
    load.load(files, ["shard_params.min_weight_size = 64"])
    seen = []
    train.train(inspect=lambda recipe, spec: seen.append(recipe))
    (taken,) = seen
    assert (taken.name, taken.gather, taken.choose) == ("zero1", None, None)


def test_what_is_built_carries_the_one_that_was_taken(monkeypatch):
    planned(monkeypatch, {"ddp": (9, 1), "zero1": (9, 2), "fsdp_keep": (9, 2), "fsdp": (9, 3)})
    built = recipe().build(certified.small_spec("linen"))
    assert (built.name, built.config.sync.__name__) == ("ddp", "sync_gradients")


@pytest.mark.slow
def test_it_follows_single():
    certified.assert_follows_single(recipe(), "linen")


@pytest.mark.slow
def test_a_run_takes_one_and_says_which(command, tmp_path):
    flags = [*WITH_MLP, f"--gin_file={AUTO}", "--gin.train.num_steps=3", "--cpu_devices=8"]
    done = command(*flags, f"--workdir={tmp_path}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    taken = summary(tmp_path)["strategy"]
    assert taken in NAMES
    assert f": {taken}, " in done.stdout
