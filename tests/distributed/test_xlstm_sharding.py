"""The functions that follow xlstm-jax: acceptance cases 1 to 6, which shard.

`shard_map`'s check is off unless said.
"""

import inspect
import logging

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

import research_dp
from tests.support.steps import A, B, abstract, mesh_of, on


def sharded(mesh, axis, shapes, min_weight_size=0, **options):
    """Name -> (names or None, local shape) of zeros of these shapes under `shard_params`."""

    def function():
        tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return research_dp.shard_params(tree, axis, min_weight_size, **options)

    out = abstract(mesh, function)
    return {
        name: (leaf.names, leaf.value.shape) if isinstance(leaf, nn.Partitioned) else leaf.shape
        for name, leaf in out.items()
    }


def test_case_01_largest_divisible_dim_ties_to_the_higher_index():
    shapes = {
        "a": (16,),
        "b": (784, 512),
        "c": (512, 512),
        "d": (8, 24),
        "e": (24, 8),
        "f": (7, 16),
        "g": (8, 8, 8),
    }
    assert sharded(A, "data", shapes) == {
        "a": (("data",), (2,)),
        "b": (("data", None), (98, 512)),
        "c": ((None, "data"), (512, 64)),
        "d": ((None, "data"), (8, 3)),
        "e": (("data", None), (3, 8)),
        "f": ((None, "data"), (7, 2)),
        "g": ((None, None, "data"), (8, 8, 1)),
    }
    held = on(A, lambda x: research_dp.shard_params(x, "data", 0).value, P(), P("data"))
    out = held(jnp.arange(16.0))
    for i, shard in enumerate(sorted(out.addressable_shards, key=lambda s: s.device.id)):
        np.testing.assert_array_equal(shard.data, [2 * i, 2 * i + 1])


def test_case_02_what_no_dim_suits_stays_bare_and_is_named_in_a_warning(caplog):
    shapes = {"odd": (7, 9), "twelve": (12, 20), "scalar": (), "empty": (0, 8)}
    with caplog.at_level(logging.WARNING):
        assert sharded(A, "data", shapes) == shapes
    (record,) = caplog.records
    for name in ("odd (7, 9)", "twelve (12, 20)", "scalar ()", "'data' of size 8"):
        assert name in record.getMessage()
    assert "empty" not in record.getMessage()
    four = {"twelve": (12, 20)}
    assert sharded(B, "fsdp", four) == {"twelve": ((None, "fsdp"), (12, 5))}


def test_case_03_at_the_threshold_whole_above_it_sharded(caplog):
    assert sharded(A, "data", {"w": (16,)}, 16) == {"w": (16,)}
    assert sharded(A, "data", {"w": (16,)}, 15) == {"w": (("data",), (2,))}
    default = inspect.signature(research_dp.shard_params).parameters["min_weight_size"].default
    shapes = {"at": (512, 512), "above": (520, 512)}
    assert sharded(A, "data", shapes, default) == {
        "at": (512, 512),
        "above": (("data", None), (65, 512)),
    }
    assert not caplog.records  # small parameters are no reason to warn


def test_case_04_boxes_keep_their_names_and_taken_dims(caplog):
    def again(names, shape):
        def function():
            before = nn.Partitioned(jnp.zeros(shape), names)
            after = research_dp.shard_params({"w": before}, "data", 0)["w"]
            assert (after is before) == (after.names == names)
            return after

        return abstract(A, function)

    twice = again(("data", None), (2, 16))
    assert (twice.names, twice.value.shape) == (("data", None), (2, 16))
    assert "already sharded" in caplog.text
    second = again(("tp", None), (64, 16))
    assert (second.names, second.value.shape) == (("tp", "data"), (64, 2))
    caplog.clear()
    assert again(("tp", "pp"), (64, 16)).names == ("tp", "pp")
    assert "no free dim" in caplog.text


def test_case_05_the_dim_depends_on_sizes_alone_and_odd_boxes_are_understood():
    shape = {"w": (64, 64, 3, 3)}
    assert sharded(A, "data", shape) == {"w": ((None, "data", None, None), (64, 8, 3, 3))}

    def short():
        return research_dp.shard_params(nn.Partitioned(jnp.zeros((8, 16)), ("tp",)), "data", 0)

    assert abstract(A, short).names == ("tp", "data")

    def nested():
        once = research_dp.shard_params(jnp.zeros((64, 16)), ("dp", "fsdp"), 0)
        twice = research_dp.shard_params(once, "dp", 0)
        assert twice is once
        return twice

    out = abstract(B, nested)
    assert (out.names, out.value.shape) == ((("dp", "fsdp"), None), (8, 16))


@pytest.mark.parametrize("size", [1, 4, 8, (2, 4)])
def test_case_06_gather_after_shard_gives_the_same_bits(size):
    sizes = {"data": size} if isinstance(size, int) else {"dp": 2, "fsdp": 4}
    axis = "data" if isinstance(size, int) else ("dp", "fsdp")
    shapes = [(16,), (24, 8), (7, 16), (8, 8, 8), (8, 24), (7, 9)]
    rng = np.random.default_rng(0)
    tree = [
        jnp.asarray(rng.normal(size=shape) * 1000).astype(dtype)
        for shape in shapes
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int32)
    ]

    def round_trip(tree):
        return research_dp.gather_params(research_dp.shard_params(tree, axis, 0), axis)

    back = on(mesh_of(**sizes), round_trip)(tree)
    for x, y in zip(tree, back, strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_trees_keep_their_kind():
    def function():
        tree = FrozenDict({"w": np.ones(16, np.float32), "none": None, "n": 3.0})
        out = research_dp.shard_params(tree, "data", 1)
        assert isinstance(out, FrozenDict)
        assert out["none"] is None
        assert research_dp.sync_gradients(tree, "data")["none"] is None
        return research_dp.gather_params(out, "data")["w"]

    assert abstract(A, function).shape == (16,)
