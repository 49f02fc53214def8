"""Predicted times: hand-made programs whose schedules can be simulated by hand."""

import dataclasses
from types import SimpleNamespace

import pytest

from research_dp.analysis import hlo, hlo_collectives, schedule, topologies
from research_dp.analysis.instruction_cost import hbm_bytes
from research_dp.analysis.topologies import Topology
from research_dp.distributed.mesh import Calibration, chips

# A device that does 1 FLOP, moves 1 byte and sends 1 byte in a microsecond.
SLOW = dataclasses.replace(
    chips()["h100"],
    memory_rate=1e6,
    inside_rate=1e6,
    across_rate=1e6,
    flops={"f32": 1e6},
    calibration=None,
)
MICRO = 1e-6


def simulate(text, sent=100.0):
    """Simulates a program; every collective takes `sent` microseconds and sends 1000 bytes."""
    predicted = schedule.simulate(hlo.parse(text), SLOW, lambda _: (sent * MICRO, False, 1e3))
    found = dataclasses.asdict(predicted)
    plain = ("wire_bytes", "hidden_bytes", "is_lower_bound")
    return {name: x if name in plain else round(x / MICRO, 6) for name, x in found.items()}


def entry(body):
    return "ENTRY %main (x: f32[5], y: f32[2,3]) -> f32[5] {\n" + body + "\n}\n"


ARGUMENTS = """
  %x = f32[5]{0} parameter(0)
  %y = f32[2,3]{1,0} parameter(1)"""


DOT = """
  ROOT %d = f32[3,3]{1,0} dot(%y, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}"""
NEGATE = "\n  ROOT %n = f32[5]{0} negate(%x)"


def test_an_instruction_takes_the_longer_of_compute_and_memory():
    assert simulate(entry(ARGUMENTS + NEGATE)) == {
        "compute": 0, "memory": 40, "network_inside": 0, "network_across": 0, "exposed": 0,
        "slowed": 0, "step": 40, "wire_bytes": 0, "hidden_bytes": 0, "is_lower_bound": False,
    }  # fmt: skip
    found = simulate(entry(ARGUMENTS + DOT))
    assert (found["compute"], found["memory"], found["step"]) == (36, 84, 84)


def test_a_calibrated_device_reaches_a_part_of_its_rates(monkeypatch):
    known = Calibration("steps", matmul=0.5, attention=0.1, memory=0.25, overlap=0.5, spread=0.1)
    monkeypatch.setattr(
        "tests.analysis.test_schedule.SLOW", dataclasses.replace(SLOW, calibration=known)
    )
    assert simulate(entry(ARGUMENTS + DOT))["step"] == 72
    assert simulate(entry(ARGUMENTS + NEGATE))["step"] == 10
    # 20 of 100 beside compute, which takes 10 longer; then all of 12, which takes 6 longer.
    found = simulate(entry(ARGUMENTS + STARTED))
    assert (found["exposed"], found["slowed"], found["step"]) == (70, 10, 100)
    found = simulate(entry(ARGUMENTS + STARTED), sent=12)
    assert (found["exposed"], found["slowed"], found["step"]) == (0, 6, 26)
    attention = DOT.replace("dot(%y, %y)", 'custom-call(%y, %y), custom_call_target="__cudnn$fmha"')
    backend = ', backend_config={"intermediate_tensor_shape": {"dimensions":["1","1"]}}'
    assert simulate(entry(ARGUMENTS + attention + backend))["compute"] == 120


STARTED = """
  %go = f32[5]{0} all-reduce-start(%x), replica_groups={}
  %a = f32[5]{0} negate(%x)
  %b = f32[5]{0} negate(%x)
  ROOT %end = f32[5]{0} all-reduce-done(%go)"""


@pytest.mark.parametrize(("sent", "exposed"), [(100, 20), (80, 0), (60, 0)])
def test_what_is_started_early_is_hidden_behind_compute(sent, exposed):
    found = simulate(entry(ARGUMENTS + STARTED), sent)
    assert (found["exposed"], found["step"]) == (exposed, 80 + exposed)
    assert found["network_inside"] == sent
    assert found["hidden_bytes"] == pytest.approx(1000 * (1 - exposed / sent))


def test_a_synchronous_collective_is_waited_for():
    for note in ("all-reduce(%x), replica_groups={}", 'all-reduce-start(%x), x={"is_sync":true}'):
        found = simulate(entry(ARGUMENTS + f"\n  ROOT %r = f32[5]{{0}} {note}"))
        assert (found["exposed"], found["step"]) == (100, 100)
        assert (found["wire_bytes"], found["hidden_bytes"]) == (1000, 0)


