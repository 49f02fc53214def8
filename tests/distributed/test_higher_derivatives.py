"""Derivatives of higher order through every gather, against plain jax on one device."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.distributed import buckets, differentiable_gather, overlap
from research_dp.distributed.boxed import unboxed
from research_dp.distributed.collectives import PLAIN, Wire
from research_dp.distributed.differentiable_gather import GatherOptions
from research_dp.distributed.sharding import choose_dim, infer_sharding
from research_dp.distributed.units import Units, exchange_rows, take_rows
from research_dp.strategies.slots import in_boxes
from tests.support.steps import mesh_of, on

AXIS = "fsdp"
X = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)


def close(found, expected, tolerance=1e-5):
    """Compares leaves relative to the largest element of each; every device has the first's."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        y = np.asarray(y, np.float32)
        x = np.asarray(x, np.float32).reshape(-1, *y.shape)
        np.testing.assert_allclose(x, np.broadcast_to(y, x.shape), atol=tolerance * abs(y).max())


def dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


HESSIAN, MAML, PENALTY, THIRD = "Hessian-vector product", "MAML", "penalty", "third derivative"


def derivatives(loss, params, x, sync=lambda grads, loss: grads, names=(HESSIAN, MAML, PENALTY)):
    """A Hessian-vector product, the gradients of MAML and of a penalty of the gradient's norm.

    Terms of shards add up over devices, as a penalty of the shards themselves does.
    """

    def grads(function, params):
        value, gradient = jax.value_and_grad(function)(params)
        return sync(gradient, value)

    def inner(params):
        return grads(lambda params: loss(params, x[0]), params)

    def adapted(params):
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, inner(params))

    vector = jax.tree.map(lambda p: jnp.sin(3 * p + 1), params)
    outer = {
        HESSIAN: lambda params: dot(inner(params), vector),
        THIRD: lambda params: dot(grads(lambda p: dot(inner(p), vector), params), vector),
        MAML: lambda params: loss(adapted(params), x[1]),
        PENALTY: lambda params: loss(params, x[1]) + dot(inner(params), inner(params)),
    }
    return {name: grads(outer[name], params) for name in names}


def one_device(loss, params, x, **options):
    return jax.jit(lambda params, x: derivatives(loss, params, x, **options))(params, x)


PARAMS = {
    "in": np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32) / 3,
    "bias": np.full((1, 1), 0.1, np.float32),  # replicated
    "out": np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32) / 4,
}


def perceptron(params, x):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean(jnp.sum(jnp.sin(hidden @ params["out"]), axis=-1))


def by_array(params, **dtypes):
    def one(leaf):
        if not isinstance(leaf, nn.Partitioned):
            return leaf
        return rdp.gather_array_with_mean_grads(leaf.value, leaf.names.index(AXIS), AXIS, **dtypes)

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def by_bucket(params, gather_dtype=None, grad_scatter_dtype=None):
    layout = infer_sharding(
        PARAMS, lambda path, shape, size: choose_dim(shape, size, 1), devices_here()
    )
    options = GatherOptions(0, AXIS, gather_dtype, Wire(dtype=grad_scatter_dtype))
    return differentiable_gather.gather_tree_with_mean_grads(unboxed(params), layout, options)


def devices_here():
    return jax.lax.axis_size(AXIS)


GATHERS = {
    "arrays": by_array,
    "boxes": lambda params, **dtypes: rdp.gather_params(params, AXIS, **dtypes),
    "buckets": by_bucket,
}
BFLOAT16 = {"gather_dtype": "bfloat16", "grad_scatter_dtype": "float32"}


def check_gather(kind, devices, check_vma, dtypes, names=(HESSIAN, MAML, PENALTY)):
    def on_device(x):
        held = rdp.shard_params(PARAMS, AXIS, 1)

        def loss(params, x):
            return perceptron(GATHERS[kind](params, **dtypes), x)

        def sync(grads, value):
            return rdp.sync_gradients(grads, AXIS, loss=value)

        found = derivatives(loss, held, x, sync, names=names)
        return jax.tree.map(lambda x: x[None], rdp.gather_params(found, AXIS))

    mapped = on(mesh_of(fsdp=devices), on_device, P(None, AXIS), P(AXIS), check_vma)
    # Second derivatives in bfloat16 are coarse; a factor of two or more is not.
    expected = one_device_of_perceptron(dtypes.get("gather_dtype", "float32"), names)
    close(mapped(X), expected, 0.1 if dtypes else 1e-5)


