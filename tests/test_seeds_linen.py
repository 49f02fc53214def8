"""The functions that follow xlstm-jax: acceptance cases 1 to 19, and their signatures.

Mesh A is `data` 8, mesh B `dp` 2 x `fsdp` 4. Inside `shard_map`, its check off unless said.
"""

import inspect
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import research_dp
from research_dp.analysis.traffic import collectives as read
from research_dp.distributed.errors import UsageError

A = {"data": 8}
B = {"dp": 2, "fsdp": 4}
DEVICES = P(("dp", "fsdp"))


def on(sizes, function, in_specs=P(), out_specs=P(), check_vma=False):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    types = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped)


def abstract(sizes, function, *args):
    """What each device is left with, local shapes and names, without running anything."""
    return jax.eval_shape(on(sizes, function), *args)


def sharded(sizes, axis, shapes, min_weight_size=0, **options):
    """Name -> (names or None, local shape) of zeros of these shapes under `shard_params`."""

    def function():
        tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return research_dp.shard_params(tree, axis, min_weight_size, **options)

    out = abstract(sizes, function)
    return {
        name: (leaf.names, leaf.value.shape) if isinstance(leaf, nn.Partitioned) else leaf.shape
        for name, leaf in out.items()
    }


def index():
    return jax.lax.axis_index(("dp", "fsdp")).astype(jnp.float32)


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
    sizes = {"data": size} if isinstance(size, int) else B
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

    back = on(sizes, round_trip)(tree)
    for x, y in zip(tree, back, strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_case_07_gradients_of_gathered_parameters_are_means():
    def loss(w):
        full = research_dp.gather_array_with_mean_grads(w, 0, "data")
        return jnp.sum(full) * (jax.lax.axis_index("data") + 1.0)

    def function(w):
        value, grad = jax.value_and_grad(loss)(w)
        return value[None], grad

    value, grad = on(A, function, P("data"), P("data"))(jnp.arange(16.0))
    np.testing.assert_array_equal(value, 120.0 * np.arange(1, 9))
    np.testing.assert_array_equal(grad, np.full(16, 4.5))


@pytest.mark.parametrize(
    ("dtype", "gather", "scatter", "gathered", "wire"),
    [
        ("float32", None, None, "float32", "float32"),
        ("float32", "bfloat16", None, "bfloat16", "float32"),
        ("float32", None, "bfloat16", "float32", "bfloat16"),
        ("float32", "bfloat16", "float16", "bfloat16", "float16"),
        ("bfloat16", None, None, "bfloat16", "bfloat16"),
        ("bfloat16", None, "float32", "bfloat16", "float32"),
    ],
)
def test_case_08_dtypes_on_the_wire(dtype, gather, scatter, gathered, wire):
    def function(w):
        def loss(w):
            full = research_dp.gather_array_with_mean_grads(w, -1, "data", gather, scatter)
            assert full.dtype == gathered
            return jnp.sum(full.astype(jnp.float32))

        grad = jax.grad(loss)(w)
        assert grad.dtype == dtype
        return grad

    found = read(on(A, function, P("data"), P("data")), jnp.arange(16.0, dtype=dtype))
    kinds = [(c.kind, c.dtype) for c in found]
    assert kinds == [("all-gather", gathered), ("reduce-scatter", wire)]


def test_case_09_float16_overflows_unless_divided_first():
    def function(w):
        def grad(scatter, pre_divide):
            def loss(w):
                full = research_dp.gather_array_with_mean_grads(
                    w, 0, "data", grad_scatter_dtype=scatter, pre_divide=pre_divide
                )
                return 10000.0 * jnp.sum(full)

            return jax.grad(loss)(w)

        return [grad(*o) for o in (("float32", 0), ("bfloat16", 0), ("float16", 0), ("float16", 1))]

    out = on(A, function, P("data"), P("data"))(jnp.ones(8))
    assert [float(x[0]) for x in out] == [10000.0, 9984.0, np.inf, 10000.0]


def test_case_10_types_after_gathering():
    def function():
        x = jnp.zeros((4, 3))
        tree = {
            "data": nn.Partitioned(x, ("data", None)),
            "both": nn.Partitioned(x, ("data", "tp")),
            "raw": x,
            "tp": nn.Partitioned(x, ("tp", None)),
        }
        out = research_dp.gather_params(tree, "data", gather_dtype="bfloat16")
        assert out["raw"] is tree["raw"]
        assert out["tp"] is tree["tp"]
        return out

    out = abstract(A, function)
    assert (out["data"].shape, out["data"].dtype) == ((32, 3), jnp.bfloat16)
    assert out["both"].names == (None, "tp")
    assert (out["both"].value.shape, out["both"].value.dtype) == ((32, 3), jnp.bfloat16)
    assert out["raw"].dtype == out["tp"].value.dtype == jnp.float32


def test_case_11_gradients_are_averaged_over_the_axes_that_do_not_split_them():
    def on_a():
        g = jax.lax.axis_index("data").astype(jnp.float32)[None]
        tree = [g, nn.Partitioned(g, ("data",)), nn.Partitioned(g, (None,))]
        out = research_dp.sync_gradients(tree, ("data",))
        assert out[1] is tree[1]
        return out

    raw, split, whole = on(A, on_a, out_specs=P("data"))()
    assert raw.tolist() == whole.value.tolist() == [3.5] * 8
    assert split.value.tolist() == list(range(8))

    def on_b():
        g = index()[None]
        axes = ("dp", "fsdp")
        boxes = [nn.Partitioned(g, names) for names in (("fsdp",), ("dp",), (axes,))]
        both = research_dp.sync_gradients([g, *boxes], axes)
        one = research_dp.sync_gradients(g, ["fsdp"])
        none = research_dp.sync_gradients(g, ())
        ints = research_dp.sync_gradients(index().astype(jnp.int32)[None], axes)
        return [leaf.value if isinstance(leaf, nn.Partitioned) else leaf for leaf in both] + [
            one,
            none,
            ints,
        ]

    out = [x.tolist() for x in on(B, on_b, out_specs=DEVICES)()]
    by_dp, by_fsdp = [2.0, 3.0, 4.0, 5.0] * 2, [1.5] * 4 + [5.5] * 4
    all_of_them = [float(i) for i in range(8)]
    assert out == [[3.5] * 8, by_dp, by_fsdp, all_of_them, by_fsdp, all_of_them, [3.5] * 8]


def test_case_12_one_axis_by_name_and_unknown_axes_named():
    def by_name():
        g = jax.lax.axis_index("data").astype(jnp.float32)[None]
        tree = [nn.Partitioned(g, ("data",)), nn.Partitioned(g, (None,)), g]
        return [
            x.value if isinstance(x, nn.Partitioned) else x
            for x in research_dp.sync_gradients(tree, "data")
        ]

    out = on(A, by_name, out_specs=P("data"))()
    assert [x.tolist() for x in out] == [list(range(8)), [3.5] * 8, [3.5] * 8]
    for function in (
        lambda: research_dp.sync_gradients(jnp.ones(2), "nope"),
        lambda: research_dp.sync_gradients(nn.Partitioned(jnp.ones(2), ("data",)), ("nope",)),
        lambda: research_dp.shard_params(jnp.ones(16), "nope"),
        lambda: research_dp.gather_array_with_mean_grads(jnp.ones(2), 0, "nope"),
        lambda: research_dp.weighted_mean(jnp.ones(()), 1, "nope"),
        lambda: research_dp.sharded_global_norm(jnp.ones(2), "nope"),
    ):
        with pytest.raises(NameError, match="nope"):
            abstract(A, function)


@pytest.mark.parametrize("check_vma", [False, True])
def test_case_13_gradients_are_right_whether_replication_is_checked_or_not(check_vma):
    x = jnp.arange(16.0)

    def replicated(w, x):
        grad = jax.grad(lambda w: jnp.mean(w * x))(w)
        return research_dp.sync_gradients(grad, ("data",))

    grad = on(A, replicated, (P(), P("data")), P(), check_vma)(jnp.ones(()), x)
    assert float(grad) == 7.5

    def hybrid(w, x):
        def loss(w):
            full = research_dp.gather_params(w, "fsdp")
            return jnp.mean(jnp.sum(full) * x)

        return research_dp.sync_gradients(jax.grad(loss)(w), ("dp", "fsdp"))

    w = nn.Partitioned(jnp.ones(8), ("fsdp",))
    grad = on(B, hybrid, (P("fsdp"), DEVICES), P("fsdp"), check_vma)(w, x)
    assert grad.value.tolist() == [7.5] * 8


class MLP(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x, train=False):
        dense = nn.Dense
        if self.axis:
            dense = research_dp.shard_module_params(nn.Dense, self.axis, 16)
        x = nn.relu(dense(512, name="input")(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return dense(10, name="output")(x)


@pytest.fixture(scope="module")
def initialised():
    """(key, abstract boxes, sharded parameters) of the MLP, made inside the map."""
    key, x = jax.random.key(0), jnp.zeros((1, 784))

    def init(key):
        return MLP("data").init(key, x)["params"]

    boxes = abstract(A, init, key)
    specs = nn.get_partition_spec(boxes)
    return key, specs, on(A, init, P(), specs)(key)


def test_case_14_modules_shard_themselves_and_train_alike(initialised):
    key, specs, params = initialised
    assert specs == {
        "input": {"kernel": P("data", None), "bias": P("data")},
        "output": {"kernel": P("data", None), "bias": P()},
    }
    whole = jax.jit(MLP().init)(key, jnp.zeros((1, 784)))["params"]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(whole))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 784)).astype(np.float32), rng.integers(0, 10, 32)
    optimizer = optax.adamw(1e-3)

    def train(model, steps, dropout):
        def function(params, x, y):
            def loss(params, step):
                keys = {"dropout": jax.random.fold_in(key, step * 8 + jax.lax.axis_index("data"))}
                logits = model.apply({"params": params}, x, dropout, rngs=keys)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

            def one(carry, step):
                params, state, _ = carry
                grads = research_dp.sync_gradients(jax.grad(loss)(params, step), ("data",))
                updates, state = optimizer.update(grads, state, params)
                return (optax.apply_updates(params, updates), state, grads), None

            start = (params, optimizer.init(params), params)
            (params, _, grads), _ = jax.lax.scan(one, start, jnp.arange(steps))
            return params, grads

        return function

    def run(model, params, specs, steps, dropout):
        function = train(model, steps, dropout)
        mapped = on(A, function, (specs, P("data"), P("data")), (specs, specs))
        return [jax.tree.leaves(tree) for tree in mapped(params, x, y)]

    def loss_of_all(params):
        logits = MLP().apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    _, grads = run(MLP("data"), params, specs, 1, False)
    single = jax.tree.leaves(jax.jit(jax.grad(loss_of_all))(whole))
    for a, b in zip(grads, single, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    fsdp, _ = run(MLP("data"), params, specs, 15, True)
    ddp, _ = run(MLP(), whole, P(), 15, True)
    for a, b, start in zip(fsdp, ddp, jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs(np.asarray(b) - start).max() > 1e-3  # something was learnt


def test_case_15_hybrid_gradient_is_that_of_one_device():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, 3)).astype("f"), rng.normal(size=(32, 8)).astype("f")
    y = rng.normal(size=(32, 3)).astype("f")

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    def function(w, x, y):
        held = nn.Partitioned(w, ("fsdp", None))
        grad = jax.grad(lambda w: loss(research_dp.gather_params(w, "fsdp"), x, y))(held)
        return research_dp.sync_gradients(grad, ("dp", "fsdp")).value

    grad = on(B, function, (P("fsdp"), DEVICES, DEVICES), P("fsdp"))(w, x, y)
    np.testing.assert_allclose(grad, jax.grad(loss)(w, x, y), atol=1e-6)


