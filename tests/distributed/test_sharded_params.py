"""The functions on boxes beyond their acceptance cases: who sums, where, and what they report."""

import functools
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.distributed.vma import as_varying, varying_axes
from research_dp.errors import UsageError
from tests.support.repository import ROOT

AXES = ("dp", "fsdp")
X = jnp.arange(16.0)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


# One function for each row of the table in the documentation: from this device's parameter (one
# scalar, or two of eight numbers) and its two of 16 examples to what `EXPECTED` says.


def own(w, x):
    return jnp.mean(jnp.sum(w) * x)


def averaged(w, x):
    return jax.lax.pmean(own(w, x), AXES)


def replicated(w, x, loss=own, check=False, **options):
    value, grad = jax.value_and_grad(loss)(w, x)
    return rdp.sync_gradients(grad, AXES, loss=value if check else None, **options)


def twice(w, x):
    value, grad = jax.value_and_grad(own)(w, x)
    once = rdp.sync_gradients(grad, "fsdp", loss=value)
    again = rdp.sync_gradients(once, AXES, loss=value)
    again = rdp.sync_gradients({"w": nn.Partitioned(again, ())}, AXES)["w"].value
    one_by_one = rdp.sync_gradients(rdp.sync_gradients(once, "dp", loss=value), AXES, loss=value)
    return (again + one_by_one) / 2


def averaged_already(w, x):
    return rdp.sync_gradients(averaged(w, x), AXES)


def made_varying(w, x):
    return replicated(as_varying(w, AXES), x, dtype="bfloat16", pre_divide=True)


def gathered_array(w, x):
    def loss(w):
        return own(rdp.gather_array_with_mean_grads(w, 0, "fsdp"), x)

    value, grad = jax.value_and_grad(loss)(w)
    return rdp.sync_gradients(nn.Partitioned(grad, ("fsdp",)), AXES, loss=value).value


def gathered(w, x, loss=own, check=False, axis="fsdp"):
    def of_shards(w):
        return loss(rdp.gather_params(w, axis), x)

    value, grad = jax.value_and_grad(of_shards)(nn.Partitioned(w, (axis,)))
    return rdp.sync_gradients(grad, AXES, loss=value if check else None).value


def same_everywhere(w, x):
    full = rdp.gather_array_with_mean_grads(jnp.ones(2), 0, "fsdp")
    return jnp.sum(full) * 7.5 / 8 + 0 * jnp.sum(w) * jnp.sum(x)


def linen(w, x):
    module = rdp.shard_module_params(nn.Dense, "fsdp", 4)(8, use_bias=False)
    params = module.init(jax.random.key(0), x[:, None])["params"]

    def loss(params):
        return jnp.mean(jnp.sum(module.apply({"params": params}, x[:, None]), axis=-1))

    value, grads = jax.value_and_grad(loss)(params)
    return rdp.sync_gradients(grads, AXES, loss=value)["kernel"].value[0]


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8, use_bias=False)(x)


