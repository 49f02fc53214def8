"""`run.json` and the training step's program: what a comparison of runs reads."""

import dataclasses
import functools
import gzip
import json
import os
import re
import subprocess
import sys

import gin
import jax
import pytest

from research_dp.config import load
from research_dp.errors import UsageError
from research_dp.runs import facts as run_facts
from research_dp.runs import files
from research_dp.runs.resume import changes
from research_dp.strategies.slots import Stateful
from research_dp.types import Bound
from tests.support import tiny_run
from tests.support.marks import exhaustive, slow
from tests.support.repository import ROOT


def facts(folder):
    return json.loads((folder / files.FACTS).read_text())


def starts(folder):
    return [start["step"] for start in facts(folder)["starts"]]


@pytest.fixture
def run(tmp_path):
    assert tiny_run.outcome(tmp_path / "run", num_steps=2) == (0, "")
    return tmp_path / "run"


def test_a_run_says_what_it_is_and_which_program_ran(run):
    found, strategy = facts(run), tiny_run._strategy().engine(None, None)
    assert (found["strategy"], found["mesh"]) == ("single", {"data": 1, "fsdp": 1})
    params = 4 * (tiny_run.DIM**2 + tiny_run.DIM)
    assert found["bytes_per_device"] == {
        **dict.fromkeys(("params", "gradients"), params),
        "opt_state": 2 * params + 4,  # adam's moments and count
        **dict.fromkeys(("model_state", "slots"), 0),
        "batch": tiny_run.BATCH * (tiny_run.DIM * 4 + 4),
    }
    lowered = strategy.train_step.lower(strategy.abstract_state, strategy.abstract_batch)
    program = lowered.compile()
    assert gzip.decompress((run / files.PROGRAM).read_bytes()).decode() == program.as_text()
    assert found["program"]["temp_bytes"] == program.memory_analysis().temp_size_in_bytes
    assert found["program"]["needed_bytes"] >= found["program"]["peak_bytes"] > 0
    (start,) = found["starts"]
    assert (start["platform"], start["devices"], start["processes"]) == ("cpu", 8, 1)
    assert start["command"].startswith("python") and start["versions"]["jax"] == jax.__version__


def test_each_start_is_added_and_the_program_stays_where_no_step_is_trained(run):
    program = facts(run)["program"]
    assert tiny_run.outcome(run, num_steps=2) == (0, "")  # done already
    assert starts(run) == [0]
    (run / files.SUMMARY).unlink()
    assert tiny_run.outcome(run, num_steps=2) == (0, "")  # evaluates again
    assert starts(run) == [0, 2] and facts(run)["program"] == program
    assert tiny_run.outcome(run, num_steps=4) == (0, "")
    assert starts(run) == [0, 2, 2]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff{", b"[]", b'{"format": 9}', b'{"format": 1, "starts": 3}'),
        '{"format": 1, "starts": [], "host": ""}'.encode("utf-32-le"),
    ],
)
def test_damaged_facts_stop_no_run_and_are_kept(run, content, capsys):
    (run / files.FACTS).write_bytes(content)
    assert tiny_run.outcome(run, num_steps=4) == (0, "")
    assert starts(run) == [2]
    aside = run / f"{files.FACTS}.damaged"
    assert aside.exists() == bool(content) == ("run.json is damaged" in capsys.readouterr().out)
    assert not content or aside.read_bytes() == content


