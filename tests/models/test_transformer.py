"""Attention and rotary positions: by distance alone, and the same however scores are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research_dp.models.transformer import attention, rotate


def test_rotary_scores_depend_on_distance_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 1, 8)), jnp.float32)
    places = jnp.arange(6)[None]
    near = jnp.einsum("bqhd,bkhd->qk", rotate(x, places), rotate(x, places))
    far = jnp.einsum("bqhd,bkhd->qk", rotate(x, places + 40), rotate(x, places + 40))
    np.testing.assert_allclose(near, far, atol=1e-4)
    assert not np.allclose(near, jnp.einsum("bqhd,bkhd->qk", x, x), atol=0.1)


# 'auto' on a CPU leaves out scores of later keys; a length need not be divisible.
PARTS = [("chunked", 768), *(("auto", length) for length in (1, 3, 6, 64, 77))]


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize(("implementation", "length"), PARTS)
def test_attention_in_parts_is_attention(implementation, length, with_segments):
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=(2, length, 2, 8)), jnp.float32) for _ in range(3)]
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    segments = segments if with_segments else None

    def loss(qkv, implementation):
        out = attention(*qkv, segments, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    (_, whole), whole_grads = jax.value_and_grad(loss, has_aux=True)(qkv, "xla")
    (_, parts), part_grads = jax.value_and_grad(loss, has_aux=True)(qkv, implementation)
    np.testing.assert_allclose(parts, whole, atol=2e-5)
    for mine, theirs in zip(part_grads, whole_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4)
