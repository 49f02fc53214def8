"""The page of a plan: what it says of compiled and extrapolated points, and its plots."""

import dataclasses
import html
import importlib.util
import json
import math
import re

import browser
import pytest
from test_planning_extrapolation import GPUS, row, states_on

from research_dp.analysis import topologies
from research_dp.commands import cli
from research_dp.commands.plan import command
from research_dp.errors import UsageError
from research_dp.planning import extrapolation, html_report
from research_dp.planning.extrapolation import Curve, Point

ODD = "<script>alert(1)</script>"


def page_of(curves, where=GPUS, rows=()):
    return html_report.page(rows, curves, where, [], "run")


def told(text):
    """What the page's charts are made of."""
    return json.loads(re.findall(r'id="page-data">(.*?)</script>', text, re.S)[0])


def test_the_page_says_what_was_compiled_and_escapes_what_users_wrote():
    rows = [row(n) for n in (16, 64)]
    curves = [extrapolation.curve(rows, states_on([8, 16, 64]), GPUS)]
    text = html_report.page(rows[1:], curves, GPUS, ["a < b & c"], "<run>")
    assert "a &lt; b &amp; c" in text
    assert "&lt;run&gt;" in text
    cell = '<td class="prose" data-head="source">{}</td>'
    assert text.count(cell.format('<span class="bold">compiled</span>')) == 2
    assert text.count(cell.format("extrapolated")) == 1
    for name, meaning in html_report.FORMULAS:
        assert f"<dt>{name}</dt><dd>{meaning}" in html.unescape(text)
    assert "<caption>Memory per device in" in text
    one = html_report.page(rows[1:], [Curve("fsdp", curves[0].points)], GPUS, [], "run")
    assert "the formulas are not checked" in one


def test_equal_curves_share_a_line():
    points = (Point(8, True, 1, 5e9, 1e9, 0.1), Point(16, False, 1, 3e9, 1e9, 0.2))
    off = (points[0], dataclasses.replace(points[1], wire_bytes=2e9))
    text = page_of([Curve("a", points), Curve("b", points), Curve("c", off)])
    columns = told(text)["data"]["points"]["columns"]
    assert columns["strategy"]["texts"] == ["a, b", "c"]
    assert columns["source"]["texts"] == ["compiled", "extrapolated"]
    assert columns["needed"]["numbers"] == [5, 3, 5, 3]


def test_lines_are_solid_between_compiled_points():
    points = (Point(n, n in (16, 64), 1, 5e9, n * 1e9, 0.1) for n in (8, 16, 32, 64, 128))
    page = told(page_of([Curve("a", tuple(points))]))
    columns = page["data"]["points"]["columns"]
    assert columns["joined"]["numbers"] == [False, True, True, True, False]
    for chart in page["groups"][0]["charts"]:
        lines = [layer for layer in chart["layer"] if layer["mark"]["type"] == "line"]
        (solid,) = (line for line in lines if "strokeDash" not in line["mark"])
        assert solid["transform"] == [{"filter": "datum.joined"}]


def test_wire_bytes_are_plotted_where_times_are_nominal():
    points = tuple(Point(n, True, 1, 5e9, n * 1e9, 0.1) for n in (8, 64))
    cpu = dataclasses.replace(GPUS, chip=dataclasses.replace(GPUS.chip, platform="cpu"))
    for where, title, unit in ((GPUS, "A step, ms", "step"), (cpu, "Wire bytes", "wire")):
        text = page_of([Curve("a", points)], where)
        assert f"<figcaption>{title}" in text
        (_, other) = told(text)["groups"][0]["charts"]
        assert other["layer"][0]["encoding"]["y"]["field"] == unit
    assert told(text)["data"]["points"]["columns"]["wire"]["numbers"] == [8, 64]