def scanned(w, x):
    block = nn.remat(rdp.shard_module_params(Residual, "fsdp", 4))
    layers = nn.scan(
        lambda module, x, _: (module(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={nn.PARTITION_NAME: None},
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layers(block(), x, None)[0]

    held = Model().init(jax.random.key(0), jnp.zeros((1, 8)))
    # With kernels of zeros the gradient of each element is the mean of x.
    params = jax.tree.map(jnp.zeros_like, held)

    def loss(params):
        return jnp.mean(jnp.sum(Model().apply(params, jnp.ones((1, 8)) * x[:, None]), axis=-1))

    value, grads = jax.value_and_grad(loss)(params)
    grads = rdp.sync_gradients(grads, AXES, loss=value)
    (kernel,) = jax.tree.leaves(grads)
    return kernel.reshape(-1)


def in_nnx(w, x):
    linear = rdp.shard_nnx_module_params(nnx.Linear, "fsdp", 4)
    module = linear(1, 8, use_bias=False, rngs=nnx.Rngs(0))

    def loss(module):
        return jnp.mean(jnp.sum(module(x[:, None]), axis=-1))

    value, grads = nnx.value_and_grad(loss)(module)
    return rdp.sync_gradients(grads, AXES, loss=value)["kernel"].get_value()[0]


def accumulated(w, x):
    gather = functools.partial(rdp.gather_params, axis_name="fsdp")
    params = {"w": nn.Partitioned(w, ("fsdp",)), "b": jnp.ones(())}

    def loss(params, x):
        return own(params["w"], x) + params["b"] * jnp.mean(x)

    value, grads = rdp.accumulate_gradients(
        loss, params, x[:, None], axis_names=AXES, gather=gather
    )
    grads = rdp.sync_gradients(grads, AXES, loss=value)
    return (grads["w"].value + grads["b"]) / 2


def weighted(w, x, loss):
    valid = jnp.where(x % 2 == 0, 1, 0) + jnp.where(x == 15, 1, 0)

    def total(w):
        return loss(w * jnp.sum(x * valid), jnp.sum(valid), AXES)

    value, grad = jax.value_and_grad(total)(w)
    return rdp.sync_gradients(grad, AXES, loss=value)


def clipped(w, x, averaged=True):
    grads = {"w": nn.Partitioned(w, ("fsdp",)), "b": jnp.ones((8,)) if averaged else w}
    transform = rdp.clip_by_global_norm(1.0, AXES)
    updates, _ = transform.update(grads, transform.init(grads))
    return updates["w"].value + 0 * jnp.sum(x)


MEAN, MASKED = 7.5, 71 / 9
SCALAR, SHARD, BOTH = (), ("fsdp",), (AXES,)
ROWS = {
    "`sync_gradients(loss=...)`, replicated parameter": (
        functools.partial(replicated, check=True),
        SCALAR,
        MEAN,
    ),
    "`sync_gradients(loss=...)`, twice": (twice, SCALAR, MEAN),
    "`sync_gradients` without `loss`, replicated parameter": (replicated, SCALAR, MEAN),
    "`sync_gradients` of a metric that was averaged": (averaged_already, SCALAR, MEAN),
    "`sync_gradients`, parameter made varying by `jax.lax.pcast`": (made_varying, SCALAR, MEAN),
    "`sync_gradients(dtype=...)`, replicated parameter": (
        functools.partial(replicated, dtype="bfloat16", check=True),
        SCALAR,
        MEAN,
    ),
    "`sync_gradients(pre_divide=True)`, replicated parameter": (
        functools.partial(replicated, pre_divide=True, check=True),
        SCALAR,
        MEAN,
    ),
    "`sync_gradients(loss=...)`, loss averaged before it is differentiated": (
        functools.partial(replicated, loss=averaged, check=True),
        SCALAR,
        MEAN,
    ),
    "`sync_gradients(loss=...)`, loss replicated because the batch is not split": (
        functools.partial(replicated, loss=lambda w, x: 7.5 * w, check=True),
        SCALAR,
        MEAN,
    ),
    "`sync_gradients` without `loss`, loss averaged before it is differentiated": (
        functools.partial(replicated, loss=averaged),
        SCALAR,
        MEAN,
    ),
    "`gather_array_with_mean_grads`, parameter sharded on one axis, replicated on the other": (
        gathered_array,
        SHARD,
        MEAN,
    ),
    "`gather_params`, the same": (functools.partial(gathered, check=True), SHARD, MEAN),
    "`gather_params`, parameter sharded on both axes as one": (
        functools.partial(gathered, axis=AXES, check=True),
        BOTH,
        MEAN,
    ),
    "`gather_params`, loss averaged before it is differentiated, `sync_gradients(loss=...)`": (
        functools.partial(gathered, loss=averaged, check=True),
        SHARD,
        MEAN,
    ),
    "`gather_array_with_mean_grads` of a replicated array, used as a shard": (
        same_everywhere,
        SCALAR,
        MEAN,
    ),
    "`shard_module_params`": (linen, SCALAR, MEAN),
    "`shard_module_params` under `nn.remat` and `nn.scan`": (scanned, SCALAR, MEAN),
    "`shard_nnx_module_params`": (in_nnx, SCALAR, MEAN),
    "`accumulate_gradients`": (accumulated, SHARD, MEAN),
    "`weighted_loss`, differentiated": (
        functools.partial(weighted, loss=rdp.weighted_loss),
        SCALAR,
        MASKED,
    ),
    "`weighted_mean`, differentiated, `sync_gradients(loss=...)`": (
        functools.partial(weighted, loss=rdp.weighted_mean),
        SCALAR,
        MASKED,
    ),
    "`clip_by_global_norm`, averaged gradients": (clipped, SHARD, 0.25),
    "`clip_by_global_norm`, gradients not averaged or shards without boxes": (
        functools.partial(clipped, averaged=False),
        SHARD,
        0.25,
    ),
    "an axis that is not bound": (
        lambda w, x: rdp.sync_gradients(w, ("nope",)),
        SCALAR,
        MEAN,
    ),
}


def run(mode, function, split, mesh):
    """What every device has, (2, 4, ...)."""
    w = jnp.ones((8,) if split else ())
    if mode.startswith("check_vma"):

        def on_device(w, x):
            out = function(w, x)
            return jnp.broadcast_to(out, (1, 1, *out.shape))

        check = mode == "check_vma=True"
        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(*split), P(AXES)), out_specs=P(*AXES), check_vma=check
        )
        return jax.jit(mapped)(w, X)
    outer, inner = {SCALAR: (None, None), SHARD: (None, 0), BOTH: (0, 0)}[split]
    w = w.reshape({SCALAR: (), SHARD: (4, 2), BOTH: (2, 4, 1)}[split])
    over_fsdp = jax.vmap(function, (inner, 0), axis_name="fsdp")
    if mode == "pmap":
        mapped = jax.pmap(over_fsdp, "dp", in_axes=(outer, 0), devices=jax.devices()[:2])
    else:
        mapped = jax.jit(jax.vmap(over_fsdp, (outer, 0), axis_name="dp"))
    return mapped(w, X.reshape(2, 4, 2))


def table():
    """(use, mode, cell) of the table "Who sums gradients" in the documentation."""
    head = ["use", "check_vma=True", "check_vma=False", "pmap", "vmap"]
    text = "\n".join(path.read_text() for path in sorted(Path(ROOT / "docs").glob("*.md")))
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]
    start = rows.index(head)
    for row in rows[start + 2 :]:
        if len(row) != len(head):
            return
        yield from ((row[0], mode, cell) for mode, cell in zip(head[1:], row[1:], strict=True))


