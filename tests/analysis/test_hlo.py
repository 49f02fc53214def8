"""Costs read from stored programs for GPUs and TPUs, against counts by hand.

The programs are those of tests/hlo/generate.py, which says what each one does.
"""

from pathlib import Path

import pytest

from research_dp.analysis import hlo, hlo_collectives
from research_dp.analysis.hlo_collectives import find_collectives
from research_dp.analysis.instruction_cost import flops
from research_dp.analysis.program_cost import flops_of

BF16, F32 = 2, 4
LAYER = 1024 * 1024 * BF16  # bytes of one layer's gathered weights in the stored FSDP programs
PART = 256 * 512  # elements of a device's array in the stored `every_kind` programs


def module(name):
    return hlo.parse(Path(f"tests/hlo/{name}.txt").read_text())


def counts(name, sizes, slices=None):
    """{(kind, purpose, axes): (wire bytes, operations)} of a stored program."""
    found = find_collectives(module(name), dict(zip(("data", "fsdp"), sizes, strict=True)), slices)
    total = {}
    for c in found:
        key = (c.kind, c.purpose, "+".join(c.axes), c.dtype)
        wire_bytes, operations = total.get(key, (0, 0))
        total[key] = (wire_bytes + c.wire_bytes, operations + c.operations)
    return total


def ring(nbytes, devices):
    return nbytes * (devices - 1) / devices


@pytest.mark.parametrize("name", ["gpu_fsdp", "gpu_fsdp_jit"])
def test_fsdp_on_gpus(name):
    """Four layers: gathered forward and backward, gradients scattered; the first or last peeled."""
    assert counts(name, (2, 8)) == {
        ("all-gather", "all-gather", "data+fsdp", "bf16"): (8 * ring(LAYER, 16), 8),
        ("reduce-scatter", "reduce-scatter", "data+fsdp", "bf16"): (4 * ring(LAYER, 16), 4),
        ("all-reduce", "all-reduce", "data+fsdp", "f32"): (2 * ring(F32, 16), 1),
    }


def test_tpu_sends_small_gathers_and_flat_scatters_as_all_reduces():
    assert counts("tpu_fsdp", (8, 8)) == {
        ("all-reduce", "all-gather", "data+fsdp", "bf16"): (8 * 2 * ring(LAYER, 64), 8),
        ("all-reduce", "reduce-scatter", "data+fsdp", "bf16"): (4 * 2 * ring(LAYER, 64), 4),
        ("all-reduce", "all-reduce", "data+fsdp", "f32"): (2 * ring(F32, 64), 1),
    }


def test_a_chain_of_fusions_that_carries_one_collective_counts_once():
    text = Path("tests/hlo/tpu_fsdp_async.txt").read_text()
    assert sum(" all-reduce(" in line and "chain_id" in line for line in text.splitlines()) > 2
    layer = 4096 * 4096 * BF16
    found = counts("tpu_fsdp_async", (8, 8))
    assert found["all-gather", "all-gather", "data+fsdp", "bf16"] == (8 * ring(layer, 64), 8)
    assert found["all-reduce", "all-reduce", "data+fsdp", "bf16"] == (4 * 2 * ring(layer, 64), 4)
    chained = [
        c
        for c in find_collectives(module("tpu_fsdp_async"), {"data": 8, "fsdp": 8})
        if c.kind == "all-reduce" and c.dtype == "bf16"
    ]
    assert all(c.is_async for c in chained)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_kind(platform):
    # The TPU's f32 all-reduce has a bf16 result, for that is all that is used: operands count.
    assert counts(f"{platform}_every_kind", (4, 4)) == {
        ("all-reduce", "all-reduce", "data", "bf16"): (2 * ring(PART * BF16, 4), 1),
        ("all-reduce", "all-reduce", "data+fsdp", "f32"): (2 * ring(PART * F32, 16), 1),
        ("all-gather", "all-gather", "fsdp", "bf16"): (ring(4 * PART * BF16, 4), 1),
        ("reduce-scatter", "reduce-scatter", "data", "bf16"): (ring(PART * BF16, 4), 1),
        ("all-to-all", "all-to-all", "fsdp", "bf16"): (ring(PART * BF16, 4), 1),
        ("permute", "permute", "fsdp", "bf16"): (PART * BF16, 1),
    }


