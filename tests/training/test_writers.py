"""W&B, MLflow, a user's writers and `train.on_record` get what `metrics.jsonl` has, once a run."""

import dataclasses
import functools
import json
import math
import os
import struct
import sys

import numpy as np
import pytest

from research_dp.errors import RunFailure
from research_dp.runs.checkpoint_files import steps_in
from research_dp.training.batches import InFlight
from research_dp.training.preemption import StopSignal
from research_dp.training.writers import MlflowWriter, WandbWriter, Writers
from tests.support import programs, tiny_run
from tests.support.runs import WITH_MLP, records, summary


@pytest.fixture
def wandb(monkeypatch):
    """W&B without a network; its process ends with the test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    yield wandb
    wandb.teardown()


@pytest.fixture
def mlflow_in(monkeypatch, tmp_path):
    """A writer to a local folder, as gin would bind it, and the client that reads there."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    uri = f"file:{tmp_path}/mlruns"
    make = functools.partial(MlflowWriter, tracking_uri=uri)
    make.gin_name = MlflowWriter.gin_name
    return make, MlflowClient(uri)


def in_log(content):
    """The records of a log as LevelDB and W&B write it: parts in blocks of 32 KiB."""
    place, record = 7, b""  # after the file's own head
    while place < len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def rows(folder):
    """(run's id, its rows) of each of W&B's offline files, the oldest first."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes the files
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        found, name = [], None
        for data in in_log(file.read_bytes()):
            record = Record.FromString(data)
            name = record.run.run_id or name
            if record.HasField("history"):
                items = ((x.key or x.nested_key[0], x.value_json) for x in record.history.item)
                found.append({key: json.loads(text) for key, text in items if key[0] != "_"})
        yield name, found


def named(record):
    """A record of `metrics.jsonl` as writers get it."""
    split = record["split"]
    return {f"{split}/{k}": x for k, x in record.items() if k not in ("split", "step")}


def test_trackers_get_the_numbers_of_the_records_in_one_run_each(
    tmp_path, wandb, mlflow_in, monkeypatch
):
    make, client = mlflow_in
    folder, options = tmp_path / "run", {"writers": [WandbWriter, make]}
    monkeypatch.setattr(StopSignal, "requested", lambda self, step: step == 5)
    assert tiny_run.train(folder, **options) == 143
    stopped = records(folder, measured=True)
    monkeypatch.undo()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert tiny_run.train(folder, **options) == 0
    all_records = records(folder, measured=True)
    assert [r["step"] for r in stopped] == [2, 4, 4] and len(all_records) == 6
    ids = json.loads((folder / "trackers.json").read_text())

    (first, before), (second, after) = rows(folder)
    assert first == second == ids["wandb"]
    assert before + after == [{"step": r["step"], **named(r)} for r in all_records]

    (experiment,) = (e for e in client.search_experiments() if e.name == "research_dp")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name) == (ids["mlflow"], "run")
    assert run.info.status == "FINISHED"
    expected = {}
    for record in all_records:
        for name, value in named(record).items():
            expected.setdefault(name, []).append((record["step"], value))
    assert run.data.metrics.keys() == expected.keys()
    for name, values in expected.items():
        history = client.get_metric_history(ids["mlflow"], name)
        assert [(m.step, m.value) for m in history] == values, name


def test_the_command_with_both_trackers_in_its_bindings(command, tmp_path, wandb, mlflow_in):
    _, client = mlflow_in
    own = ["--gin.train.writers=[@wandb, @mlflow]", "--gin.wandb.group=a"]
    own += [f"--gin.mlflow.tracking_uri=file:{tmp_path}/mlruns", "--gin.mlflow.experiment=own"]
    environment = {name: os.environ[name] for name in ("WANDB_MODE", "MLFLOW_ALLOW_FILE_STORE")}
    done = command(*SHORT, *own, f"--workdir={tmp_path}/run", **environment)
    assert done.returncode == 0, done.stderr
    expected = records(tmp_path / "run", measured=True)
    ((_, found),) = rows(tmp_path / "run")
    assert found == [{"step": r["step"], **named(r)} for r in expected]
    (run,) = client.search_runs([client.get_experiment_by_name("own").experiment_id])
    assert run.data.params["train.num_steps"] == "4"
    assert run.data.params["train.writers"] == "[@wandb, @mlflow]"
    assert {k: v for k, v in run.data.metrics.items() if "eval/" in k} == named(expected[-1])


def test_a_run_that_fails_is_told_to_trackers_and_nan_is_recorded(tmp_path, wandb, mlflow_in):
    make, client = mlflow_in
    writers = Writers([WandbWriter, make])
    with pytest.raises(ZeroDivisionError):
        try:
            writers.open(tmp_path)
            writers.write({"split": "eval", "step": 3}, {"loss": math.nan})
            writers.end("flush")
            raise ZeroDivisionError
        finally:
            writers.end()
    ids = json.loads((tmp_path / "trackers.json").read_text())
    assert client.get_run(ids["mlflow"]).info.status == "FAILED"
    (measured,) = client.get_metric_history(ids["mlflow"], "eval/loss")
    assert math.isnan(measured.value) and measured.step == 3
    ((_, [row]),) = rows(tmp_path)
    assert row["step"] == 3 and math.isnan(float(row["eval/loss"]))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    status, message = tiny_run.outcome(
        tmp_path, writers=[{"wandb": WandbWriter, "mlflow": MlflowWriter}[name]]
    )
    assert status == 2 and message.startswith(f"train.writers: {name} cannot be opened: ")
    assert message.endswith(f"Do: pip install 'research_dp[{name}]'") and "\n" not in message


class Kept:
    """A writer that keeps what it gets; it raises in the method called `bad`."""

    def __init__(self, folder, bad=""):
        self.folder, self.bad, self.got = folder, bad, []

    def write_scalars(self, step, scalars):
        self.take("write_scalars", step, dict(scalars))

    def flush(self):
        self.take("flush")

    def close(self):
        self.take("close")

    def take(self, method, *arguments):
        self.got.append((method, *arguments))
        if method == self.bad:
            raise OSError("the disk is full")


class Half:
    def write_scalars(self, step, scalars):
        pass


def opens(*writers):
    """Functions that give these writers, called first, second, third."""
    functions = [lambda folder, writer=writer: writer for writer in writers]
    for name, function in zip(("first", "second", "third"), functions, strict=False):
        function.__name__ = name
    return functions


def test_writers_are_flushed_at_each_save_and_closed_once_at_the_end(tmp_path):
    writer = Kept(tmp_path)
    assert tiny_run.train(tmp_path, writers=opens(writer)) == 0
    written = [(step, scalars) for method, step, scalars in (x for x in writer.got if len(x) == 3)]
    assert written == [(r["step"], named(r)) for r in records(tmp_path, measured=True)]
    methods = [method for method, *_ in writer.got]
    assert methods.count("close") == 1 and methods[-1] == "close"
    assert methods.count("flush") >= 4 and methods[-2] == "flush"


@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("write_scalars", "the train record of step 2"),
        ("flush", "flush"),
        ("close", "close"),
    ],
)
def test_a_writer_that_raises_ends_the_run_by_name_and_the_others_are_closed(
    tmp_path, method, where
):
    good, bad, last = Kept(tmp_path), Kept(tmp_path, method), Kept(tmp_path)
    status, message = tiny_run.outcome(tmp_path, writers=opens(good, bad, last))
    problem = f"train.writers: second raised an error at {where}: OSError: the disk is full ("
    assert status == 1 and message.startswith(problem) and f"{__file__}:" in message
    assert [writer.got[-1] for writer in (good, bad, last)] == [("close",)] * 3
    assert len(records(tmp_path)) == {"write_scalars": 1, "flush": 1, "close": 6}[method]
    assert tiny_run.train(tmp_path) == 0  # what was saved is whole


def overflowing(order):
    """The batches of a tiny run; the loss of step 3 is infinite."""
    for step, batch in enumerate(tiny_run.DATA.train(order), order.first_step + 1):
        yield {"x": batch["x"] * np.float32(1e30)} if step == 3 else batch


@pytest.mark.parametrize("behind", [1, 2])  # 2: as on accelerators, a step is still running
def test_what_ended_the_run_is_what_is_said_not_what_fails_after_it(tmp_path, monkeypatch, behind):
    monkeypatch.setattr(InFlight, "wait_for_room", lambda self: self.wait(behind))
    first, second = Kept(tmp_path, "close"), Kept(tmp_path, "close")

    def finite(record):
        assert math.isfinite(record["loss"] or math.nan)

    options = {"writers": opens(first, second), "on_record": finite, "log_every": 1}
    data = dataclasses.replace(tiny_run.DATA, train=overflowing)
    with pytest.raises(RunFailure, match=r"^step 3: the loss is not finite") as failed:
        tiny_run.train(tmp_path, data=data, **options)
    problem = "also: train.writers: {} raised an error at close: OSError: the disk is full ("
    for name, note in zip(("second", "first"), failed.value.__notes__, strict=True):
        assert note.startswith(problem.format(name))
    assert first.got[-1] == second.got[-1] == ("close",)


def test_of_writers_that_cannot_close_the_first_is_said_and_the_checkpoint_is_whole(tmp_path):
    writers = opens(Kept(tmp_path, "close"), Kept(tmp_path, "close"))
    with pytest.raises(RunFailure, match=r"^train.writers: second raised an error at") as failed:
        tiny_run.train(tmp_path, writers=writers)
    (note,) = failed.value.__notes__
    assert note.startswith("also: train.writers: first raised an error at close")
    assert steps_in(tmp_path / "checkpoints")[-1] == 8


@pytest.mark.parametrize("options", [{}, {"checkpoint_every": None}], ids=["each", "last"])
@pytest.mark.parametrize("bad", ["write_scalars", "flush", "on_record"])
def test_what_raises_at_a_record_loses_no_step_that_was_due_to_be_saved(tmp_path, bad, options):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert tiny_run.train(whole, **options) == 0
    at = 4 if not options else 8

    class Late(Kept):
        def take(self, method, *arguments):
            super().take(method, *arguments)
            if method == "write_scalars" and arguments[0] == at:
                self.bad = bad
                assert bad != "write_scalars"

    def late(record):
        assert bad != "on_record" or record["step"] < at

    status, _ = tiny_run.outcome(folder, writers=opens(Late(folder)), on_record=late, **options)
    assert status == 1 and steps_in(folder / "checkpoints")[-1] == at
    assert tiny_run.train(folder, **options) == 0
    assert records(folder) == records(whole)
    assert summary(folder)["params_fingerprint"] == summary(whole)["params_fingerprint"]


def test_each_writer_has_a_record_of_its_own(tmp_path):
    class Emptying(Kept):
        def write_scalars(self, step, scalars):
            scalars.clear()

    kept = Kept(tmp_path)
    assert tiny_run.train(tmp_path, writers=opens(Emptying(tmp_path), kept)) == 0
    written = [x[1:] for x in kept.got if len(x) == 3]
    assert written == [(r["step"], named(r)) for r in records(tmp_path, measured=True)]


def test_an_iteration_that_ends_in_a_writer_is_named(tmp_path):
    class Short(Kept):
        def write_scalars(self, step, scalars):
            next(iter(()))

    status, message = tiny_run.outcome(tmp_path, writers=opens(Short(tmp_path)))
    problem = "train.writers: first raised an error at the train record of step 2: StopIteration: "
    assert status == 1 and message.startswith(problem)


async def awaited(*_):
    pass


class Awaited(Kept):
    write_scalars = awaited


class Called:
    __call__ = awaited


def test_functions_that_nobody_would_await_are_refused(tmp_path):
    for function in (awaited, functools.partial(awaited, 1), Called(), lambda x: awaited(x)):
        status, message = tiny_run.outcome(tmp_path, on_record=function)
        said = "train.on_record is async, and nobody awaits it: use `def`."
        assert status == 2 and message == said
    status, message = tiny_run.outcome(tmp_path, writers=opens(Awaited(tmp_path)))
    assert (
        status == 2 and message == "train.writers: first is async, and nobody awaits it: use `def`."
    )


@pytest.mark.parametrize(
    ("writers", "message"),
    [
        ([WandbWriter, WandbWriter], "train.writers has wandb twice: leave one out."),
        (opens(3), "train.writers: first cannot be opened: train.writers = 3: give a MetricWriter"),
        (opens(object()), "give a MetricWriter."),
        (opens(Half()), "give a MetricWriter. It lacks flush and close."),
        (opens(open), "train.writers = <built-in function open>: give a MetricWriter."),
        ([lambda: 3], "cannot be opened: TypeError: "),
        ([Kept, 3], "give a tuple or list of functions"),
    ],
)
def test_writers_that_cannot_be_are_refused(tmp_path, writers, message):
    status, said = tiny_run.outcome(tmp_path, writers=writers)
    assert status == 2 and message in said
    assert not (tmp_path / "metrics.jsonl").exists()


def test_on_record_gets_each_record_and_may_not_change_it(tmp_path):
    taken = []
    assert tiny_run.train(tmp_path, on_record=taken.append) == 0
    assert [dict(x) for x in taken] == records(tmp_path, measured=True)
    with pytest.raises(TypeError):
        taken[0]["loss"] = 0


def test_an_error_of_on_record_ends_the_run_with_its_place(tmp_path):
    writer = Kept(tmp_path)

    def too_high(record):
        if record["split"] == "eval":
            int("a high loss")

    status, message = tiny_run.outcome(tmp_path, writers=opens(writer), on_record=too_high)
    line = too_high.__code__.co_firstlineno + 2
    assert status == 1 and message == (
        "train.on_record raised an error at the eval record of step 4: ValueError: invalid "
        f"literal for int() with base 10: 'a high loss' ({__file__}:{line})."
    )
    assert writer.got[-1] == ("close",) and records(tmp_path)[-1]["split"] == "eval"


OWN = """import gin
from clu.metric_writers import MetricWriter


