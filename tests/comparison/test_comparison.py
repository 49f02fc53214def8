"""Comparisons of folders that tests write: verdicts, configurations, records, tables, JSON."""

import dataclasses
import gzip
import json
import re
import time

import numpy as np
import pytest

from examples import figures
from research_dp.certification.noise import Noise
from research_dp.comparison import chart_data, differences, html_report, runs, verdicts
from research_dp.comparison.comparison import Comparison
from research_dp.comparison.verdicts import Figure, Judge
from research_dp.console import put
from research_dp.runs import facts
from research_dp.runs.manifest import Damaged, Leaf, Manifest, Progress
from tests.support.plan_rows import make_row
from tests.support.repository import json_names
from tests.support.run_folders import losses, write_run

ALL_REDUCE = """HloModule step

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[8]{0} parameter(0)
  ROOT y = f32[8]{0} all-reduce(x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=sum
}
"""
EPS = float(np.finfo(np.float32).eps)


def noise(steps=100, spread=1e-3, **evaluation):
    series = np.ones(steps)
    at_the_end = {steps: evaluation} if evaluation else {}
    return Noise(series, series, series * spread, series * spread, {}, EPS, at_the_end)


def judged(*folders, noise=(), varied=()):
    """The runs of folders, what differs, and the verdict of the second on the first."""
    found = runs.read(folders)
    differing = differences.differences(found, varied)
    verdict = Judge(differing, noise).verdict(found[1], found[0])
    return found, differing, verdict


def test_equal_records_and_fingerprints_are_the_same_bits(tmp_path):
    _, differing, verdict = judged(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert (differing, verdict.kind) == ([], "bits")
    assert verdict.message == "the same bits at step 100, and in 20 records"


def with_checkpoints(run, shapes):
    """The run with checkpoints: step -> path -> shape."""
    progress = Progress(batch_size=1, seed=0, order="", window={})
    vars(run)["manifests"] = {}
    for step, paths in shapes.items():
        leaves = {path: Leaf(shape, "float32", "aa") for path, shape in paths.items()}
        run.manifests[step] = Manifest(step=step, progress=progress, leaves=leaves, origin={})


@pytest.mark.parametrize(("more", "kind"), [("opt_state/error", "bits"), ("params/v", "differs")])
def test_a_strategys_optimizer_may_have_state_of_its_own(tmp_path, more, kind):
    a, b = runs.read([write_run(tmp_path / name) for name in "ab"])
    with_checkpoints(a, {100: {"params/w": (4,)}})
    with_checkpoints(b, {100: {"params/w": (4,), more: (4,)}})
    assert Judge([]).verdict(a, b).kind == kind


def test_another_model_is_named_by_the_newest_checkpoints(tmp_path):
    a, b = runs.read([write_run(tmp_path / name) for name in "ab"])
    with_checkpoints(a, {50: {"params/w": (4,)}, 100: {"params/w": (4,), "opt_state/m": (1,)}})
    with_checkpoints(b, {50: {"params/w": (4,)}, 100: {"params/w": (8,)}})
    verdict = Judge([]).verdict(a, b)
    assert verdict.kind == "differs"
    assert verdict.message == "another model: params/w is (4,) in a, (8,) in b"


def test_one_loss_that_differs_by_a_bit_is_not_the_same_bits(tmp_path):
    other = losses()
    other[7] = float(np.nextafter(other[7], 1))
    _, _, verdict = judged(write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=other))
    assert verdict.kind == "unknown"
    assert verdict.message.startswith("they differ from step 40 on: loss ")
    assert verdict.message.endswith("--bound=N measures what rounding explains")


def test_numbers_that_differ_are_printed_so():
    said = "they differ in the evaluation at step 60: loss 0.5 and "
    assert str(Figure("loss", None, 60, 0.5, 0.5004)) == f"{said}0.5004"
    assert str(Figure("loss", None, 60, 0.5, 0.5 + 2**-25)) == f"{said}0.50000003"
    assert str(Figure("loss", None, 60, 0.5, 0.5 + 2**-40)) == f"{said}0.50000000000090949"