def test_is_sync_is_not_asynchronous():
    found = find_collectives(module("gpu_every_kind"), {"data": 4, "fsdp": 4})
    assert not any(c.is_async for c in found)
    assert any(c.is_async for c in find_collectives(module("gpu_fsdp"), {"data": 2, "fsdp": 8}))


def test_fusion_around_an_all_reduce_that_keeps_a_slice_is_a_reduce_scatter_of_the_padded_array():
    found = counts("tpu_scatter_uneven", (8, 8))
    padded = 2048 * 1024 * BF16  # 250 rows a device, in tiles of 16, that is 256
    key = ("reduce-scatter", "reduce-scatter", "fsdp", "bf16")
    assert found.pop(key) == (ring(padded, 8), 1)
    (rest,) = found  # rows that lie on the wrong device once padding is cut away
    assert rest[0] == "permute"


def test_between_slices_collectives_are_sends_to_the_host():
    whole = 512 * 1024 * BF16
    assert counts("tpu_slices", (2, 16), [0] * 16 + [1] * 16) == {
        ("reduce-scatter", "reduce-scatter", "fsdp", "bf16"): (ring(whole, 16), 1),
        ("all-reduce", "all-reduce", "data", "bf16"): (
            2 * ring(whole / 16, 2) + 2 * ring(whole, 2),
            2,
        ),
        ("all-gather", "all-gather", "fsdp", "bf16"): (ring(whole, 16), 1),
    }


MATMUL = 2 * 2 * 4 * 256 * 256 * 64  # one of attention's, of 2 sequences, 4 heads of 64


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpu_fsdp", 4 * 4 * 2 * 512 * 1024 * 1024),  # forward, once more, and twice backward
        ("gpu_fsdp_jit", 4 * 4 * 2 * 512 * 1024 * 1024),
        ("tpu_fsdp", 4 * 4 * 2 * 512 * 1024 * 1024),
        ("tpu_fsdp_async", 4 * 4 * 2 * 1024 * 4096 * 4096),
        ("gpu_attention", 6 * MATMUL),  # two forward, four backward
        ("tpu_attention", 5 * MATMUL),  # the result itself is not needed for its gradient
        ("gpu_cublas", 2 * 256 * 512 * 1024),
        ("tpu_kernel", 12345),
    ],
)
def test_flops(name, count):
    assert sum(flops_of(module(name)).values()) == count


def test_flash_attention_takes_twice_as_much_backward_as_forward():
    counted = [flops(one)[0] for one, _, _ in hlo.executed(module("gpu_attention"))]
    assert [count for count in counted if count] == [2 * MATMUL, 4 * MATMUL]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,1},{2,3}}, use_global_device_ids=true", [[0, 1], [2, 3]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3]]),
        ("channel_id=1", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups=[4]<=[4]", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['axis_0'=4]{'axis_0'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1','axis_0'}", [[0, 2, 1, 3]]),
        ("replica_groups=mesh['axis_0'=4]{'axis_0':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['axis_0'=4]{'axis_0':(2)2}", [[0, 1], [2, 3]]),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}",
            [[0, 2], [1, 3]],
        ),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
    ],
)
def test_groups(text, expected):
    assert hlo_collectives.replica_groups(text, 4) == expected


def test_groups_in_an_unknown_form_are_refused():
    with pytest.raises(NotImplementedError, match="a form that this reader does not know"):
        hlo_collectives.replica_groups("replica_groups=something_new", 4)


def test_mesh_axes_of_a_group():
    sizes = {"data": 2, "fsdp": 4}
    assert hlo_collectives.mesh_axes([0, 1, 2, 3], sizes) == ("fsdp",)
    assert hlo_collectives.mesh_axes([0, 4], sizes) == ("data",)
    assert hlo_collectives.mesh_axes([0, 1], sizes) == ("fsdp",)  # a part of it
    assert hlo_collectives.mesh_axes(list(range(8)), sizes) == ("data", "fsdp")


@pytest.mark.parametrize(
    ("pairs", "found"),
    [
        ([[2, 6], [6, 2], [3, 7], [7, 3]], (2, 6)),  # each with one other
        ([[0, 1], [1, 2], [2, 0], [3, 4], [4, 5], [5, 3]], (0, 1, 2)),  # a ring of three
        ([[4, 5], [0, 1], [3, 4], [2, 3]], (2, 3, 4, 5)),  # an open chain, in any order
    ],
)
def test_whom_a_permute_joins(pairs, found):
    assert hlo_collectives.connected_devices(pairs) == found