@pytest.mark.parametrize("name", [files.FACTS, files.PROGRAM])
def test_a_link_and_a_fifo_are_refused_as_for_other_files(tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    for make in (lambda path: path.symlink_to(tmp_path / "precious"), os.mkfifo):
        (tmp_path / "run").mkdir(exist_ok=True)
        make(tmp_path / "run" / name)
        status, message = tiny_run.outcome(tmp_path / "run", num_steps=2)
        assert status == 2 and name in message
        (tmp_path / "run" / name).unlink()
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_program_that_cannot_be_printed_is_a_problem_in_the_facts_and_none_of_the_run(
    run, monkeypatch
):
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: newer than jaxlib\nand more")

    single = tiny_run._strategy()
    built = single.engine(None, None)

    class Step:
        def __call__(self, state, batch):
            return built.train_step(state, batch)

        def lower(self, *_):
            return Lowered()

    changed = dataclasses.replace(built, train_step=Step())
    strategy = dataclasses.replace(single, engine=lambda config, spec: changed)
    monkeypatch.setattr(tiny_run, "_strategy", lambda: strategy)
    assert tiny_run.outcome(run, num_steps=4) == (0, "")
    problem = "JaxRuntimeError: UNIMPLEMENTED: newer than jaxlib"
    assert facts(run)["program"] == {"problem": problem}
    assert not (run / files.PROGRAM).exists(), "the program of another start is taken for this one"
    changed = dataclasses.replace(built, train_step=lambda *args: built.train_step(*args))
    assert tiny_run.outcome(run, num_steps=6) == (0, "")
    assert "has no attribute 'lower'" in facts(run)["program"]["problem"]


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_facts._commit() is None
    git = "git -c user.name=a -c user.email=a@b"
    assert os.system(f"git init -q && echo 1 > f && git add f && {git} commit -qm one") == 0
    commit = run_facts._commit()
    assert len(commit) == 8
    (tmp_path / "f").write_text("2")
    assert run_facts._commit() == f"{commit}, changed"
    monkeypatch.setenv("PATH", "")
    assert run_facts._commit() is None


# ---- Bindings, and whose they are ----


def bound(files, *bindings):
    return load.load([f"gin/{file}.gin" for file in files], bindings, complete=True).bound()


def test_bindings_of_the_strategy_are_those_that_only_it_leads_to():
    found = bound(["runs/digits", "models/mlp", "strategies/zero1", "options/deterministic"])
    own = {name for name, binding in found.items() if binding.of_strategy}
    assert {"train.strategy", "data_parallel.name", "make_mesh.axes"} < own
    assert {"data_parallel.reduction", "shard_params.min_weight_size"} < own
    others = {"train.num_steps", "adamw.learning_rate", "mlp.dtype", "COMPUTE_DTYPE"}
    assert others < found.keys() - own
    assert found["train.num_steps"] == Bound("1000", "gin/runs/digits.gin:11", False)


def test_a_macro_that_the_model_uses_too_is_not_the_strategys():
    gin_files = ["runs/digits", "models/mlp", "strategies/fsdp"]
    of_shards = ["SIZE = 64", "shard_params.min_weight_size = %SIZE"]
    alone = bound(gin_files, *of_shards)
    assert alone["SIZE"].of_strategy and alone["shard_params.min_weight_size"].of_strategy
    both = bound(gin_files, *of_shards, "mlp.widths = (%SIZE,)")
    assert not both["SIZE"].of_strategy and both["shard_params.min_weight_size"].of_strategy


def test_names_are_those_of_the_saved_configuration_so_that_changes_have_places():
    found = bound(["runs/digits", "models/mlp", "strategies/fsdp"], "adamw.weight_decay = 0.5")
    assert found.keys() == run_facts.bindings_in(gin.config_str()).keys()
    before = {"config": gin.config_str().replace("weight_decay = 0.5", "weight_decay = 0.1")}
    (line,) = changes(before, {"config": gin.config_str()}, found)
    assert line == "adamw.weight_decay: 0.1 -> 0.5  (--gin.adamw.weight_decay)"


def test_without_places_the_bindings_are_those_of_gin(tmp_path):
    gin.parse_config("train.num_steps = 2")
    assert tiny_run.outcome(tmp_path / "run", num_steps=2) == (0, "")
    unknown = {"value": "2", "place": None, "of_strategy": None}
    assert facts(tmp_path / "run")["bindings"] == {"train.num_steps": unknown}


# ---- Another algorithm by design ----


def mean_each_8(grads, axis_names):
    return grads


mean_each_8.algorithm = "parameters are averaged each 8 steps"


class Local:
    differs_over = ()
    algorithm = "gradients have one bit"

    def init(self, params):
        return ()

    def apply(self, *args, state, **options):
        return args[0], state

    def resize(self, state, devices):
        return state


def test_a_slot_says_that_it_computes_something_else_through_wrappers():
    config = tiny_run._strategy()
    assert config.algorithm is None
    wrapped = gin.external_configurable(mean_each_8, module="tests")
    for slot in (mean_each_8, functools.partial(mean_each_8), functools.partial(wrapped)):
        sync = dataclasses.replace(config, sync=slot)
        assert sync.algorithm == "parameters are averaged each 8 steps"
    assert isinstance(Local(), Stateful)
    both = dataclasses.replace(config, sync=functools.partial(mean_each_8), update=Local())
    assert both.algorithm == "parameters are averaged each 8 steps; gradients have one bit"


def test_an_attribute_set_after_gin_wrapped_the_function_is_found():
    def late(grads, axis_names):
        return grads

    gin.register(late, module="tests")
    late.algorithm = "late"
    gin.parse_config("data_parallel.sync = @tests.late")
    sync = gin.query_parameter("data_parallel.sync").scoped_configurable_fn
    assert dataclasses.replace(tiny_run._strategy(), sync=sync).algorithm == "late"


def test_an_algorithm_that_is_no_sentence_is_refused():
    slot = functools.partial(lambda grads, axis_names: grads)
    slot.algorithm = True
    with pytest.raises(UsageError, match="attribute `algorithm` is True"):
        dataclasses.replace(tiny_run._strategy(), sync=slot).algorithm  # noqa: B018


# ---- As commands ----

LISTENS = """
import collections, json, os
import jax
from research_dp.runs.facts import RunFacts

events, inside, compiled = collections.Counter(), [], RunFacts.compiled
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: events.update([name] * len(inside))
)

def listening(facts):
    inside.append(1)
    compiled(facts)
    inside.clear()
    with open(f"{os.environ['HEARD']}/{jax.process_index()}", "a") as file:
        file.write(json.dumps(events) + "\\n")

RunFacts.compiled = listening
"""


@pytest.mark.parametrize(
    ("stem", "more", "processes", "cached"),
    [
        exhaustive("fsdp", (), 1, True),
        exhaustive("spmd_fsdp", (), 1, True),
        exhaustive("hsdp", ("options/deterministic.gin",), 1, True),
        slow("zero1", (), 2, True),
        exhaustive("ddp", ("precision/bf16_params.gin",), 1, False),
    ],
)
def test_the_program_is_printed_without_another_compilation(
    stem, more, processes, cached, tmp_path, data_dir
):
    (tmp_path / "listens.py").write_text(LISTENS)
    heard, cache = tmp_path / "heard", tmp_path / "cache"
    heard.mkdir()
    environment = {
        **os.environ,
        "TFDS_DATA_DIR": str(data_dir),
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "HEARD": str(heard),
        "JAX_ENABLE_COMPILATION_CACHE": str(cached).lower(),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    names = ("runs/digits.gin", "models/mlp.gin", f"strategies/{stem}.gin", *more)
    flags = [*(f"--gin_file={name}" for name in names), "--import=listens", "--allow_unused"]
    flags += ["--gin.mlp.widths=(32,)", "--gin.train.num_steps=2"]
    flags += [f"--cpu_devices={8 // processes}"]
    launch = ["launch", "-n", "2", "--"] if processes > 1 else ["train"]
    texts = []
    for number in range(1 + cached):
        folder = tmp_path / f"run{number}"
        command = [sys.executable, "-m", f"research_dp.{launch[0]}", *launch[1:], *flags]
        subprocess.run([*command, f"--workdir={folder}"], env=environment, check=True)
        sizes = facts(folder)["program"]
        assert sizes.keys() == {"temp_bytes", "peak_bytes", "needed_bytes"}
        texts.append(gzip.decompress((folder / files.PROGRAM).read_bytes()).decode())
        assert "ENTRY" in texts[-1]
    for process in range(processes):
        lines = (heard / str(process)).read_text().splitlines()
        assert lines == ["{}"] * (1 + cached), "the step was traced or compiled again"
    # A program from the disk has the source lines of who compiled it.
    operations = {re.sub(r"(, )?metadata=\{.*?\}", "", x[x.index("ENTRY") :]) for x in texts}
    assert len(operations) == 1
