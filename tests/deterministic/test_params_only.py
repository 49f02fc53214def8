"""Parameters that enter operations without examples are fenced for each logical shard."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp.deterministic.reduction import tree_reduction
from research_dp.deterministic.step import computed_from_params_only, sum_over_logical_shards
from research_dp.distributed.units import Units
from research_dp.models import convnet, mlp, transformer
from research_dp.strategies.strategy import example_keys
from research_dp.types import LossOutput, TrainableModel
from tests.support.exact import AS_USERS_DO, bits, build

A, B, V = jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((1, 4))
ROWS = jnp.ones((3, 4))


@jax.custom_vjp
def scaled(x, a):
    return x @ a


scaled.defvjp(lambda x, a: (x @ a, (x, a)), lambda kept, g: (g @ (2 * kept[1]).T, kept[0].T @ g))


def layers(x, stack, body):
    return jax.lax.scan(lambda h, a: (body(h, a), None), x, stack)[0]


def carried(x, v):
    """A carry of parameters only for one turn, and then of examples too."""

    def turn(carry, _):
        h, w = carry
        return (h + w, h[:1]), None

    return jax.lax.scan(turn, (x, v), length=2)[0][0]


def repeated(x, v):
    return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * 2), (0, v))[1] + x


@pytest.mark.parametrize(
    ("function", "params", "expected"),
    [
        (lambda p, x: x @ p[0] + p[1], (A, V), [False, False]),
        (lambda p, x: jax.nn.relu(x * p[0]) - p[1], (V, V), [False, False]),
        (lambda p, x: x @ p[0].T[:, ::-1].reshape(2, 8)[:, :2].repeat(2, 0), (A,), [False]),
        (lambda p, x: x @ (p[0] @ p[1]), (A, B), [True, True]),
        (lambda p, x: x * (1 + p[0]) + p[1], (V, V), [True, False]),
        (lambda p, x: x.sum() + 0.1 * (p[0] ** 2).sum(), (A,), [True]),
        (lambda p, x: x @ p[0].astype(jnp.bfloat16), (A,), [True]),
        # Its derivative squares the divisor.
        (lambda p, x: x / p[0], (V,), [True]),
        (lambda p, x: p[0][jnp.int32(x[:, 0])] * p[1], (A, V), [False, False]),
        (lambda p, x: jnp.where(p[0] > 0, x, 0), (V,), [True]),
        (lambda p, x: scaled(x, p[0]), (A,), [True]),
        (lambda p, x: layers(x, p[0], lambda h, a: h @ a), (A[None],), [False]),
        (lambda p, x: layers(x, p[0], jax.checkpoint(lambda h, a: h @ a)), (A[None],), [False]),
        (lambda p, x: layers(x, p[0], lambda h, a: h @ (2 * a)), (A[None],), [True]),
        (lambda p, x: jax.jit(lambda a: x @ (a - 1))(p[0]), (A,), [True]),
        (lambda p, x: carried(x, p[0]) * p[1], (V, V), [False, False]),
        (lambda p, x: repeated(x, jax.lax.stop_gradient(p[0])) * p[1], (V, V), [True, False]),
        (lambda p, x: jax.lax.cond(x[0, 0] > 0, lambda a: a, lambda a: -a, p[0]) * x, (V,), [True]),
    ],
)
def test_which_parameters_are_combined_without_examples(function, params, expected):
    def gradient(params, x):
        return jax.grad(lambda params: jnp.sum(jnp.tanh(function(params, x))))(params)

    program = jax.make_jaxpr(gradient)(params, ROWS)
    assert computed_from_params_only(program, len(params)) == expected


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (mlp(widths=(8,), num_classes=3, dropout_rate=0.1), {"image": (4, 4, 1), "label": ()}),
        (convnet(num_classes=3), {"image": (8, 8, 1), "label": ()}),
        (
            transformer(vocab_size=32, width=8, depth=2, heads=2, mlp_width=16),
            {"tokens": (8,)},
        ),
    ],
)
def test_models_leave_their_kernels_to_the_examples(model, example):
    """Copies of kernels would cost memory and time."""
    batch = {
        name: jnp.zeros((2, *shape), "float32" if name == "image" else "int32")
        for name, shape in example.items()
    }
    params, _ = model.init(jax.random.key(0), jax.eval_shape(lambda: batch))

    def gradient(params, batch):
        keys = example_keys(0, jnp.int32(0), jnp.arange(2))
        more = {"units": Units()} if model.units else {}
        loss = functools.partial(model.loss, train=True, batch_axes=(), **more)
        return jax.grad(lambda p: loss(p, {}, batch, keys).total)(params)

    leaves = jax.tree.leaves(params)
    params_only = computed_from_params_only(jax.make_jaxpr(gradient)(params, batch), len(leaves))
    for x, found in zip(leaves, params_only, strict=True):
        assert not (found and x.ndim > 1)


def product_and_sum():
    """A model that multiplies and adds parameters, which compilers may round once or twice."""

    def init(key, batch):
        keys = jax.random.split(key, 3)
        return {n: jax.random.normal(k, (16, 10)) for n, k in zip("abc", keys, strict=True)}, {}

    def loss(params, model_state, batch, keys, train, batch_axes):
        kernel = params["a"] * params["b"] + params["c"]
        logits = batch["image"].reshape(-1, 16) @ kernel
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)
        return LossOutput(-chosen.sum(), jnp.float32(len(chosen)), model_state, {})

    return TrainableModel(init, loss)


def test_only_what_is_computed_from_params_only_is_fenced_for_each_shard():
    def fences(function):
        params, parts = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, jnp.ones((2, 3, 4))
        sums = functools.partial(
            sum_over_logical_shards, function, reduction=tree_reduction(logical_shards=2)
        )
        text = str(jax.make_jaxpr(lambda step: sums(params, parts, step))(0))
        return len(re.findall(r"u32\[4,4\] = xor", text))

    assert fences(lambda p, x: (x @ p["a"]) @ p["b"]) == 0
    assert fences(lambda p, x: x @ (p["a"] @ p["b"])) == 4, "two parameters, two shards"


@pytest.mark.slow
def test_the_same_bits_of_a_model_that_computes_with_parameters_only():
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(32, 4, 4, 1)).astype(np.float32),
        "label": rng.integers(0, 10, 32).astype(np.int32),
    }
    cells = [("ddp", 8, 1), ("fsdp", 1, 2), ("single", 1, 1)]
    shards = (*AS_USERS_DO, "tree_reduction.logical_shards = 8")
    found = [bits(build(*c, product_and_sum(), bindings=shards), [batch] * 3) for c in cells]
    assert found[0] == found[1] == found[2]