@pytest.mark.parametrize(("order", "hidden"), [(("one", "two"), 0), (("two", "one"), 1000)])
def test_there_is_one_network(order, hidden):
    """Where the second is waited for first, the wait for both sends all bytes of the second."""
    body = """
  %one = f32[5]{{0}} all-reduce-start(%x), replica_groups={{}}
  %two = f32[5]{{0}} all-reduce-start(%x), replica_groups={{}}
  %first = f32[5]{{0}} all-reduce-done(%{})
  ROOT %second = f32[5]{{0}} all-reduce-done(%{})"""
    found = simulate(entry(ARGUMENTS + body.format(*order)))
    assert (found["exposed"], found["hidden_bytes"]) == (200, hidden)


def test_an_update_in_between_is_no_end():
    text = """
%wrapped (w: f32[5]) -> f32[5] {
  %w = f32[5]{0} parameter(0)
  ROOT %e = f32[5]{0} all-to-all(%w), replica_groups={}
}
""" + entry(
        ARGUMENTS
        + """
  %go = ((f32[5]{0}), f32[5]{0}) async-start(%x), calls=%wrapped
  %on = ((f32[5]{0}), f32[5]{0}) async-update(%go), calls=%wrapped
  %a = f32[5]{0} negate(%x)
  %end = f32[5]{0} async-done(%on), calls=%wrapped
  ROOT %b = f32[5]{0} negate(%end)"""
    )
    found = simulate(text)
    assert (found["exposed"], found["step"], found["network_inside"]) == (60, 140, 100)


LOOP = """
%body (p: (s32[], f32[5])) -> (s32[], f32[5]) {{
  %p = (s32[], f32[5]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[5]{{0}} get-tuple-element(%p), index=1
{body}
  ROOT %t = (s32[], f32[5]{{0}}) tuple(%i, %end)
}}

%condition (q: (s32[], f32[5])) -> pred[] {{
  %q = (s32[], f32[5]{{0}}) parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (p: (s32[], f32[5])) -> (s32[], f32[5]) {{
  %z = (s32[], f32[5]{{0}}) parameter(0)
  ROOT %l = (s32[], f32[5]{{0}}) while(%z), condition=%condition, body=%body, {note}
}}
"""


@pytest.mark.parametrize("turns", [1, 2, 7, 1000])
def test_loops_are_simulated_and_then_multiplied(turns):
    note = f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    found = simulate(LOOP.format(body=STARTED.replace("ROOT ", ""), note=note))
    assert found["exposed"] == pytest.approx(20 * turns)
    assert found["step"] == pytest.approx(100 * turns)
    assert found["network_inside"] == pytest.approx(100 * turns)
    assert found["wire_bytes"] == pytest.approx(1000 * turns)
    assert found["hidden_bytes"] == pytest.approx(800 * turns)
    assert not found["is_lower_bound"]


def test_a_loop_of_unknown_length_makes_the_time_a_lower_bound():
    found = simulate(LOOP.format(body=STARTED.replace("ROOT ", ""), note="x={}"))
    assert found["is_lower_bound"]
    assert found["step"] == pytest.approx(100)


def test_what_is_hidden_is_counted_in_bytes():
    """A short collective carries most bytes, unseen; a long one few, waited for."""
    body = """
  %one = f32[5]{0} all-reduce-start(%x), replica_groups={}
  %a = f32[5]{0} negate(%x)
  %first = f32[5]{0} all-reduce-done(%one)
  ROOT %two = f32[5]{0} all-reduce(%x), replica_groups={}"""

    def network(name):
        return (10 * MICRO, False, 9e3) if name == "one" else (90 * MICRO, False, 1e3)

    found = schedule.simulate(hlo.parse(entry(ARGUMENTS + body)), SLOW, network)
    assert found.exposed == pytest.approx(90 * MICRO)
    assert found.hidden_fraction == pytest.approx(0.9)


