"""The page of a plan: what it says of compiled and extrapolated points, and its plots."""

import html
import importlib.util
import math
import re

import pytest
from test_planning_extrapolation import GPUS, row, states_on

from research_dp.analysis import topologies
from research_dp.commands.plan import Plan
from research_dp.errors import UsageError
from research_dp.planning import extrapolation, html_report
from research_dp.planning.extrapolation import Curve, Point


def test_the_page_says_what_was_compiled_and_escapes_what_users_wrote():
    rows = [row(n) for n in (16, 64)]
    curves = [extrapolation.curve(rows, states_on([8, 16, 64]), GPUS)]
    text = html_report.page(rows[1:], curves, GPUS, ["a < b & c"], "<run>")
    assert "a &lt; b &amp; c" in text
    assert "&lt;run&gt;" in text
    assert len(re.findall("<td>compiled</td>", text)) == 2
    assert len(re.findall("<td>extrapolated</td>", text)) == 1
    for name, told in html_report.FORMULAS:
        assert f"<dt>{name}</dt><dd>{told}" in html.unescape(text)
    assert "prefers-color-scheme: dark" in text
    assert "<caption>Memory per device in" in text and "<pre>" not in text
    # Nothing is loaded from elsewhere.
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    one = html_report.page(rows[1:], [Curve("fsdp", curves[0].points)], GPUS, [], "run")
    assert "the formulas are not checked" in one


def test_filled_markers_are_compiled_points_and_equal_curves_share_a_line():
    points = (Point(8, True, 1, 5e9, 1e9, 0.1), Point(16, False, 1, 3e9, 1e9, 0.2))
    figure = html_report.draw([Curve("a", points), Curve("b", points)], int(20e9), "h100")
    (memory, _), (legend,) = figure.axes, figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a, b", "compiled", "extrapolated"]
    every, compiled = memory.lines[:2]
    assert list(every.get_xdata()) == [8, 16]
    assert every.get_markerfacecolor() == "white"
    assert list(compiled.get_xdata()) == [8]
    assert compiled.get_markerfacecolor() != "white"


@pytest.mark.parametrize("memory", [(1.0e6, 1.5e6), (0.9e9, 30e9), (5e6, 4e9)])
def test_each_axis_has_ticks_that_can_be_read(memory):
    points = [Point(n, True, 1, y, y, 0.1 * n) for n, y in zip((8, 64), memory, strict=True)]
    figure = html_report.draw([Curve("a", tuple(points))], None, "h100")
    figure.canvas.draw()
    for axes in figure.axes:
        least, most = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        labels = [label.get_text() for y, label in ticks if least <= y <= most]
        assert 3 <= len(labels) <= 20 and len(set(labels)) == len(labels)


def test_wire_bytes_are_plotted_where_times_are_nominal():
    points = tuple(Point(n, True, 1, 5e9, n * 1e9, 0.1) for n in (8, 64))
    for timed, title, values in ((True, "A step, ms", 100.0), (False, "Wire bytes", 8.0)):
        figure = html_report.draw([Curve("a", points)], None, "cpu", timed=timed)
        _, other = figure.axes
        assert other.get_title().startswith(title)
        assert other.lines[0].get_ydata()[0] == pytest.approx(values)


def test_an_axis_without_a_positive_value_is_not_logarithmic():
    points = (Point(1, True, 1, 5e9, 0.0, 0.1), Point(2, True, 1, 5e9, 0.0, 0.1))
    figure = html_report.draw([Curve("single", points)], None, "cpu", timed=False)
    figure.canvas.draw()
    memory, other = figure.axes
    assert (memory.get_yscale(), other.get_yscale()) == ("log", "linear")


def test_without_matplotlib_nothing_is_compiled(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    flags = ["--gin_file=gin/runs/digits.gin", "--topology=cpu:8", f"--html={tmp_path / 'p.html'}"]
    with pytest.raises(UsageError, match=r"pip install -c constraints.txt -e '\.\[plots\]'"):
        Plan().parse(flags).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_writes_a_page_whose_formulas_hold(tmp_path):
    file = tmp_path / "plan.html"
    flags = ["--gin_file=gin/runs/digits.gin", "--gin_file=gin/models/mlp.gin"]
    flags += ["--topology=cpu:8", "--strategies=ddp,fsdp,hsdp,single", f"--html={file}"]
    assert Plan().parse(flags).run() == 0
    text = file.read_text()
    assert "<svg" in text
    assert "It runs on one device" in text
    checks = text[text.index("How far the formulas") : text.index("<th>fits")]
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
