"""Costs on other numbers of devices: what follows from compiled programs by formulas."""

import pytest
from plan_rows import make_row

from research_dp.analysis.topologies import Topology
from research_dp.distributed.hardware import chips
from research_dp.planning import extrapolation, html_report
from research_dp.planning.extrapolation import MeshState
from research_dp.planning.row import CollectiveTotal

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
    collectives = [
        CollectiveTotal(kind, "fsdp", "bf16", kind, devices, 3, nbytes)
        for kind, nbytes in sent.items()
    ]
    across = devices > 8
    network = sum(sent.values()) / (400e9 if across else 450e9)
    state = int(12 * ELEMENTS) // devices
    exposed = network * (1 - hidden)
    # Reading and writing the state is a part of the step.
    busy = 0.1 + 2 * state / chips()["h100"].memory_rate
    return make_row(
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


def states_on(sizes):
    return {n: MeshState(mesh(n), int(12 * ELEMENTS) // n, int(ELEMENTS)) for n in sizes}


def test_formulas_give_what_is_compiled_where_the_model_of_costs_is_theirs():
    rows = [row(n) for n in (16, 64, 256)]
    found = extrapolation.curve(rows, states_on([8, 16, 32, 64, 256, 4096]), GPUS)
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
    sums = CollectiveTotal("all-reduce", "data", "f32", "all-reduce", 2, 1, total)
    rows = CollectiveTotal("all-gather", "fsdp", "s32", "all-gather", 16, 1, total * 15 / 16)
    for one, expected in ((sums, total / 2), (rows, 2 * total * 31 / 32)):
        near = row(32, sizes=where)
        near.collectives, near.wire_bytes = [one], {"total": one.wire_bytes}
        at = {n: MeshState({"data": 2, "fsdp": n // 2}, 1, 1) for n in (32, 64)}
        assert extrapolation.extrapolate([near], 64, at, GPUS).wire_bytes == pytest.approx(expected)


@pytest.mark.parametrize("compiled_on", [8, 64])
def test_sums_of_pairs_are_exchanged_inside_a_host_first(compiled_on):
    total = 1e9
    sent = total * (1 - 1 / compiled_on)
    halves = CollectiveTotal("reduce-scatter", "fsdp", "f32", "reduce-scatter", 2, 1, sent)
    near = row(compiled_on)
    near.collectives, near.wire_bytes = [halves], {"total": sent}
    sent, took = extrapolation._network(near, mesh(64), GPUS)
    chip = GPUS.chip
    assert sent == pytest.approx(total * 63 / 64)
    assert took == pytest.approx(
        total * (7 / 8 / chip.inside_rate + (1 / 8 - 1 / 64) / chip.across_rate)
    )


def test_the_mesh_grows_along_the_axis_that_grew():
    rows = [row(n, sizes={"data": 2, "fsdp": n // 2}) for n in (16, 64)]
    assert extrapolation.scaled_meshes(rows, [8, 9]) == {8: {"data": 2, "fsdp": 4}}
    assert extrapolation.scaled_meshes(rows[:1], [8]) == {}, "either axis may take more"
    assert extrapolation.scaled_meshes([row(16)], [8]) == {8: mesh(8)}


def test_nothing_is_extrapolated_that_does_not_follow():
    at = states_on([16, 32, 64])
    at[32] = MeshState(mesh(32), at[32].state_bytes, 5)
    found = extrapolation.curve([row(16), row(64)], at, GPUS)
    assert [p.devices for p in found.points] == [16, 64]
    assert "On 32 devices other parameters are split" in found.remark
    at[64] = MeshState(mesh(64), 1, 5)  # not what the built strategy holds
    found = extrapolation.curve([row(16), row(64)], at, GPUS)
    assert not found.checks
    assert "does not follow" in found.remark
    found = extrapolation.curve([row(1)], {}, GPUS)
    assert "one device" in found.remark


def test_a_strategy_that_does_not_compile_has_no_times():
    refused = make_row("x", mesh=mesh(64), state_bytes=187500000, needed_bytes=int(90e9))
    found = extrapolation.curve([refused], states_on([32, 64]), GPUS)
    assert [p.seconds for p in found.points] == [None, None]
    assert all(p.needed_bytes for p in found.points)
    page = html_report.page([refused], [found], GPUS, [], "run")
    assert "A step, ms (predicted from vendors&#x27; rates): not known" in page


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