LOOP = """
%body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  %step = s32[] constant(STEP)
  %next = s32[] add(%i, %step)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}

%condition (q: (s32[], s32[])) -> pred[] {
  %q = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %m), direction=DIRECTION
}

ENTRY %main (a: s32[]) -> (s32[], s32[]) {
  %start = s32[] constant(START)
  %end = s32[] END
  %init = (s32[], s32[]) tuple(%start, %end)
  ROOT %loop = (s32[], s32[]) while(%init), condition=%condition, body=%bodyNOTE
}
"""


@pytest.mark.parametrize(
    ("start", "end", "step", "direction", "turns"),
    [
        (0, "constant(8)", 1, "LT", 8),
        (1, "constant(8)", 1, "LT", 7),
        (0, "constant(8)", 3, "LT", 3),
        (0, "constant(8)", 1, "LE", 9),
        (8, "constant(0)", -1, "GT", 8),
        (8, "constant(0)", -2, "GE", 5),
        (0, "constant(8)", 2, "NE", 4),
        (8, "constant(8)", 1, "LT", 0),
        (0, "parameter(0)", 1, "LT", None),  # depends on data
        (0, "constant(8)", 0, "LT", None),  # never ends
    ],
)
def test_trip_count_from_the_condition(start, end, step, direction, turns):
    text = LOOP.replace("NOTE", "").replace("START", str(start)).replace("STEP", str(step))
    parsed = hlo.parse(text.replace("END", end).replace("DIRECTION", direction))
    assert hlo.trip_count(parsed.instructions["loop"]) == turns


def test_trip_count_that_the_compiler_knows():
    note = ', backend_config={"known_trip_count":{"n":"5"}}'
    parsed = hlo.parse(LOOP.replace("NOTE", note).replace("END", "parameter(0)"))
    assert hlo.trip_count(parsed.instructions["loop"]) == 5


ASYNC = """
%wrapped (w: bf16[64]) -> bf16[64] {
  %w = bf16[64]{0} parameter(0)
  ROOT %exchange = bf16[64]{0} all-to-all(%w), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: bf16[64], y: f32[32]) -> bf16[64] {
  %x = bf16[64]{0} parameter(0)
  %y = f32[32]{0} parameter(1)
  %go = ((bf16[64]{0}), bf16[64]{0}, u32[]) async-start(%x), calls=%wrapped
  %on = ((bf16[64]{0}), bf16[64]{0}, u32[]) async-update(%go), calls=%wrapped
  %kernel = f32[32]{0} custom-call(%y), custom_call_target="tpu_custom_call", config={
    "a": "b"
} more lines of it
}, backend_config={"cost_estimate":{"flops":"7"}}
  %two = (bf16[64]{0}, /*index=1*/f32[32]{0}) all-reduce(%x, %kernel), replica_groups={}
  ROOT %end = bf16[64]{0} async-done(%on), calls=%wrapped
}
"""


def test_wrapped_asynchronous_collectives_count_once_and_tuples_by_type():
    found = find_collectives(hlo.parse(ASYNC), {"fsdp": 4})
    assert [(c.kind, c.dtype, c.nbytes, c.operations, c.is_async) for c in found] == [
        ("all-to-all", "bf16", 128, 1, True),
        ("all-reduce", "bf16", 128, 1, False),
        ("all-reduce", "f32", 128, 0, False),
    ]


def test_instructions_may_run_over_several_lines():
    assert flops_of(hlo.parse(ASYNC)) == {"f32": 7}


def test_shapes():
    text = "(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f8e4m3fn[5], s4[3], pred[], f32[<=4])"
    assert [(a.dtype, a.dims, a.nbytes, a.on_chip) for a in hlo.arrays(text)] == [
        ("bf16", (2, 3), 12, True),
        ("f8e4m3fn", (5,), 5, False),
        ("s4", (3,), 2, False),
        ("pred", (), 1, False),
        ("f32", (4,), 16, False),
    ]
    assert hlo.arrays("token[]")[0].nbytes == 0


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("module @jit_step {}")