@gin.register
class Lines({base}):
    def __init__(self, folder, name="own.txt"):
        self.file = open(folder / name, "a")

    def write_scalars(self, step, scalars):
        print(step, *scalars, file=self.file)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()

    write_summaries = write_images = write_videos = write_audios = write_texts = None
    write_histograms = write_hparams = None


@gin.register
def stop_at(record, step=4):
    if record["step"] == step:
        raise RuntimeError(f"step {{step}} is enough")
"""
SHORT = [*WITH_MLP, "--gin.mlp.widths=(8,)", "--gin.train.num_steps=4", "--gin.train.log_every=2"]


@pytest.mark.parametrize("base", ["MetricWriter", "object"])
def test_a_writer_and_a_hook_of_a_users_module(main, tmp_path, monkeypatch, base):
    (tmp_path / f"own_{base}.py").write_text(OWN.format(base=base))
    monkeypatch.syspath_prepend(tmp_path)
    own = [f"--gin.train.writers=[@own_{base}.Lines]", f"--gin.own_{base}.Lines.name=a.txt"]
    stop = [f"--gin.train.on_record=@own_{base}.stop_at", f"--workdir={tmp_path}/run"]
    own.append(f"--import=own_{base}")
    done = main(*SHORT, *own, *stop)
    assert done.returncode == 1, done.stderr
    assert "error: train.on_record raised an error at the train record of step 4: " in done.stderr
    assert f"RuntimeError: step 4 is enough ({tmp_path}/own_{base}.py:26)." in done.stderr
    assert "Traceback" not in done.stderr
    lines = (tmp_path / "run" / "a.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["2", "train/accuracy"],
        ["4", "train/accuracy"],
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gin.train.writers=[@wandbb]"], "there is no 'wandbb'. Did you mean wandb?"),
        (["--gin.train.writers=@wandb"], "train.writers = @wandb: "),
        (["--gin.train.writers=[@wandb()]"], "wandb needs 'folder'"),
        (["--gin.train.on_record='text'"], "train.on_record = 'text': give "),
        (["--gin.wandb.projetc=a"], "wandb has no parameter 'projetc'. Did you mean project?"),
        (["--gin.mlflow.experimant=a"], "mlflow has no parameter 'experimant'. Did you mean"),
        (["--gin.mlflow.experiment=a"], "this run never calls mlflow"),
    ],
)
def test_mistakes_in_these_bindings_are_refused_before_anything_is_built(main, flags, message):
    done = main(*SHORT, *flags, "--dry_run")
    assert done.returncode == 2 and message in done.stderr, done.stderr


PROCESS = """
import sys, jax
address, number = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, number)
from research_dp.errors import UsageError
from research_dp.training.writers import Writers
made = []
def kept(folder):
    made.append(folder)
try:
    Writers([kept]).open("folder")
except UsageError as error:
    print(len(made), error, flush=True)
"""


def test_only_process_0_opens_writers_and_all_hear_of_a_failure():
    with programs.pair(PROCESS) as (_, both):
        outputs = [process.communicate(timeout=100)[0].strip() for process in both]
    assert [text.splitlines()[-1][0] for text in outputs] == ["1", "0"]
    assert all("process 0: train.writers: kept cannot be opened" in text for text in outputs)


def test_without_writers_nothing_is_added_to_a_run(tmp_path):
    assert tiny_run.train(tmp_path) == 0
    assert not (tmp_path / "trackers.json").exists()
