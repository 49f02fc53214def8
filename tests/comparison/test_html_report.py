"""The page of a comparison: axes, colours and differences of its charts, and what fits a screen."""

import dataclasses
import gzip
import itertools
import json
import re

import pytest

from research_dp import html_page
from research_dp.comparison import chart_data, differences, html_report, runs, tables
from research_dp.comparison.comparison import Comparison, LinkTimes
from research_dp.comparison.verdicts import Judge
from research_dp.console import Table
from research_dp.planning.row import Row
from tests.support import browser
from tests.support.run_folders import losses, write_run

PROGRAM = """HloModule step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  ROOT %y = f32[1000]{0} all-reduce(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""
LONG = "fsdp_keep+bf16_collectives+h100-learning_rate=0.0003"
SECONDS = dict(data=1.0, dispatch=2.0, device=3.0, evaluation=1.0, saves=4.0, total=12.0)


def folder(path, **facts):
    """A run with all that the page draws: wire bytes, seconds, records."""
    write_run(path, **facts)
    (path / "train_step.hlo.gz").write_bytes(gzip.compress(PROGRAM.encode()))
    summary = path / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "seconds": SECONDS}))
    return path


def compared(*folders):
    found = runs.read(folders)
    judge = Judge(differing := differences.differences(found))
    verdicts = [judge.verdict(run, found[0]) for run in found[1:]]
    return Comparison(found, found[0], differing, verdicts)


def charts(page):
    """Title -> specification of all charts of a page."""
    specs = map(json.loads, re.findall(r"data-spec='(.*?)'", page))
    return {chart["description"]: chart for chart in specs}


def test_the_difference_to_the_reference_has_a_chart(tmp_path):
    loss = losses()
    off = [loss[0] + 2e-7, *loss[1:9], float("nan"), *loss[10:19], loss[19] - 2e-3]
    folders = [write_run(tmp_path / name, loss=x) for name, x in (("a", loss), ("b", off))]
    a, b = runs.read(folders)
    found = chart_data.curves([a, b], "train", a)["difference"]
    assert all(x != x for x in (*found[:20], found[29]))  # of the reference, and of no number
    assert found[20] == pytest.approx(2e-7) and found[39] == pytest.approx(-2e-3)
    assert not any(found[21:29])
    chart = charts(html_report.page(compared(*folders)))["Training loss minus that of a"]
    y = chart["layer"][0]["encoding"]["y"]
    assert y["scale"] == {"type": "symlog", "constant": pytest.approx(1e-7), "padding": 8}
    assert {0, 1e-3, -1e-3} <= set(y["axis"]["values"])


def test_runs_of_the_same_bits_have_no_chart_of_differences(tmp_path):
    page = html_report.page(compared(write_run(tmp_path / "a"), write_run(tmp_path / "b")))
    assert not [title for title in charts(page) if "minus" in title]


def test_a_colour_is_that_of_a_run_or_of_a_part(tmp_path):
    page = html_report.page(compared(folder(tmp_path / "a"), folder(tmp_path / "b")))
    of_runs, of_parts = set(), set()
    for chart in charts(page).values():
        for part in (chart, *chart.get("layer", ())):
            color = part.get("encoding", {}).get("color", {})
            colors = of_runs if color.get("field") == "run" else of_parts
            colors.update(color.get("scale", {}).get("range", ()))
    assert len(of_runs) == 2 and len(of_parts) >= 4 and not of_runs & of_parts


def test_the_page_has_the_notes_and_the_tables_of_the_command(tmp_path):
    strategy = {"data_parallel.engine": ("'compiled'", "strategies/fsdp.gin:3", True)}
    bindings = {"a": {}, "b": strategy, "c": {"train.seed": ("7", "runs/digits.gin:4", False)}}
    found = runs.read([folder(tmp_path / name, bindings=bindings[name]) for name in bindings])
    judge = Judge(differing := differences.differences(found))
    verdicts = [judge.verdict(a, b) for a, b in itertools.combinations(reversed(found), 2)]
    planned = {"a": Row("ddp", needed_bytes=5e6)}
    result = Comparison(found, found[0], differing, verdicts, "t:8", planned=planned)
    page = html_report.page(result)
    shown = [part for part in result.parts(verbose=True) if isinstance(part, Table)]
    assert all(html_page.table_html(part) in result._repr_html_() for part in shown)
    shown.append(tables.pairs_table(found, verdicts))
    assert {s.role for s in differing} >= {"other", "strategy"} and len(shown) == 9
    assert [part.title for part in shown if html_page.table_html(part) not in page] == []
    notes = list(result.notes())
    assert notes and all(f"<li>{html_page.inline(note)}</li>" in page for note in notes)
    assert "<summary>1 parameters differ as the strategies do</summary>" in page
    assert "Nothing differs." not in page and "--topology=T" not in page


def test_the_page_says_what_is_not_known(tmp_path):
    page = html_report.page(compared(*(write_run(tmp_path / name, loss=[]) for name in "ab")))
    for text in (
        *("Nothing differs.", "No run has a record yet.", "No device reported the memory"),
        *("is hidden behind compute, are known with --topology=T.", "No run recorded it yet."),
        "by the speed of the link are known with --topology=T.",
    ):
        assert text in page


@pytest.mark.parametrize("is_timed", [False, True])
def test_times_of_a_cpu_are_not_predicted(tmp_path, is_timed):
    result = dataclasses.replace(
        compared(write_run(tmp_path / "a"), write_run(tmp_path / "b")),
        topology="t:8",
        is_timed=is_timed,
        planned={"a": Row("ddp", predicted_seconds=0.5, predicted_parts={"exposed": 0.25})},
        links=LinkTimes([1e9, 4e10], 4e10, {"a": [0.7, 0.5]}),
    )
    page = html_report.page(result)
    for text in ("step ms", "exposed ms", "predicted ms of a step", "Speed of the slowest link"):
        assert (text in page) == is_timed, text
    assert ("step ms" in str(result)) == is_timed
    told = "Times for t:8 are not predicted: a CPU's rates are nominal."
    assert (told in " ".join(result.notes())) != is_timed


@pytest.mark.slow
def test_axes_can_be_read_where_all_values_are_equal(tmp_path, open_page):
    folders = [folder(tmp_path / name, loss=[0.4905] * 3) for name in ("a", "b")]
    file = tmp_path / "page.html"
    file.write_text(html_report.page(compared(*folders)))
    page = open_page(file)
    for _ in range(2):  # linear, logarithmic
        loss = page.locator(".chart").first.locator(".role-axis").last
        assert loss.locator(".role-axis-label text").all_text_contents() == ["0.4905"]
        page.get_by_label("logarithmic").first.click()
        page.wait_for_timeout(500)
    front = page.locator(".chart").last.locator(".role-axis-label text").all_text_contents()
    assert len({*front}) == len(front) >= 6  # bytes, evaluation loss
    assert all(float(text) > 0 for text in front)
    assert page.problems == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut(tmp_path, open_page, width):
    folders = [folder(tmp_path / name, loss=losses(seed=1)) for name in ("single", LONG)]
    file = tmp_path / "page.html"
    file.write_text(html_report.page(compared(*folders)))
    page = open_page(file, width=width)
    assert page.problems == [] and browser.cut(page) == []
    page.close()


@pytest.mark.slow
def test_the_slider_shows_the_predicted_seconds_of_each_speed(tmp_path, open_page):
    result = dataclasses.replace(
        compared(write_run(tmp_path / "a"), write_run(tmp_path / "b")),
        topology="t:8",
        is_timed=True,
        links=LinkTimes([1e9, 1e10, 4e10], 1e10, {"a": [0.7, 0.5, 0.25], "b": [0.9, 0.5, 0.4]}),
    )
    file = tmp_path / "page.html"
    file.write_text(html_report.page(result))
    page = open_page(file)
    chart = page.locator(".chart").last
    slider = chart.get_by_label("Speed of the slowest link")
    slider.focus()
    for key, speed, expected in (
        ("Home", "1 Gbit/s", (700, 900)),
        ("ArrowRight", "10 Gbit/s (its own)", (500, 500)),
        ("End", "40 Gbit/s", (250, 400)),
    ):
        page.keyboard.press(key)
        page.wait_for_timeout(300)
        assert chart.locator(".role-title-text text").text_content() == speed
        bars = chart.locator(".mark-rect path").all()
        told = [bar.get_attribute("aria-label") for bar in bars]
        assert [int(re.search(r"step: (\d+)", text)[1]) for text in told] == list(expected)
    assert page.problems == []
    page.close()