@functools.cache
def one_device_of_perceptron(dtype, names):
    def plain(params, x):
        cast = {name: p.astype(dtype) if p.size > 1 else p for name, p in params.items()}
        return perceptron(cast, x)

    return one_device(plain, PARAMS, X, names=names)


@pytest.mark.parametrize(
    ("kind", "devices", "check_vma", "dtypes"),
    [
        ("arrays", 8, True, {}),
        ("boxes", 2, False, BFLOAT16),
        ("buckets", 4, False, {}),
    ],
)
def test_gathers(kind, devices, check_vma, dtypes):
    check_gather(kind, devices, check_vma, dtypes)


# A gather meets each dtype with and without check_vma; numbers of devices take turns.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "devices", "check_vma", "dtypes"),
    [
        pytest.param(kind, (2, 4, 8)[(i + j) % 3], check_vma, dtypes)
        for i, kind in enumerate(GATHERS)
        for j, (check_vma, dtypes) in enumerate(itertools.product((False, True), ({}, BFLOAT16)))
    ],
)
def test_every_gather(kind, devices, check_vma, dtypes):
    check_gather(kind, devices, check_vma, dtypes, (HESSIAN, MAML, PENALTY, THIRD))


@pytest.mark.parametrize("kind", ["arrays", "buckets"])
def test_derivatives_of_part_of_the_parameters(kind):
    """An inner gradient of some parameters passes, at the next order, through all gathers."""

    def adapting(loss, params, x):
        def head(out):
            return loss({**params, "out": out}, x[0])

        return loss(
            {
                **params,
                "out": jax.tree.map(jnp.subtract, params["out"], jax.grad(head)(params["out"])),
            },
            x[1],
        )

    def on_device(x):
        held = rdp.shard_params(PARAMS, AXIS, 1)

        def loss(params, x):
            return perceptron(GATHERS[kind](params), x)

        grads = jax.grad(functools.partial(adapting, loss))(held, x)
        grads = rdp.sync_gradients(grads, AXIS)
        return jax.tree.map(lambda x: x[None], rdp.gather_params(grads, AXIS))

    found = on(mesh_of(fsdp=8), on_device, P(None, AXIS), P(AXIS))(X)
    close(found, jax.jit(jax.grad(functools.partial(adapting, perceptron)))(PARAMS, X))


class Linen(nn.Module):
    wrap: bool = True

    @nn.compact
    def __call__(self, x):
        dense = rdp.shard_module_params(nn.Dense, AXIS, 16) if self.wrap else nn.Dense
        x = nn.remat(dense)(16, name="in")(x)
        return jnp.sum(jnp.sin(dense(8, name="out")(jnp.tanh(x))), axis=-1)


class InNnx(nnx.Module):
    def __init__(self, wrap=True):
        linear = rdp.shard_nnx_module_params(nnx.Linear, AXIS, 16) if wrap else nnx.Linear
        self.first = linear(8, 16, rngs=nnx.Rngs(0))
        self.last = linear(16, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return jnp.sum(jnp.sin(self.last(jnp.tanh(self.first(x)))), axis=-1)


def of_linen(wrap):
    module = Linen(wrap)

    def loss(params, x):
        return jnp.mean(module.apply({"params": params}, x))

    return loss, module.init(jax.random.key(0), X[0, :1])["params"]


def of_nnx(wrap):
    graphdef, params = nnx.split(InNnx(wrap))
    return lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x)), params


def check_module(api, devices, check_vma):
    def on_device(x):
        loss, held = api(True)

        def sync(grads, value):
            return rdp.sync_gradients(grads, AXIS, loss=value)

        found = derivatives(loss, held, x, sync)
        return jax.tree.leaves(jax.tree.map(lambda x: x[None], rdp.gather_params(found, AXIS)))

    mapped = on(mesh_of(fsdp=devices), on_device, P(None, AXIS), P(AXIS), check_vma)
    close(mapped(X), one_device(*api(False), X))


@pytest.mark.parametrize(("api", "check_vma"), [(of_linen, True), (of_nnx, False)])
def test_modules(api, check_vma):
    check_module(api, 8, check_vma)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("api", [of_linen, of_nnx])
def test_every_module(api, devices, check_vma):
    check_module(api, devices, check_vma)


