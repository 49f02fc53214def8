"""The page of a plan: its plots by number of devices, and that it opens in a browser."""

import dataclasses
import importlib.util
import json
import re

import pytest

from research_dp.commands import cli
from research_dp.commands.plan import command
from research_dp.errors import UsageError
from research_dp.planning import html_report
from tests.support import browser
from tests.support.plan_rows import GPUS, make_row
from tests.support.runs import DIGITS, WITH_MLP

ODD = "<script>alert(1)</script>"
CPU = dataclasses.replace(GPUS, chip=dataclasses.replace(GPUS.chip, platform="cpu"))


def row(needed, wire=1e9, seconds=0.1):
    return make_row("x", needed_bytes=needed, wire_bytes={"total": wire}, predicted_seconds=seconds)


def page_of(curves, where=GPUS, rows=()):
    return html_report.page(rows, curves, where, [], "run")


def points(text):
    """The columns of the data of the page's charts."""
    return json.loads(re.findall(r'id="page-data">(.*?)</script>', text, re.S)[0])["points"]


def test_the_page_escapes_what_users_wrote_and_has_a_table_of_sizes():
    curves = {"fsdp": {8: row(5e9), 64: row(3e9)}}
    text = html_report.page([curves["fsdp"][64]], curves, GPUS, ["a < b & c"], "<run>")
    assert "a &lt; b &amp; c" in text
    assert "&lt;run&gt;" in text
    assert "<caption>Memory per device in" in text
    assert "<caption>By number of devices" in text
    assert "<caption>By number of devices" not in page_of({"fsdp": {8: row(5e9)}})


def test_equal_curves_share_a_line():
    curve = {8: row(5e9), 16: row(3e9)}
    off = {8: row(5e9), 16: row(3e9, wire=2e9)}
    columns = points(page_of({"a": curve, "b": curve, "c": off}))
    assert columns["strategy"] == ["a, b", "a, b", "c", "c"]
    assert columns["needed"] == [5, 3, 5, 3]


@pytest.mark.parametrize("where", [GPUS, CPU])
def test_times_are_plotted_unless_they_are_nominal(where):
    text = page_of({"a": {n: row(5e9, wire=n * 1e9) for n in (8, 64)}}, where)
    titles = re.findall("<figcaption>(.*?),", text)
    assert titles == [
        *("Memory needed per device", "Wire bytes per device and step"),
        *(("A step", "Exposed communication of a step") if where is GPUS else ()),
    ]
    assert points(text)["wire"] == [8, 64]
    assert points(text).get("step") == ([100, 100] if where is GPUS else None)
    assert ("No time has stragglers" in text) == (where is GPUS)


def test_one_size_has_bars_beside_the_available_memory():
    text = page_of({"a": {64: row(5e9)}, "b": {64: row(3e9)}})
    specs = map(json.loads, re.findall(r"data-spec='(.*?)'", text))
    assert {chart["mark"]["type"] for chart in specs} == {"bar"}
    assert "<figcaption>Memory needed per device, GB (of h100: 78.1 GB)<" in text


def test_where_nothing_compiles_the_page_says_that_nothing_is_known():
    refused = make_row("x", mesh={"data": 8}, needed_bytes=int(90e9))
    text = page_of({"a": {8: refused}})
    assert text.count(": not known") == 3
    assert text.count("<figcaption>") == 1
    text = page_of({"a": {8: make_row("x")}})
    assert text.count(": not known") == 4 and "<script" not in text


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_without_a_library_of_pages_nothing_is_compiled(monkeypatch, tmp_path, module):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    flags = [DIGITS, "--topology=cpu:8", f"--html={tmp_path / 'p.html'}"]
    with pytest.raises(UsageError, match=r"pip install -c constraints.txt -e '\.\[plots\]'"):
        command(**cli.parse("plan", flags))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_in_a_browser(open_page, tmp_path, scheme, width):
    file = tmp_path / "plan.html"
    curve = {n: row(10e9 + 64e9 / n, seconds=0.1 + 1 / n) for n in (8, 16, 64)}
    curves = {"fsdp": curve, ODD: {8: row(9e9), 64: row(2e9)}}
    rows = [dataclasses.replace(curve[64], strategy=name) for name in curves]
    file.write_text(html_report.page(rows, curves, GPUS, [ODD], ODD), encoding="utf-8")
    page = open_page(file, scheme=scheme, width=width)
    assert page.problems == []
    assert page.requested == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.cut(page) == []
    charts = page.locator(".chart").all()
    assert len(charts) == 4
    for chart in charts:
        assert chart.locator(".mark-symbol.role-mark path").count() == 3 + 2
    limit = page.get_by_text("of h100: 78.1 GB")
    assert limit.evaluate("e => getComputedStyle(e).paintOrder") == "stroke"  # what sets it off
    assert ODD in page.locator("h1").inner_text()
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [(0.62e6, 1.75e6), (1.0e6, 1.5e6), (0.9e9, 30e9), (5e6, 4e9), (0.0, 0.0), (1e9, 1.0004e9)],
)
def test_each_axis_has_ticks_that_can_be_read(open_page, tmp_path, memory):
    points = {n: row(y, y, 0.1 * n) for n, y in zip((8, 64), memory, strict=True)}
    file = tmp_path / "plan.html"
    file.write_text(page_of({"a": points}, CPU), encoding="utf-8")
    page = open_page(file)
    assert page.problems == []
    visible = "all => all.filter(e => e.getAttribute('opacity') !== '0').map(e => e.textContent)"
    for chart in page.locator(".chart").all():
        shown = chart.locator(".role-axis-label text").evaluate_all(visible)
        x, y = shown[: len(points)], list(filter(None, shown[len(points) :]))
        assert x == list(map(str, points))
        least = 3 if len(set(memory)) > 1 else 1
        assert least <= len(y) <= 20 and len(set(y)) == len(y)
        if memory[-1] == 1.75e6:
            assert max(map(float, y)) > 1.5
    page.close()


@pytest.mark.slow
def test_the_command_writes_a_page(open_page, tmp_path, capsys):
    file = tmp_path / "plan.html"
    flags = [*WITH_MLP, "--topology=cpu:8", "--strategies=ddp,fsdp,single", "--sizes=2"]
    assert command(**cli.parse("plan", [*flags, f"--html={file}"])) == 0
    assert capsys.readouterr().out.endswith(f"\nThe page is {file}\n")
    page = open_page(file)
    assert page.problems == [] and page.locator(".chart svg").count() == 2
    page.close()