def test_other_parameters_with_the_same_records_are_not_the_same_bits(tmp_path):
    _, _, verdict = judged(write_run(tmp_path / "a"), write_run(tmp_path / "b", fingerprint="bb"))
    assert (verdict.kind, "fingerprints" in verdict.message) == ("unknown", True)


@pytest.mark.parametrize(("offset", "kind"), [(0.009, "rounding"), (0.03, "differs")])
def test_a_bound_of_as_many_steps_judges_the_last_record(tmp_path, offset, kind):
    other = [*losses()[:-1], losses()[-1] + offset]
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=other, fingerprint="bb")
    assert judged(*folders, noise=[noise(spread=2e-3)])[2].kind == kind


@pytest.mark.parametrize(("offset", "kind"), [(0.009, "rounding"), (0.03, "differs")])
def test_a_measured_bound_decides(tmp_path, offset, kind):
    other = [x + offset for x in losses()]
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=other, fingerprint="bb")
    _, _, verdict = judged(*folders, noise=[noise(spread=2e-3)])
    assert verdict.kind == kind
    assert ("loss at step 5: " in verdict.message) == (kind == "differs")


def test_another_seed_differs_with_its_place_and_no_bound_excuses_it(tmp_path):
    other = {"train.seed": ("1", "mine.gin:2", False)}
    b = write_run(tmp_path / "b", loss=losses(seed=1), bindings=other)
    _, (setting,), verdict = judged(write_run(tmp_path / "a"), b, noise=[noise(spread=9)])
    assert (setting.name, setting.role) == ("train.seed", "other")
    assert setting.values == {"a": "0", "b": "1"} and setting.places["b"] == "mine.gin:2"
    assert verdict.kind == "differs"
    assert verdict.message.startswith("another configuration (train.seed); they differ from step")


def test_what_is_varied_on_purpose_is_no_mistake(tmp_path):
    other = {"train.seed": ("1", None, False)}
    b = write_run(tmp_path / "b", loss=losses(seed=1), bindings=other)
    _, (setting,), verdict = judged(write_run(tmp_path / "a"), b, varied=["train.seed"])
    assert (setting.role, verdict.kind) == ("varied", "varied")


def test_what_the_strategy_binds_may_differ(tmp_path):
    other = {"shard_params.min_weight_size": ("1024", "strategies/fsdp.gin:9", True)}
    _, (setting,), verdict = judged(
        write_run(tmp_path / "a"), write_run(tmp_path / "b", bindings=other)
    )
    assert (setting.role, verdict.kind) == ("strategy", "bits")
    assert setting.values == {"a": "unbound", "b": "1024"}


def test_what_only_one_of_two_runs_binds_for_its_strategy_is_no_excuse(tmp_path):
    folders = [
        write_run(tmp_path / name, bindings={"relu.limit": (name, None, name == "a")})
        for name in "ab"
    ]
    _, (setting,), _ = judged(*folders)
    assert setting.role == "other"


def test_the_bound_of_two_precisions_is_that_of_the_coarser_one(tmp_path):
    rounded = {"sync_gradients.dtype": ("'bfloat16'", None, True)}
    a = write_run(tmp_path / "a")
    b = write_run(
        tmp_path / "b", loss=[x + 0.1 for x in losses()], bindings=rounded, fingerprint="bb"
    )
    coarse = dataclasses.replace(noise(spread=0.02), precision=2.0**-7)
    _, _, verdict = judged(a, b, noise=[noise(spread=1e-3), coarse])
    assert verdict.kind == "rounding", verdict.message


def test_another_algorithm_says_so(tmp_path):
    sentence = "parameters are averaged each 8 steps"
    b = write_run(tmp_path / "b", loss=losses(seed=3), algorithm=sentence)
    _, _, verdict = judged(write_run(tmp_path / "a"), b)
    assert verdict.kind == "design" and sentence in verdict.message