@pytest.mark.parametrize(
    "check_vma", [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True)]
)
def test_rows_of_a_table(check_vma):
    table = np.random.default_rng(3).normal(size=(12, 16)).astype(np.float32)
    indices = np.arange(16) % 5

    def loss(look_up, table, x):
        return jnp.mean(jnp.sum(jnp.sin(look_up(table)) * jnp.sum(x), axis=-1))

    def on_device(x, indices):
        options = GatherOptions(1, AXIS)
        block = rdp.shard_params(table, AXIS, 1, rule=lambda *_: rdp.ShardDecision(1)).value
        look_up = functools.partial(exchange_rows, indices=indices, options=options)
        found = derivatives(functools.partial(loss, look_up), block, x)
        return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True)[None], found)

    one = np.ones((2, 16), np.float32) / 2
    found = on(mesh_of(fsdp=8), on_device, (P(None, AXIS), P(AXIS)), P(AXIS), check_vma)(
        one, indices
    )
    look_up = functools.partial(take_rows, indices=indices)
    close(found, one_device(functools.partial(loss, look_up), table, one[:, :2]))


MODEL = {
    "table": np.random.default_rng(4).normal(size=(12, 16)).astype(np.float32),
    "blocks": {"w": np.random.default_rng(5).normal(size=(3, 16, 16)).astype(np.float32) / 4},
    "head": {"w": np.random.default_rng(6).normal(size=(16, 8)).astype(np.float32) / 4},
}
UNITS = (HESSIAN, MAML)
TOKENS = np.random.default_rng(7).integers(0, 12, size=(2, 16))


def run_units(units, params, tokens, remat):
    def block(own, carry, _):
        return jnp.tanh(carry @ own["w"])

    def head(own, hidden):
        return jnp.mean(jnp.sum(jnp.sin(hidden @ own["head"]["w"]), axis=-1))

    hidden = units.look_up("table", params, tokens, jnp.float32)
    hidden = units.scan(block, "blocks", params, hidden, each=jnp.zeros(3), remat=remat)
    return units.run(head, ("head",), params, hidden, remat=remat)


def layout_of(params, devices):
    return infer_sharding(params, lambda path, shape, size: rdp.ShardDecision(1), devices)


def check_units(remat, *, devices=8, **options):
    layout = layout_of(MODEL, devices)
    bucket_bytes = options.pop("bucket_bytes", 0)

    def gather(shards, shardings, **rows):
        boxed = in_boxes(shards, shardings)
        return rdp.gather_params(boxed, AXIS, bucket_bytes=bucket_bytes, **rows)

    units = Units(gather, layout, look_up_sharded=gather, **options)

    def on_device(params, tokens):
        held = buckets.shard_tree(params, layout)

        def loss(params, tokens):
            return run_units(units, params, tokens, remat)

        found = derivatives(loss, held, tokens, names=UNITS)
        return {name: buckets.gather_tree(one, layout) for name, one in found.items()}

    found = on(mesh_of(fsdp=devices), on_device, (P(), P(None, AXIS)))(MODEL, TOKENS)
    close(found, one_device_of_units())


@functools.cache
def one_device_of_units():
    return one_device(lambda p, t: run_units(Units(), p, t, "full"), MODEL, TOKENS, names=UNITS)


@pytest.mark.parametrize(
    ("remat", "options"),
    [
        ("full", {"prefetch": True}),
        pytest.param("none", {"keep": True, "bucket_bytes": 2**20}, marks=pytest.mark.exhaustive),
    ],
)
def test_units(remat, options):
    check_units(remat, **options)