def test_case_16_batch_norm_and_scan():
    wrapped = research_dp.shard_module_params(nn.BatchNorm, "data", 0)
    x = jnp.zeros((4, 16))
    boxes = abstract(A, lambda k: wrapped(use_running_average=False).init(k, x), jax.random.key(0))
    specs = nn.get_partition_spec(boxes)
    assert specs["params"] == {"scale": P("data"), "bias": P("data")}
    assert specs["batch_stats"] == {"mean": P(), "var": P()}

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = research_dp.shard_module_params(nn.Dense, "data", 16)
            scanned = nn.scan(
                lambda module, x, _: (module(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
                metadata_params={nn.PARTITION_NAME: None},
            )
            return scanned(dense(784, name="dense"), x, None)[0]

    boxes = abstract(A, lambda k: Layers().init(k, jnp.zeros((1, 784))), jax.random.key(0))
    params = boxes["params"]["dense"]
    specs = nn.get_partition_spec(params)
    assert specs == {"kernel": P(None, None, "data"), "bias": P(None, "data")}
    assert params["kernel"].value.shape == (3, 784, 98)


def test_case_17_optimizer_state_lies_as_its_parameters(initialised):
    _, specs, params = initialised
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    adam = nn.get_partition_spec(state)[0]
    assert adam.mu == adam.nu == specs
    assert adam.count == P()


def test_case_18_the_norm_of_shards_is_the_norm_of_the_whole():
    def function(w, g):
        norm = research_dp.sharded_global_norm(nn.Partitioned(w, ("data",)), "data")
        naive = optax.tree.norm(w)
        tree = {"g": nn.Partitioned(g, ("data",))}
        clipped, before = research_dp.clip_by_global_norm_sharded(tree, 1.0, "data")
        transform = research_dp.clip_by_global_norm(1.0, ("data",))
        updates, _ = transform.update(tree, transform.init(tree))
        mixed = {"w": nn.Partitioned(w, ("data",)), "b": jnp.full((3,), 2.0)}
        both = research_dp.sharded_global_norm(mixed, "data")
        numbers = jnp.stack([norm, naive, before, both])[None]
        return numbers, clipped["g"].value, updates["g"].value

    g = jnp.repeat(jnp.arange(8.0), 2)
    numbers, clipped, updates = on(A, function, P("data"), P("data"))(jnp.ones(16), g)
    expected = [4.0, np.sqrt(2), np.sqrt(280), np.sqrt(28)]
    np.testing.assert_allclose(numbers, np.tile(expected, (8, 1)), rtol=1e-6)
    np.testing.assert_allclose(clipped, g / 16.7332, rtol=1e-5)
    np.testing.assert_array_equal(clipped, updates)


@pytest.mark.parametrize("check_vma", [False, True])
def test_case_19_a_masked_mean_counts_items_not_devices(check_vma):
    x = jnp.arange(16.0)
    valid = (jnp.arange(16) % 2 == 0) | (jnp.arange(16) == 15)

    def loss(w, x, valid):
        return research_dp.weighted_loss(w * jnp.sum(x * valid), jnp.sum(valid), "data")

    def function(w, x, valid):
        value, grad = jax.value_and_grad(loss)(w, x, valid)
        grad = research_dp.sync_gradients(grad, "data", loss=value)
        mean = research_dp.weighted_mean(jnp.sum(x * valid), jnp.sum(valid), "data")
        none = research_dp.weighted_mean(jnp.sum(x), 0, "data")
        means = jax.lax.pmean(jnp.sum(x * valid) / jnp.sum(valid), "data")
        return mean, grad, jax.lax.pmean(value, "data"), none, means

    out = on(A, function, (P(), P("data"), P("data")), P(), check_vma)(jnp.ones(()), x, valid)
    np.testing.assert_allclose(out, [71 / 9, 71 / 9, 71 / 9, 0.0, 7.0625], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("shard_params", "params, axis_name, min_weight_size=262144"),
        (
            "gather_array_with_mean_grads",
            "x, axis, axis_name, gather_dtype=None, grad_scatter_dtype=None",
        ),
        ("gather_params", "params, axis_name, gather_dtype=None, grad_scatter_dtype=None"),
        (
            "shard_module_params",
            "target, axis_name, min_weight_size=262144, gather_dtype=None, grad_scatter_dtype=None",
        ),
        ("sync_gradients", "grads, axis_names"),
    ],
)
def test_signatures_are_those_of_the_seed(name, parameters):
    signature = inspect.signature(getattr(research_dp, name))
    positional = [
        p.replace(annotation=p.empty)
        for p in signature.parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]
    assert ", ".join(map(str, positional)) == parameters
    extra = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert all(p.default is not p.empty for p in extra)


def test_trees_keep_their_kind():
    def function():
        tree = FrozenDict({"w": np.ones(16, np.float32), "none": None, "n": 3.0})
        out = research_dp.shard_params(tree, "data", 1)
        assert isinstance(out, FrozenDict)
        assert out["none"] is None
        assert research_dp.sync_gradients(tree, "data")["none"] is None
        return research_dp.gather_params(out, "data")["w"]

    assert abstract(A, function).shape == (16,)


def test_an_instance_is_no_class():
    with pytest.raises(Exception, match="Dense"):
        abstract(A, lambda: research_dp.shard_module_params(nn.Dense(3), "data")(jnp.ones((1, 2))))


def test_a_dim_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match=r"shape \(2,\) has no dim 1"):
        abstract(A, lambda: research_dp.gather_array_with_mean_grads(jnp.ones(2), 1, "data"))
