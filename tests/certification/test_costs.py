"""What strategies send, beside what they may: traced, and not run."""

import pytest

from research_dp.certification import costs
from research_dp.models import convnet, mlp
from research_dp.strategies import gather_params
from tests.support.certified import bench_of

LAYERS = 40
HALF = (
    "gather_params.gather_dtype = 'bfloat16'",
    "gather_params.grad_scatter_dtype = 'bfloat16'",
)


def sent(bench):
    """Bytes sent a step, and how many at most."""
    by_name = {cost.name: cost for cost in costs.costs(bench.config.build(bench.spec), bench.spec)}
    assert by_name["parameters a device"].passed
    return by_name["bytes sent a step"]


SLOW = [pytest.param(stem, marks=pytest.mark.exhaustive) for stem in ("ddp", "fsdp_keep")]


@pytest.mark.parametrize("stem", ["zero1", *SLOW])
def test_a_model_of_many_leaves_is_within_the_table(stem):
    deep = mlp(widths=(8,) * LAYERS, num_classes=10, dropout_rate=0.0)
    cost = sent(bench_of(stem, spec={"model": deep, "max_grad_norm": 1.0}))
    assert cost.passed, cost


def test_statistics_over_the_batch_are_within_the_table():
    model = convnet(features=(64, 64), hidden=8, num_classes=10, norm="batch")
    cost = sent(bench_of("ddp", spec={"model": model}))
    assert cost.passed, cost


def test_parameters_in_bfloat16_may_be_reduced_in_float32():
    wide = ["scatter_gradients.dtype = 'float32'", "sync_gradients.dtype = 'float32'"]
    for stem in ("ddp", "zero1"):
        cost = sent(bench_of(stem, bindings=wide, param_dtype="bfloat16"))
        assert cost.passed, cost


def without_dtypes(params, axis_name, gather_dtype="bfloat16", grad_scatter_dtype="bfloat16"):
    return gather_params(params, axis_name)


def test_a_named_dtype_must_be_that_on_the_wire():
    assert sent(bench_of("fsdp", bindings=HALF)).passed
    cost = sent(bench_of("fsdp", gather=without_dtypes))
    assert not cost.passed and cost.measured > 1.5 * cost.limit


def test_sums_in_a_fixed_order_are_within_the_table():
    tree = ["data_parallel.reduction = @tree_reduction()", "tree_reduction.logical_shards = 8"]
    cost = sent(bench_of("fsdp", bindings=tree, spec={"max_grad_norm": 1.0}))
    assert cost.passed, cost
