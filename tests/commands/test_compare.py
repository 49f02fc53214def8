"""`compare` as a user runs it: planted differences are named, the page opens, numbers agree."""

import json
import re
import signal
import time

import pytest

import research_dp
from research_dp.commands import compare as compare_command
from research_dp.commands import main as command_line
from research_dp.commands import sweep
from research_dp.training import trainer
from tests.support.repository import ROOT

BASE = ["runs/digits.gin", "models/mlp.gin"]
SMALL = [f"--gin_file={file}" for file in BASE] + ["--gin.mlp.widths=(16,)", "--cpu_devices=8"]
EVIL = "<script>alert(1)</script>"
# One of two groups of devices counts for nothing, the same on all: no replica shows it.
ONE_GROUP = """
import gin
import jax

from research_dp.distributed.buckets import all_mean_tree


@gin.register
def one_group(grads, axis_names):
    one = jax.lax.axis_index(axis_names[0]) == 0
    return all_mean_tree(jax.tree.map(lambda g: 2 * g * one, grads), axis_names)
"""
ONE_GROUP_GIN = """
import one_group
include 'strategies/ddp.gin'
data_parallel.name = 'one_group'
data_parallel.sync = @one_group
make_mesh.axes = {'data': 2, 'fsdp': -1}
"""


# In evaluation alone, what an example gives depends on its device.
CENTRED = """
import flax.linen as nn
import gin
import optax
from jax import lax

import research_dp


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train, batch_axes=()):
        x = nn.Dense(10)(x.reshape(x.shape[0], -1))
        return x if train or not batch_axes else x * (1 + 0.1 * lax.axis_index(batch_axes))


@gin.register
def centred() -> research_dp.TrainableModel:
    loss = optax.softmax_cross_entropy_with_integer_labels
    return research_dp.from_linen(Net(), loss=loss, inputs="image", targets="label")
"""
CENTRED_GIN = """
import centred
include 'runs/digits.gin'
train.model = @centred()
train.num_steps = 20
train.log_every = 1
"""


def text_of(done):
    """What a command printed, its lines joined."""
    return re.sub(r"\s+", " ", done.stdout)


