"""The page of a plan: what it says of compiled and extrapolated points, and its formulas."""

import html
import importlib.util
import math
import re

import pytest

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology
from research_dp.commands import flags as command_line
from research_dp.commands import plan
from research_dp.distributed.hardware import chips
from research_dp.errors import UsageError
from research_dp.planning import extrapolation, html_report
from research_dp.planning.estimate import Row
from research_dp.planning.extrapolation import Curve, Held, Point

ELEMENTS = 1e9


class Device:
    """One of 64 GPUs on hosts of eight."""

    def __init__(self, number):
        self.process_index = number // 8


GPUS = Topology("h100:8x8", chips()["h100"], tuple(map(Device, range(64))))


def mesh(devices):
    return {"data": 1, "fsdp": devices}


def row(devices, *, hidden=0.5, whole=1e9, split=64e9, sizes=None):
    """A row of a strategy of which all is known: state 12 bytes an element, split evenly."""
    sizes = sizes or mesh(devices)
    f = (devices - 1) / devices
    sent = {"all-gather": 2 * 2 * ELEMENTS * f, "reduce-scatter": 2 * ELEMENTS * f}
    kept = {"axes": "fsdp", "dtype": "bf16", "count": 3, "devices": devices}
    collectives = [
        {**kept, "kind": kind, "purpose": kind, "wire_bytes": nbytes}
        for kind, nbytes in sent.items()
    ]
    across = devices > 8
    network = sum(sent.values()) / (400e9 if across else 450e9)
    state = int(12 * ELEMENTS) // devices
    exposed = network * (1 - hidden)
    # Reading and writing the state is a part of the step.
    busy = 0.1 + 2 * state / chips()["h100"].memory_rate
    return Row(
        "fsdp",
        mesh=sizes,
        state_bytes=state,
        needed_bytes=int(state + whole + split / devices),
        available_bytes=int(20e9),
        wire_bytes={"total": sum(sent.values())},
        collectives=collectives,
        predicted_seconds=busy + exposed,
        predicted_parts={
            "compute": 0.1,
            "memory": 0.05,
            "network_inside": 0.0 if across else network,
            "network_across": network if across else 0.0,
            "exposed": exposed,
        },
    )