def test_a_tpu_chain_is_waited_for_where_it_is_done():
    text = """
%start (s: f32[5]) -> (f32[5], u32[]) {
  %s = f32[5]{0} parameter(0)
  %r = f32[5]{0} all-reduce(%s), replica_groups={}, frontend_attributes={chain_id="3"}
  ROOT %go = (f32[5]{0}, u32[]) custom-call(%r), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion (c: f32[5], d: f32[5]) -> (f32[5], f32[5]) {
  %c = f32[5]{0} parameter(0)
  %d = f32[5]{0} parameter(1)
  %step = f32[5]{0} all-reduce(%c), replica_groups={}, frontend_attributes={chain_id="3"}
  %work = f32[5]{0} negate(%d)
  ROOT %u = (f32[5]{0}, f32[5]{0}) tuple(%step, %work)
}

%done (e: f32[5]) -> f32[5] {
  %e = f32[5]{0} parameter(0)
  %q = f32[5]{0} all-reduce(%e), replica_groups={}, frontend_attributes={chain_id="3"}
  ROOT %w = f32[5]{0} custom-call(%q), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[5]) -> f32[5] {
  %x = f32[5]{0} parameter(0)
  %f = (f32[5]{0}, u32[]) fusion(%x), kind=kCustom, calls=%start
  %g = f32[5]{0} get-tuple-element(%f), index=0
  %h = (f32[5]{0}, f32[5]{0}) fusion(%g, %x), kind=kCustom, calls=%async_collective_fusion
  %k = f32[5]{0} get-tuple-element(%h), index=0
  ROOT %m = f32[5]{0} fusion(%k), kind=kCustom, calls=%done
}
"""
    (found,) = hlo_collectives.find_collectives(hlo.parse(text), {"fsdp": 4})
    assert found.is_async and found.operations == 1
    times = simulate(text)
    assert times["network_inside"] == 100
    assert times["memory"] == times["step"] - times["exposed"] == 40  # of the compute alone
    assert times["exposed"] == 60


def test_memory_of_slices_and_updates_in_place():
    text = """
%inner (stack: f32[10,5], part: f32[5], i: s32[]) -> f32[10,5] {
  %stack = f32[10,5]{1,0} parameter(0)
  %part = f32[5]{0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %taken = f32[1,5]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,5}
  %row = f32[1,5]{1,0} bitcast(%part)
  %sum = f32[1,5]{1,0} add(%taken, %row)
  ROOT %put = f32[10,5]{1,0} dynamic-update-slice(%stack, %sum, %i, %zero)
}

ENTRY %main (a: f32[10,5], b: f32[5], c: s32[]) -> f32[10,5] {
  %a = f32[10,5]{1,0} parameter(0)
  %b = f32[5]{0:T(128)S(1)} parameter(1)
  %c = s32[] parameter(2)
  ROOT %f = f32[10,5]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%inner
}
"""
    # A row is read and a row is written; b is on the chip; the index has 4 bytes.
    assert hbm_bytes(hlo.parse(text).root) == 20 + 20 + 4


@pytest.mark.parametrize(("place", "nbytes"), [("", 20 + 20), ("S(1)", 20)])
def test_a_copy_reads_and_writes_unless_one_end_is_on_the_chip(place, nbytes):
    arrays = f"(f32[5]{{0:T(128){place}}}, f32[5]{{0}}, u32[])"
    body = f"{ARGUMENTS}\n  ROOT %copy = {arrays} copy-start(%x)"
    assert hbm_bytes(hlo.parse(entry(body)).root) == nbytes


@pytest.mark.parametrize(
    ("result", "root", "nbytes"),
    [
        ("f32[1,5]", "dynamic-slice(%sum, %i, %zero), dynamic_slice_sizes={1,5}", 20 + 10 + 20 + 4),
        ("f32[10,5]", "negate(%sum)", 200 + 100 + 200),
        ("f32[5]", "reduce(%sum, %zero), dimensions={0}, to_apply=%add", 200 + 100 + 20),
        ("(f32[10,5], f32[10,5])", "tuple(%sum, %a)", 200 + 100 + 200),
        ("f32[10,5]", "dynamic-update-slice(%sum, %row, %i, %zero)", 200 + 100 + 200 + 4),
        ("f32[10,5]", "dynamic-update-slice(%a, %row, %i, %zero)", 20 + 20 + 4),
        ("f32[1,5]", "dynamic-slice(%half, %i, %zero), dynamic_slice_sizes={1,5}", 20 + 20 + 4),
    ],
)
def test_a_fusion_reads_what_its_result_needs(result, root, nbytes):
    text = f"""
%inner (a: f32[10,5], b: bf16[10,5], i: s32[]) -> {result} {{
  %a = f32[10,5]{{1,0}} parameter(0)
  %b = bf16[10,5]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[10,5]{{1,0}} convert(%b)
  %sum = f32[10,5]{{1,0}} add(%a, %wide)
  %row = f32[1,5]{{1,0}} slice(%a), slice={{[0:1], [0:5]}}
  %half = f32[10,5]{{1,0}} multiply(%a, %a)
  ROOT %made = {result} {root}
}}

ENTRY %main (a: f32[10,5], b: bf16[10,5], c: s32[]) -> {result} {{
  %a = f32[10,5]{{1,0}} parameter(0)
  %b = bf16[10,5]{{1,0}} parameter(1)
  %c = s32[] parameter(2)
  ROOT %f = {result} fusion(%a, %b, %c), kind=kLoop, calls=%inner
}}
"""
    assert hbm_bytes(hlo.parse(text).root) == nbytes