# What is kept is decided by the first two; buckets and devices meet each value of both.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("remat", "keep", "bucket_bytes", "devices"),
    [
        (remat, keep, (0, 2**20)[(i + keep) % 2], devices)
        for i, remat in enumerate(("full", "dots", "none"))
        for keep, devices in ((False, (2, 4)[i % 2]), (True, (4, 2)[i // 2]))
    ],
)
def test_every_kind_of_unit(remat, keep, bucket_bytes, devices):
    check_units(remat, keep=keep, bucket_bytes=bucket_bytes, devices=devices)


@pytest.mark.parametrize("sync", [rdp.sync_gradients, rdp.scatter_gradients])
def test_gradients_that_are_synchronised_as_units_finish(sync):
    sliced = sync is rdp.scatter_gradients
    devices = 8 if sliced else 4
    rule = rdp.ShardDecision(1) if sliced else rdp.ShardDecision(None)
    layout = infer_sharding(MODEL, lambda path, shape, size: rule, devices)

    def synced(grads, shardings, states):
        return sync(grads, (AXIS,), **({"shardings": shardings} if sliced else {})), states

    units = Units(overlap.synchronised(synced), layout)

    def on_device(params, tokens):
        none = jax.tree.map(lambda _: (), params)

        def gradient(targets):
            def loss(targets):
                given = overlap.with_target(params, targets, none)
                return run_units(units, given, tokens[0], "full")

            return jax.grad(loss)(targets)

        targets = overlap.targets_of(synced, params, layout, none)
        vector = jax.tree.map(lambda p: jnp.sin(3 * p + 1), buckets.shard_tree(params, layout))
        product = jax.grad(lambda t: dot(gradient(t), vector))(targets)
        return buckets.gather_tree(product, layout)

    found = on(mesh_of(fsdp=devices), on_device, (P(), P(None, AXIS)))(MODEL, TOKENS)
    close(found, one_device_of_units()[HESSIAN])


def test_a_gather_by_the_compiler():
    mesh = mesh_of(fsdp=8)
    sharded = jax.NamedSharding(mesh, P(AXIS))

    def loss(w, x):
        full = differentiable_gather.gather_by_compiler(w, GatherOptions(0, AXIS), mesh)
        return jnp.mean(jnp.sin(x @ full))

    w = PARAMS["in"]
    found = jax.jit(lambda w, x: derivatives(loss, w, x))(jax.device_put(w, sharded), X)
    close(found, one_device(lambda w, x: jnp.mean(jnp.sin(x @ w)), w, X))


def test_forward_mode_is_refused_as_before():
    def function(x):
        gather = functools.partial(rdp.gather_array_with_mean_grads, axis=0, axis_name=AXIS)
        return jax.jvp(gather, (x,), (x,))[1]

    with pytest.raises(TypeError, match="forward-mode"):
        on(mesh_of(fsdp=2), function, P(AXIS), P())(jnp.ones(4))


def gathered_loss(x):
    return jnp.sum(rdp.gather_array_with_mean_grads(x, 0, AXIS) ** 4)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "derivative",
    [
        lambda x: jax.jvp(gathered_loss, (x,), (x,))[1] * x,
        lambda x: jax.jvp(jax.grad(gathered_loss), (x,), (x,))[1],
        lambda x: jnp.sum(jax.hessian(gathered_loss)(x), axis=1),
    ],
    ids=["jvp", "jvp of grad", "hessian"],
)
def test_forward_mode_without_jit_says_what_to_use(derivative, check_vma):
    mapped = jax.shard_map(
        derivative, mesh=mesh_of(fsdp=2), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )
    with pytest.raises(rdp.UsageError, match=r"not available through a gather\. Use reverse over"):
        mapped(jnp.ones(4))


def test_an_error_of_the_function_itself_stays_what_it_is():
    reduction = dataclasses.replace(PLAIN, all_gather=lambda x, axis, dim, to: x + None)

    def function(x):
        gather = functools.partial(rdp.gather_array_with_mean_grads, axis=0, axis_name=AXIS)
        return jax.grad(lambda x: jnp.sum(gather(x, reduction=reduction)))(x)

    with pytest.raises(TypeError, match="NoneType"):
        on(mesh_of(fsdp=2), function, P(AXIS), P(AXIS))(jnp.ones(4))


class Sgd:
    def apply_gradients(self, gradients, parameters):
        return jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients)


@pytest.mark.parametrize(
    ("check_vma", "max_norm"),
    [(True, 0.5), *(pytest.param(c, None, marks=pytest.mark.exhaustive) for c in (False, True))],
)
def test_through_a_sharded_update(check_vma, max_norm):
    def adapted(update, w, x):
        value, grad = jax.value_and_grad(own)(w, x[0])
        return own(update(w, grad, value), x[1])

    def own(w, x):
        return jnp.mean(jnp.sum(jnp.sin(x @ w), axis=-1))

    def sharded(w, grad, loss):
        new = rdp.fsdp_apply_gradients(grad, w, Sgd(), max_norm=max_norm, loss=loss)
        return new if max_norm is None else new[0]

    def plain(w, grad, loss):
        scale = 1 if max_norm is None else max_norm / jnp.linalg.norm(grad)
        return w - 0.5 * scale * grad

    def on_device(w, x):
        value, grad = jax.value_and_grad(functools.partial(adapted, sharded))(w, x)
        return rdp.sync_gradients(grad, AXIS, loss=value)

    found = on(mesh_of(fsdp=4), on_device, (P(), P(None, AXIS)), P(), check_vma)(PARAMS["in"], X)
    close(found, jax.jit(jax.grad(functools.partial(adapted, plain)))(PARAMS["in"], X))