@pytest.fixture(scope="module")
def planted(tmp_path_factory, data_dir):
    """Folders of runs of one configuration, each but the first two with something wrong in it."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "one_group.py").write_text(ONE_GROUP)
    (folder / "one_group.gin").write_text(ONE_GROUP_GIN)
    common = {"mlp.widths": (16,), "train.num_steps": 20, "train.log_every": 1}
    runs = {
        "single": ("strategies/single.gin", {}),
        "ddp": ("strategies/ddp.gin", {}),
        EVIL.replace("/", "_"): ("strategies/zero1.gin", {}),
        "bf16_state": ("strategies/fsdp.gin", {"optax.adamw.mu_dtype": "bfloat16"}),
        "seed": ("strategies/ddp.gin", {"train.seed": 1}),
        "batch": ("strategies/ddp.gin", {"train.batch_size": 64}),
        "model": ("strategies/ddp.gin", {"mlp.widths": (32,)}),
        "one_group": (str(folder / "one_group.gin"), {}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(data_dir))
        patch.syspath_prepend(folder)
        patch.chdir(ROOT)
        for name, (strategy, bindings) in runs.items():
            research_dp.run([*BASE, strategy], common | bindings, folder / name, cpu_devices=8)
    (folder / "photos").mkdir()
    return folder


@pytest.mark.slow
def test_each_planted_difference_is_named(main, planted, open_page, monkeypatch):
    names = ["single", "ddp", "bf16_state", "seed", "batch", "model", "one_group", "photos"]
    names.append(EVIL.replace("/", "_"))
    page, content = planted / "page.html", planted / "content.json"
    monkeypatch.syspath_prepend(planted)
    monkeypatch.setenv("COLUMNS", "100")
    flags = ["--bound=20", "--cpu_devices=8", f"--html={page}", f"--json={content}"]
    done = main(*(planted / name for name in names), *flags, name="compare")
    assert done.returncode == 1, done.stderr
    result = json.loads(content.read_text())
    verdicts = {v["a"]: v for v in result["verdicts"] if v["b"] == "single"}
    kinds = {name: v["kind"] for name, v in verdicts.items()}
    assert kinds.pop("photos") == "unknown" and "no run" in verdicts["photos"]["message"]
    assert kinds.pop("ddp") == kinds.pop(names[-1]) == "rounding"
    assert set(kinds.values()) == {"differs"}, kinds
    assert verdicts["one_group"]["message"].startswith("beyond rounding first in ")
    assert verdicts["model"]["message"].startswith("another model: params/")
    for name, parameter in {"seed": "train.seed", "batch": "train.batch_size"}.items():
        assert f"another configuration ({parameter}" in verdicts[name]["message"]
    wrong = {s["name"]: s for s in result["settings"] if s["role"] == "other"}
    assert wrong["train.seed"]["values"]["seed"] == "1"
    assert wrong["train.batch_size"]["places"]["ddp"].startswith("runs/digits.gin:")
    (dtype,) = (s for name, s in wrong.items() if name.startswith("dtype of opt_state/"))
    assert (dtype["values"]["bf16_state"], dtype["values"]["ddp"]) == ("bfloat16", "float32")

    said = text_of(done)
    shown = open_page(page)
    assert not shown.problems and shown.requested == [page.as_uri()]
    html = re.sub(r"\s+", " ", shown.inner_text("body"))
    for text in (
        "train.seed",
        "train.batch_size",
        "another model",
        "bfloat16",
        "one_group",
        EVIL[:8],
    ):
        assert text in said and text in html, text
    assert shown.locator("script:text('alert(1)')").count() == 0


@pytest.mark.slow
def test_runs_that_train_alike_and_evaluate_otherwise_differ(tmp_path, data_dir, monkeypatch):
    """Training agrees within rounding, and evaluation depends on the device.

    A run refuses such a model, unless the order of a batch does not show it.
    """
    monkeypatch.setattr(trainer, "check_batch_loss", lambda strategy, batch: None)
    (tmp_path / "centred.py").write_text(CENTRED)
    (tmp_path / "centred.gin").write_text(CENTRED_GIN)
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))
    monkeypatch.syspath_prepend(tmp_path)
    for stem in ("single", "zero1", "ddp"):
        files = [str(tmp_path / "centred.gin"), f"strategies/{stem}.gin"]
        options = {"cpu_devices": 8, "allow_unused": True}
        research_dp.run(files, {}, tmp_path / stem, **options)
    folders = [tmp_path / stem for stem in ("single", "ddp", "zero1")]
    result = research_dp.compare(folders, bound=20, cpu_devices=8)
    verdicts = {(v.a, v.b): v for v in result.verdicts}
    for stem in ("ddp", "zero1"):
        verdict = verdicts[stem, "single"]
        assert verdict.kind == "differs", verdict
        assert "beyond rounding first in loss of the evaluation at step 20" in verdict.message
    assert verdicts["zero1", "ddp"].kind in ("bits", "rounding"), verdicts["zero1", "ddp"]


@pytest.mark.slow
def test_a_run_that_goes_on_and_one_that_died_are_named(command, planted, tmp_path):
    going = tmp_path / "going"
    flags = [*SMALL, "--gin.train.num_steps=100000", "--gin.train.log_every=1"]
    process = command(*flags, f"--workdir={going}", start_only=True)
    records = going / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (records.exists() and records.read_text().count("\n") > 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    folders = [planted / "ddp", going]
    done = command(*folders, module="research_dp.compare")
    assert "running, step " in text_of(done), done.stderr
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = command(*folders, module="research_dp.compare")
    assert done.returncode == 1 and "died at step " in text_of(done), done.stderr


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_named(main, planted, tmp_path):
    spoilt = ["--gin.train.on_nonfinite=skip", "--gin.train.optimizer=@optax.sgd()"]
    spoilt += ["--gin.optax.sgd.learning_rate=1e38", "--allow_unused", "--gin.train.log_every=1"]
    folder = tmp_path / "nan"
    main(*SMALL, *spoilt, "--gin.train.num_steps=20", f"--workdir={folder}")
    done = main(planted / "ddp", folder, name="compare")
    assert re.search(r"nan: the loss is not finite from step \d+ on\.", text_of(done)), done.stdout


@pytest.mark.slow
def test_strategies_are_trained_planned_and_compared_by_one_command(
    main, tmp_path, open_page, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    page, content = tmp_path / "page.html", tmp_path / "content.json"
    flags = [*SMALL, "--strategies=fsdp,single,zero1", "--steps=20", f"--workdir={tmp_path / 'w'}"]
    flags += [f"--html={page}", f"--json={content}", "--gin_file=options/deterministic.gin"]
    done = main(*flags, name="compare")
    assert done.returncode == 0, done.stderr
    assert "2 runs compared with single: 2 the same bits." in text_of(done)
    tables = done.stdout.partition("2 runs compared")[2].partition("The page is")[0]
    assert max(map(len, tables.splitlines())) <= 80 and "…" not in tables
    result = json.loads(content.read_text())
    assert [v["kind"] for v in result["verdicts"]] == ["bits"] * 3

    plan = tmp_path / "plan.json"
    strategies = "--strategies=fsdp,zero1,single"
    planned = ["--topology=cpu:8", "--gin_file=options/deterministic.gin", f"--json={plan}"]
    own_flags = [flag for flag in SMALL if not flag.startswith("--cpu_devices")]
    done = main(*own_flags, *planned, strategies, name="plan")
    assert done.returncode == 0, done.stderr
    links = result["links"]
    own = links["rates"].index(links["own"])
    for name, row in json.loads(plan.read_text())["strategies"].items():
        run = result["runs"][name]
        assert run["wire_bytes"]["total"] == row["wire_bytes"]["total"]
        assert run["wire_bytes"]["by_kind"] == row["wire_bytes"]["by_kind"]
        assert run["wire_bytes"]["by_axis"] == row["wire_bytes"]["by_axis"]
        assert run["program"]["needed_bytes"] == row["needed_bytes"]
        assert links["seconds"][name][own] == row["predicted_seconds"]
    assert links["rates"][0] == 1e6 and links["rates"][-1] == 4e11

    for scheme in ("light", "dark"):
        shown = open_page(page, scheme=scheme)
        assert not shown.problems and shown.requested == [page.as_uri()]
        headings = [h.inner_text() for h in shown.locator("h2").all()]
        assert headings == [
            "Verdict per pair",
            "Configuration difference",
            "Progress",
            "Loss, evaluation, gradient norm",
            "Memory per device",
            "Wire bytes of a step",
            "Where the time goes",
            "Loss for the bytes",
            "Provenance",
        ]
        charts = shown.locator(".chart")
        assert charts.count() == shown.locator(".chart svg").count() >= 10
    assert not shown.locator("input[name=slider]").count()
    assert "are not predicted: a CPU's rates are nominal" in shown.locator("body").inner_text()

    again = main(*flags, name="compare")
    assert again.returncode == 0 and "First step done" not in again.stdout


@pytest.mark.slow
def test_the_function_returns_what_the_command_prints(planted):
    result = research_dp.compare([planted / "single", planted / "ddp"])
    assert result.title() == "1 run compared with single: 1 not known."
    assert "<table>" in result._repr_html_() and str(result).startswith(result.title())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to compare: give folders of runs, or --gin_file and --strategies"),
        (["a", "--gin_file=runs/digits.gin"], "not both"),
        (["--gin_file=runs/digits.gin", "--strategies=ddp"], "--workdir=DIR is required"),
        (["a", "b", "--dry_run"], "--dry_run is for runs that are to be trained"),
        (["a", ""], "the name of a folder is empty"),
        (
            [*SMALL, "--strategies=ddp", "--steps=2", "--gin.train.num_steps=3", "--workdir=w"],
            "--steps is train.num_steps: give one of them",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(capsys, flags, said):
    assert command_line.main(["compare", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runs": ["a", "./a/"]}, "a is given twice"),
        ({"runs": ["a", "b"], "topology": "h100:8by8"}, "topology 'h100:8by8' is not known"),
        ({"runs": ["a", "b"], "topology": "h900:8x8"}, "topology 'h900:8x8' is not known"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, said):
    with pytest.raises(research_dp.UsageError, match=said):
        research_dp.compare(**options)


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (10, 1), (25, 1), (26, 2), (200, 8)])
def test_a_run_that_is_trained_records_each_step_or_at_most_25_times(monkeypatch, steps, every):
    seen = []

    def show(run, members):
        seen.extend(run.bindings)
        return 0

    monkeypatch.setattr(sweep, "show_all", show)
    flags = [*SMALL, "--strategies=ddp", f"--steps={steps}", "--dry_run"]
    assert command_line.main(["compare", *flags]) == 0
    assert f"train.num_steps = {steps}" in seen and f"train.log_every = {every}" in seen


def test_one_file_cannot_be_the_page_and_the_json(tmp_path, main):
    same = [f"--{kind}={tmp_path / 'same'}" for kind in ("html", "json")]
    assert command_line.main(["compare", "a", "b", *same]) == 2


def test_folders_without_a_run_are_a_mistake(tmp_path):
    with pytest.raises(research_dp.UsageError, match="no run: there is no such folder"):
        research_dp.compare([tmp_path / "a", tmp_path / "b"])


@pytest.mark.slow
def test_a_plan_or_a_bound_that_fails_loses_no_comparison(command, planted):
    """Hours of training may be behind it."""
    folders = [planted / "one_group", planted / "ddp"]
    flags = ["--topology=cpu:9", "--bound=5", "--cpu_devices=4"]
    done = command(*folders, *flags, module="research_dp.compare")  # one_group is not importable
    said = text_of(done)
    assert done.returncode == 1
    assert "The bound of rounding could not be measured: " in said and "one_group" in said
    assert "Nothing could be planned for cpu:9: topology 'cpu:9': 4 CPU devices" in said


def test_a_comparison_by_a_script_leaves_its_devices_for_training(monkeypatch):
    """As a plan does: `find_topology` is told who asks."""

    def result(self, html_file):
        raise research_dp.UsageError(f"shared: {self.is_shared}")

    monkeypatch.setattr(compare_command._Comparing, "result", result)
    with pytest.raises(research_dp.UsageError, match="shared: True"):
        research_dp.compare(["a", "b"], topology="h100:1x8")
    with pytest.raises(research_dp.UsageError, match="shared: False"):
        compare_command.command(runs=["a", "b"], topology="h100:1x8")