def devices(domains, members):
    return [
        SimpleNamespace(process_index=domain, id=domain * members + member)
        for domain in range(domains)
        for member in range(members)
    ]


def collective(kind, count, nbytes=64e9):
    return hlo_collectives.CompiledCollective(
        kind=kind, axes=("fsdp",), devices=count, dtype="bf16", nbytes=int(nbytes), times=2,
        of_model=False, name="c", operations=2, is_async=False, purpose=kind,
        group=tuple(range(count)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "domains", "members", "seconds"),
    [
        ("all-gather", 8, 8, 63 / 400),  # a ring over whole hosts: 8 cards of 50 GB/s
        ("all-reduce", 8, 8, 2 * 63 / 400),
        ("reduce-scatter", 1, 8, 56 / 450),  # NVLink
        ("all-gather", 8, 1, 56 / 50),  # one GPU a host: its own card
        ("all-to-all", 8, 8, 56 / 50),  # what leaves the host leaves by the sender's card
        ("all-to-all", 1, 8, 56 / 450),
        ("permute", 2, 1, 64 / 50),
    ],
)
def test_times_on_the_network_of_h100s(kind, domains, members, seconds):
    h100 = chips()["h100"]
    present = devices(domains, members)
    links = topologies.route(Topology("h100", h100, tuple(present)), present)
    assert links.crosses == (domains > 1)
    found = links.sending(collective(kind, len(present)))
    assert found == pytest.approx(seconds)
    never = dataclasses.replace(collective(kind, len(present)), times=0)
    assert links.sending(never) == found  # of one execution, however often it runs


@pytest.mark.parametrize(
    ("coordinates", "kind", "seconds"),
    [
        ([(x, y, 0) for x in range(8) for y in range(8)], "all-gather", 63 / 180),  # four links
        ([(x, 3, 0) for x in range(8)], "all-gather", 56 / 90),  # two, along one axis
        ([(x, 3, 0) for x in range(8)], "all-to-all", 56 / 45),
    ],
)
def test_times_on_the_torus_of_v5e(coordinates, kind, seconds):
    present = [SimpleNamespace(process_index=0, coords=at) for at in coordinates]
    links = topologies.route(Topology("v5e", chips()["v5e"], tuple(present)), present)
    found = links.sending(collective(kind, len(present)))
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "domains", "members", "sending", "micros"),
    [
        ("all-gather", 8, 8, 0.0, 6.6 + 56 * 0.6 + 7 * 2.7),  # each device's part passes all others
        ("all-gather", 8, 8, 10e-6, 6.6 + 56 * 0.6 + 7 * 2.7 + 20),  # at half of the links' rate
        ("all-gather", 1, 8, 1.0, 8.4 + 7 * 3.4 + 1e6),  # large: the full rate counts more
        ("reduce-scatter", 128, 8, 0.0, 6.6 + 896 * 0.6 + 127 * 2.7),
        ("all-reduce", 1, 8, 0.0, 6.6 + 2 * 7 * 0.6),
        ("all-reduce", 128, 8, 0.0, 6.8 + 2 * (7 * 0.6 + 7 * 5.0)),  # a tree over the hosts
        ("all-to-all", 128, 8, 0.0, 6.6 + 0.6 + 2.7),
        ("all-gather", 1, 1, 0.0, 0.0),
    ],
)
def test_latency_grows_with_the_hops_of_a_group(kind, domains, members, sending, micros):
    present = devices(domains, members)
    links = topologies.route(Topology("h100", chips()["h100"], tuple(present)), present)
    assert links.seconds(kind, sending) * 1e6 == pytest.approx(micros, rel=1e-6)


def test_latency_on_a_torus():
    """Half of each dimension's hops: rings go both ways."""
    present = [
        SimpleNamespace(process_index=0, coords=(x, y, 0)) for x in range(16) for y in range(16)
    ]
    links = topologies.route(Topology("v5e", chips()["v5e"], tuple(present)), present)
    assert links.seconds("all-gather", 1.0) == pytest.approx(1.0 + 16e-6, rel=1e-9)
    assert links.seconds("all-reduce", 1.0) == pytest.approx(1.0 + 32e-6, rel=1e-9)


def test_what_is_hidden():
    found = schedule.Schedule(
        compute=3.0, memory=2.0, network_inside=1.0, network_across=3.0, exposed=1.0, slowed=0.0,
        step=5.0, wire_bytes=8.0, hidden_bytes=6.0,
    )  # fmt: skip
    assert found.hidden_fraction == 0.75
    assert dataclasses.replace(found, wire_bytes=0.0, hidden_bytes=0.0).hidden_fraction is None
