"""The rule and the mesh."""

import functools

import gin
import jax
import numpy as np
import pytest

from research_dp.distributed.mesh import make_mesh, one_device_mesh
from research_dp.distributed.sharding import ShardDecision, choose_dim, infer_sharding, largest_dim
from research_dp.errors import UsageError


def test_a_rule_that_does_not_divide_says_so_and_one_without_such_a_dim_is_refused():
    tree = {"a": {"kernel": jax.ShapeDtypeStruct((6, 8), np.float32)}}
    (found,) = jax.tree.leaves(infer_sharding(tree, lambda *_: ShardDecision(0), 4))
    assert (found.dim, found.reason) == (None, "4 devices do not divide dim 0 of (6, 8)")
    with pytest.raises(UsageError, match=r"dim 2 of a/kernel \(6, 8\), which 4 devices"):
        infer_sharding(tree, lambda path, shape, size: ShardDecision(2), 4)


def test_only_the_default_rule_lets_its_dim_be_moved():
    stack = {"layers": jax.ShapeDtypeStruct((2, 16, 64), np.float32)}

    def dim(rule):
        return infer_sharding(stack, rule, 8, {"layers": "stack"})["layers"].dim

    assert dim(lambda path, shape, size: choose_dim(shape, size, 0)) == 2
    assert dim(functools.partial(largest_dim, min_weight_size=0)) == 1


def test_one_device_serves_one_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UsageError, match="runs in one process; this run has 2") as caught:
        one_device_mesh()
    assert caught.value.binding == "one_device_mesh"


def test_mesh_fills_up_and_keeps_the_order_of_axes():
    assert dict(make_mesh({"fsdp": -1, "data": 2}).shape) == {"data": 2, "fsdp": 4}
    assert dict(make_mesh({"data": -1}).shape) == {"data": 8, "fsdp": 1}
    assert one_device_mesh().size == 1


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3, "fsdp": 4}, r"data 3 x fsdp 4 = 12 devices, but 8 cpu devices are present"),
        ({"data": 3, "fsdp": -1}, r"data 3 x fsdp \? cannot make 8"),
        ({"data": 2, "fsdp": 2}, r"= 4 devices, but 8"),
        ({"data": -1, "fsdp": -1}, "only one axis may be -1"),
        ({"data": 0}, "size 0"),
        ({"model": 8}, "unknown axis 'model'"),
        ({"data": 8.0}, "= {'data': 8.0}: give a dict of sizes"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_equation(axes, message):
    with pytest.raises(UsageError, match=message) as caught:
        make_mesh(axes)
    assert caught.value.binding == "make_mesh.axes"


def test_gin_reaches_the_rule():
    gin.parse_config("largest_dim.min_weight_size = 7")
    rule = gin.get_configurable("largest_dim")
    assert rule("w", (8,), 8).dim == 0