def held(sizes):
    return {n: Held(mesh(n), int(12 * ELEMENTS) // n, int(ELEMENTS)) for n in sizes}


def test_formulas_give_what_is_compiled_where_the_model_of_costs_is_theirs():
    rows = [row(n) for n in (16, 64, 256)]
    found = extrapolation.curve(rows, held([8, 16, 32, 64, 256, 4096]), GPUS)
    assert [p.devices for p in found.points] == [8, 16, 32, 64, 256, 4096]
    assert [p.devices for p in found.points if p.compiled] == [16, 64, 256]
    assert len(found.checks) == 3
    for point in found.points:
        real = row(point.devices)
        assert point.state_bytes == real.state_bytes
        assert point.needed_bytes == pytest.approx(real.needed_bytes, rel=1e-6)
        assert point.wire_bytes == pytest.approx(real.wire_total)
        # 8 devices are one host: its links are quicker, which the formula knows.
        assert point.seconds == pytest.approx(real.predicted_seconds)
    for real, guess in found.checks:
        assert not guess.compiled
        assert guess.seconds == pytest.approx(real.seconds)


def test_sums_over_replicas_go_with_the_shard_and_indices_with_the_batch():
    where, total = {"data": 2, "fsdp": 16}, 1e9
    sums = {"kind": "all-reduce", "axes": "data", "dtype": "f32", "devices": 2}
    sums["wire_bytes"] = total
    rows = {"kind": "all-gather", "axes": "fsdp", "dtype": "s32", "devices": 16}
    rows["wire_bytes"] = total * 15 / 16
    for one, expected in ((sums, total / 2), (rows, 2 * total * 31 / 32)):
        near = row(32, sizes=where)
        near.collectives = [one]
        at = {n: Held({"data": 2, "fsdp": n // 2}, 1, 1) for n in (32, 64)}
        assert extrapolation.extrapolate([near], 64, at, GPUS).wire_bytes == pytest.approx(expected)


@pytest.mark.parametrize("compiled_on", [8, 64])
def test_sums_of_pairs_are_exchanged_inside_a_host_first(compiled_on):
    total = 1e9
    halves = {"kind": "reduce-scatter", "axes": "fsdp", "dtype": "f32", "devices": 2}
    near = row(compiled_on)
    near.collectives = [{**halves, "wire_bytes": total * (1 - 1 / compiled_on)}]
    sent, took = extrapolation._network(near, mesh(64), GPUS)
    chip = GPUS.chip
    assert sent == pytest.approx(total * 63 / 64)
    assert took == pytest.approx(
        total * (7 / 8 / chip.inside_rate + (1 / 8 - 1 / 64) / chip.across_rate)
    )


def test_the_mesh_grows_along_the_axis_that_grew():
    rows = [row(n, sizes={"data": 2, "fsdp": n // 2}) for n in (16, 64)]
    assert extrapolation.meshes(rows, [8, 9]) == {8: {"data": 2, "fsdp": 4}}
    assert extrapolation.meshes(rows[:1], [8]) == {}, "either axis may take more"
    assert extrapolation.meshes([row(16)], [8]) == {8: mesh(8)}


def test_nothing_is_extrapolated_that_does_not_follow():
    at = held([16, 32, 64])
    at[32] = Held(mesh(32), at[32].state_bytes, 5)
    found = extrapolation.curve([row(16), row(64)], at, GPUS)
    assert [p.devices for p in found.points] == [16, 64]
    assert "On 32 devices other parameters are split" in found.remark
    at[64] = Held(mesh(64), 1, 5)  # not what the built strategy holds
    found = extrapolation.curve([row(16), row(64)], at, GPUS)
    assert not found.checks
    assert "does not follow" in found.remark
    found = extrapolation.curve([row(1)], {}, GPUS)
    assert "one device" in found.remark


def test_a_strategy_that_does_not_compile_has_no_times():
    refused = Row("x", mesh=mesh(64), state_bytes=187500000, needed_bytes=int(90e9))
    found = extrapolation.curve([refused], held([32, 64]), GPUS)
    assert [p.seconds for p in found.points] == [None, None]
    assert all(p.needed_bytes for p in found.points)
    assert "<svg" in html_report.plot([found], None, "h100")


@pytest.mark.parametrize(
    ("name", "chip", "count", "hosts", "expected"),
    [
        ("h100:8x8", "h100", 64, 8, ["h100:2x8", "h100:32x8"]),
        ("h100:2x8", "h100", 16, 2, ["h100:1x4", "h100:8x8"]),
        ("cpu:8", "cpu", 8, 1, ["cpu:2", "cpu:32"]),
        ("h100:1x6", "h100", 6, 1, []),
        ("h100:6x8", "h100", 48, 6, ["h100:24x8"]),  # 12 are no whole hosts
    ],
)
def test_neighbours_are_a_quarter_and_four_times_the_devices(name, chip, count, hosts, expected):
    devices = [Device(i * 8 // (count // hosts)) for i in range(count)]
    assert extrapolation.neighbours(Topology(name, chips()[chip], tuple(devices))) == expected


def test_the_page_says_what_was_compiled_and_escapes_what_users_wrote():
    rows = [row(n) for n in (16, 64)]
    curves = [extrapolation.curve(rows, held([8, 16, 64]), GPUS)]
    text = html_report.page(rows[1:], curves, GPUS, ["a < b & c"], "<run>")
    assert "a &lt; b &amp; c" in text
    assert "&lt;run&gt;" in text
    assert len(re.findall("<td>compiled</td>", text)) == 2
    assert len(re.findall("<td>extrapolated</td>", text)) == 1
    for name, told in html_report.FORMULAS:
        assert f"<dt>{name}</dt><dd>{told}" in html.unescape(text)
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


def test_without_matplotlib_nothing_is_compiled(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    flags = ["--gin_file=gin/runs/digits.gin", "--topology=cpu:8", f"--html={tmp_path / 'p.html'}"]
    with pytest.raises(UsageError, match=r"pip install -c constraints.txt -e '\.\[plots\]'"):
        plan.plan(*command_line.parse_plan(flags, ""))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_writes_a_page_whose_formulas_hold(tmp_path):
    file = tmp_path / "plan.html"
    flags = ["--gin_file=gin/runs/digits.gin", "--gin_file=gin/models/mlp.gin"]
    flags += ["--topology=cpu:8", "--strategies=ddp,fsdp,hsdp,single", f"--html={file}"]
    assert plan.plan(*command_line.parse_plan(flags, "")) == 0
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