def test_where_nothing_compiles_the_page_says_that_nothing_is_known():
    points = (Point(8, False, 1, None, None, None),)
    assert page_of([Curve("a", points)]).count(": not known") == 2


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_without_a_library_of_pages_nothing_is_compiled(monkeypatch, tmp_path, module):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    flags = ["--gin_file=gin/runs/digits.gin", "--topology=cpu:8", f"--html={tmp_path / 'p.html'}"]
    with pytest.raises(UsageError, match=r"pip install -c constraints.txt -e '\.\[plots\]'"):
        command(**cli.parse("plan", flags))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_in_a_browser(open_page, tmp_path, scheme, width):
    file = tmp_path / "plan.html"
    rows = [row(n) for n in (16, 64)]
    found = extrapolation.curve(rows, states_on([8, 16, 64, 4096]), GPUS)
    curves = [found, dataclasses.replace(found, strategy="x", points=found.points[1:])]
    odd = dataclasses.replace(rows[1], strategy=ODD)
    curves.append(dataclasses.replace(found, strategy=ODD, points=found.points[2:]))
    text = html_report.page([rows[1], odd], curves, GPUS, [ODD], ODD)
    file.write_text(text, encoding="utf-8")
    page = open_page(file, scheme=scheme, width=width)
    assert page.problems == []
    assert page.requested == [file.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.cut(page) == []
    fills = "marks => marks.map(mark => mark.getAttribute('fill'))"
    for chart in page.locator(".chart").all():
        marks = chart.locator(".mark-symbol path").evaluate_all(fills)
        # 16 and 64 devices were compiled, 8 and 4096 not.
        assert sum(fill == "var(--page)" for fill in marks) == 2 + 1 + 1
        assert sum(fill.startswith("var(--series-") for fill in marks) == 2 + 2 + 1
    assert page.get_by_text("of h100: 20.0 GB").count() == 2  # the limit, and what it is set off by
    assert ODD in page.locator("h1").inner_text()
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", [(0.62e6, 1.75e6), (1.0e6, 1.5e6), (0.9e9, 30e9), (5e6, 4e9), (0.0, 0.0)]
)
def test_each_axis_has_ticks_that_can_be_read(open_page, tmp_path, memory):
    points = [Point(n, True, 1, y, y, 0.1 * n) for n, y in zip((8, 64), memory, strict=True)]
    file = tmp_path / "plan.html"
    file.write_text(page_of([Curve("a", tuple(points))]), encoding="utf-8")
    page = open_page(file)
    assert page.problems == []
    labels, charts = ".role-axis-label text", page.locator(".chart").all()
    visible = "all => all.filter(e => e.getAttribute('opacity') !== '0').map(e => e.textContent)"
    for chart in charts:
        texts = chart.locator(labels).evaluate_all(visible)
        shown = [text for text in texts if text]
        assert shown[:2] == ["8", "64"]  # of the horizontal axis
        least = 3 if any(memory) else 1  # zero
        assert least <= len(shown[2:]) <= 20 and len(set(shown[2:])) == len(shown[2:])
        if chart is charts[0] and memory[1] == 1.75e6:
            assert max(map(float, shown[2:])) > 1.5
    page.close()


@pytest.mark.slow
def test_the_command_writes_a_page_whose_formulas_hold(open_page, tmp_path):
    file = tmp_path / "plan.html"
    flags = ["--gin_file=gin/runs/digits.gin", "--gin_file=gin/models/mlp.gin"]
    flags += ["--topology=cpu:8", "--strategies=ddp,fsdp,hsdp,single", f"--html={file}"]
    assert command(**cli.parse("plan", flags)) == 0
    text = file.read_text()
    assert "It runs on one device" in text
    checks = text[text.index("How far the formulas") : text.index("<summary>All points")]
    off = [float(part) / 100 for part in re.findall(r">([+-][\d.]+)%<", checks)]
    # Three figures of ddp and fsdp on 2 and 8 devices each; hsdp on 2 splits nothing.
    assert len(off) == 12
    sizes = [part for place, part in enumerate(off) if place % 3 < 2]
    assert max(map(abs, sizes)) <= 0.02
    # A step of so small a model is its update, of which two passes over the state are a part.
    assert max(map(abs, off)) <= 0.25
    assert all(math.isfinite(part) for part in off)
    assert "4,096" in text
    assert topologies.topology("cpu:8").hosts == 1
    page = open_page(file)
    assert page.problems == [] and page.locator(".chart svg").count() == 2
    page.close()