def test_the_table_has_the_rows_that_are_tested():
    assert {use for use, _, _ in table()} == set(ROWS)


@pytest.mark.parametrize(("use", "mode", "cell"), list(table()))
def test_table_of_who_sums(use, mode, cell, mesh):
    function, split, expected = ROWS[use]
    if cell == "error":
        with pytest.raises((UsageError, NameError)):
            run(mode, function, split, mesh)
        return
    out = np.asarray(run(mode, function, split, mesh))
    right = np.allclose(out, expected, rtol=1e-6)
    assert right == (cell == "right"), out


@pytest.mark.parametrize("tracked", ["mat", "manual_axis_type", "vma"])
def test_types_are_read_wherever_jax_keeps_them(monkeypatch, tracked):
    manual = SimpleNamespace(varying=frozenset({"a"}), unreduced=frozenset({"b"}))
    kind = {"vma": frozenset({"a"}), "unreduced": frozenset({"b"})}
    kind = SimpleNamespace(**(kind if tracked == "vma" else {tracked: manual}))
    monkeypatch.setattr(jax, "typeof", lambda x: kind)
    assert varying_axes(1) == {"a", "b"}


def test_a_jax_that_keeps_them_nowhere_is_an_error(monkeypatch):
    monkeypatch.setattr(jax, "typeof", lambda x: SimpleNamespace())
    with pytest.raises(NotImplementedError, match="whether a gradient has been summed is unknown"):
        varying_axes(1)


def test_a_box_with_too_many_names_is_named(mesh):
    def function(w):
        return rdp.gather_params({"a": {"w": nn.Partitioned(w, (None, "fsdp"))}}, "fsdp")

    with pytest.raises(UsageError, match=r"^a/w: .* array of shape \(8,\) has no dim 1"):
        jax.eval_shape(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P()), jnp.ones(8))


def test_the_function_that_sums_is_handed_down(mesh):
    seen = []

    def all_reduce(x, axes):
        seen.append(axes)
        return jax.lax.psum(x, axes)

    def reduce_scatter(x, axis, dim):
        seen.append(axis)
        return jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)

    summing = rdp.Reduction(all_reduce, reduce_scatter)

    def function(w, x):
        held = {"w": nn.Partitioned(w, ("fsdp",)), "b": jnp.ones(())}

        def loss(held):
            full = rdp.gather_params(held, "fsdp", reduction=summing)
            return own(full["w"], x) + full["b"]

        grads = rdp.sync_gradients(jax.grad(loss)(held), AXES, reduction=summing)
        _, norm = rdp.clip_by_global_norm_sharded(grads, 1.0, AXES, reduction=summing)
        return norm + rdp.weighted_mean(x, 1, AXES, reduction=summing)

    run("check_vma=False", function, SHARD, mesh)
    by_name = sorted(map(str, seen))
    both, dp, fsdp = str(AXES), "('dp',)", "('fsdp',)"
    assert by_name == sorted(["fsdp", dp, both, fsdp, both, both])
