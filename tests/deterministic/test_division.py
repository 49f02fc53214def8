"""Divisions that compilers leave as they are written."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp.deterministic.division import as_written
from tests.support.compilers import AS_USERS_COMPILE


@jax.custom_jvp
def thirds(x):
    return x / 3.1


thirds.defjvp(lambda x, t: (thirds(*x), t[0] / 3.1))


@jax.custom_vjp
def halves(x):
    return x / 2.3


halves.defvjp(lambda x: (halves(x), None), lambda _, g: (g / 2.3,))

X = jnp.linspace(0.3, 7.1, 12).reshape(3, 4)
TABLE = np.linspace(1, 2, 4, dtype=np.float32)[None]


def twice(x, s):
    """Two divisions, of which the compiler makes one."""
    return (x / s) / (x + 1)


BODIES = {
    "straight": twice,
    "of a sigmoid": lambda x, s: twice(jax.nn.sigmoid(x) / s, s),
    "of a power": lambda x, s: twice(jax.lax.integer_pow(x, -2) / s, s),
    "a reciprocal": lambda x, s: jax.lax.integer_pow(jnp.exp(x), -1),  # is exp(-x)
    "of a number": lambda x, s: twice(3.0 / x, s),
    "jit": lambda x, s: jax.jit(twice)(x, s),
    "custom_jvp": lambda x, s: thirds(twice(x, s)),
    "custom_vjp": lambda x, s: halves(twice(x, s)),
    "remat": jax.checkpoint(twice),
    "remat of a constant": jax.checkpoint(lambda x, s: jax.jit(lambda x: twice(x * TABLE, s))(x)),
    "scan": lambda x, s: jax.lax.scan(lambda h, row: (twice(h, s), twice(row, s)), x[0], x)[1],
    "cond": lambda x, s: jax.lax.cond(s > 1, lambda x: twice(x, s), lambda x: x, x),
    "while": lambda x, s: jax.lax.while_loop(lambda x: x.sum() > 5, lambda x: twice(x, s), x),
    "loop in a loop": lambda x, s: jax.lax.fori_loop(
        0, 3, lambda i, x: jax.lax.fori_loop(0, i, lambda _, x: twice(x, s), x), x
    ),
}


def divisions(function, *args):
    """How many times a compiled program divides arrays."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return len(re.findall(r"f32\[\d[\d,]*\]\S* divide\(", text))


@pytest.mark.parametrize("name", BODIES)
def test_what_is_written_is_computed(name):
    function, scale = BODIES[name], jnp.float32(1.7)
    written = as_written(function, X, scale)
    eager = np.asarray(function(X, scale))
    np.testing.assert_allclose(jax.jit(written)(X, scale), eager, rtol=1e-6)
    left, kept = divisions(function, X, scale), divisions(written, X, scale)
    if name == "a reciprocal" and jax.__version_info__ >= (0, 11):
        assert left == kept == 1  # that compiler leaves it alone
    else:
        assert left < kept


def test_scopes_are_kept():
    def scoped(x):
        with jax.named_scope("seventh"):
            return jax.checkpoint(lambda x: x / 3)(x)

    written = as_written(scoped, X)
    assert "seventh" in jax.jit(written).lower(X).compile().as_text()


def test_gradients_are_computed_as_written():
    # Loops whose length is not known have no derivative backwards.
    def gradients(x, s):
        names = [name for name in BODIES if name not in ("while", "loop in a loop")]
        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(BODIES[n](x, s))) for n in names))(x)

    written = as_written(gradients, X, jnp.float32(1.7))
    expected = gradients(X, jnp.float32(1.7))
    np.testing.assert_allclose(jax.jit(written)(X, jnp.float32(1.7)), expected, rtol=2e-5)


def test_structures_are_kept():
    written = as_written(lambda a, b: {"q": a["x"] / b, "p": (b,)}, {"x": X}, X)
    found = written({"x": X}, 2 * X)
    assert set(found) == {"q", "p"}
    np.testing.assert_array_equal(found["q"], np.full(X.shape, 0.5))


def test_sums_add_rounded_products():
    # Fused with the addition, a product is not rounded, in one program and not in another.
    x = np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)
    written = as_written(lambda x: jnp.sum(x * x, 0), x, sums=True)
    pairs = x * x
    while len(pairs) > 1:
        pairs = pairs[0::2] + pairs[1::2]
    compiled = jax.jit(written).lower(x).compile(AS_USERS_COMPILE)
    np.testing.assert_array_equal(compiled(x), pairs[0])
    assert np.isnan(compiled(np.where(x == x.max(), np.nan, x))).sum() == 1