def test_a_loss_that_is_not_finite_is_named_with_its_step(tmp_path):
    other = losses()
    other[3:] = [float("nan")] * len(other[3:])
    (_, b), _, verdict = judged(
        write_run(tmp_path / "a"), write_run(tmp_path / "b", loss=other), noise=[noise()]
    )
    assert b.first_nonfinite == 20
    assert (verdict.kind, verdict.message) == (
        "differs",
        "the loss is not finite: b from step 20 on",
    )


def test_other_versions_and_commits_are_listed_and_numbers_decide(tmp_path):
    b = write_run(tmp_path / "b", start={"commit": "9", "versions": {"jax": "0.2"}})
    _, differing, verdict = judged(write_run(tmp_path / "a"), b)
    assert {s.name: s.values["b"] for s in differing} == {"commit": "9", "version of jax": "0.2"}
    assert {s.role for s in differing} == {"version"} and verdict.kind == "bits"


def test_records_that_are_cut_off_or_odd_are_left_out(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n"x"\n{"split": "train", "step": "five"}\n{"split": "train", "ste')
    (run,) = runs.read([folder])
    assert run.column("train", "step").tolist() == list(range(5, 101, 5))
    assert run.column("train", "accuracy").size == 0 and run.last("eval", "accuracy") == 0.9


def test_names_are_as_long_as_it_takes(tmp_path):
    paths = [tmp_path / x for x in ("one/run", "two/run", "two/other")]
    assert runs.names(paths) == ["one/run", "two/run", "two/other"]
    assert runs.names(paths[1:]) == ["run", "other"]


def compared(*folders):
    found = runs.read(folders)
    differing = differences.differences([run for run in found if run.is_run])
    known = [run for run in found if run.is_run]
    judge = Judge(differing)
    verdicts = [judge.verdict(run, known[0]) for run in found if run is not known[0]]
    return Comparison(found, known[0], differing, verdicts)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    (tmp_path / "photos").mkdir()
    result = compared(write_run(tmp_path / "a"), tmp_path / "photos", tmp_path / "nowhere")
    assert not result.is_clean
    text = re.sub(r"\s+", " ", str(result))
    assert "photos" in text and "config.gin" in text and "nowhere" in text


def test_times_of_other_devices_are_not_ranked_and_cpus_are_marked(tmp_path):
    gpu = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}
    result = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", start=gpu))
    notes = " ".join(result.notes())
    assert "do not rank their times against each other" in notes
    assert "8 x NVIDIA H100 80GB HBM3" in notes and "measured on a CPU" in notes
    alone = compared(tmp_path / "b")
    assert not [note for note in alone.notes() if "CPU" in note or "rank" in note]


def test_json_is_strict_and_has_what_is_shown(tmp_path):
    nan = [1.0, float("nan")]
    other = {"x.y": ("1", "f:1", False)}
    b = write_run(tmp_path / "b", loss=nan, bindings=other, fingerprint="bb")
    content = json.loads(
        json.dumps(compared(write_run(tmp_path / "a"), b).as_json(), allow_nan=False)
    )
    assert content["runs"]["b"]["records"]["train"]["loss"] == [1.0, None]
    assert content["settings"][0]["places"] == {"b": "f:1"}
    assert content["verdicts"][0]["kind"] == "differs" and content["clean"] is False


def test_the_page_describes_the_json_and_an_example_draws_it(tmp_path):
    content = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b")).as_json()
    assert {*content, *content["runs"]["a"]} <= json_names("compare.md")
    sizes = dict(params_bytes=4e6, opt_bytes=8e6, temp_bytes=2e6)
    rows = {name: make_row(name, **sizes).as_json() for name in ("ddp", "fsdp")}
    rows["spmd"] = make_row("spmd", problem="refused: x").as_json()
    assert {*rows["ddp"]} <= json_names("plan.md")
    for chart, lines in ((figures.loss(content), 2), (figures.memory({"strategies": rows}), 6)):
        chart.save(tmp_path / "figure.svg")
        drawn = (tmp_path / "figure.svg").read_text()
        assert drawn.count('aria-roledescription="line mark"') in (lines, 0)
        assert drawn.count('aria-roledescription="bar"') in (lines, 0)
        assert "aria-roledescription" in drawn


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_a_terminal(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    long = write_run(
        tmp_path / "fsdp_keep+bf16_collectives+h100-learning_rate=0.0003",
        loss=losses(seed=1),
        bindings={
            "warmup_cosine.peak_value": ("0.0003", "some/long/path/of/a/run/file.gin:123", False)
        },
    )
    put(*compared(write_run(tmp_path / "single"), long).parts(verbose=True))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed and long.name in printed


@pytest.mark.slow
def test_a_hundred_long_runs_make_a_small_page_quickly(tmp_path):
    folders = [
        write_run(tmp_path / f"run{i:03}", loss=losses(10_000, i), step=10_000, fingerprint=f"{i}")
        for i in range(100)
    ]
    start = time.monotonic()
    page = html_report.page(compared(*folders))
    assert time.monotonic() - start < 30 and len(page.encode()) < 5e6
    assert all(f"run{i:03}" in page for i in range(100))


@pytest.mark.slow
def test_what_configurations_say_is_text_on_the_page(tmp_path, open_page):
    evil = "<script>alert(1)</script>"
    bindings = {evil: (evil, evil, True), "train.seed": (f"'{evil}'", evil, False)}
    start = {"command": evil, "commit": evil, "device_kind": evil, "versions": {evil: evil}}
    b = write_run(tmp_path / "b", bindings=bindings, start=start, strategy=evil, algorithm=evil)
    page = tmp_path / "page.html"
    page.write_text(html_report.page(compared(write_run(tmp_path / "a"), b)))
    shown = open_page(page)
    assert not shown.problems and shown.inner_text("body").count(evil) >= 6


@pytest.mark.parametrize(("spoilt", "kind"), [("b", "differs"), ("ab", "rounding")])
def test_nan_in_another_metric_than_the_loss_is_beyond_any_bound_in_one_run(tmp_path, spoilt, kind):
    """In both it is alike: the step was skipped."""
    a, b = (write_run(tmp_path / name, fingerprint=name) for name in "ab")
    for name in spoilt:
        records = tmp_path / name / "metrics.jsonl"
        text = records.read_text()
        records.write_text(re.sub(r'"grad_norm": [\d.]+', '"grad_norm": null', text, count=1))
    _, _, verdict = judged(a, b, noise=[noise(spread=9)])
    assert verdict.kind == kind
    assert ("grad_norm at step 5" in verdict.message) == (kind == "differs")


def test_a_metric_that_one_run_lacks_is_not_compared(tmp_path):
    a, b = (write_run(tmp_path / name) for name in "ab")
    records = b / "metrics.jsonl"
    records.write_text(re.sub(r', "grad_norm": [-\d.e]+', "", records.read_text()))
    assert judged(a, b)[2].kind == "bits"


@pytest.mark.parametrize(
    ("offset", "kind", "said"),
    [
        (0.1, "rounding", "params/w: 0.4 times the allowed (1.0e-01 of its size)"),
        (1.0, "differs", "first in params/w: 4 times the allowed (1.0e+00 of its size)"),
        (None, "unknown", "; a checkpoint of step 100 cannot be read: it is cut"),
    ],
)
def test_a_measured_bound_decides_on_parameters(tmp_path, monkeypatch, offset, kind, said):
    a, b = runs.read([write_run(tmp_path / name, fingerprint=name) for name in "ab"])
    for run in (a, b):
        with_checkpoints(run, {100: {"params/w": (4,)}})

    def read(folder, step):
        if offset is None:
            raise Damaged("it is cut")
        return {"w": np.ones(4) + offset * (folder.name == "b")}

    monkeypatch.setattr(verdicts, "read_params", read)
    bound = dataclasses.replace(noise(), params={"w": (0.5, 2.0)})
    verdict = Judge([], [bound]).verdict(b, a)
    assert verdict.kind == kind and said in verdict.message


def test_a_bound_without_parameters_says_so(tmp_path):
    b = write_run(tmp_path / "b", fingerprint="bb")
    _, _, verdict = judged(write_run(tmp_path / "a"), b, noise=[noise(steps=50)])
    assert verdict.kind == "rounding" and "in the first 50 steps" in verdict.message
    assert "; parameters were not compared: not both saved step 50; 0 of 1 eval" in verdict.message


def evaluated(folder, **metrics):
    """A run with these metrics in its evaluation."""
    write_run(folder)
    records = folder / "metrics.jsonl"
    *lines, last = records.read_text().splitlines()
    changed = json.dumps({**json.loads(last), **metrics, "eval_seconds": len(str(folder))})
    records.write_text("\n".join([*lines, changed]))
    return folder


def test_runs_that_evaluate_alike_are_the_same_whatever_the_evaluation_took(tmp_path):
    assert judged(evaluated(tmp_path / "a"), evaluated(tmp_path / "longer"))[2].kind == "bits"


@pytest.mark.parametrize(
    ("metric", "value", "kind"),
    [
        ("loss", 0.5009, "rounding"),
        ("loss", 0.52, "differs"),
        ("loss", float("nan"), "differs"),
        ("accuracy", 0.91, "rounding"),
        ("accuracy", 0.7, "differs"),
    ],
)
def test_a_measured_bound_decides_on_evaluations(tmp_path, metric, value, kind):
    """Training alike to the bit is no verdict: a model may evaluate in another way."""
    a, b = write_run(tmp_path / "a"), evaluated(tmp_path / "b", **{metric: value})
    _, _, unmeasured = judged(a, b)
    assert unmeasured.kind == "unknown"
    assert (
        f"differ in the evaluation at step 100: {metric} {value:.7g} and 0." in unmeasured.message
    )
    _, _, verdict = judged(a, b, noise=[noise(loss=1e-3, accuracy=0.02)])
    assert verdict.kind == kind
    if kind == "differs":
        assert f"first in {metric} of the evaluation at step 100: " in verdict.message


def test_metrics_that_are_nan_in_both_runs_are_alike_and_in_one_of_them_never(tmp_path):
    nan = float("nan")
    a = evaluated(tmp_path / "a", rare=nan, loss=0.5)
    both, one = (evaluated(tmp_path / n, rare=x, loss=0.5001) for n, x in (("b", nan), ("c", 0.1)))
    bound = [noise(loss=1e-2)]
    assert judged(a, both, noise=bound)[2].kind == "rounding"
    verdict = judged(a, one, noise=bound)[2]
    assert verdict.kind == "differs" and "rare of the evaluation at step 100" in verdict.message


def test_thinned_curves_have_the_peaks_of_each_metric(tmp_path):
    loss = losses(20_000)
    run = write_run(tmp_path / "a", loss=loss, step=20_000)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[777] = re.sub(r'"grad_norm": [-\d.e]+', '"grad_norm": 1e6', lines[777])
    (run / "metrics.jsonl").write_text("\n".join(lines))
    columns = chart_data.curves(runs.read([run]) * 10, "train")
    assert len(columns["run"]) <= 30_000 and max(columns["grad_norm"]) == 1e6
    assert max(columns["loss"]) == max(loss) and min(columns["loss"]) == min(loss)
    assert (min(columns["step"]), max(columns["step"])) == (1, 20_000)


def test_of_runs_with_equal_bytes_and_loss_all_are_on_the_front(tmp_path):
    found = runs.read([write_run(tmp_path / name) for name in "abc"])
    found = [dataclasses.replace(run, wire=runs.WireBytes(1.0, {}, {})) for run in found]
    found[2] = dataclasses.replace(found[2], wire=runs.WireBytes(2.0, {}, {}))
    columns, loss = chart_data.front(found)
    assert (columns["best"], loss) == ([1, 1, 0], "evaluation loss")


def test_of_runs_with_equal_bytes_the_lowest_loss_is_on_the_front(tmp_path):
    found = runs.read([evaluated(tmp_path / "a", loss=0.6), evaluated(tmp_path / "b", loss=0.5)])
    found = [dataclasses.replace(run, wire=runs.WireBytes(1.0, {}, {})) for run in found]
    columns, _ = chart_data.front(found)
    assert (columns["run"], columns["best"]) == (["b", "a"], [1, 0])


BOUND = {"value": "1", "place": None, "of_strategy": False}
DAMAGES = {
    "bindings": (
        *([], "x", 1, {"a": 1}, {"a": {"value": "1"}}),
        *({"a": {**BOUND, "value": [1]}}, {"a": {**BOUND, "place": {}}}),
    ),
    "mesh": (None, [], 1, {"data": "x"}, {}, {"data": 3}),
    "starts": ({}, 1, [1], [None], [{"versions": []}]),
    "program": ([], "x", 1),
    "bytes_per_device": (None, [], {"params": "x"}),
    "algorithm": ([], {}),
    "format": (None, "1", 2),
}


@pytest.mark.parametrize(("field", "values"), DAMAGES.items())
def test_a_damaged_record_of_a_run_ends_no_comparison(tmp_path, field, values):
    a, good = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    program = gzip.compress(ALL_REDUCE.encode())
    (good / "train_step.hlo.gz").write_bytes(program)
    facts = json.loads((good / "run.json").read_text())
    for value in values:
        (good / "run.json").write_text(json.dumps({**facts, field: value}))
        result = compared(a, good)
        assert str(result) and json.dumps(result.as_json())
        assert any(re.search("b: (its run.json is|the bytes)", n) for n in result.notes()), value


@pytest.mark.parametrize("name", ["run.json", "summary.json", "metrics.jsonl", "train_step.hlo.gz"])
@pytest.mark.parametrize("damage", ["gone", "cut", "a folder", "bytes"])
def test_a_damaged_file_of_a_run_ends_no_comparison(tmp_path, name, damage):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (b / "train_step.hlo.gz").write_bytes(gzip.compress(ALL_REDUCE.encode()))
    content = (b / name).read_bytes()
    (b / name).unlink()
    if damage == "a folder":
        (b / name).mkdir()
    elif damage != "gone":
        half = len(content) // 2
        (b / name).write_bytes(content[:half] + (b"" if damage == "cut" else b"\xff" * half))
    assert str(compared(a, b))


def test_a_program_that_inflates_beyond_a_limit_is_not_read(tmp_path, monkeypatch):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    (b / "train_step.hlo.gz").write_bytes(gzip.compress(ALL_REDUCE.encode() + b" " * 2**20))
    monkeypatch.setattr(facts, "_MOST_TEXT", 2**20)
    said = "b: .*not known: train_step.hlo.gz inflates to more than 0.000976562 GiB."
    assert any(re.fullmatch(said, note) for note in compared(a, b).notes())


@pytest.mark.parametrize("seconds", [None, [], "x", 1.5, {"a": "b"}])
def test_odd_values_in_a_summary_are_not_read(tmp_path, seconds):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    summary = {"step": 100, "seconds": seconds, "steps_per_second": "fast", "warnings": 3}
    (b / "summary.json").write_text(json.dumps(summary))
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"split": ["train"], "step": 101}\n')
        file.write(f'{{"split": "train", "step": 101, "loss": {10**400}}}\n')
    assert str(compared(a, b))


def test_names_do_not_move_the_cursor(tmp_path):
    found = runs.read([write_run(tmp_path / "a\n\x1b[31mred")])
    assert found[0].name == r"a\n\x1b[31mred"
